"""What a rank computed, and how much memory it has left."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...analysis.record import Span
from ..intervals import length_ns, subtract, union
from ..laps import Lap
from ..ledger import BESIDE, LIBRARY_STREAM, OFFLOAD_STREAM, WAIT_STREAM
from .free_memory import bytes_of


def computed_ns(laps: Iterable[Lap], spans: Sequence[Span]) -> int:
    """Of forward and backward passes, the time in which the main thread was held by no collective, wait or codec.

    Args:
        laps: Of whole steps.
        spans: Of the same time.
    """
    held = {span.stream for span in spans}.difference(BESIDE)
    if WAIT_STREAM in held:  # a communication thread does the rest
        held = {WAIT_STREAM, LIBRARY_STREAM, OFFLOAD_STREAM}
    passes = union((lap.start_ns, lap.end_ns) for lap in laps if "/" in lap.name)
    waits = union((span.start_ns, span.end_ns) for span in spans if span.stream in held)
    return length_ns(subtract(passes, waits))


def available_bytes() -> int:
    """Of this machine's memory, what new allocations can have without swapping."""
    return bytes_of(Path("/proc/meminfo"), "MemAvailable")
