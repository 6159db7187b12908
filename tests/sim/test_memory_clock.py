"""Memory on the clock of a simulated step, over all micro-batches and for each engine."""

import json
from itertools import pairwise

import pytest

from twinbed.analysis.record import read_record, write_record
from twinbed.conf.compose import compose
from twinbed.sim.memory import CLASSES, MemoryPoint
from twinbed.sim.memory_clock import MAX_POINTS, thinned
from twinbed.sim.simulate import simulate

BIG = ("cluster=dgx2_v100", "model=gpt_18b", "model.layers=4", "recompute=full", "batch.micro=2")
PIPELINE = ("cluster=dgx_a100", "cluster.nodes=2", "model=gpt_18b", "model.layers=8", "recompute=full")
MEGATRON = (*PIPELINE, "engine=megatron", "comm=zero1", "parallel.pipeline=4", "parallel.tensor=2")
LAYERS = 4


def simulated(*overrides):
    composed = compose(("target=sim", "steps=3", "warmup_steps=1", *overrides))
    return simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "deepspeed_2023"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("comm", ["zero3", "zeropp"])
def test_each_unit_of_each_micro_batch_has_its_time(engine, accumulation, comm):
    record = simulated(*BIG, f"engine={engine}", f"comm={comm}", f"batch.accumulation={accumulation}")
    points = record.result["memory_over_time"]
    assert len(points) == accumulation * (2 * LAYERS + 4) + 1
    assert max(sum(p[name] for name in CLASSES) for p in points) == record.result["memory_bytes"]["peak"]
    times = [p["t_s"] for p in points]
    assert all(a < b for a, b in pairwise(times))
    assert 0 <= times[0] < times[-1] < record.result["iteration_s"]["max"]
    assert [p["micro_batch"] for p in points] == sorted(p["micro_batch"] for p in points)
    assert (points[-1]["phase"], points[-1]["activations"], points[-1]["buffers"]) == ("step", 0, 0)
    first = [p["gradients"] for p in points if not p["micro_batch"]]
    assert first[0] == 0
    assert first == sorted(first)
    later = {p["gradients"] for p in points if p["micro_batch"]}
    assert later <= {record.result["memory_bytes"]["gradients"]}


def test_times_are_those_of_the_timeline():
    record = simulated(*BIG, "comm=zero3")
    spans = {s.name: s.start_ns for s in reversed(record.spans) if s.rank == 0 and s.stream == "compute"}
    first = {(p["phase"], p["unit"]): p["t_s"] for p in record.result["memory_over_time"]}
    for phase in ("forward", "backward"):
        for layer in range(LAYERS):
            assert first[phase, f"block.{layer}"] == pytest.approx(spans[f"{phase}/block.{layer}"] / 1e9)
    assert first["step", "all"] == pytest.approx(spans["step"] / 1e9)
    own = [c for c in record.counters if c.rank == 0]
    assert len(own) == 3 * len(record.result["memory_over_time"])
    assert own[1].at_ns == spans["forward/block.0"]
    assert own[1].values == {name: record.result["memory_over_time"][1][name] for name in CLASSES}


@pytest.mark.parametrize("slow", [(), ("cluster.slowdown={3:1.5}",)], ids=["merged", "steps"])
@pytest.mark.parametrize("virtual", [1, 2])
def test_a_pipeline_holds_what_its_schedule_has_in_flight(slow, virtual):
    """1F1B: the first of four stages has four micro-batches in flight, the last one."""
    keys = ("batch.accumulation=8", f"parallel.virtual_stages={virtual}")
    keys += ("parallel.pipeline_schedule=interleaved",) * (virtual > 1)
    record = simulated(*MEGATRON, *keys, *slow)
    points = record.result["memory_over_time"]
    per_stage = 16 // 4
    assert {p["rank"] for p in points} == {0, 3 * per_stage}
    assert max(sum(p[name] for name in CLASSES) for p in points) == record.result["memory_bytes"]["peak"]
    for rank in (0, 3 * per_stage):
        own = [p for p in points if p["rank"] == rank]
        assert len(own) == 2 * 8 * virtual + 1
        assert all(a["t_s"] < b["t_s"] for a, b in pairwise(own))
        assert own[-1]["t_s"] < record.result["iteration_s"]["max"]
    if virtual == 1:
        stage = [p["activations"] for p in points if p["rank"] == 0 and p["phase"] == "forward"]
        step = stage[1] - stage[0]
        assert [round((a - stage[0]) / step) for a in stage] == [0, 1, 2, 3, 3, 3, 3, 3]


def test_a_long_series_keeps_its_peak_and_its_order():
    points = [(at, MemoryPoint("forward", "u", {"a": at * 7919 % 10_007})) for at in range(9_999)]
    kept = list(thinned(points))
    assert len(kept) <= MAX_POINTS
    assert [at for at, _ in kept] == sorted(at for at, _ in kept)
    totals, whole = [p.total for _, p in kept], [p.total for _, p in points]
    assert (max(totals), min(totals)) == (max(whole), min(whole))
    assert thinned(points[:MAX_POINTS]) == points[:MAX_POINTS]


def test_a_run_that_failed_before_a_step_has_no_series():
    record = simulated(*BIG, "comm=zero3", "cluster.failures=[{rank: 3, at_s: 0.0}]")
    assert record.result["status"] == "failed"
    assert record.result["memory_over_time"] == []
    assert record.counters == []
    assert record.result["memory_bytes"]["peak"] > 0


def test_counters_are_written_and_read_back(tmp_path):
    record = simulated(*BIG, "comm=zero3")
    write_record(tmp_path, record)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [e["args"] for e in events if e["ph"] == "C"] == [c.values for c in record.counters]
    again = read_record(tmp_path)
    assert (again.counters, again.spans) == (record.counters, sorted_spans(record.spans))


def sorted_spans(spans):
    return sorted(spans, key=lambda s: (s.start_ns, s.rank, s.stream, -s.end_ns))
