"""Units shared out so that the slowest rank is done first, and what of that each slow rank lends to whom."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .policy import Half
from .work import BlockWork

ROUNDING = 1e-9  # relative: a level that a count of units was made from holds so many units again


@dataclass(frozen=True, slots=True)
class Lending:
    """Of one half.

    Args:
        lent: [ranks], that a rank gives to others.
        borrowed: [ranks], that it gets; as many in all. No rank does both.
    """

    lent: tuple[int, ...]
    borrowed: tuple[int, ...]

    def parts(self) -> tuple[tuple[int, ...], ...]:
        """[from][to], ascending ranks to ascending ranks: fewer messages than ranks that lend or borrow."""
        left = list(self.borrowed)
        rows = []
        for amount in self.lent:
            row = [0] * len(left)
            for dst, open_units in enumerate(left):
                row[dst] = min(amount, open_units)
                amount -= row[dst]
                left[dst] -= row[dst]
            rows.append(tuple(row))
        return tuple(rows)


def split_units(unit_ns: Sequence[float], total: int, most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Units of each rank, `total` in all, such that the slowest is done as early as it can be.

    Args:
        unit_ns: [ranks], > 0.
        most: [ranks], upper limits.

    Raises:
        ValueError: If the limits do not leave room for all.
    """
    none = [0] * len(unit_ns)
    return tuple(fill(unit_ns, none, [total] * len(unit_ns) if most is None else most, total))


def lend(
    unit_ns: Sequence[float],
    own: int,
    room: Sequence[int],
    shares: Sequence[float] = (1.0,),
    *,
    at_least: int = 0,
    beside: Sequence[float] | None = None,
) -> list[Lending]:
    """What ranks of `own` units each lend and borrow for the earliest end, or for a part of the way to it.

    Of all that end equally early it moves the fewest units, to the fewest ranks.

    Args:
        unit_ns: [ranks], > 0.
        room: [ranks], that a rank can borrow.
        shares: Of the time that an even split takes longer than the best: what of it is gained, at the least. For
            each, an answer.
        at_least: Units that each rank keeps, if it has them.
        beside: [ranks], what else a rank does, in the time of so many units.
    """
    if beside is None:
        beside = [0.0] * len(unit_ns)
    even_ns = max(time * (own + more) for time, more in zip(unit_ns, beside, strict=True))
    best = fill(unit_ns, beside, [own + units for units in room], own * len(unit_ns))
    best_ns = max(time * (units + more) for time, units, more in zip(unit_ns, best, beside, strict=True))
    return [
        _lend_to_level(
            unit_ns,
            own,
            room,
            (even_ns - share * (even_ns - best_ns)) * (1 + ROUNDING),
            min(own, at_least),
            beside,
        )
        for share in shares
    ]


def _lend_to_level(
    unit_ns: Sequence[float],
    own: int,
    room: Sequence[int],
    level: float,
    at_least: int,
    beside: Sequence[float],
) -> Lending:
    """Such that no rank takes longer than `level`, which is no earlier than the best."""
    lent = [
        max(0, own - max(at_least, int(level / time - more)))
        for time, more in zip(unit_ns, beside, strict=True)
    ]
    moved = sum(lent)
    borrowed = [0] * len(unit_ns)
    if not moved:
        return Lending(tuple(lent), tuple(borrowed))
    helpers = [rank for rank, units in enumerate(lent) if not units]
    times, rooms = [unit_ns[rank] for rank in helpers], [room[rank] for rank in helpers]
    base = [own + beside[rank] for rank in helpers]
    loads = fill(times, base, rooms, moved)
    until = max(time * (has + more) for time, has, more in zip(times, base, loads, strict=True) if more)
    until *= 1 + ROUNDING
    # Until then some have room for more than others. Who has most comes first, so that few get a message.
    open_units = {
        rank: min(limit, int(until / time - has))
        for rank, time, limit, has in zip(helpers, times, rooms, base, strict=True)
    }
    for rank in sorted(helpers, key=lambda rank: (-open_units[rank], rank)):
        borrowed[rank] = max(0, min(moved, open_units[rank]))
        moved -= borrowed[rank]
    return Lending(tuple(lent), tuple(borrowed))


