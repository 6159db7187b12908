"""Attention with all tokens of some heads in place of some tokens of all heads (Jacobs et al. 2023, DeepSpeed-Ulysses).

An all-to-all of queries, keys and values before it and of its output behind it: with Z heads and as many key heads,
4 (N - 1) / N of B Z (L / N) A elements sent per rank forward, and as many backward.
"""

from ..mesh import SEQUENCE
from ..plan import AllToAll, Apply, Step
from .layers import LayerRuns

HEADS, TOKENS = 1, 2  # dimensions of queries, keys and values


def ulysses(event: LayerRuns) -> list[Step]:
    return [
        *(_to_heads(operand) for operand in ("q", "k", "v")),
        Apply(
            function="attention",
            number=event.number,
            reads=("q_heads", "k_heads", "v_heads"),
            writes=("y_heads", "log_sums"),
        ),
        _to_tokens("y_heads", "y"),
    ]


def ulysses_backward(event: LayerRuns) -> list[Step]:
    return [
        _to_heads("dy"),
        Apply(
            function="attention_gradient",
            number=event.number,
            reads=("dy_heads", "q_heads", "k_heads", "v_heads", "y_heads", "log_sums"),
            writes=("dq_heads", "dk_heads", "dv_heads"),
        ),
        *(_to_tokens(f"d{operand}_heads", f"d{operand}") for operand in ("q", "k", "v")),
    ]


def _to_heads(operand: str) -> Step:
    return AllToAll(axis=SEQUENCE, dim=HEADS, into_dim=TOKENS, reads=(operand,), writes=(f"{operand}_heads",))


def _to_tokens(operand: str, made: str) -> Step:
    return AllToAll(axis=SEQUENCE, dim=TOKENS, into_dim=HEADS, reads=(operand,), writes=(made,))
