"""What each step's time was spent on, from the laps and the ledger's spans."""

from collections.abc import Sequence
from typing import Final

from ..analysis.record import Span
from ..policies.plan import GATHER_STREAM, REDUCE_STREAM
from .intervals import Intervals, clip, length_ns, subtract, union
from .laps import Lap

PHASES: Final = ("compute", "comm_exposed", "comm_total", "quantize", "idle")
COMPUTE_STREAM: Final = "compute"
LIBRARY_STREAM: Final = "library"


def step_phases(
    steps_ns: Sequence[tuple[int, int]],
    laps: Sequence[Lap],
    spans: Sequence[Span],
    slowest_ns: Sequence[int],
) -> list[dict[str, float]]:
    """Seconds of each phase, for each step of one rank.

    compute, comm_exposed and quantize are what the rank's main thread did; idle is what it waited for the
    slowest rank after its step; these four add up to the iteration. comm_total is the time that collectives took,
    hidden or not.

    Args:
        steps_ns: Start and end of each step.
        laps: All laps of the run.
        spans: The ledger's.
        slowest_ns: Each step's time on its slowest rank.
    """
    comm = union((s.start_ns, s.end_ns) for s in spans if is_comm(s))
    blocked = union((s.start_ns, s.end_ns) for s in spans if is_comm(s) and blocks(s))
    quantize = union((s.start_ns, s.end_ns) for s in spans if is_quantize(s) and blocks(s))
    phases = []
    for (start, end), slowest in zip(steps_ns, slowest_ns, strict=True):
        coding = clip(quantize, start, end)
        exposed = subtract(clip(blocked, start, end), coding)
        own = end - start
        phases.append(
            {
                "compute": (own - length_ns(exposed) - length_ns(coding)) / 1e9,
                "comm_exposed": length_ns(exposed) / 1e9,
                "comm_total": length_ns(clip(comm, start, end)) / 1e9,
                "quantize": length_ns(coding) / 1e9,
                "idle": max(0, slowest - own) / 1e9,
            }
        )
    return phases


def mean_phases(steps: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Means over steps; null where there are none."""
    return {key: sum(step[key] for step in steps) / len(steps) if steps else None for key in PHASES}


def compute_spans(rank: int, laps: Sequence[Lap], spans: Sequence[Span]) -> list[Span]:
    """The laps as spans, without the time in which the ledger's spans held the main thread."""
    held = union((s.start_ns, s.end_ns) for s in spans if blocks(s))
    pieces: list[Span] = []
    for lap in laps:
        inside = clip(held, lap.start_ns, lap.end_ns)
        for start, end in subtract([(lap.start_ns, lap.end_ns)], inside):
            pieces.append(Span(rank, COMPUTE_STREAM, lap.name, start, end))
    return pieces


def is_comm(span: Span) -> bool:
    return span.stream in (GATHER_STREAM, REDUCE_STREAM, LIBRARY_STREAM)


def is_quantize(span: Span) -> bool:
    return span.stream == "quantize"


def blocks(span: Span) -> bool:
    return True
