"""The parameter tensors of each family, in the order and under the names of its torch implementation.

Hugging Face families follow transformers 5 (its modeling files); `tests/conf/test_hf.py` compares the two.
"""

from __future__ import annotations

from .model_spec import ModelSpec, Tensor

# Path of block i in the whole model. A bare stack (head "none" or "pooled") has no such first component.
_BLOCKS = {
    "gpt": "blocks",
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "qwen2": "model.layers",
    "opt": "model.decoder.layers",
    "bert": "bert.encoder.layer",
    "mixtral": "model.layers",
    "vit": "vit.layers",
}


def block_module(spec: ModelSpec, index: int) -> str:
    """Dotted path of a block within the model."""
    path = _BLOCKS[spec.family]
    if spec.head in ("none", "pooled"):
        path = path.partition(".")[2]
    return f"{path}.{index}"


def root_tensors(spec: ModelSpec) -> tuple[Tensor, ...]:
    """Everything outside the blocks: embeddings, final norm, head."""
    match spec.family:
        case "gpt":
            return _gpt_root(spec)
        case "gpt2":
            return _gpt2_root(spec)
        case "opt":
            return _opt_root(spec)
        case "bert":
            return _bert_root(spec)
        case "vit":
            return _vit_root(spec)
        case _:
            return _llama_root(spec)


def block_tensors(spec: ModelSpec) -> tuple[Tensor, ...]:
    """One block; names are within the block. All blocks of a model are alike."""
    match spec.family:
        case "gpt":
            return _gpt_block(spec)
        case "gpt2":
            return _gpt2_block(spec)
        case "opt":
            return _opt_block(spec)
        case "bert":
            return _bert_block(spec)
        case "vit":
            return _vit_block(spec)
        case _:
            return _llama_block(spec)


def _linear(name: str, num_out: int, num_in: int, *, bias: bool = True) -> tuple[Tensor, ...]:
    weight = Tensor(f"{name}.weight", (num_out, num_in))
    return (weight, Tensor(f"{name}.bias", (num_out,))) if bias else (weight,)


def _layer_norm(name: str, size: int, *, affine: bool = True) -> tuple[Tensor, ...]:
    return (Tensor(f"{name}.weight", (size,)), Tensor(f"{name}.bias", (size,))) if affine else ()


def _conv1d(name: str, num_out: int, num_in: int) -> tuple[Tensor, ...]:
    # GPT-2's Conv1D keeps its matrix transposed against nn.Linear
    return (Tensor(f"{name}.weight", (num_in, num_out)), Tensor(f"{name}.bias", (num_out,)))


def _gpt_root(spec: ModelSpec) -> tuple[Tensor, ...]:
    return (
        Tensor("embedding.weight", (spec.vocab, spec.hidden)),
        Tensor("position.weight", (spec.sequence, spec.hidden)),
        *_layer_norm("norm", spec.hidden),
        *(() if spec.tied_embeddings else (Tensor("head.weight", (spec.vocab, spec.hidden)),)),
    )


def _gpt_block(spec: ModelSpec) -> tuple[Tensor, ...]:
    return (
        *_layer_norm("norm1", spec.hidden),
        *_linear("qkv", spec.hidden + 2 * spec.kv_heads * spec.head_dim, spec.hidden),
        *_linear("proj", spec.hidden, spec.hidden),
        *_layer_norm("norm2", spec.hidden),
        *_linear("fc1", spec.ffn, spec.hidden),
        *_linear("fc2", spec.hidden, spec.ffn),
    )


def _gpt2_root(spec: ModelSpec) -> tuple[Tensor, ...]:
    at = "transformer." if spec.head == "lm" else ""
    untied = spec.head == "lm" and not spec.tied_embeddings
    return (
        Tensor(f"{at}wte.weight", (spec.vocab, spec.hidden)),
        Tensor(f"{at}wpe.weight", (spec.sequence, spec.hidden)),
        *_layer_norm(f"{at}ln_f", spec.hidden),
        *((Tensor("lm_head.weight", (spec.vocab, spec.hidden)),) if untied else ()),
    )


