"""Plans by which lent units go to the ranks that compute them, and their gradients come back.

A unit's weights and biases lie side by side, one row for each unit. Each straggler sends once a forward pass of a
block's half, and gets the gradients back once a backward pass; both run beside computation.
"""

from collections.abc import Sequence

from ..mesh import TENSOR
from ..plan import Gather, Plan, Scatter
from .assignment import Assignment, moves
from .policy import Half, Migrate
from .work import BlockWork

LEND_STREAM = "lend"
RETURN_STREAM = "return"
MEASURE_STREAM = "balance"  # times of all ranks, at the end of a period


def lend_plans(assignment: Assignment, half: Half) -> tuple[Plan, ...]:
    """One for each rank that lends, ascending: "units" [units lent, numbers of one] -> "lent", those for this rank."""
    return tuple(
        Plan(
            (
                Scatter(
                    axis=TENSOR,
                    root=src,
                    parts=assignment.lent(half, src),
                    reads=("units",),
                    writes=("lent",),
                ),
            ),
            LEND_STREAM,
        )
        for src in assignment.sources(half)
    )


def pretest_moves(work: BlockWork, half: Half) -> tuple[tuple[Migrate, ...], ...]:
    """What is moved before the first step, one after the other: the first rank of a group lends few units, at most one
    to each; then half of what it has, but two where there are two (of one unit both are that one). Of four ranks or
    more the first two then lend as many each, to ranks of their own: whether that takes longer than one of them alone.
    """
    own, ranks = work.units[half], work.ranks
    many = min(own, max(2, own // 2))
    few = max(1, min(ranks - 1, many // 2))
    found = [_spread(half, 0, units, range(1, ranks)) for units in (few, many)]
    if ranks >= 4:
        middle = ranks // 2 + 1
        first, second = range(2, middle), range(middle, ranks)
        found.append((*_spread(half, 0, many, first), *_spread(half, 1, many, second)))
    return tuple(found)


def _spread(half: Half, src: int, units: int, helpers: Sequence[int]) -> tuple[Migrate, ...]:
    """As evenly as they go, the first helpers first."""
    each, more = divmod(units, len(helpers))
    parts = [0] * (max(helpers) + 1)
    for place, helper in enumerate(helpers):
        parts[helper] = each + (place < more)
    return tuple(moves(half, src, parts))


def return_plans(assignment: Assignment, half: Half) -> tuple[Plan, ...]:
    """One for each rank that lends, ascending: "dlent" of each rank -> "dunits" at the one that lent them."""
    return tuple(
        Plan(
            (
                Gather(
                    axis=TENSOR,
                    root=src,
                    parts=assignment.lent(half, src),
                    reads=("dlent",),
                    writes=("dunits",),
                ),
            ),
            RETURN_STREAM,
        )
        for src in assignment.sources(half)
    )
