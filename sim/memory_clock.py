"""When a rank holds what: the points of `memory` set on the clock of a simulated step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..analysis.record import Counter
from ..conf.schema import Engine
from .classes import Fold
from .executor import Segment, Timing
from .memory import EMBED, ROOT, MemoryPoint
from .program import COMPUTE, Program

MAX_POINTS = 500  # of a rank in the record; more are thinned
_UNITS = {EMBED: ROOT, "all": ""}  # as a program calls them


class MemoryClock:
    """Knows of each point during which item of its rank's program it holds.

    Args:
        engine: Whose programs they are.
        points: Of one step, rank by rank, as `memory.memory_over_time` has them.
    """

    def __init__(self, engine: Engine, points: Sequence[MemoryPoint], fold: Fold) -> None:
        self._engine = engine
        self._fold = fold
        self._by_rank: dict[int, list[MemoryPoint]] = {}
        for point in points:
            self._by_rank.setdefault(point.rank, []).append(point)
        self._items: dict[int, list[int]] = {}  # of each program

    def step(
        self, segment: Segment, timings: Mapping[int, Timing]
    ) -> Iterator[tuple[int, list[tuple[int, MemoryPoint]]]]:
        """Each rank's points with the simulated time at which the computation of each begins, thinned.

        Where a segment's items were not kept there is nothing.
        """
        for rank, points in self._by_rank.items():
            timing = timings.get(self._fold.representative(rank))
            if timing is None or not timing.starts_ns:
                continue
            items = self._items_of(segment.program(rank), points)
            yield rank, list(thinned([(timing.starts_ns[i], p) for i, p in zip(items, points, strict=True)]))

    def plain(self, segment: Segment, timings: Mapping[int, Timing]) -> list[dict[str, Any]]:
        """As the record has them, in seconds from the start of the step."""
        start_ns = min(timing.start_ns for timing in timings.values())
        return [
            {
                "rank": rank,
                "t_s": (at_ns - start_ns) / 1e9,
                "phase": point.phase,
                "unit": point.unit,
                "micro_batch": point.micro_batch,
                **point.held,
            }
            for rank, points in self.step(segment, timings)
            for at_ns, point in points
        ]

    def counters(self, segment: Segment, timings: Mapping[int, Timing]) -> list[Counter]:
        """As the timeline has them."""
        return [
            Counter(rank, "memory", at_ns, dict(point.held))
            for rank, points in self.step(segment, timings)
            for at_ns, point in points
        ]

    def _items_of(self, program: Program, points: Sequence[MemoryPoint]) -> list[int]:
        known = self._items.get(id(program))
        if known is not None:
            return known
        if self._engine is Engine.megatron:
            from .megatron.memory import pass_starts  # other engines do not import it

            visits = pass_starts(program)
        else:
            visits = unit_starts(program)
        at, items = 0, []
        for point in points:
            unit = _UNITS.get(point.unit, point.unit)
            # a model may have no parameters before its blocks, or behind them: it computes nothing there
            if at < len(visits) and visits[at][:2] == (point.phase, unit):
                at += 1
            items.append(visits[max(at - 1, 0)][2])
        assert at == len(visits), f"no point of memory for the computation of {visits[at]}"
        self._items[id(program)] = items
        return items


def unit_starts(program: Program) -> list[tuple[str, str, int]]:
    """(phase, unit, first item) of each computation of a unit, and of the optimizer step."""
    found: list[tuple[str, str, int]] = []
    for item in program.items:
        if item.stream == COMPUTE and any(part.work.kind in ("compute", "step") for part in item.parts):
            # what is offloaded is stepped unit by unit
            visit = (item.phase, "" if item.phase == "step" else item.unit)
            if not found or found[-1][:2] != visit:
                found.append((*visit, item.index))
    return found


def thinned(points: Sequence[tuple[int, MemoryPoint]]) -> Iterable[tuple[int, MemoryPoint]]:
    """At most about MAX_POINTS: of each stretch the fullest and the emptiest one, in order."""
    if len(points) <= MAX_POINTS:
        return points
    size = -(-2 * len(points) // MAX_POINTS)
    kept = []
    for first in range(0, len(points), size):
        stretch = range(first, min(first + size, len(points)))
        totals = {at: points[at][1].total for at in stretch}
        ends = {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
        kept += [points[at] for at in sorted(ends)]
    return kept
