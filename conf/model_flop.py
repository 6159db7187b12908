"""The matmuls of a model's forward pass, and the floating-point operations that follow from them.

A product of (m, k) with (k, n) costs 2 m n k. Norms, softmax, activations and look-ups are left out, as in
published TFLOP/s; the attention products are counted over the whole square, also under a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model_spec import ModelSpec

RECOMPUTE = ("none", "selective", "selective_op", "selective_layer", "full")


@dataclass(frozen=True, slots=True)
class Matmul:
    """`num` products of (m, k) with (k, n)."""

    kind: str  # "qkv", "q", "k", "v", "scores", "context", "out", "fc1", "gate", ..., "logits"
    m: int
    n: int
    k: int
    num: int = 1

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k * self.num


def block_matmuls(spec: ModelSpec, *, sequence: int, micro: int = 1) -> tuple[Matmul, ...]:
    """Forward matmuls of one block, in order of execution, for `micro` sequences of `sequence` tokens.

    For vit a sequence is one image and `sequence` its patches + 1. Of a mixture of experts only those are
    counted that its tokens are routed to.
    """
    _check_sequence(spec, sequence)
    tokens = micro * sequence
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.family in ("gpt", "gpt2"):
        projections = [Matmul("qkv", tokens, query + 2 * keys, spec.hidden)]
    else:
        projections = [
            Matmul("q", tokens, query, spec.hidden),
            Matmul("k", tokens, keys, spec.hidden),
            Matmul("v", tokens, keys, spec.hidden),
        ]
    routed = tokens * spec.experts_per_token if spec.is_moe else tokens
    router = [Matmul("router", tokens, spec.experts, spec.hidden)] if spec.is_moe else []
    if spec.is_gated:
        widen = [Matmul("gate", routed, spec.ffn, spec.hidden), Matmul("up", routed, spec.ffn, spec.hidden)]
        narrow = Matmul("down", routed, spec.hidden, spec.ffn)
    else:
        widen = [Matmul("fc1", routed, spec.ffn, spec.hidden)]
        narrow = Matmul("fc2", routed, spec.hidden, spec.ffn)
    return (
        *projections,
        Matmul("scores", sequence, sequence, spec.head_dim, micro * spec.heads),
        Matmul("context", sequence, spec.head_dim, sequence, micro * spec.heads),
        Matmul("out", tokens, spec.hidden, query),
        *router,
        *widen,
        narrow,
    )


def root_matmuls(spec: ModelSpec, *, sequence: int, micro: int = 1) -> tuple[Matmul, ...]:
    """Forward matmuls outside the blocks: patches or a projected embedding before, the head after them."""
    _check_sequence(spec, sequence)
    tokens, hidden = micro * sequence, spec.hidden
    products: list[Matmul] = []
    if spec.family == "vit":
        height, width = spec.patch
        products.append(Matmul("patch", micro * spec.num_patches, hidden, spec.channels * height * width))
    if spec.embedding_width != hidden:
        products.append(Matmul("embedding_in", tokens, hidden, spec.embedding_width))
        products.append(Matmul("embedding_out", tokens, spec.embedding_width, hidden))
    if spec.head in ("pooled", "pretraining"):
        products.append(Matmul("pooler", micro, spec.pooler_size or hidden, hidden))  # first token only
    if spec.head in ("masked_lm", "pretraining"):
        products.append(Matmul("transform", tokens, hidden, hidden))
    if spec.head in ("lm", "masked_lm", "pretraining"):
        products.append(Matmul("logits", tokens, spec.vocab, spec.embedding_width))
    if spec.head == "pretraining":
        products.append(Matmul("next_sentence", micro, 2, hidden))
    if spec.head == "classifier":
        products.append(Matmul("classifier", micro, spec.classes, hidden))
    return tuple(products)


def forward_flop(spec: ModelSpec, *, sequence: int, micro: int = 1) -> dict[str, int]:
    """Operations of one forward pass over `micro` sequences, by kind of matmul, all layers together."""
    block = {
        product.kind: spec.layers * product.flop
        for product in block_matmuls(spec, sequence=sequence, micro=micro)
    }
    root = {product.kind: product.flop for product in root_matmuls(spec, sequence=sequence, micro=micro)}
    return block | root


def forward_flop_per_token(spec: ModelSpec, sequence: int) -> dict[str, float]:
    """`forward_flop` of one sequence shared out over its tokens."""
    return {kind: flop / sequence for kind, flop in forward_flop(spec, sequence=sequence).items()}


def recompute_flop(spec: ModelSpec, *, sequence: int, recompute: str, micro: int = 1) -> int:
    """Forward operations that the backward pass repeats.

    none: nothing. full: every block. selective: the two attention products (Megatron, Korthikanti et al.
    2022). selective_op: every second linear of a block, attention kept (torchtitan's "op"). selective_layer:
    every second block (torchtitan's "2"). What lies outside the blocks is never repeated.

    "full" counts whole blocks, as published TFLOP/s do. torch's non-reentrant checkpoint stops as soon as it
    has what backward needs, and so does not repeat the last matmul of a block.

    Raises:
        ValueError: An unknown `recompute`, or a sequence that the model cannot take.
    """
    products = block_matmuls(spec, sequence=sequence, micro=micro)
    attention = [product for product in products if product.kind in ("scores", "context")]
    linears = [product for product in products if product.kind not in ("scores", "context")]
    match recompute:
        case "none":
            return 0
        case "full":
            return spec.layers * sum(product.flop for product in products)
        case "selective":
            return spec.layers * sum(product.flop for product in attention)
        case "selective_op":
            return spec.layers * sum(product.flop for product in linears[1::2])
        case "selective_layer":
            return spec.layers // 2 * sum(product.flop for product in products)
        case _:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")


def train_flop_per_token(spec: ModelSpec, sequence: int, recompute: str = "none") -> float:
    """Operations of one training step per token: forward, a backward of twice that, and what is recomputed.

    With recompute "none" this is the numerator of MFU; with another, of hardware utilization.
    """
    forward = sum(forward_flop(spec, sequence=sequence).values())
    return (3 * forward + recompute_flop(spec, sequence=sequence, recompute=recompute)) / sequence


def _check_sequence(spec: ModelSpec, sequence: int) -> None:
    if spec.family == "vit" and sequence != spec.sequence:
        raise ValueError(f"sequence={sequence} must be the patches + 1 of {spec.name}: {spec.sequence}")
    if sequence < 1:
        raise ValueError(f"sequence must be at least 1, got {sequence}")
