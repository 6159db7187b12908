"""What a step is predicted to take with an assignment: compute of the slowest, and movement that does not hide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .assignment import Assignment
from .beside import NOTHING, Beside, Extra
from .column_costs import column_half_ns
from .movement_cost import ColumnsCost, MovementCost
from .policy import Half
from .product_cost import ProductCost, Products, product_cost
from .speeds import kept_shares
from .split import Lending
from .work import BACKWARD, FORWARD, BlockWork

# Of a link, what an all-reduce keeps while units move on it: NCCL's two channels against a message for each helper.
REDUCING_SHARE = 0.25


Movement = Mapping[Half, MovementCost | ColumnsCost]  # what is not in it costs nothing


@dataclass(frozen=True, slots=True)
class HalfTimes:
    """Of one half of one block, forward and backward of one micro-batch.

    Args:
        own_ns: The slowest of ranks that compute units of their own alone.
        borrowing_ns: The slowest of those that compute borrowed units too.
        move_ns: Of what is lent, one way; 0 by columns, whose movement is over within the half and in `own_ns`.
    """

    own_ns: float
    borrowing_ns: float
    move_ns: float

    @property
    def compute_ns(self) -> float:
        return max(self.own_ns, self.borrowing_ns)


def half_times(
    work: BlockWork,
    half: Half,
    unit_ns: Sequence[float],
    lending: Lending,
    cost: MovementCost | ColumnsCost,
    pruning: Sequence[float],
    product: ProductCost,
    extras: Sequence[Extra],
) -> HalfTimes:
    """Of ranks that take `unit_ns` for a unit of all blocks in a step, with what they prune taken off.

    Args:
        pruning: [ranks], what it takes beside (`pruning_units`), in the time of so many units.
        product: What units take by their number; not asked for by columns.
        extras: [ranks], beside products; not asked for by columns.
    """
    if isinstance(cost, ColumnsCost):
        return HalfTimes(column_half_ns(work, half, unit_ns, lending, cost, pruning), 0.0, 0.0)
    own, parts = work.units[half], work.blocks * work.passes
    alone = with_borrowed = 0.0
    for time_ns, lent, borrowed, more, extra in zip(
        unit_ns, lending.lent, lending.borrowed, pruning, extras, strict=True
    ):
        units = own - lent + borrowed
        took_ns = time_ns * (product.effort(units) + more) + extra.ns(units)
        if borrowed:
            with_borrowed = max(with_borrowed, took_ns)
        else:
            alone = max(alone, took_ns)
    return HalfTimes(alone / parts, with_borrowed / parts, cost.one_way_ns(lending))


def pruning_units(product: ProductCost, kept: float, overhead: float) -> float:
    """What a rank that keeps a share of its columns does beside its units, in the time of so many of them, pruned."""
    return (overhead + product.flat_of(kept)) * product.own / product.left_of(kept) if kept < 1 else 0.0


def all_reduce_ns(work: BlockWork, movement: Movement) -> float:
    """Of one of a block's all-reduces, as a ring on links that are as fast as movement's were. 0 by columns, where it
    is not asked for.
    """
    byte_ns = max(
        (
            cost.unit_ns / (2 * work.unit_bytes(half))
            for half, cost in movement.items()
            if isinstance(cost, MovementCost)
        ),
        default=0.0,
    )
    nbytes = work.tokens * work.hidden * work.element_bytes
    return 2 * (work.ranks - 1) / work.ranks * nbytes * byte_ns


def block_ns(attention: HalfTimes, ffn: HalfTimes, *, ahead: bool, reduce_ns: float = 0.0) -> float:
    """Of one block, one micro-batch, without its all-reduces.

    Units go out from the start of the block's forward on, attention's first; a rank that borrows waits for them at the
    start of the half. `ahead`: from the start of the block before on. In backward, gradients of the FFN's units
    come back beside attention's backward, and then attention's, beside nothing. Movement hides behind computation
    alone: an all-reduce that it meets is held up by what moves meanwhile, for both are on the same links.

    Args:
        reduce_ns: Of an all-reduce, of which each half has one at the end of forward and one at the end of backward.
    """
    both_out = attention.move_ns + ffn.move_ns
    if ahead:
        forward = _with_movement(
            both_out,
            ((FORWARD * attention.compute_ns, reduce_ns), (FORWARD * ffn.compute_ns, reduce_ns)),
        )
    else:
        first = FORWARD * attention.own_ns
        if attention.borrowing_ns:
            first = max(first, attention.move_ns + FORWARD * attention.borrowing_ns)
        left = max(0.0, both_out - first)
        held = _held_up(left, reduce_ns)
        forward = first + held + FORWARD * ffn.own_ns
        if ffn.borrowing_ns:
            forward = max(forward, first + left + FORWARD * ffn.borrowing_ns)
    returning = _with_movement(ffn.move_ns, ((0.0, reduce_ns), (BACKWARD * attention.compute_ns, 0.0)))
    return forward + BACKWARD * ffn.compute_ns + returning + attention.move_ns


def _with_movement(move_ns: float, stretches: Sequence[tuple[float, float]]) -> float:
    """Of computation, each stretch with an all-reduce behind it that is not counted, beside movement from the start on
    that has to be over at the end.
    """
    taken, left = 0.0, move_ns
    for compute_ns, reduce_ns in stretches:
        left = max(0.0, left - compute_ns)
        held = _held_up(left, reduce_ns)
        taken += compute_ns + held
        left -= held
    return taken + left


def _held_up(left_ns: float, reduce_ns: float) -> float:
    """By what an all-reduce ends later for movement that it meets."""
    return min(left_ns, (1 / REDUCING_SHARE - 1) * reduce_ns)


def predicted_ns(
    assignment: Assignment,
    unit_ns: Mapping[Half, Sequence[float]],
    movement: Movement,
    overhead: float = 0.0,
    products: Products | None = None,
    beside: Beside = NOTHING,
) -> float:
    """Of all blocks of a stage in one step: products and what ranks do beside them, with what movement adds.

    Args:
        unit_ns: [ranks] for each half, of a unit of all blocks in a step, nothing pruned.
        overhead: As `Speeds` says.
    """
    work = assignment.work
    lending = {half: lending_of(assignment, half) for half in Half}
    shares = {half: [kept_shares(assignment, half, rank) for rank in range(work.ranks)] for half in Half}
    # where ratios differ by product each block waits for its own slowest rank
    unlike = max(len(each) for of_half in shares.values() for each in of_half)
    reduce_ns = all_reduce_ns(work, movement)
    total = 0.0
    for block in range(unlike):
        times = {}
        for half in Half:
            product = product_cost(products or {}, work, half)
            kept = [each[block if len(each) > 1 else 0] for each in shares[half]]
            times[half] = half_times(
                work,
                half,
                [
                    time_ns * product.left_of(share)
                    for time_ns, share in zip(unit_ns[half], kept, strict=True)
                ],
                lending[half],
                movement.get(half, MovementCost()),
                [pruning_units(product, share, overhead) for share in kept],
                product,
                beside.of(half, work),
            )
        total += block_ns(times[Half.attention], times[Half.ffn], ahead=work.ahead, reduce_ns=reduce_ns)
    return total / unlike * work.blocks * work.passes


def lending_of(assignment: Assignment, half: Half) -> Lending:
    ranks = range(assignment.work.ranks)
    return Lending(
        tuple(sum(assignment.lent(half, rank)) for rank in ranks),
        tuple(assignment.received(half, rank) for rank in ranks),
    )
