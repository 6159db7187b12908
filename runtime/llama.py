"""Llama in plain torch, and Qwen2, which differs in the biases of queries, keys and values: the parameters that
`conf.model_spec` counts.

They have the names and shapes of transformers' LlamaForCausalLM and Qwen2ForCausalLM, and give the same numbers. What
`ModelSpec` does not tell is Llama 2's (Touvron et al. 2023): rotary positions of base 10,000, without
the scaling by which later releases take longer contexts, and 1e-5 in the norms.

Shapes: B sequences, T tokens, D hidden, F width of the MLP, H heads, K key heads, E head size, V vocabulary.
"""

import math
from typing import Final

from torch import Tensor, nn
from torch.nn import functional

from ..conf.model_spec import ModelSpec
from .leaves import AttentionCore, CrossEntropy, Rotary, TiedHead, split_heads
from .stack import PacedBlock, Stack

FAMILIES: Final = ("llama", "qwen2")
_NORM_EPS: Final = 1e-5


class Llama(Stack):
    """Returns the loss.

    Weights are the same for one seed on every rank and under every layout.

    Args:
        spec: Of family "llama" or "qwen2" with head "lm".
        seed: Of the initial weights; None: they come from elsewhere, and are left as they are made.
        recompute, dropout: As `Stack`.

    Raises:
        ValueError: The spec is of another family or has another head, or its heads have an odd size.
    """

    def __init__(
        self, spec: ModelSpec, *, seed: int | None, recompute: bool = False, dropout: float = 0.0
    ) -> None:
        if spec.family not in FAMILIES or spec.head != "lm":
            raise ValueError(
                f"model.family={spec.family!r} with head {spec.head!r}: a Llama is of one of the families "
                f"{list(FAMILIES)} with head 'lm'"
            )
        super().__init__(spec, recompute=recompute, dropout=dropout)
        self.model = _Body(self)
        self.lm_head = (
            TiedHead(self, "model.embed_tokens")
            if spec.tied_embeddings
            else nn.Linear(spec.hidden, spec.vocab, bias=False)
        )
        self.loss = CrossEntropy()
        if seed is not None:
            self.init_weights(seed)

    def stack(self) -> nn.ModuleList:
        return self.model.layers

    def first_deviation(self, name: str, weight: Tensor) -> float:
        """0.02, and of what is added to the residual 1 / sqrt(2 layers) of that, as the GPT's here."""
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.02 / math.sqrt(2 * self.spec.layers) if residual else 0.02

    def before_blocks(self, inputs: Tensor) -> Tensor:
        embedded_BTD: Tensor = self.model.drop(self.model.embed_tokens(inputs))
        return embedded_BTD

    def behind_blocks(self, x_BTD: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, fp32."""
        loss: Tensor = self.loss(self.logits(x_BTD), targets)
        return loss

    def logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, V] from what the last block gave."""
        logits_BTV: Tensor = self.lm_head(self.model.norm(x_BTD))
        return logits_BTV


class _Body(nn.Module):
    def __init__(self, model: Stack) -> None:
        super().__init__()
        spec = model.spec
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.drop = model.make_dropout("embedding")
        self.layers = nn.ModuleList(Block(model, i) for i in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=_NORM_EPS)


class Block(PacedBlock):
    """x + attention(input_layernorm(x)), then x + mlp(post_attention_layernorm(x))."""

    def __init__(self, model: Stack, index: int) -> None:
        super().__init__()
        spec = model.spec
        self.self_attn = _Attention(spec)
        self.mlp = _Mlp(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden, eps=_NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden, eps=_NORM_EPS)
        self.drop1 = model.make_dropout(f"block.{index}.attention")
        self.drop2 = model.make_dropout(f"block.{index}.mlp")

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.pace is not None:
            x_BTD = self.pace.enter(x_BTD)
        x_BTD = x_BTD + self.drop1(self.self_attn(self.input_layernorm(x_BTD)))
        x_BTD = x_BTD + self.drop2(self.mlp(self.post_attention_layernorm(x_BTD)))
        return x_BTD if self.pace is None else self.pace.leave(x_BTD)


class _Attention(nn.Module):
    """A token sees those before it and itself; several query heads may share one key head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._head_size = spec.head_dim
        query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden, query, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden, keys, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden, keys, bias=spec.qkv_bias)
        self.rotary = Rotary(spec.head_dim)
        self.core = AttentionCore(causal=True, head_size=spec.head_dim)
        self.o_proj = nn.Linear(query, spec.hidden, bias=spec.out_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = (
            split_heads(project(x_BTD), self._head_size)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTE, k_BKTE = self.rotary(q_BHTE, k_BKTE)
        mixed_BTD: Tensor = self.o_proj(self.core(q_BHTE, k_BKTE, v_BKTE))
        return mixed_BTD


class _Mlp(nn.Module):
    """SwiGLU (Shazeer 2020): one projection, through SiLU, gates another."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gated_BTF = functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        narrowed_BTD: Tensor = self.down_proj(gated_BTF)
        return narrowed_BTD
