"""Runs programs in simulated time: one process a rank and worker, until all ranks have finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .collectives import Collectives
from .machine import Machine, Steps
from .program import MAIN, Item, Program


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of the run: a training step, or the validation after it."""

    iteration: int
    validation: bool
    program: Program


@dataclass(slots=True)
class Timing:
    """When one rank ran one segment. `starts_ns` and `ends_ns` by the index of the item."""

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


@dataclass(slots=True)
class _Progress:
    """How far one rank's workers are in a segment. `awaited`: the items that another worker now waits for."""

    timing: Timing
    over: bytearray
    awaited: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Rank:
    timings: list[Timing] = field(default_factory=list)
    at: dict[str, tuple[int, Item]] = field(default_factory=dict)  # worker -> (iteration, item)
    finished: bool = False


class Executor:
    """One run.

    Args:
        ranks: Those to simulate, each with its own copy of the programs.
        root: The rank that does what only the root does (`Item.only_root`).
    """

    def __init__(
        self,
        machine: Machine,
        collectives: Collectives,
        ranks: Sequence[int],
        *,
        root: int = 0,
    ) -> None:
        self._env = machine.env
        self._machine = machine
        self._collectives = collectives
        self._ranks = {rank: _Rank() for rank in ranks}
        self._root = root
        self._workers: dict[int, dict[str, list[Item]]] = {}
        self._history: list[int] | None = None
        self._marks: list[tuple[int, int]] = []  # the first rank's starts: (time, length of the history)
        self._stop: Any = self._env.event()
        self._left = len(self._ranks)

    def run(self, segments: Sequence[Segment]) -> dict[int, list[Timing]]:
        """Timings of each rank, one for each segment.

        A run whose segments are all alike stops as soon as it repeats itself: when every start and end of
        every flow and item between two starts of the first rank equals, to the nanosecond, those of the
        stretch before. What is in flight at the border is then the same too, for it began within the stretch,
        so all that follows is a shift in time.

        Raises:
            RuntimeError: If ranks wait for each other for ever; it names the collective and the ranks.
        """
        alike = all(segment.program is segments[0].program for segment in segments)
        if alike and len(segments) > 3:
            self._history = self._machine.network.history = []
        for rank in self._ranks:
            self._env.process(self._rank(rank, segments))
        try:
            self._env.run(until=self._stop)
        except RuntimeError as err:
            if "No scheduled events left" not in str(err):  # simpy's words for a queue that ran empty
                raise
            raise RuntimeError(self._stuck()) from err
        return {rank: self._complete(state, len(segments)) for rank, state in self._ranks.items()}

    def _complete(self, state: _Rank, count: int) -> list[Timing]:
        timings = state.timings
        if len(timings) < count:
            period_ns = self._marks[-1][0] - self._marks[-2][0]
            last = timings[-1]
            timings += [last.shifted(period_ns * (i + 1)) for i in range(count - len(timings))]
        return timings

    def _rank(self, rank: int, segments: Sequence[Segment]) -> Steps:
        state = self._ranks[rank]
        leads = rank == next(iter(self._ranks))
        for number, segment in enumerate(segments):
            if leads and self._history is not None and self._repeats():
                self._stop.succeed()
                return
            program = segment.program
            workers = self._workers.get(id(program))
            if workers is None:
                workers = self._workers[id(program)] = program.workers()
            size = len(program.items)
            timing = Timing(self._env.now, 0, [0] * size, [0] * size)
            progress = _Progress(timing, bytearray(size))
            others = [
                self._env.process(self._work(rank, name, items, segment, number, progress))
                for name, items in workers.items()
                if name != MAIN
            ]
            yield from self._work(rank, MAIN, workers[MAIN], segment, number, progress)
            yield from others
            timing.end_ns = self._env.now
            state.timings.append(timing)
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
    ) -> Steps:
        machine, env, history = self._machine, self._env, self._history
        starts_ns, ends_ns, over = progress.timing.starts_ns, progress.timing.ends_ns, progress.over
        awaited = progress.awaited
        at = self._ranks[rank].at
        private = not machine.shares_cores
        skew_ns = machine.skew_ns if rank % 2 else 0
        ns, timeout, run = machine.costs.ns, env.timeout, self._collectives.run
        for item in items:
            for index in item.after:
                if not over[index]:
                    at[worker] = (segment.iteration, item)
                    yield awaited.setdefault(index, env.event())
            index = item.index
            starts_ns[index] = env.now
            if item.transfer is not None:
                at[worker] = (segment.iteration, item)
                if skew_ns:
                    yield timeout(skew_ns)
                yield from run(rank, item.transfer, (number, index))
            elif not item.only_root or rank == self._root:
                if private:
                    total_ns = 0
                    for part in item.parts:
                        total_ns += ns(part.work)
                    if total_ns:
                        yield timeout(total_ns)
                else:
                    yield from machine.work(rank, [part.work for part in item.parts])
            ends_ns[index] = env.now
            over[index] = 1
            if history is not None:
                history.append(env.now)
            if index in awaited:
                awaited[index].succeed()
        at.pop(worker, None)

    def _repeats(self) -> bool:
        """Mark the first rank's start of a segment; whether the last two stretches were alike."""
        history, now = self._history, self._env.now
        assert history is not None
        self._marks.append((now, len(history)))
        if len(self._marks) < 4 or any(len(state.timings) < 2 for state in self._ranks.values()):
            return False
        (t0, a), (t1, b), (t2, c) = self._marks[-3:]
        if t1 - t0 != t2 - t1 or b - a != c - b:
            return False
        return [t - t0 for t in history[a:b]] == [t - t1 for t in history[b:c]]

    def _stuck(self) -> str:
        unfinished = [rank for rank, state in self._ranks.items() if not state.finished]
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
            f"the simulation came to rest at {self._env.now} ns, but ranks {unfinished} have not finished: "
            f"{places}{': ' if waits else ''}{', '.join(waits)}"
        )
