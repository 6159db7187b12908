"""The layers of each unit of a model, in the order of forward, under the names of its torch implementation.

Units are those of `conf.model_spec.parameters`; the root's layers come in two parts, before and behind the blocks.
Only what a layout changes is listed: what each rank does with what it holds, such as a GELU, is not.
"""

from dataclasses import dataclass

from ...conf.model_spec import ModelSpec
from .layers import Kind, Layer, Role

ROTARY = ("llama", "qwen2")


@dataclass(frozen=True, slots=True)
class Outline:
    """Of one model. All blocks are alike."""

    before: tuple[Layer, ...]
    block: tuple[Layer, ...]
    behind: tuple[Layer, ...]


def outline(spec: ModelSpec) -> Outline:
    """Layers without borders, which `parallel.ParallelLayout` adds.

    Raises:
        ValueError: If the family is not laid out over ranks.
    """
    match spec.family:
        case "gpt":
            return _gpt(spec)
        case "gpt2":
            return _gpt2(spec)
        case "llama" | "qwen2":
            return _llama(spec)
        case "bert":
            return _bert(spec)
        case "vit":
            return _vit(spec)
    raise ValueError(
        f"model.family={spec.family!r} is not laid out over tensor, sequence or pipeline ranks by engine=fsdp2; "
        "families are gpt, gpt2, llama, qwen2, bert and vit"
    )


def _linear(path: str, features_in: int, features_out: int, role: Role, *, bias: bool) -> Layer:
    return Layer(
        path=path,
        kind=Kind.linear,
        role=role,
        features_in=features_in,
        features_out=features_out,
        bias=bias,
    )


def _together(first: Layer, *others: Layer) -> Layer:
    """One product of matrices that share their input."""
    return Layer(
        path=first.path,
        kind=Kind.linear,
        role=first.role,
        features_in=first.features_in,
        features_out=first.features_out,
        bias=first.bias,
        others=others,
    )


def _norm(path: str, spec: ModelSpec) -> Layer:
    if spec.family in ROTARY:
        return Layer(path=path, kind=Kind.rms_norm, features_in=spec.hidden, number=spec.hidden)
    return Layer(path=path, kind=Kind.layer_norm, features_in=spec.hidden, bias=True, number=spec.hidden)


def _embedding(path: str, rows: int, spec: ModelSpec) -> Layer:
    return Layer(path=path, kind=Kind.embedding, features_in=rows, features_out=spec.hidden)


def _positions(path: str, rows: int, spec: ModelSpec) -> Layer:
    return Layer(path=path, kind=Kind.positions, features_in=rows, features_out=spec.hidden)


def _attention(path: str, spec: ModelSpec, *, causal: bool) -> Layer:
    return Layer(
        path=path,
        kind=Kind.attention,
        features_in=spec.heads * spec.head_dim,
        features_out=spec.kv_heads * spec.head_dim,
        number=int(causal),
    )


def _loss(classes: int) -> Layer:
    return Layer(path="loss", kind=Kind.loss, features_in=classes, number=classes)


def _head(path: str, table: str, spec: ModelSpec, *, bias: bool = False) -> Layer:
    if spec.tied_embeddings:
        return Layer(
            path=path,
            kind=Kind.tied,
            features_in=spec.hidden,
            features_out=spec.vocab,
            bias=bias,
            shares=table,
        )
    return _linear(path, spec.hidden, spec.vocab, Role.columns, bias=bias)


def _gpt(spec: ModelSpec) -> Outline:
    hidden, keys = spec.hidden, spec.kv_heads * spec.head_dim
    qkv = Layer(
        path="qkv",
        kind=Kind.linear,
        role=Role.columns,
        features_in=hidden,
        features_out=hidden + 2 * keys,
        bias=True,
        sections=(hidden, keys, keys),
    )
    return Outline(
        (_embedding("embedding", spec.vocab, spec), _positions("position", spec.sequence, spec)),
        (
            _norm("norm1", spec),
            qkv,
            _attention("core", spec, causal=True),
            _linear("proj", hidden, hidden, Role.rows, bias=True),
            _norm("norm2", spec),
            _linear("fc1", hidden, spec.ffn, Role.columns, bias=True),
            _linear("fc2", spec.ffn, hidden, Role.rows, bias=True),
        ),
        (_norm("norm", spec), _head("head", "embedding", spec), _loss(spec.vocab)),
    )


