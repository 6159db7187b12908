"""Llama and Qwen2 of transformers (`models/llama/modeling_llama.py` and `models/qwen2` of release 5)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from ..layout.modules import replace_call
from ..leaves import AttentionCore, ByPosition, split_heads
from .model import Foreign

# Whose wavelengths depend on how long the sequence is, of which a rank sees a part
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_PARTS = {
    "llama": (
        modeling_llama.LlamaModel,
        modeling_llama.LlamaDecoderLayer,
        modeling_llama.LlamaAttention,
        modeling_llama.LlamaMLP,
        modeling_llama.LlamaRMSNorm,
        modeling_llama.LlamaRotaryEmbedding,
    ),
    "qwen2": (
        modeling_qwen2.Qwen2Model,
        modeling_qwen2.Qwen2DecoderLayer,
        modeling_qwen2.Qwen2Attention,
        modeling_qwen2.Qwen2MLP,
        modeling_qwen2.Qwen2RMSNorm,
        modeling_qwen2.Qwen2RotaryEmbedding,
    ),
}


class ForeignLlama(Foreign):
    """Norms become torch's; blocks are given the rotary angles of the tokens that are here, and their attention a core
    that a layout may replace.
    """

    blocks_path = "model.layers"
    table_path = "model.embed_tokens"

    def __init__(self, module: Any, *, seed: int) -> None:
        super().__init__(module, seed=seed)
        config = module.config
        self.refuse(attention_dropout=(config.attention_dropout, 0.0))
        if config.rope_parameters["rope_type"] in _ROPE_BY_LENGTH:
            raise ValueError(
                f"{self.kind}.config.rope_parameters['rope_type']={config.rope_parameters['rope_type']!r}: its angles "
                "depend on the length of the sequence, of which a rank sees a part; use default, linear, yarn or llama3"
            )
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        self.refuse(layer_types=(sorted(kinds), ["full_attention"]))
        body_kind, *_, norm, rotary = _PARTS[self.spec.family]
        body = module.model
        self.expect(body, body_kind, "model")
        self.lm_head = self.head_of(module)
        self.expect(body.rotary_emb, rotary, "model.rotary_emb")
        angles = body.rotary_emb = Angles(body.rotary_emb)
        self.expect(body.norm, norm, "model.norm")
        body.norm = _norm(body.norm)
        for i, block in enumerate(body.layers):
            self._take(block, i, angles)
        self.model = body
        self.train(module.training)

    def before_blocks(self, inputs: Tensor) -> Tensor:
        body: Any = self.model
        x_BTD: Tensor = body.embed_tokens(inputs)
        return x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        body: Any = self.model
        logits_BTV: Tensor = self.lm_head(body.norm(x_BTD))
        return logits_BTV

    def _take(self, block: Any, i: int, angles: "Angles") -> None:
        _, block_kind, attention, mlp, norm, _ = _PARTS[self.spec.family]
        path = f"{self.blocks_path}.{i}"
        for part, kind, name in (
            (block, block_kind, path),
            (block.self_attn, attention, f"{path}.self_attn"),
            (block.mlp, mlp, f"{path}.mlp"),
            (block.input_layernorm, norm, f"{path}.input_layernorm"),
            (block.post_attention_layernorm, norm, f"{path}.post_attention_layernorm"),
            *(
                (getattr(block.self_attn, f"{x}_proj"), nn.Linear, f"{path}.self_attn.{x}_proj")
                for x in "qkvo"
            ),
            *(
                (getattr(block.mlp, f"{x}_proj"), nn.Linear, f"{path}.mlp.{x}_proj")
                for x in ("gate", "up", "down")
            ),
        ):
            self.expect(part, kind, name)
        block.gradient_checkpointing = False  # the stack's `recompute`
        block.input_layernorm = _norm(block.input_layernorm)
        block.post_attention_layernorm = _norm(block.post_attention_layernorm)
        attending = block.self_attn
        attending.core = AttentionCore(causal=True, head_size=self.spec.head_dim)
        replace_call(attending, partial(_attend, attending))
        replace_call(block, _with_angles(block.forward, angles))


class Angles(ByPosition):
    """Cosines and sines of a rotary module of transformers, for the tokens that are here."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    @torch.no_grad()
    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [1, T, E]."""
        index_T = self.token_index
        if index_T is None:
            index_T = torch.arange(x_BTD.shape[1])
        cos_1TE, sin_1TE = self.rotary(x_BTD, position_ids=index_T.to(x_BTD.device)[None])
        return cos_1TE, sin_1TE


def _attend(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: object,
) -> tuple[Tensor, None]:
    """As the module's own forward, for products that may have another number of tokens than what goes into them (with
    sequence_mode=megatron), which the module's own takes to be the same.
    """
    q_BHTE, k_BKTE, v_BKTE = (
        split_heads(project(hidden_states), attention.head_dim)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q_BHTE, k_BKTE = modeling_llama.apply_rotary_pos_emb(q_BHTE, k_BKTE, *position_embeddings)
    return attention.o_proj(attention.core(q_BHTE, k_BKTE, v_BKTE)), None


def _with_angles(forward: Callable[..., Tensor], angles: Angles) -> Callable[[Tensor], Tensor]:
    """A block's forward as a stack calls it."""

    def call(x_BTD: Tensor) -> Tensor:
        return forward(x_BTD, position_embeddings=angles(x_BTD))

    return call


def _norm(norm: Any) -> nn.RMSNorm:
    made = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, device="meta")
    made.weight = norm.weight
    return made
