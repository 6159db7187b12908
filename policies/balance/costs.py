"""What a step is predicted to take with an assignment: compute of the slowest, and movement that does not hide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .assignment import Assignment
from .policy import Half, MovementTimed
from .speeds import kept_shares
from .split import Lending
from .work import BlockWork

FORWARD = 1 / 3  # of a product's time: one of three multiplications of the same size
BACKWARD = 2 / 3


@dataclass(frozen=True, slots=True)
class MovementCost:
    """Units of one rank out and their gradients back: `start_ns` for each time, `unit_ns` for each unit (c0, c1)."""

    start_ns: float = 0.0
    unit_ns: float = 0.0

    def one_way_ns(self, lent: Sequence[int]) -> float:
        """Of all ranks that lend, one after the other: what they send ends at the same few links."""
        return sum(self.start_ns + self.unit_ns * units for units in lent if units) / 2


def fit_movement(timed: MovementTimed) -> MovementCost:
    """The line through two timed movements; no part of it falls."""
    (few, many), (few_ns, many_ns) = timed.units, timed.time_ns
    if min(few, many) < 1 or min(few_ns, many_ns) < 0:
        raise ValueError(f"{timed}: must be of at least one unit and 0 ns")
    if few == many:
        return MovementCost(0.0, (few_ns + many_ns) / (few + many))
    unit_ns = max(0.0, (many_ns - few_ns) / (many - few))
    return MovementCost(max(0.0, few_ns - unit_ns * few), unit_ns)


@dataclass(frozen=True, slots=True)
class HalfTimes:
    """Of one half of one block, forward and backward of one micro-batch.

    Args:
        own_ns: The slowest of ranks that compute units of their own alone.
        borrowing_ns: The slowest of those that compute borrowed units too.
        move_ns: Of what is lent, one way.
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
    cost: MovementCost,
    beside: Sequence[float],
) -> HalfTimes:
    """Of ranks that take `unit_ns` for a unit of all blocks in a step, with what they prune taken off.

    Args:
        beside: [ranks], what else a rank does, in the time of so many units.
    """
    own, parts = work.units[half], work.blocks * work.passes
    alone = with_borrowed = 0.0
    for time_ns, lent, borrowed, more in zip(unit_ns, lending.lent, lending.borrowed, beside, strict=True):
        if borrowed:
            with_borrowed = max(with_borrowed, time_ns * (own + borrowed + more))
        else:
            alone = max(alone, time_ns * (own - lent + more))
    return HalfTimes(alone / parts, with_borrowed / parts, cost.one_way_ns(lending.lent))


def beside_pruned(work: BlockWork, half: Half, kept: float, overhead: float) -> float:
    """What a rank that keeps a share of its columns does beside its units, in the time of so many of them, pruned."""
    return overhead * work.units[half] / kept if kept < 1 else 0.0


def block_ns(attention: HalfTimes, ffn: HalfTimes, *, ahead: bool) -> float:
    """Of one block, one micro-batch.

    Units go out from the start of the block's forward on, attention's first; a rank that borrows waits for them at the
    start of the half. `ahead`: from the start of the block before on. In backward, gradients of the FFN's units
    come back beside attention's backward, and then attention's, beside nothing.
    """
    both_out = attention.move_ns + ffn.move_ns
    if ahead:
        forward = max(FORWARD * (attention.compute_ns + ffn.compute_ns), both_out)
    else:
        first = FORWARD * attention.own_ns
        if attention.borrowing_ns:
            first = max(first, attention.move_ns + FORWARD * attention.borrowing_ns)
        forward = first + FORWARD * ffn.own_ns
        if ffn.borrowing_ns:
            forward = max(forward, max(first, both_out) + FORWARD * ffn.borrowing_ns)
    beside = max(BACKWARD * attention.compute_ns, ffn.move_ns)
    return forward + BACKWARD * ffn.compute_ns + beside + attention.move_ns


def predicted_ns(
    assignment: Assignment,
    unit_ns: Mapping[Half, Sequence[float]],
    movement: Mapping[Half, MovementCost],
    overhead: float = 0.0,
) -> float:
    """Of the products of all blocks of a stage in one step, with what movement adds.

    Args:
        unit_ns: [ranks] for each half, of a unit of all blocks in a step, nothing pruned.
        movement: What is not in it costs nothing.
        overhead: As `Speeds` says.
    """
    work = assignment.work
    lending = {half: lending_of(assignment, half) for half in Half}
    shares = {half: [kept_shares(assignment, half, rank) for rank in range(work.ranks)] for half in Half}
    # where ratios differ by product each block waits for its own slowest rank
    unlike = max(len(each) for of_half in shares.values() for each in of_half)
    total = 0.0
    for block in range(unlike):
        times = {}
        for half in Half:
            kept = [each[block if len(each) > 1 else 0] for each in shares[half]]
            times[half] = half_times(
                work,
                half,
                [time_ns * share for time_ns, share in zip(unit_ns[half], kept, strict=True)],
                lending[half],
                movement.get(half, MovementCost()),
                [beside_pruned(work, half, share, overhead) for share in kept],
            )
        total += block_ns(times[Half.attention], times[Half.ffn], ahead=work.ahead)
    return total / unlike * work.blocks * work.passes


def lending_of(assignment: Assignment, half: Half) -> Lending:
    ranks = range(assignment.work.ranks)
    return Lending(
        tuple(sum(assignment.lent(half, rank)) for rank in ranks),
        tuple(assignment.received(half, rank) for rank in ranks),
    )