def _gpt2(spec: ModelSpec) -> Outline:
    hidden = spec.hidden
    qkv = Layer(
        path="attn.c_attn",
        kind=Kind.linear,
        role=Role.columns,
        features_in=hidden,
        features_out=3 * hidden,
        bias=True,
        sections=(hidden, hidden, hidden),
    )
    return Outline(
        (
            _embedding("transformer.wte", spec.vocab, spec),
            _positions("transformer.wpe", spec.sequence, spec),
        ),
        (
            _norm("ln_1", spec),
            qkv,
            _attention("attn.core", spec, causal=True),
            _linear("attn.c_proj", hidden, hidden, Role.rows, bias=True),
            _norm("ln_2", spec),
            _linear("mlp.c_fc", hidden, spec.ffn, Role.columns, bias=True),
            _linear("mlp.c_proj", spec.ffn, hidden, Role.rows, bias=True),
        ),
        (
            _norm("transformer.ln_f", spec),
            _head("lm_head", "transformer.wte", spec),
            _loss(spec.vocab),
        ),
    )


def _llama(spec: ModelSpec) -> Outline:
    hidden, query, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    biased = spec.qkv_bias
    return Outline(
        (_embedding("model.embed_tokens", spec.vocab, spec),),
        (
            _norm("input_layernorm", spec),
            _together(
                _linear("self_attn.q_proj", hidden, query, Role.columns, bias=biased),
                _linear("self_attn.k_proj", hidden, keys, Role.columns, bias=biased),
                _linear("self_attn.v_proj", hidden, keys, Role.columns, bias=biased),
            ),
            _attention("self_attn.core", spec, causal=True),
            _linear("self_attn.o_proj", query, hidden, Role.rows, bias=spec.out_bias),
            _norm("post_attention_layernorm", spec),
            _together(
                _linear("mlp.gate_proj", hidden, spec.ffn, Role.columns, bias=spec.mlp_bias),
                _linear("mlp.up_proj", hidden, spec.ffn, Role.columns, bias=spec.mlp_bias),
            ),
            _linear("mlp.down_proj", spec.ffn, hidden, Role.rows, bias=spec.mlp_bias),
        ),
        (_norm("model.norm", spec), _head("lm_head", "model.embed_tokens", spec), _loss(spec.vocab)),
    )


def _bert(spec: ModelSpec) -> Outline:
    if spec.head != "masked_lm":
        raise ValueError(
            f"model.extra.head={spec.head!r}: a BERT is laid out over tensor, sequence or pipeline ranks with "
            "model.extra.head=masked_lm only"
        )
    hidden = spec.hidden
    return Outline(
        (
            _embedding("bert.embeddings.word_embeddings", spec.vocab, spec),
            _positions("bert.embeddings.token_type_embeddings", spec.token_types, spec),
            _positions("bert.embeddings.position_embeddings", spec.sequence, spec),
            _norm("bert.embeddings.LayerNorm", spec),
        ),
        (
            _together(
                *(
                    _linear(f"attention.self.{name}", hidden, hidden, Role.columns, bias=True)
                    for name in ("query", "key", "value")
                )
            ),
            _attention("attention.self.core", spec, causal=False),
            _linear("attention.output.dense", hidden, hidden, Role.rows, bias=True),
            _norm("attention.output.LayerNorm", spec),
            _linear("intermediate.dense", hidden, spec.ffn, Role.columns, bias=True),
            _linear("output.dense", spec.ffn, hidden, Role.rows, bias=True),
            _norm("output.LayerNorm", spec),
        ),
        (
            _linear("cls.predictions.transform.dense", hidden, hidden, Role.whole, bias=True),
            _norm("cls.predictions.transform.LayerNorm", spec),
            _head("cls.predictions.decoder", "bert.embeddings.word_embeddings", spec, bias=True),
            _loss(spec.vocab),
        ),
    )


def _vit(spec: ModelSpec) -> Outline:
    hidden = spec.hidden
    patch = Layer(
        path="vit.embeddings.patch_embeddings.projection",
        kind=Kind.patches,
        features_in=spec.channels * spec.patch[0] * spec.patch[1],
        features_out=hidden,
        bias=True,
    )
    token = Layer(path="vit.embeddings.cls_token", kind=Kind.first_token, features_out=hidden)
    return Outline(
        (patch, token, _positions("vit.embeddings.position_embeddings", spec.sequence, spec)),
        (
            _norm("layernorm_before", spec),
            _together(
                *(
                    _linear(f"attention.{name}_proj", hidden, hidden, Role.columns, bias=spec.qkv_bias)
                    for name in ("q", "k", "v")
                )
            ),
            _attention("attention.core", spec, causal=False),
            _linear("attention.o_proj", hidden, hidden, Role.rows, bias=True),
            _norm("layernorm_after", spec),
            _linear("mlp.fc1", hidden, spec.ffn, Role.columns, bias=True),
            _linear("mlp.fc2", spec.ffn, hidden, Role.rows, bias=True),
        ),
        (
            _norm("vit.layernorm", spec),
            _linear("classifier", hidden, spec.classes, Role.columns, bias=True),
            _loss(spec.classes),
        ),
    )
