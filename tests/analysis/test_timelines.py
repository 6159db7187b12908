"""Timelines of both sides: the file for Perfetto and the picture of one iteration."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twinbed.analysis import plots
from twinbed.analysis.load import Run, load
from twinbed.analysis.record import Counter, Record, Span, trace_events
from twinbed.analysis.tables import memory_series
from twinbed.analysis.timelines import iteration_timeline, merged_trace

Make = Callable[..., Record]


def test_both_sides_lie_in_one_trace_and_start_together(both: Path) -> None:
    run = load(both)
    assert isinstance(run, Run)
    events = json.loads(json.dumps(merged_trace(run)))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()).count("sim rank 0") == 1
    assert sorted(names.values()) == sorted(
        f"{side} rank {rank}" for side in ("sim", "real") for rank in range(4)
    )
    spans = [e for e in events if e["ph"] == "X"]
    assert run.sim is not None
    assert run.real is not None
    assert len(spans) == len(run.sim.spans) + len(run.real.spans)
    for side in ("sim", "real"):
        assert (
            min(e["ts"] for e in spans if names[e["pid"]].startswith(side)) == 0
        )  # the real clock began at 123 s
    # Perfetto shows the prediction above its run, rank by rank
    order = sorted(
        (e["args"]["sort_index"], names[e["pid"]]) for e in events if e["name"] == "process_sort_index"
    )
    assert [name for _, name in order][:3] == ["sim rank 0", "real rank 0", "sim rank 1"]


def test_the_first_iteration_after_the_warm_up_is_shown(both: Path) -> None:
    run = load(both)
    assert isinstance(run, Run)
    timeline = iteration_timeline(run)
    for side, length in (("predicted", 0.4), ("measured", 0.42)):
        part = timeline[timeline["side"] == side]
        assert part["start_s"].min() == pytest.approx(0.0, abs=1e-6)
        assert part["end_s"].max() == pytest.approx(length, rel=1e-3)
        assert len(part[(part["rank"] == 0) & (part["stream"] == "gather")]) == 6  # 3 gathers, 3 encodes
    encodes = timeline[timeline["name"] == "encode"]
    assert set(encodes["depth"]) == {1}  # inside their gathers
    figure = plots.timeline_figure(timeline)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["predicted", "measured"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[-1] == "rank 0  compute"  # on top


def test_accumulation_is_one_iteration(make_record: Make) -> None:
    record = make_record("runtime")
    record.result["experiment"] |= {"steps": 2, "warmup_steps": 1, "batch": {"accumulation": 2}}
    record.spans = [
        Span(0, "compute", name, 10 * i, 10 * i + 10)
        for i, name in enumerate(
            ("step", "forward/root", "backward/root", "step", "forward/root", "backward/root", "step") * 2
        )
    ]
    timeline = iteration_timeline(Run(Path(), real=record))
    # from the second iteration's first forward to the end: two micro-batches, two steps between and after
    assert list(timeline["name"]) == [
        "forward/root",
        "backward/root",
        "step",
        "forward/root",
        "backward/root",
        "step",
    ]


def test_without_names_the_last_stretch_is_shown(make_record: Make) -> None:
    record = make_record(step_s=0.4)
    record.spans = [Span(0, "compute", "work", i * 10**8, (i + 1) * 10**8) for i in range(20)]
    assert len(iteration_timeline(Run(Path(), sim=record))) == 4


def test_only_so_many_ranks_are_drawn(make_record: Make) -> None:
    timeline = iteration_timeline(Run(Path(), sim=make_record()), max_ranks=2)
    assert set(timeline["rank"]) == {0, 1}


def test_spans_of_a_stream_that_overlap_have_tracks_of_their_own() -> None:
    times = {"a": (0, 10), "in a": (2, 5), "b": (6, 14), "c": (8, 20), "d": (14, 16), "e": (10, 12)}
    spans = [Span(0, "reduce_node", name, *at) for name, at in times.items()]
    events = trace_events([*spans, Span(0, "gather", "g", 0, 30), Span(1, "reduce_node", "other rank", 0, 9)])
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events["traceEvents"] if e["name"] == "thread_name"
    }
    shown = {e["name"]: tracks[e["pid"], e["tid"]] for e in events["traceEvents"] if e["ph"] == "X"}
    first, second, third = "reduce_node", "reduce_node 2", "reduce_node 3"
    assert shown == {
        "g": "gather",
        "a": first,
        "in a": first,
        "other rank": first,
        "b": second,
        "c": third,
        "e": first,
        "d": first,
    }


def test_memory_is_a_counter_beside_the_spans_and_a_series_of_the_fullest_rank(make_record: Make) -> None:
    record = make_record()
    first = min(span.start_ns for span in record.spans)
    record.counters = [Counter(0, "memory", first + 5_000, {"parameters": 7, "activations": 9})]
    held = dict.fromkeys(("parameters", "gradients", "optimizer", "secondary_shard", "buffers"), 1)
    record.result["memory_over_time"] = [
        {
            "rank": rank,
            "t_s": 0.1 * i,
            "phase": "forward",
            "unit": "u",
            "micro_batch": 0,
            "activations": n,
            **held,
        }
        for rank, sizes in ((0, (1, 2)), (2, (5, 9, 3)))
        for i, n in enumerate(sizes)
    ]
    run = Run(Path(), sim=record, real=None)
    (counter,) = [e for e in merged_trace(run)["traceEvents"] if e["ph"] == "C"]
    assert (counter["name"], counter["ts"], counter["args"]["activations"]) == ("memory", 5.0, 9)
    series = memory_series(run)
    assert list(series["rank"]) == [2, 2, 2]
    assert list(series["activations"]) == [5, 9, 3]
    assert len(plots.png(plots.memory_series_figure(series, capacity_bytes=20.0))) > 1000
    record.result["memory_over_time"] = [{"phase": "forward", "unit": "u", "activations": 1, **held}]
    assert memory_series(run).empty  # of a record without times
