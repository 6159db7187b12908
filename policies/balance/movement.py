"""Plans by which lent units go to the ranks that compute them, and their gradients come back.

A unit's weights and biases lie side by side, one row for each unit. Each straggler sends once a forward pass of a
block's half, and gets the gradients back once a backward pass; both run beside computation.
"""

from ..mesh import TENSOR
from ..plan import Gather, Plan, Scatter
from .assignment import Assignment
from .policy import Half

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
