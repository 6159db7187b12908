"""Plans by which lent units go to the ranks that compute them, and their gradients come back.

A unit's weights and biases lie side by side, one row for each unit. Each straggler sends once a forward pass of a
block's half, and gets the gradients back once a backward pass; both run beside computation.
"""

from ..mesh import TENSOR
from ..plan import Gather, Plan, Scatter
from .assignment import Assignment
from .policy import Half
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


def pretest_parts(work: BlockWork, half: Half) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Before the first step the first rank of a group lends so many units to each, twice: first few, at most one to
    each; then half of what it has, but two where there are two. Of one unit both are that one.
    """
    own, helpers = work.units[half], work.ranks - 1
    many = min(own, max(2, own // 2))
    few = max(1, min(helpers, many // 2))
    return _spread(few, helpers), _spread(many, helpers)


def _spread(units: int, helpers: int) -> tuple[int, ...]:
    """As evenly as they go, the lower ranks first."""
    return (0, *(units // helpers + (place < units % helpers) for place in range(helpers)))


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
