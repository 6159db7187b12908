"""Runs programs in simulated time: one process a rank and worker, until all ranks have finished."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .busy import Busy, beside_collectives
from .collectives import Collectives
from .costs import Costs
from .machine import Machine, Steps
from .program import COMPUTE, MAIN, Item, Program


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of the run: a training step, or the validation after it.

    `programs`: of representative ranks, ascending from rank 0. The others run that of the nearest one below.
    """

    iteration: int
    validation: bool
    programs: Mapping[int, Program]

    def program(self, rank: int) -> Program:
        """What `rank` runs."""
        if len(self.programs) == 1:
            return self.programs[0]
        keys = list(self.programs)
        return self.programs[keys[bisect_right(keys, rank) - 1]]


@dataclass(slots=True)
class Timing:
    """When one rank ran one segment. `starts_ns` and `ends_ns` by the index of the item; empty: not kept."""

    start_ns: int
    end_ns: int
    starts_ns: list[int]
    ends_ns: list[int]

    def shifted(self, by_ns: int) -> "Timing":
        return Timing(
            self.start_ns + by_ns,
            self.end_ns + by_ns,
            [t + by_ns for t in self.starts_ns],
            [t + by_ns for t in self.ends_ns],
        )

    def repeats(self, other: "Timing") -> bool:
        """Whether this is `other` shifted."""
        by_ns = self.start_ns - other.start_ns
        return self.starts_ns == [t + by_ns for t in other.starts_ns] and self.ends_ns == [
            t + by_ns for t in other.ends_ns
        ]

    def border(self, by_ns: int) -> "Timing":
        """Shifted, without its items."""
        return Timing(self.start_ns + by_ns, self.end_ns + by_ns, [], [])


class Observer(Protocol):
    """Is told when a rank's share of a segment's local work is done; what comes after it may depend on that."""

    def computed(self, rank: int, number: int, timing: Timing) -> None:
        """Of segment `number`, before the rank's first collective on `stream`, or at the segment's end."""
        ...

    @property
    def stream(self) -> str: ...


class FailureError(Exception):
    """A rank or a link has failed, and others wait for it for ever. The message says who waits for whom."""


@dataclass(slots=True)
class _Progress:
    """How far one rank's workers are in a segment.

    `known`: whether the end of an item is known, which may be in the future: a worker that only computes runs ahead of
    the clock. `awaited`: the items that another worker now waits for.
    """

    timing: Timing
    known: bytearray
    awaited: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Rank:
    busy: Busy = field(default_factory=Busy)
    timings: list[Timing] = field(default_factory=list)
    at: dict[str, tuple[int, Item]] = field(default_factory=dict)  # worker -> (iteration, item)
    finished: bool = False


