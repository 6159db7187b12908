"""A simulation's record: its figures at once, its rows when somebody asks for them."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter
from typing import Any

from ..analysis.record import Counter, Decision, Record, Span
from .executor import Timing
from .ledger import RankClass
from .memory_clock import MemoryClock
from .program import Program
from .run import TIMELINE_STEPS, Run, Simulated
from .timeline import spans

TIMELINE_RANKS = 64  # the timeline shows so many ranks, each the first of its class, at most
_ROWS = ("ledger", "decisions", "spans", "counters")
_SPAN = attrgetter("rank", "stream", "name", "start_ns", "end_ns", "nbytes")


class SimulatedRecord(Record):
    """`ledger`, `decisions`, `spans` and `counters` are made together when one of them is first read.

    They are most of what a record holds, and a sweep, a fit or a validation reads none of them.
    """

    __slots__ = ("_behind",)

    def __init__(
        self,
        result: Mapping[str, Any],
        run: Run,
        simulated: Simulated,
        classes: Sequence[RankClass],
        memory: MemoryClock,
    ) -> None:
        self.result = dict(result)
        self.missing = ()
        self._behind: tuple[Run, Simulated, Sequence[RankClass], MemoryClock] | None = (
            run,
            simulated,
            classes,
            memory,
        )

    def __getattr__(self, name: str) -> Any:
        """Of a slot that has no value yet."""
        if name not in _ROWS or self._behind is None:
            raise AttributeError(name)
        (run, simulated, classes, memory), self._behind = self._behind, None
        begun = len(next(iter(simulated.timings.values())))  # segments that all ranks have ended
        with collector_paused():
            made = {
                "ledger": run.ledger.rows(run.segments[:begun], classes),
                "decisions": _decisions(run),
                "spans": _spans(run, simulated),
                "counters": _counters(run, simulated, memory),
            }
        for each, rows in made.items():
            if not hasattr(self, each):  # nobody has put others there
                setattr(self, each, rows)
        return made[name]


@contextmanager
def collector_paused() -> Iterator[None]:
    """What a run makes is needed until its record is there: a fourth of the time would go to looking for garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decisions(run: Run) -> list[Decision]:
    """Of rank 0, as which all ranks decide; and those by which groups of their own do."""
    decisions: list[Decision] = []
    for segment, decided in zip(run.segments, run.decided, strict=True):
        if decided:
            decisions += map(Decision, repeat(0), repeat(segment.iteration), *zip(*decided, strict=True))
    return [*decisions, *run.decided_apart]


def _spans(run: Run, nominal: Simulated) -> list[Span]:
    shares = nominal.machine.shares_cores
    found: list[Span] = []
    for rank, timings in list(nominal.timings.items())[:TIMELINE_RANKS]:
        before: tuple[Program, Timing, list[tuple[Any, ...]]] | None = None
        for segment, timing in zip(run.segments[:TIMELINE_STEPS], timings, strict=False):
            if not timing.starts_ns:
                continue  # it repeats the one before
            program = segment.program(rank)
            if before and before[0] is program and timing.repeats(before[1]):
                by_ns = timing.start_ns - before[1].start_ns
                starts, ends = ([ns + by_ns for ns in column] for column in before[2][3:5])
                found += map(Span, *before[2][:3], starts, ends, before[2][5])
                continue
            own = list(spans(rank, segment, timing, nominal.machine.costs_of(rank), shares_cores=shares))
            found += own
            if own:
                before = (program, timing, [*zip(*map(_SPAN, own), strict=True)])
    return found


def _counters(run: Run, simulated: Simulated, memory: MemoryClock) -> list[Counter]:
    """Of the training steps that the timeline shows."""
    return [
        counter
        for at, segment in enumerate(run.segments[:TIMELINE_STEPS])
        if not segment.validation and all(at < len(own) for own in simulated.timings.values())
        for counter in memory.counters(segment, {r: own[at] for r, own in simulated.timings.items()})
    ]