def _gpt2_block(spec: ModelSpec) -> tuple[Tensor, ...]:
    return (
        *_layer_norm("ln_1", spec.hidden),
        *_conv1d("attn.c_attn", 3 * spec.hidden, spec.hidden),
        *_conv1d("attn.c_proj", spec.hidden, spec.hidden),
        *_layer_norm("ln_2", spec.hidden),
        *_conv1d("mlp.c_fc", spec.ffn, spec.hidden),
        *_conv1d("mlp.c_proj", spec.hidden, spec.ffn),
    )


def _llama_root(spec: ModelSpec) -> tuple[Tensor, ...]:
    at = "model." if spec.head == "lm" else ""
    untied = spec.head == "lm" and not spec.tied_embeddings
    return (
        Tensor(f"{at}embed_tokens.weight", (spec.vocab, spec.hidden)),
        Tensor(f"{at}norm.weight", (spec.hidden,)),  # RMS norm has no bias
        *((Tensor("lm_head.weight", (spec.vocab, spec.hidden)),) if untied else ()),
    )


def _llama_block(spec: ModelSpec) -> tuple[Tensor, ...]:
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    mlp: tuple[Tensor, ...]
    if spec.is_moe:
        mlp = (
            Tensor("mlp.gate.weight", (spec.experts, spec.hidden)),
            Tensor("mlp.experts.gate_up_proj", (spec.experts, 2 * spec.ffn, spec.hidden)),
            Tensor("mlp.experts.down_proj", (spec.experts, spec.hidden, spec.ffn)),
        )
    else:
        mlp = (
            *_linear("mlp.gate_proj", spec.ffn, spec.hidden, bias=spec.mlp_bias),
            *_linear("mlp.up_proj", spec.ffn, spec.hidden, bias=spec.mlp_bias),
            *_linear("mlp.down_proj", spec.hidden, spec.ffn, bias=spec.mlp_bias),
        )
    return (
        *_linear("self_attn.q_proj", query, spec.hidden, bias=spec.qkv_bias),
        *_linear("self_attn.k_proj", keys, spec.hidden, bias=spec.qkv_bias),
        *_linear("self_attn.v_proj", keys, spec.hidden, bias=spec.qkv_bias),
        *_linear("self_attn.o_proj", spec.hidden, query, bias=spec.out_bias),
        *mlp,
        Tensor("input_layernorm.weight", (spec.hidden,)),
        Tensor("post_attention_layernorm.weight", (spec.hidden,)),
    )


def _opt_root(spec: ModelSpec) -> tuple[Tensor, ...]:
    at = "model.decoder." if spec.head == "lm" else "decoder."
    width = spec.embedding_width
    projected = width != spec.hidden  # opt-350m embeds in 512 and computes in 1024
    untied = spec.head == "lm" and not spec.tied_embeddings
    return (
        Tensor(f"{at}embed_tokens.weight", (spec.vocab, width)),
        # positions start at 2: the table has two rows that no token uses
        Tensor(f"{at}embed_positions.weight", (spec.sequence + 2, spec.hidden)),
        *(_linear(f"{at}project_out", width, spec.hidden, bias=False) if projected else ()),
        *(_linear(f"{at}project_in", spec.hidden, width, bias=False) if projected else ()),
        *_layer_norm(f"{at}final_layer_norm", spec.hidden, affine=spec.final_norm and spec.norm_affine),
        *((Tensor("lm_head.weight", (spec.vocab, width)),) if untied else ()),
    )


def _opt_block(spec: ModelSpec) -> tuple[Tensor, ...]:
    return (
        *_linear("self_attn.k_proj", spec.hidden, spec.hidden, bias=spec.qkv_bias),
        *_linear("self_attn.v_proj", spec.hidden, spec.hidden, bias=spec.qkv_bias),
        *_linear("self_attn.q_proj", spec.hidden, spec.hidden, bias=spec.qkv_bias),
        *_linear("self_attn.out_proj", spec.hidden, spec.hidden, bias=spec.out_bias),
        *_layer_norm("self_attn_layer_norm", spec.hidden, affine=spec.norm_affine),
        *_linear("fc1", spec.ffn, spec.hidden, bias=spec.mlp_bias),
        *_linear("fc2", spec.hidden, spec.ffn, bias=spec.mlp_bias),
        *_layer_norm("final_layer_norm", spec.hidden, affine=spec.norm_affine),
    )


