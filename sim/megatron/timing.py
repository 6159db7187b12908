"""How long one rank's passes take when nothing else uses the links of its tensor group.

A pass runs the plans of its parts one after the other; within a plan each stream runs by itself. All ranks of
a tensor group do the same, so the pass has one length, and one item of a program can stand for all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...policies.layout import Direction, Part, PartRuns
from ...policies.plan import Plan
from ..device import Device, Tally
from ..interpreter import Transfer
from .parts import LayoutStep, Parts

Ask = Callable[[PartRuns], Plan | None]
CollectiveNs = Callable[[Transfer], float]


@dataclass(frozen=True, slots=True)
class PassKind:
    """What a pass runs. Passes of one kind take equally long.

    `behind`: collectives that gather what the stage before has sent.
    """

    backward: bool
    blocks: int
    embedding: bool
    head: bool
    behind: tuple[Transfer, ...] = ()

    @property
    def key(self) -> str:
        """As `Work.key` names it."""
        ends = ("e" if self.embedding else "") + ("h" if self.head else "")
        way = "backward" if self.backward else "forward"
        return f"{way}/{self.blocks}{ends}{'g' if self.behind else ''}"

    def parts(self) -> tuple[tuple[Part, Direction, int], ...]:
        """(part, direction, how often), in order; a block's recomputation comes right before its backward."""
        ends = [(Part.embedding, self.embedding), (Part.head, self.head), (Part.loss, self.head)]
        embedding, head, loss = ((part, int(has)) for part, has in ends)
        if not self.backward:
            order = [embedding, (Part.block, self.blocks), head, loss]
            return tuple((part, Direction.forward, times) for part, times in order)
        return (
            (loss[0], Direction.backward, loss[1]),
            (head[0], Direction.backward, head[1]),
            (Part.block, Direction.recompute, self.blocks),
            (Part.block, Direction.backward, self.blocks),
            (embedding[0], Direction.backward, embedding[1]),
        )


class PassSteps:
    """The steps behind each part, asked of the layout once."""

    def __init__(self, parts: Parts, ask: Ask) -> None:
        self._parts = parts
        self._ask = ask
        self._known: dict[tuple[Part, Direction], tuple[LayoutStep, ...]] = {}

    def of(self, part: Part, direction: Direction) -> tuple[LayoutStep, ...]:
        known = self._known.get((part, direction))
        if known is None:
            plan = self._ask(PartRuns(part, direction))
            known = self._parts.steps(plan, part, direction) if plan is not None else ()
            self._known[part, direction] = known
        return known

    def transfers(self, kind: PassKind) -> tuple[tuple[Transfer, str, int], ...]:
        """Collectives of a pass, where they are shown, and how often each is there."""
        counts: dict[tuple[Transfer, str], int] = dict.fromkeys(((t, "tensor") for t in kind.behind), 1)
        for part, direction, times in kind.parts():
            if not times:
                continue
            for step in self.of(part, direction):
                if isinstance(step.what, Transfer):
                    key = (step.what, step.stream)
                    counts[key] = counts.get(key, 0) + times
        return tuple((transfer, stream, times) for (transfer, stream), times in counts.items())


class PassTimes:
    """Durations of passes on one device.

    Args:
        collective_ns: Of a collective alone on its links.
    """

    def __init__(self, steps: PassSteps, device: Device, collective_ns: CollectiveNs) -> None:
        self._steps = steps
        self._device = device
        self._collective_ns = collective_ns
        self._known: dict[tuple[Part, Direction], tuple[float, int]] = {}

    def ns(self, kind: PassKind) -> int:
        """The device's time, or the host's for launching all kernels, if that is longer."""
        total, kernels = 0.0, 0
        for transfer in kind.behind:
            total += self._collective_ns(transfer)
        for part, direction, times in kind.parts():
            if times:
                ns, launched = self._part(part, direction)
                total += times * ns
                kernels += times * launched
        return round(max(total, kernels * float(self._device.conf.host_ns)))

    def _part(self, part: Part, direction: Direction) -> tuple[float, int]:
        known = self._known.get((part, direction))
        if known is None:
            steps = self._steps.of(part, direction)
            known = self._known[part, direction] = (self._run(steps), _kernels(steps))
        return known

    def _run(self, steps: Sequence[LayoutStep]) -> float:
        """From the first start to the last end: streams are first in, first out."""
        free: dict[str, float] = {}
        ends: list[float] = []
        under_way: list[tuple[float, float]] = []  # collectives
        for step in steps:
            start = max([free.get(step.stream, 0.0), *(ends[at] for at in step.after)])
            if isinstance(step.what, Transfer):
                end = start + self._collective_ns(step.what)
                under_way.append((start, end))
            else:
                end = start + self._compute_ns(step.what, start, under_way)
            free[step.stream] = end
            ends.append(end)
        return max(ends, default=0.0)

    def _compute_ns(self, work: Tally, start: float, under_way: Sequence[tuple[float, float]]) -> float:
        """Products slow down while a collective runs beside them."""
        alone = work.matmul_ns + work.other_ns
        beside = max((end - start for begin, end in under_way if begin <= start < end), default=0.0)
        if not beside or not alone:
            return alone
        slow = max(1.0, (work.busy_ns + work.other_ns) / alone)
        if alone * slow <= beside:
            return alone * slow
        return beside + (alone - beside / slow)


def _kernels(steps: Sequence[LayoutStep]) -> int:
    return sum(step.what.kernels for step in steps if isinstance(step.what, Tally))
