"""Plans of attention over ranks that hold some tokens of each sequence."""

from dataclasses import dataclass

from ..mesh import divisors
from ..plan import Plan
from .common import layer_plan
from .layers import LayerRuns
from .policy import Direction
from .ring import ring, ring_backward
from .rsa import rsa, rsa_backward
from .tokens import token_runs
from .ulysses import ulysses, ulysses_backward


@dataclass(frozen=True, slots=True)
class AttentionPlans:
    """Args:
    mode: "ring", "rsa" or "ulysses"; of no effect with one rank.
    size: Ranks of the group.
    zigzag: Each rank has the r-th piece of 2 * size, and the r-th from the end.
    """

    mode: str
    size: int
    zigzag: bool = False

    def plan(self, event: LayerRuns) -> Plan | None:
        """Of a layer of kind attention; None with one rank, which needs no other.

        Raises:
            ValueError: If the mode has no plans of its own.
        """
        forward = event.direction is not Direction.backward
        if self.size == 1:
            return None
        if self.mode == "ulysses":
            return layer_plan(ulysses(event) if forward else ulysses_backward(event))
        if self.mode == "rsa":
            return layer_plan(rsa(event) if forward else rsa_backward(event))
        if self.mode == "ring":
            plan = ring if forward else ring_backward
            return layer_plan(plan(event, size=self.size, zigzag=self.zigzag))
        raise ValueError(
            f"parallel.sequence_mode={self.mode!r} has no plans of attention; use ring, rsa or ulysses"
        )

    def token_runs(self, tokens: int, rank: int) -> tuple[tuple[int, int], ...]:
        """[start, end) of the runs of a sequence's tokens that the `rank`-th of the group holds."""
        return token_runs(tokens, size=self.size, zigzag=self.zigzag, rank=rank)

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
                f"it can be cut in one of {[n for n in divisors(tokens) if tokens % (pieces // self.size * n) == 0]}"
            )
        if self.mode == "ulysses":
            for key, size in (("heads", heads), ("kv_heads", kv_heads)):
                if size // features % self.size:
                    raise ValueError(
                        f"parallel.sequence={self.size} with parallel.sequence_mode=ulysses must divide the "
                        f"{size // features} of model.{key}={size} that a rank has; use one of "
                        f"{divisors(size // features)}, or sequence_mode=ring"
                    )
