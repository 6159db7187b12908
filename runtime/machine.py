"""Is anything else busy on this machine? A measurement beside a neighbour is void."""

import os
import resource
import time

# A one-core busy loop moved CPU-heavy policies by 13% on two cores; a tenth of that is below the noise.
MAX_OTHER_FRACTION = 0.08
_SAMPLE_S = 0.3


class BusyWatch:
    """Watches the processors from its making until `reason`, apart from this process and its children."""

    def __init__(self) -> None:
        self._before = _other_fraction(*_sample(_SAMPLE_S))
        self._start = _reading()

    def reason(self) -> str | None:
        """Why times measured meanwhile are void, or None. Call it when the children have ended."""
        during = _other_fraction(self._start, _reading())
        for fraction, when in ((self._before, "before the run"), (during, "during the run")):
            if fraction is not None and fraction > MAX_OTHER_FRACTION:
                return f"other processes took {fraction:.0%} of the processors {when}"
        return None


def _sample(seconds: float) -> tuple[tuple[float, float, float] | None, tuple[float, float, float] | None]:
    first = _reading()
    time.sleep(seconds)
    return first, _reading()


def _reading() -> tuple[float, float, float] | None:
    """(busy seconds of all processors, seconds of all processors, seconds of ours), None off Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return None
    hertz = os.sysconf("SC_CLK_TCK")
    total = sum(ticks) / hertz
    idle = (ticks[3] + ticks[4]) / hertz
    ours = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        ours += usage.ru_utime + usage.ru_stime
    return total - idle, total, ours


def _other_fraction(
    start: tuple[float, float, float] | None, end: tuple[float, float, float] | None
) -> float | None:
    if start is None or end is None or end[1] <= start[1]:
        return None
    return max(0.0, (end[0] - start[0]) - (end[2] - start[2])) / (end[1] - start[1])
