"""From timings to spans, and to where a rank's time went."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..analysis.record import Span
from .costs import Costs
from .executor import Segment, Timing
from .program import COMPUTE, HOST, QUANTIZE
from .rules import COMM_THREAD

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Phases:
    """Nanoseconds of one rank in one training step.

    `compute`: in which it computed. `quantize`: in which only codecs, sums and copies ran that plans ask for.
    `comm_exposed`: in which only collectives did, waiting for other ranks included; all that a communication
    thread does counts as that. `offload`: in which only copies between near and far memory ran, and steps in the
    host; None where there are none. `idle`: in which nothing ran. These add up. `comm_total`: in which a collective
    was under way, hidden or not.
    """

    compute: int
    comm_exposed: int
    comm_total: int
    quantize: int
    idle: int
    offload: int | None = None

    def seconds(self) -> dict[str, float]:
        times = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: ns / 1e9 for name, ns in times.items() if ns is not None}


def phases(rank: int, segment: Segment, timing: Timing, *, until_ns: int) -> Phases:
    """Where the time of `rank` went, from its start of the segment to `until_ns`."""
    compute: list[Interval] = []
    quantize: list[Interval] = []
    comm: list[Interval] = []
    beside: list[Interval] = []  # codecs on a communication thread
    moves: list[Interval] = []
    for item in segment.program(rank).items:
        start, end = timing.starts_ns[item.index], timing.ends_ns[item.index]
        if end == start:
            continue
        if item.transfer is not None:
            if item.transfer.op != "recv":  # a receipt waits; what moves is the sender's
                comm.append((start, end))
        elif item.move is not None:
            moves.append((start, end))
        elif item.stream == COMPUTE:
            compute.append((start, end))
        elif item.stream != HOST:
            (beside if item.worker == COMM_THREAD else quantize).append((start, end))
    computing = _union_ns(compute)
    busy = _union_ns(compute + quantize)
    everything = _union_ns(compute + quantize + comm + beside)
    whole = _union_ns(compute + quantize + comm + beside + moves) if moves else everything
    return Phases(
        compute=computing,
        comm_exposed=everything - busy,
        comm_total=_union_ns(comm),
        quantize=busy - computing,
        idle=until_ns - timing.start_ns - whole,
        offload=whole - everything if moves else None,
    )


def spans(rank: int, segment: Segment, timing: Timing, costs: Costs, *, shares_cores: bool) -> Iterable[Span]:
    """All that took time on one rank."""
    for item in segment.program(rank).items:
        start, end = timing.starts_ns[item.index], timing.ends_ns[item.index]
        if end == start:
            continue
        unit = f" {item.unit}" if item.unit else ""
        if item.transfer is not None:
            name = f"{item.transfer.op}{unit}"
            yield Span(rank, item.stream, name, start, end, item.transfer.payload_bytes)
        elif item.move is not None:
            yield Span(rank, item.stream, f"{item.parts[0].name}{unit}", start, end, item.move.nbytes)
        elif item.stream == COMPUTE:
            yield Span(rank, COMPUTE, item.parts[0].name, start, end)
        elif item.stream == HOST:
            yield Span(rank, HOST, item.parts[0].name, start, end)
        elif len(item.parts) == 1 or shares_cores:
            yield Span(rank, QUANTIZE, f"{item.parts[0].name}{unit}", start, end)
        else:
            for part in item.parts:  # merged: nothing shares the device, so each took its own time
                end = start + costs.ns(part.work)
                yield Span(rank, QUANTIZE, f"{part.name}{unit}", start, end)
                start = end


def _union_ns(intervals: list[Interval]) -> int:
    total, reached = 0, -1
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
