"""Plans by which lent units go to the ranks that compute them, and their gradients come back.

A unit's weights and biases lie side by side, one row for each unit. Each straggler sends once a forward pass of a
block's half, and gets the gradients back once a backward pass; both run beside computation.
"""

from collections.abc import Sequence

from ..mesh import TENSOR
from ..plan import Gather, Plan, Scatter
from .assignment import Assignment
from .policy import Half, Migrate
from .work import BlockWork

LEND_STREAM = "lend"
RETURN_STREAM = "return"
MEASURE_STREAM = "balance"  # times of all ranks, at the end of a period


def lend_plans(assignment: Assignment, half: Half) -> tuple[Plan, ...]:
    """One for each rank that lends, ascending: "units" [units lent, numbers of one] -> "lent", those for this rank."""
    return _plans(assignment, half, Scatter, "units", "lent", LEND_STREAM)


def return_plans(assignment: Assignment, half: Half) -> tuple[Plan, ...]:
    """One for each rank that lends, ascending: "dlent" of each rank -> "dunits" at the one that lent them."""
    return _plans(assignment, half, Gather, "dlent", "dunits", RETURN_STREAM)


def _plans(
    assignment: Assignment,
    half: Half,
    word: type[Scatter] | type[Gather],
    reads: str,
    writes: str,
    stream: str,
) -> tuple[Plan, ...]:
    return tuple(
        Plan(
            (
                word(
                    axis=TENSOR, root=src, parts=assignment.lent(half, src), reads=(reads,), writes=(writes,)
                ),
            ),
            stream,
        )
        for src in assignment.sources(half)
    )


def pretest_moves(work: BlockWork, half: Half) -> tuple[tuple[Migrate, ...], ...]:
    """What is moved before the first step, one after the other, between the two halves of a group: ranks that are far
    from each other are in different ones.

    The first rank lends few units to the second half, at most one to each; then half of what it has, but two where
    there are two (of one unit both are that one). Of four ranks or more each of the first half then lends as many to
    one of the second: whether they take longer than one alone. By columns it shares out half of that to the next one,
    as those who lend do (`split.Lending.parts`): there each rank's movement is in the order of ranks that lend, so that
    a helper of two makes one of them wait. (): there is no unit that can move.
    """
    own, middle = work.units[half] - work.least_kept, work.ranks // 2
    helpers = range(middle, work.ranks)
    many = min(own, max(2, work.units[half] // 2))
    if not many:
        return ()
    few = max(1, min(len(helpers), many // 2))
    found = [_spread(half, units, helpers) for units in (few, many)]
    if middle > 1:
        to_next = many // 2 if work.by_columns else 0
        parts = [
            (src, dst, units)
            for src in range(middle)
            for dst, units in ((middle + src, many - to_next), (middle + (src + 1) % middle, to_next))
        ]
        found.append(tuple(Migrate(src, dst, half, units) for src, dst, units in parts if units))
    return tuple(found)


def _spread(half: Half, units: int, helpers: Sequence[int]) -> tuple[Migrate, ...]:
    """Of the first rank, as evenly as they go, the lower helpers first."""
    each, more = divmod(units, len(helpers))
    parts = (each + (place < more) for place in range(len(helpers)))
    return tuple(Migrate(0, dst, half, part) for dst, part in zip(helpers, parts, strict=True) if part)
