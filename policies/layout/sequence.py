"""Plans of attention over ranks that hold some tokens of each sequence."""

from dataclasses import dataclass

from ..mesh import SEQUENCE, divisors
from ..plan import AllToAll, Apply, Plan, Step
from .common import layer_plan
from .layers import LayerRuns
from .policy import Direction

HEADS, TOKENS = 1, 2  # dimensions of queries, keys and values


@dataclass(frozen=True, slots=True)
class AttentionPlans:
    """Args:
    mode: "ring" or "ulysses"; of no effect with one rank.
    size: Ranks of the group.
    zigzag: Each rank has the r-th piece of 2 * size, and the r-th from the end.
    """

    mode: str
    size: int
    zigzag: bool = False

    def plan(self, event: LayerRuns) -> Plan | None:
        forward = event.direction is not Direction.backward
        return layer_plan(_ulysses(event) if forward else _ulysses_backward(event))

    def check(self, *, tokens: int, heads: int, kv_heads: int, features: int) -> None:
        """Raises ValueError if a size does not divide, naming both numbers.

        Args:
            features: Parts in which tensor parallelism cuts the heads.
        """
        if self.size == 1:
            return
        pieces = 2 * self.size if self.zigzag else self.size
        if tokens % pieces:
            why = " in two pieces each (parallel.zigzag)" if self.zigzag else ""
            raise ValueError(
                f"parallel.sequence={self.size} must cut batch.sequence={tokens}{why}: {pieces} does not divide it; "
                f"it can be cut in one of {divisors(tokens)}"
            )
        if self.mode == "ulysses":
            for key, size in (("heads", heads), ("kv_heads", kv_heads)):
                if size // features % self.size:
                    raise ValueError(
                        f"parallel.sequence={self.size} with parallel.sequence_mode=ulysses must divide the "
                        f"{size // features} of model.{key}={size} that a rank has; use one of "
                        f"{divisors(size // features)}, or sequence_mode=ring"
                    )


def _ulysses(event: LayerRuns) -> list[Step]:
    """All tokens of some heads in place of some tokens of all heads (Jacobs et al. 2023, DeepSpeed-Ulysses)."""
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


def _ulysses_backward(event: LayerRuns) -> list[Step]:
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