def _bert_root(spec: ModelSpec) -> tuple[Tensor, ...]:
    at = "" if spec.head == "pooled" else "bert."
    tensors = [
        Tensor(f"{at}embeddings.word_embeddings.weight", (spec.vocab, spec.hidden)),
        Tensor(f"{at}embeddings.position_embeddings.weight", (spec.sequence, spec.hidden)),
        Tensor(f"{at}embeddings.token_type_embeddings.weight", (spec.token_types, spec.hidden)),
        *_layer_norm(f"{at}embeddings.LayerNorm", spec.hidden),
    ]
    if spec.head in ("pooled", "pretraining"):
        tensors += _linear(f"{at}pooler.dense", spec.hidden, spec.hidden)
    if spec.head in ("masked_lm", "pretraining"):
        tensors.append(Tensor("cls.predictions.bias", (spec.vocab,)))
        tensors += _linear("cls.predictions.transform.dense", spec.hidden, spec.hidden)
        tensors += _layer_norm("cls.predictions.transform.LayerNorm", spec.hidden)
        if not spec.tied_embeddings:  # the bias is tied along with the matrix, so untied there are two
            tensors += _linear("cls.predictions.decoder", spec.vocab, spec.hidden)
    if spec.head == "pretraining":
        tensors += _linear("cls.seq_relationship", 2, spec.hidden)
    return tuple(tensors)


def _bert_block(spec: ModelSpec) -> tuple[Tensor, ...]:
    return (
        *_linear("attention.self.query", spec.hidden, spec.hidden),
        *_linear("attention.self.key", spec.hidden, spec.hidden),
        *_linear("attention.self.value", spec.hidden, spec.hidden),
        *_linear("attention.output.dense", spec.hidden, spec.hidden),
        *_layer_norm("attention.output.LayerNorm", spec.hidden),
        *_linear("intermediate.dense", spec.ffn, spec.hidden),
        *_linear("output.dense", spec.hidden, spec.ffn),
        *_layer_norm("output.LayerNorm", spec.hidden),
    )


def _vit_root(spec: ModelSpec) -> tuple[Tensor, ...]:
    at = "vit." if spec.head == "classifier" else ""
    tensors = [
        Tensor(f"{at}embeddings.cls_token", (1, 1, spec.hidden)),
        Tensor(f"{at}embeddings.position_embeddings", (1, spec.sequence, spec.hidden)),
        Tensor(
            f"{at}embeddings.patch_embeddings.projection.weight", (spec.hidden, spec.channels, *spec.patch)
        ),
        Tensor(f"{at}embeddings.patch_embeddings.projection.bias", (spec.hidden,)),
        *_layer_norm(f"{at}layernorm", spec.hidden),
    ]
    if spec.head == "classifier":
        tensors += _linear("classifier", spec.classes, spec.hidden)
    else:
        tensors += _linear("pooler.dense", spec.pooler_size or spec.hidden, spec.hidden)
    return tuple(tensors)


def _vit_block(spec: ModelSpec) -> tuple[Tensor, ...]:
    return (
        *_linear("attention.q_proj", spec.hidden, spec.hidden, bias=spec.qkv_bias),
        *_linear("attention.k_proj", spec.hidden, spec.hidden, bias=spec.qkv_bias),
        *_linear("attention.v_proj", spec.hidden, spec.hidden, bias=spec.qkv_bias),
        *_linear("attention.o_proj", spec.hidden, spec.hidden),
        *_layer_norm("layernorm_before", spec.hidden),
        *_layer_norm("layernorm_after", spec.hidden),
        *_linear("mlp.fc1", spec.ffn, spec.hidden),
        *_linear("mlp.fc2", spec.hidden, spec.ffn),
    )
