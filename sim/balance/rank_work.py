"""What an assignment comes to on one rank of a tensor group: its share of each block, and the units that it moves."""

from dataclasses import dataclass

from ...conf.schema import Way
from ...policies.balance import Assignment, Half, lend_plans, return_plans
from ...policies.plan import Gather, Plan, Scatter
from ..interpreter import Transfer
from .columns import ColumnShare
from .share import Share, shares_of


@dataclass(frozen=True, slots=True)
class Movement:
    """Units of one straggler that others compute, in which this rank takes part.

    Args:
        lends: Whether it is the straggler.
        own_bytes: Of the rows that this rank sends or gets, one way.
        computed_bytes: Of all units that it computes, which lie together for one product.
    """

    half: Half
    lend: Transfer
    bring_back: Transfer
    lend_stream: str
    return_stream: str
    lends: bool
    own_bytes: int
    computed_bytes: int


@dataclass(frozen=True, slots=True)
class RankWork:
    """Args:
    shares: Of the blocks of the stage; () where all are even.
    movements: In the order of issue.
    """

    shares: tuple[Share | ColumnShare | None, ...] = ()
    movements: tuple[Movement, ...] = ()


EVEN = RankWork()


def rank_work(assignment: Assignment, place: int, way: Way = Way.paired) -> RankWork:
    """Of the rank at `place` in its group."""
    if assignment.is_even:
        return EVEN
    if way is not Way.paired:
        blocks = range(assignment.work.blocks)
        return RankWork(tuple(ColumnShare.of(assignment, place, way, block) for block in blocks))
    shares = shares_of(assignment, place)
    movements: list[Movement] = []
    for half in Half:
        unit_bytes = assignment.work.unit_bytes(half)
        computed = assignment.computed(half, place) * unit_bytes
        pairs = zip(lend_plans(assignment, half), return_plans(assignment, half), strict=True)
        for lends, returns in pairs:
            step, lend = uneven(lends, unit_bytes)
            _, bring_back = uneven(returns, unit_bytes)
            if not step.takes_part(place):
                continue
            is_root = place == step.root
            own = sum(lend.parts) if is_root else lend.parts[place]
            movements.append(
                Movement(half, lend, bring_back, lends.stream, returns.stream, is_root, own, computed)
            )
    return RankWork(shares if any(shares) else (), tuple(movements))


def uneven(plan: Plan, row_bytes: int) -> tuple[Scatter | Gather, Transfer]:
    """The one step of a plan that moves rows of an operand, and what it comes to.

    Raises:
        ValueError: If it is something else.
    """
    (step,) = plan.steps
    if not isinstance(step, Scatter | Gather):
        raise ValueError(f"plan '{plan.describe()}' moves no units; its step must be a Scatter or a Gather")
    op = "scatter" if isinstance(step, Scatter) else "gather"
    parts = tuple(rows * row_bytes for rows in step.parts)
    size = len(parts)
    return step, Transfer(op, step.axis, size, sum(parts), max(parts), root=step.root, parts=parts)
