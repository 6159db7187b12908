"""A line through measured times: bandwidth from long messages, latency from short ones, by medians throughout.

In between NCCL changes protocol and algorithm, and times lie above the line that both ends give; fitted to all sizes
alike, a line would miss the long messages, which are what training sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Long messages: down to this share of the longest, and at least so many sizes
_LONG = 1 / 16
_FEWEST_SIZES = 5
_SHORT = 0.05  # of a short message's time, at most, is its bytes'
# Bandwidth counts where it is most of the longest message's time, latency where it is seen in the short ones'
_LEAST_BANDWIDTH_SHARE = 0.8
_LEAST_LATENCY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Line:
    """time = latency + sent / bandwidth. None: the sizes do not tell it.

    `errors`: |measured / line - 1| of each row; empty where either is None.
    """

    latency_ns: float | None
    bandwidth_Bps: float | None
    errors: tuple[float, ...]


def fit_line(sent_bytes: Sequence[float], times_ns: Sequence[float]) -> Line:
    """Repeated medians of slopes (Siegel 1982) over the long messages, and the median rest over the short ones.

    Up to half of the rows may be wrong, at any size, before the result follows them.

    Args:
        sent_bytes: What one rank sends, > 0, [num_rows].
        times_ns: > 0, [num_rows].
    """
    x, t = np.asarray(sent_bytes, dtype=np.float64), np.asarray(times_ns, dtype=np.float64)
    sizes = np.unique(x)
    least = min(_LONG * sizes[-1], sizes[-min(len(sizes), _FEWEST_SIZES)])
    long = x >= least
    slope = _slope(x[long], t[long]) if len(sizes) > 1 else None
    if slope is None or slope <= 0:
        latency = float(np.median(t)) if len(sizes) > 1 else None
        return Line(latency, None, ())
    short = slope * x <= _SHORT * t
    told = len(np.unique(x[short])) > 1  # a single one may be a wrong row
    if not told:
        short = x <= sizes[min(len(sizes), _FEWEST_SIZES) - 1]
    latency = float(np.median((t - slope * x)[short]))
    if not told and latency < _LEAST_LATENCY_SHARE * float(np.median(t[short])):
        return Line(None, 1e9 / slope, tuple(float(e) for e in np.abs(t / (slope * x) - 1)))
    longest = slope * sizes[-1]
    if longest < _LEAST_BANDWIDTH_SHARE * (longest + latency):
        return Line(latency, None, ())
    errors = np.abs(t / (latency + slope * x) - 1)
    return Line(latency, 1e9 / slope, tuple(float(e) for e in errors))


def _slope(x: NDArray[np.float64], t: NDArray[np.float64]) -> float | None:
    """Of each row the median slope to all rows of other sizes; of these the median."""
    medians = []
    for i in range(len(x)):
        others = x != x[i]
        if others.any():
            medians.append(float(np.median((t[others] - t[i]) / (x[others] - x[i]))))
    return float(np.median(medians)) if medians else None
