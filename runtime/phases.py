"""What each step's time was spent on, from the laps and the ledger's spans."""

from collections.abc import Collection, Sequence
from typing import Final

from ..analysis.record import Span
from .intervals import Intervals, clip, length_ns, subtract, union
from .laps import Lap
from .ledger import LIBRARY_STREAM, OFFLOAD_STREAM, QUANTIZE_STREAM, WAIT_STREAM

PHASES: Final = ("compute", "comm_exposed", "comm_total", "quantize", "idle")
OFFLOAD: Final = "offload"  # a phase too, where states lie in far memory
COMPUTE_STREAM: Final = "compute"


def step_phases(
    steps_ns: Sequence[tuple[int, int]],
    spans: Sequence[Span],
    slowest_ns: Sequence[int],
    comm_streams: Collection[str],
) -> list[dict[str, float]]:
    """Seconds of each phase, for each step of one rank.

    compute, comm_exposed and quantize are what the rank's main thread did; idle is what it waited for the
    slowest rank after its step; these four, and offload (waits for far memory, where there were any), add up to
    the iteration. comm_total is the time that collectives took, hidden or not.

    Args:
        steps_ns: Start and end of each step.
        spans: The ledger's.
        slowest_ns: Each step's time on its slowest rank.
        comm_streams: Of collectives.
    """
    comm = union((s.start_ns, s.end_ns) for s in spans if s.stream in comm_streams)
    coding = union((s.start_ns, s.end_ns) for s in spans if s.stream == QUANTIZE_STREAM)
    waits = _waits(spans)
    held = _held(spans, comm_streams)
    phases = []
    for (start, end), slowest in zip(steps_ns, slowest_ns, strict=True):
        own_ns = end - start
        main = clip(held, start, end)
        exposed_ns = length_ns(main) if _overlaps(spans) else length_ns(subtract(main, coding))
        coding_ns = length_ns(main) - exposed_ns
        waited_ns = length_ns(subtract(clip(waits, start, end), main))
        phases.append(
            {
                "compute": (own_ns - length_ns(main) - waited_ns) / 1e9,
                "comm_exposed": exposed_ns / 1e9,
                "comm_total": length_ns(clip(comm, start, end)) / 1e9,
                "quantize": coding_ns / 1e9,
                "idle": max(0, slowest - own_ns) / 1e9,
            }
            | ({OFFLOAD: waited_ns / 1e9} if waits else {})
        )
    return phases


def mean_phases(steps: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Means over steps; null where there are none."""
    keys = (*PHASES, *([OFFLOAD] if any(OFFLOAD in step for step in steps) else []))
    return {key: sum(step.get(key, 0.0) for step in steps) / len(steps) if steps else None for key in keys}


def compute_spans(
    rank: int, laps: Sequence[Lap], spans: Sequence[Span], comm_streams: Collection[str]
) -> list[Span]:
    """The laps as spans, without the time in which the ledger's spans held the main thread."""
    held = union([*_held(spans, comm_streams), *_waits(spans)])
    pieces: list[Span] = []
    for lap in laps:
        inside = clip(held, lap.start_ns, lap.end_ns)
        for start, end in subtract([(lap.start_ns, lap.end_ns)], inside):
            pieces.append(Span(rank, COMPUTE_STREAM, lap.name, start, end))
    return pieces


def _waits(spans: Sequence[Span]) -> Intervals:
    return union((s.start_ns, s.end_ns) for s in spans if s.stream == OFFLOAD_STREAM)


def _overlaps(spans: Sequence[Span]) -> bool:
    """With a communication thread the main thread is held by its waits only, and not by collectives."""
    return any(span.stream == WAIT_STREAM for span in spans)


def _held(spans: Sequence[Span], comm_streams: Collection[str]) -> Intervals:
    """When the main thread did not compute."""
    streams = (WAIT_STREAM, LIBRARY_STREAM) if _overlaps(spans) else (*comm_streams, QUANTIZE_STREAM)
    return union((s.start_ns, s.end_ns) for s in spans if s.stream in streams)
