"""Sets of time as sorted, disjoint intervals of nanoseconds."""

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Sorted and disjoint; empty ones are dropped."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What of `a` is not in `b`; both as `union` makes them."""
    left: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """The part of `a` within [start, end)."""
    return [(max(s, start), min(e, end)) for s, e in a if e > start and s < end]


def length_ns(a: Intervals) -> int:
    return sum(end - start for start, end in a)
