"""Timelines of a prediction and its run, side by side: one file for Perfetto, one table for the picture."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from .load import Run
from .record import Counter, Record, Span, trace_events
from .tables import sides
from .units import amount_text

SHORT = {"predicted": "sim", "measured": "real"}


def merged_trace(run: Run) -> dict[str, Any]:
    """Chrome trace events of both sides; processes are called `sim rank 0`, `real rank 0`, ...

    Each side starts at 0: a prediction knows nothing of the time that processes take to start.
    """
    events: list[dict[str, Any]] = []
    order = list(SHORT.values())
    for side, record in sides(run):
        name = SHORT[side]
        spans, counters = _from_zero(record.spans, record.counters)
        for event in trace_events(spans, counters)["traceEvents"]:
            rank = event["pid"]
            pid = len(order) * rank + order.index(name)  # ranks in order, the prediction above its run
            if event["name"] == "process_name" and event["ph"] == "M":
                events.append(event | {"pid": pid, "args": {"name": f"{name} rank {rank}"}})
                events.append(
                    {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
                )
            else:
                events.append(event | {"pid": pid})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def held(run: Run) -> str:
    """What `merged_trace` has of each side, in words."""
    parts = []
    for side, record in sides(run):
        if not record.spans:
            continue
        ranks = len({span.rank for span in record.spans})
        seconds = (max(s.end_ns for s in record.spans) - min(s.start_ns for s in record.spans)) / 1e9
        what = "the first iterations of the prediction" if side == "predicted" else "the whole real run"
        parts.append(f"{what} ({ranks} {'rank' if ranks == 1 else 'ranks'}, {amount_text('s', seconds)})")
    return " and ".join(parts)


def iteration_timeline(run: Run, *, max_ranks: int = 8) -> pd.DataFrame:
    """side, rank, stream, name, start_s, end_s, depth: the spans of one iteration, which starts at 0.

    `depth` counts the spans of the same track that enclose this one. Both sides show the same iteration, the
    first after the warm-up, found by the computations called `forward/...`; where they do not tell (with
    recomputation forward passes come in backward too), the last stretch as long as the mean iteration.

    Args:
        max_ranks: Show the lowest ranks only: a picture of more tracks cannot be read.
    """
    rows = []
    for side, record in sides(run):
        window = _window(record)
        if window is None:
            continue
        start, end = window
        ranks = sorted({span.rank for span in record.spans})[:max_ranks]
        kept = [
            span
            for span in record.spans
            if span.rank in ranks and span.start_ns < end and span.end_ns > start
        ]
        for span, depth in _with_depth(kept):
            rows.append(
                {
                    "side": side,
                    "rank": span.rank,
                    "stream": span.stream,
                    "name": span.name,
                    "start_s": (max(span.start_ns, start) - start) / 1e9,
                    "end_s": (min(span.end_ns, end) - start) / 1e9,
                    "depth": depth,
                }
            )
    return pd.DataFrame(rows, columns=["side", "rank", "stream", "name", "start_s", "end_s", "depth"])


def _window(record: Record) -> tuple[int, int] | None:
    """First and last nanosecond of the iteration to show; None without spans."""
    if not record.spans:
        return None
    first = min(span.start_ns for span in record.spans)
    last = max(span.end_ns for span in record.spans)
    experiment = record.result.get("experiment") or {}
    accumulation = (experiment.get("batch") or {}).get("accumulation") or 1
    starts = _micro_batch_starts(record.spans)[::accumulation]
    if len(starts) == experiment.get("steps"):
        number = min(experiment.get("warmup_steps") or 0, len(starts) - 1)
        return (starts[number], starts[number + 1] if number + 1 < len(starts) else last)
    mean_s = (record.result.get("iteration_s") or {}).get("mean")
    return (first, last) if not mean_s else (max(first, last - round(mean_s * 1e9)), last)


def _micro_batch_starts(spans: Sequence[Span]) -> list[int]:
    """Where, on the lowest rank, a forward pass follows something else: there the something else ended."""
    lowest = min(span.rank for span in spans)
    compute = [span for span in spans if span.rank == lowest and span.stream == "compute"]
    compute.sort(key=lambda span: span.start_ns)
    starts = [min(span.start_ns for span in spans)] if compute and _is_forward(compute[0]) else []
    return starts + [
        before.end_ns for before, span in pairwise(compute) if _is_forward(span) and not _is_forward(before)
    ]


def _is_forward(span: Span) -> bool:
    return span.name.partition("/")[0] == "forward"


def _with_depth(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    tracks: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        tracks[span.rank, span.stream].append(span)
    placed = []
    for key in sorted(tracks):
        enclosing: list[Span] = []
        for span in sorted(tracks[key], key=lambda s: (s.start_ns, -s.end_ns)):
            while enclosing and enclosing[-1].end_ns <= span.start_ns:
                enclosing.pop()
            placed.append((span, len(enclosing)))
            enclosing.append(span)
    return placed


def _from_zero(spans: Sequence[Span], counters: Sequence[Counter]) -> tuple[list[Span], list[Counter]]:
    first = min((span.start_ns for span in spans), default=0)
    return [
        Span(s.rank, s.stream, s.name, s.start_ns - first, s.end_ns - first, s.nbytes)
        for s in sorted(spans, key=lambda s: (s.start_ns, s.rank, s.stream))
    ], [Counter(c.rank, c.name, c.at_ns - first, c.values) for c in counters]