class Executor:
    """One run.

    Args:
        ranks: Those to simulate, each with its own copy of the programs.
        root: The rank that does what only the root does (`Item.only_root`).
        classes: Whether each rank stands for a class. A run whose segments are all alike then ends as soon as the
            ranks begin a segment as far apart from each other as the one before.
        counts: How many ranks each stands for; None: for itself.
        observer: None: nobody asks. With one, segments are not taken for repetitions of each other.
    """

    def __init__(
        self,
        machine: Machine,
        collectives: Collectives,
        ranks: Sequence[int],
        *,
        root: int = 0,
        classes: bool = False,
        counts: Mapping[int, int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._env = machine.env
        self._observer = observer
        self._watched = observer.stream if observer is not None else None
        self._machine = machine
        self._collectives = collectives
        self._ranks = {rank: _Rank() for rank in ranks}
        self._root = root
        self._classes = classes
        self._counts = dict(counts or {})
        self._workers: dict[int, dict[str, list[Item]]] = {}
        self._takes_ns: dict[tuple[int, int], list[int]] = {}
        self._history: list[int] | None = None
        self._marks: list[tuple[int, int]] = []  # the first rank's starts: (time, length of the history)
        self._alike = False
        self._ended: list[int] = []  # ranks that have ended each segment
        self._kept: int | None = None  # segments after which the run repeats itself
        self._stop: Any = self._env.event()
        self._left = len(self._ranks)

    def run(self, segments: Sequence[Segment]) -> dict[int, list[Timing]]:
        """Timings of each rank, one for each segment.

        A run whose segments are all alike stops as soon as it repeats itself: when every start and end of
        every flow and item between two starts of the first rank equals, to the nanosecond, those of the
        stretch before. What is in flight at the border is then the same too, for it began within the stretch,
        so all that follows is a shift in time.

        Raises:
            FailureError: If a rank or a link has failed (`cluster.failures`), and others wait for it.
            RuntimeError: If ranks wait for each other for ever; it names the collective and the ranks.
        """
        varies = self._machine.conditions.varies
        self._alike = (
            self._observer is None
            and not varies
            and all(s.programs is segments[0].programs for s in segments)
        )
        self._ended = [0] * len(segments)
        if self._alike and len(segments) > 3 and not self._classes:
            self._history = self._machine.network.history = []
        for rank in self._ranks:
            self._env.process(self._rank(rank, segments))
        try:
            self._env.run(until=self._stop)
        except RuntimeError as err:
            if "No scheduled events left" not in str(err):  # simpy's words for a queue that ran empty
                raise
            failed = self._machine.conditions.failed(self._env.now)
            if failed:
                raise FailureError(f"{', '.join(failed)}: {self._stuck()}") from err
            raise RuntimeError(self._stuck()) from err
        return {rank: self._complete(state, len(segments)) for rank, state in self._ranks.items()}

    def done(self) -> dict[int, list[Timing]]:
        """Timings of the segments that all ranks have ended, of a run that failed."""
        whole = min(len(state.timings) for state in self._ranks.values())
        return {rank: state.timings[:whole] for rank, state in self._ranks.items()}

    def _complete(self, state: _Rank, count: int) -> list[Timing]:
        timings = state.timings
        if self._kept is not None:
            timings = timings[: self._kept]
            last = timings[-1]
            period_ns = last.end_ns - (timings[-2].end_ns if len(timings) > 1 else 0)
            return timings + [last.border(period_ns * (i + 1)) for i in range(count - len(timings))]
        if len(timings) < count:
            period_ns = self._marks[-1][0] - self._marks[-2][0]
            last = timings[-1]
            lacking = count - len(timings)
            # The first ones are shown in the timeline, and phases are of the last one; a long run is kept small.
            for i in range(lacking):
                whole = i < 2 or i == lacking - 1
                shift_ns = period_ns * (i + 1)
                timings.append(last.shifted(shift_ns) if whole else last.border(shift_ns))
        return timings

    def _rank(self, rank: int, segments: Sequence[Segment]) -> Steps:
        state, env = self._ranks[rank], self._env
        leads = rank == next(iter(self._ranks))
        clock = 0
        for number, segment in enumerate(segments):
            if leads and self._history is not None and self._repeats(clock):
                self._stop.succeed()
                return
            self._machine.begin(rank, segment.iteration)
            program = segment.program(rank)
            workers = self._workers.get(id(program))
            if workers is None:
                workers = self._workers[id(program)] = program.workers()
            size = len(program.items)
            timing = Timing(clock, 0, [0] * size, [0] * size)
            progress = _Progress(timing, bytearray(size))
            others = [
                env.process(self._work(rank, name, items, segment, number, progress))
                for name, items in workers.items()
                if name != MAIN
            ]
            clock = yield from self._work(rank, MAIN, workers[MAIN], segment, number, progress)
            for other in others:
                ended = yield other
                clock = max(clock, ended)
            timing.end_ns = clock
            if self._observer is not None:
                self._observer.computed(rank, number, timing)
            state.timings.append(timing)
            self._ended[number] += 1
            if (
                self._ended[number] == len(self._ranks)
                and self._classes
                and self._alike
                and self._steady(number)
            ):
                self._kept = number + 1
                self._stop.succeed()
                return
        if clock > env.now:
            yield env.timeout(clock - env.now)
        state.finished = True
        self._left -= 1
        if not self._left:
            self._stop.succeed()

    def _work(
        self,
        rank: int,
        worker: str,
        items: Sequence[Item],
        segment: Segment,
        number: int,
        progress: "_Progress",
    ) -> Any:
        """A worker's items; its value is the time at which it has done them, on its own clock."""
        machine, env, history = self._machine, self._env, self._history
        starts_ns, ends_ns, known = progress.timing.starts_ns, progress.timing.ends_ns, progress.known
        awaited = progress.awaited
        at, busy = self._ranks[rank].at, self._ranks[rank].busy
        costs = machine.costs_of(rank)
        ahead = not machine.shares_cores  # nothing that others do changes how long a computation takes
        slows_down = ahead and costs.slows_down
        skew_ns = machine.skew_ns if rank % 2 else 0
        takes_ns = self._durations(segment.program(rank), costs) if ahead else []
        timeout, run = env.timeout, self._collectives.run
        conditions = machine.conditions
        is_slow = conditions.is_slow(rank)
        dies_ns = machine.conditions.dies_ns.get(rank)
        clock = progress.timing.start_ns
        for item in items:
            for index in item.after:
                if not known[index]:
                    at[worker] = (segment.iteration, item)
                    yield awaited.setdefault(index, env.event())
                if ends_ns[index] > clock:
                    clock = ends_ns[index]
            index = item.index
            starts_ns[index] = clock
            transfer = item.transfer
            if transfer is not None:
                at[worker] = (segment.iteration, item)
                if item.stream == self._watched and self._observer is not None:
                    self._observer.computed(rank, number, progress.timing)
                tag = (number, index if item.tag is None else item.tag)
                wait_ns = clock - env.now + skew_ns
                if dies_ns is not None or (slows_down and not (transfer.peer or transfer.parts)):
                    if wait_ns:
                        yield timeout(wait_ns)
                    if dies_ns is not None and env.now >= dies_ns:
                        yield env.event()
                    busy.begin()
                    yield from run(rank, transfer, tag, 0)
                    busy.end()
                else:
                    yield from run(rank, transfer, tag, wait_ns)
                clock = env.now
            elif item.move is not None:
                at[worker] = (segment.iteration, item)
                if clock > env.now:
                    yield timeout(clock - env.now)
                yield machine.far.run(rank, item.move)
                clock = env.now
            elif not item.only_root or rank == self._root:
                of_block = item.half is not None
                slowed = is_slow and conditions.slows(product=item.product, of_block=of_block)
                if slows_down and item.stream == COMPUTE and costs.slowdown(item.parts[0].work) > 1.0:
                    if clock > env.now:
                        yield timeout(clock - env.now)
                    yield from beside_collectives(env, busy, item.parts, costs)
                    clock = env.now
                    if slowed:
                        clock = machine.end_ns(rank, starts_ns[index], clock - starts_ns[index])
                elif ahead:
                    total_ns = takes_ns[index]
                    clock = machine.end_ns(rank, clock, total_ns) if slowed else clock + total_ns
                else:
                    works = [part.work for part in item.parts]
                    yield from machine.work(rank, works, product=item.product, of_block=of_block)
                    clock = env.now
            if dies_ns is not None and clock >= dies_ns:
                yield env.event()
            ends_ns[index] = clock
            known[index] = 1
            if history is not None:
                history.append(clock)
            if index in awaited:
                awaited.pop(index).succeed()
        at.pop(worker, None)
        return clock

    def _durations(self, program: Program, costs: Costs) -> list[int]:
        """Of the local work of each item, at full speed."""
        key = (id(program), id(costs))
        known = self._takes_ns.get(key)
        if known is None:
            ns = costs.ns
            known = self._takes_ns[key] = [
                sum([ns(part.work) for part in item.parts]) if item.parts else 0 for item in program.items
            ]
        return known

    def _repeats(self, now: int) -> bool:
        """Mark the first rank's start of a segment; whether the last two stretches were alike."""
        history = self._history
        assert history is not None
        self._marks.append((now, len(history)))
        if len(self._marks) < 4 or any(len(state.timings) < 2 for state in self._ranks.values()):
            return False
        (t0, a), (t1, b), (t2, c) = self._marks[-3:]
        if t1 - t0 != t2 - t1 or b - a != c - b:
            return False
        return [t - t0 for t in history[a:b]] == [t - t1 for t in history[b:c]]

    def _steady(self, number: int) -> bool:
        """Whether all ranks end segment `number` as far apart as they began it."""
        takes = {
            state.timings[number].end_ns - state.timings[number].start_ns for state in self._ranks.values()
        }
        return len(takes) == 1

    def _stuck(self) -> str:
        dead = {r for r, t in self._machine.conditions.dies_ns.items() if t <= self._env.now}
        unfinished = [rank for rank, state in self._ranks.items() if not state.finished and rank not in dead]
        where: dict[str, list[int]] = {}
        for rank in unfinished:
            for worker, (iteration, item) in self._ranks[rank].at.items():
                what = f"{item.transfer.op} over {item.transfer.axis}" if item.transfer else "local work"
                unit = item.unit or item.stream
                text = f"{worker} in {what} of {unit} ({item.phase}, iteration {iteration})"
                where.setdefault(text, []).append(rank)
        waits = sorted({f"rank {a} waits for rank {b}" for a, b in self._collectives.missing()})
        places = "; ".join(f"ranks {ranks}: {text}" for text, ranks in where.items())
        return (
            f"the simulation came to rest at {self._env.now} ns, but ranks {unfinished} have not finished"
            f"{self._stand_for(unfinished)}: {places}{': ' if waits else ''}{', '.join(waits)}"
        )

    def _stand_for(self, ranks: Sequence[int]) -> str:
        """How many ranks those that are simulated stand for, where it is more than themselves."""
        many = {rank: self._counts[rank] for rank in ranks if self._counts.get(rank, 1) > 1}
        told = ", ".join(f"rank {rank} for {count}" for rank, count in many.items())
        return f" (each stands for ranks that behave alike: {told})" if told else ""
