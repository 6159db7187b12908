"""Whole shares of work for the earliest end, each taker one at least: sequences for replicas, blocks for stages."""

from collections.abc import Sequence

from .split import fill


def taken_for_equal(speeds_ns: Sequence[float], slack: float) -> list[float]:
    """Times of one unit of work, of which those that differ by at most `slack` are replaced by their mean: groups begin
    with the fastest that is left.
    """
    order = sorted(range(len(speeds_ns)), key=lambda i: (speeds_ns[i], i))
    found = list(speeds_ns)
    while order:
        first = speeds_ns[order[0]]
        group = [i for i in order if speeds_ns[i] <= (1 + slack) * first]
        mean = sum(speeds_ns[i] for i in group) / len(group)
        for i in group:
            found[i] = mean
        order = order[len(group) :]
    return found


def best_split(
    total: int, each_ns: Sequence[float], *, most: Sequence[int] | None = None, ends_ns: Sequence[float] = ()
) -> tuple[int, ...]:
    """Whole shares of `total`, at least one each, whose slowest ends first.

    Args:
        each_ns: [takers], of one unit.
        most: [takers], that each can take; None: all.
        ends_ns: [takers], that each needs beside; (): none does.

    Raises:
        ValueError: If they cannot take so many, or there are fewer units than takers.
    """
    takers = len(each_ns)
    limits = [total] * takers if most is None else list(most)
    if total < takers or sum(limits) < total or min(limits) < 1:
        raise ValueError(f"{total} units over {takers} that can take {limits}, at least one each")
    beside = list(ends_ns) or [0.0] * takers
    base = [1 + end_ns / unit_ns for end_ns, unit_ns in zip(beside, each_ns, strict=True)]
    more = fill(each_ns, base, [limit - 1 for limit in limits], total - takers)
    return tuple(1 + units for units in more)
