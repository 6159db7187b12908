"""Timelines of a prediction and its run, side by side: one file for Perfetto, one table for the picture."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .load import Run
from .record import Record, Span, trace_events
from .tables import sides

SHORT = {"predicted": "sim", "measured": "real"}
_ITERATION = re.compile(r"(?:iteration|step)[ ._:/-]?(\d+)")


def merged_trace(run: Run) -> dict[str, Any]:
    """Chrome trace events of both sides; processes are called `sim rank 0`, `real rank 0`, ...

    Each side starts at 0: a prediction knows nothing of the time that processes take to start.
    """
    events: list[dict[str, Any]] = []
    order = list(SHORT.values())
    for side, record in sides(run):
        name = SHORT[side]
        spans = _from_zero(record.spans)
        for event in trace_events(spans)["traceEvents"]:
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


def iteration_timeline(run: Run, *, max_ranks: int = 8) -> pd.DataFrame:
    """side, rank, stream, name, start_s, end_s, depth: the spans of one iteration, which starts at 0.

    `depth` counts the spans of the same track that enclose this one. Both sides show the same iteration, the
    first after the warm-up, where spans named `iteration N` (or `step N`) mark it; else the last stretch of
    the run as long as its mean iteration.

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
            if span.rank in ranks
            and span.start_ns < end
            and span.end_ns > start
            and not _ITERATION.fullmatch(span.name)
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
    marks = _marked(record.spans)
    warmup = (record.result.get("experiment") or {}).get("warmup_steps")
    if marks:
        after = [number for number in sorted(marks) if number >= (warmup or 0)]
        return marks[after[0] if after else max(marks)]
    first = min(span.start_ns for span in record.spans)
    last = max(span.end_ns for span in record.spans)
    mean_s = (record.result.get("iteration_s") or {}).get("mean")
    return (first, last) if not mean_s else (max(first, last - round(mean_s * 1e9)), last)


def _marked(spans: Sequence[Span]) -> Mapping[int, tuple[int, int]]:
    marks: dict[int, tuple[int, int]] = {}
    for span in spans:
        match = _ITERATION.fullmatch(span.name)
        if match:
            number = int(match.group(1))
            start, end = marks.get(number, (span.start_ns, span.end_ns))
            marks[number] = (min(start, span.start_ns), max(end, span.end_ns))
    return marks


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


def _from_zero(spans: Sequence[Span]) -> list[Span]:
    first = min((span.start_ns for span in spans), default=0)
    return [
        Span(s.rank, s.stream, s.name, s.start_ns - first, s.end_ns - first, s.nbytes)
        for s in sorted(spans, key=lambda s: (s.start_ns, s.rank, s.stream))
    ]