def room_for_units(
    work: BlockWork, free_bytes: Sequence[int], borrowed: Mapping[Half, Sequence[int]]
) -> dict[Half, tuple[int, ...]]:
    """[ranks] for each half: units that free memory can hold, of all blocks: weights and gradients, and by columns
    inputs, which stay from forward to backward.

    Both halves get the same share of a rank's units. What a rank has borrowed already it can hold.
    """
    all_bytes = _all_units_bytes(work)
    return {
        half: tuple(
            max(has, max(0, free) * work.units[half] // max(1, all_bytes))
            for free, has in zip(free_bytes, borrowed[half], strict=True)
        )
        for half in Half
    }


def least_room_bytes(work: BlockWork) -> int:
    """Free memory from which on `room_for_units` has room for a unit of either half."""
    return -(-_all_units_bytes(work) // max(1, *work.units.values()))


def _all_units_bytes(work: BlockWork) -> int:
    return work.blocks * sum(
        work.units[half] * (2 * work.unit_bytes(half) + work.lent_input_bytes(half)) for half in Half
    )


def lossless_ceiling(slowness: Sequence[float], work: BlockWork | None = None) -> float:
    """How many times faster the best lossless split is than an even one, where movement costs nothing.

    With one straggler of slowness chi and k helpers, m* = (chi - 1) / (chi + 1 / k) of its units move, and it takes
    chi (1 - m*) instead of chi.

    Args:
        slowness: [ranks], of each rank: time of the same work, 1 at full speed.
        work: Its units do not part, and each half of a block waits for its slowest rank; None: any fraction can move.

    Raises:
        ValueError: If there is no rank, or one of no speed.
    """
    if not slowness or min(slowness) <= 0:
        raise ValueError(f"slowness={list(slowness)}: must be numbers > 0, one for each rank")
    if work is None:
        return max(slowness) * sum(1 / slow for slow in slowness) / len(slowness)
    even = best = 0.0
    for half in Half:
        units = split_units(slowness, work.units[half] * len(slowness))
        even += work.units[half] * work.unit_flop[half] * max(slowness)
        best += work.unit_flop[half] * max(slow * mine for slow, mine in zip(slowness, units, strict=True))
    return even / best


def fill(unit_ns: Sequence[float], base: Sequence[float], room: Sequence[int], amount: int) -> list[int]:
    """Units that each rank gets on top of `base`, `amount` in all: the largest time is the smallest that can be.

    Whole units are given one by one to whoever would have done with it first, the lowest rank of several; that is
    exact (it is the rule of d'Hondt). All but the last few are given at once, below the level of a split in fractions.

    Raises:
        ValueError: If there is no room for all.
    """
    if sum(room) < amount:
        raise ValueError(f"{amount} units have room for {sum(room)} only, {list(room)} on each rank")
    added = [0] * len(unit_ns)
    full = {i for i, limit in enumerate(room) if limit <= 0}
    while len(full) < len(unit_ns):
        active = [i for i in range(len(unit_ns)) if i not in full]
        left = amount - sum(added[i] for i in full)
        for i in active:
            added[i] = 0
        while True:  # without those that have more to do already than the level
            units, rate = float(left), 0.0
            for i in active:
                units += base[i]
                rate += 1 / unit_ns[i]
            level = units / rate * (1 - ROUNDING)
            below = [i for i in active if base[i] * unit_ns[i] <= level]
            if len(below) in (0, len(active)):
                break
            active = below
        for i in active:
            added[i] = max(0, int(level / unit_ns[i] - base[i]))
        over = [i for i in active if added[i] >= room[i]]
        if not over:
            break
        for i in over:
            added[i] = room[i]
        full.update(over)
    left = amount - sum(added)
    done = [((base[i] + added[i] + 1) * unit_ns[i], i) for i in range(len(unit_ns)) if added[i] < room[i]]
    heapq.heapify(done)
    for _ in range(left):
        _, i = done[0]
        added[i] += 1
        if added[i] < room[i]:
            heapq.heapreplace(done, ((base[i] + added[i] + 1) * unit_ns[i], i))
        else:
            heapq.heappop(done)
    return added
