"""Whole trainings on two ranks: what they write, how they resume, and what ends them."""

import csv
import itertools
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.conf.model_spec import parameters, spec_from_keys
from twinbed.runtime.calibrate import read_calibration
from twinbed.runtime.case import Case
from twinbed.runtime.checkpoint import check_resume, find_checkpoint
from twinbed.runtime.failure import Heartbeat
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.preflight import check_run

CASES = str(Path(__file__).with_name("rank_cases.py"))
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 256, "sequence": 16}
BASE = [
    "target=runtime",
    "model=gpt",
    *(f"model.{key}={value}" for key, value in SIZES.items()),
    "cluster.nodes=1",
    "cluster.devices_per_node=2",
    "cluster.shaped=false",
    "comm=zero3",
    "precision=fp32",
    "steps=6",
    "train.timeout_s=10",
]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


def case(name, *overrides, kind="train", resume=None, **options):
    resolved = compose([*BASE, *overrides]).resolved
    if resume is not None:  # written by an earlier case of the launch
        resolved["train"]["resume_from"] = str(resume)
    return Case(name=name, folder=name, experiment=resolved, kind=kind, options=options)


def launch(folder, cases, *overrides):
    cluster = compose([*BASE, *overrides]).experiment.cluster
    return launch_local(folder, cluster=cluster, cases=cases, timeout_s=150, show_progress=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of one launch with many cases."""
    folder = tmp_path_factory.mktemp("launch")
    cases = [
        case("plain", "train.save_every=3", "train.eval_every=2"),
        case("resumed", resume=folder / "plain/checkpoints/step_00000003"),
        case("accumulated", "batch.accumulation=2"),
        replace(case("wide", "batch.micro=2"), tensorboard=True),
        case("recomputed", "recompute=full"),
        case("bf16", "precision=bf16", "train.lr_schedule=cosine", "train.warmup_lr_steps=2"),
        case("overflowing", "precision=fp16", "train.loss_scale=16777216", "train.save_every=3"),
        case("fp16", "precision=fp16"),
        case("sgd", "optimizer=sgd", "optimizer.momentum=0.9", "train.save_every=4"),
        case("sgd_resumed", "optimizer=sgd", "optimizer.momentum=0.9", resume=folder / "sgd"),
        *(case(comm, f"comm={comm}") for comm in ("ddp", "ps", "zero1", "zero2")),
        *(
            case(f"{comm}_saved", f"comm={comm}", "train.save_every=3", "train.gradient_clipping=0")
            for comm in ("ddp", "ps")
        ),
        *(
            case(
                f"{comm}_resumed",
                f"comm={comm}",
                "train.gradient_clipping=0",
                resume=folder / f"{comm}_saved/checkpoints/step_00000003",
            )
            for comm in ("ddp", "ps")
        ),
        case("synthetic", "data=synthetic", "model.vocab=50"),
        case("calibrated", "batch.accumulation=2", kind="calibrate"),
        case("paced", "cluster.emulated_flops_per_s=1e7", kind="calibrate", warmup=1, iterations=3),
    ]
    outcome = launch(folder, cases)
    assert outcome.exit_code == 0, outcome.error
    return folder


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


def test_a_run_writes_a_record(done):
    record = read_record(done / "plain")
    found = record.result
    assert found["status"] == "ok"
    assert found["target"] == "runtime"
    assert len(found["loss"]) == 6
    assert found["loss"][-1] < found["loss"][0]
    assert found["iteration_s"]["n"] == 4
    assert found["tokens_per_s"] == pytest.approx(2 * 16 / found["iteration_s"]["mean"])
    assert [step for step, _ in found["validation_loss"]] == [1, 3, 5]
    assert found["kernels"]["backend"] in ("native", "reference")
    assert found["kernels"]["reason"]
    assert found["kernels"]["prepare_s"] > 0
    assert {row.rank for row in record.ledger} == {0, 1}
    assert {row.phase for row in record.ledger} == {"forward", "backward", "step", "eval"}
    assert {decision.rank for decision in record.decisions} == {0}
    num_parameters = sum(unit.numel for unit in parameters(spec_from_keys({"family": "gpt", **SIZES})))
    memory = found["memory_bytes"]
    assert memory["parameters"] == memory["gradients"] == 4 * num_parameters / 2
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert memory["activations"] == sum(found["saved_bytes"].values()) > 0
    for phases in (
        found["phases_s"],
        *({k: v for k, v in rank.items() if k not in ("rank", "count")} for rank in found["ranks"]),
    ):
        parts = sum(phases[key] for key in ("compute", "comm_exposed", "quantize", "idle"))
        assert parts == pytest.approx(found["iteration_s"]["mean"], rel=1e-6)
        assert 0 < phases["comm_exposed"] <= phases["comm_total"] * (1 + 1e-9)


def test_metrics_hold_the_means_over_ranks(done):
    with (done / "plain" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = result(done, "plain")
    assert [float(row["loss"]) for row in rows] == found["loss"]
    assert [float(row["iteration_s"]) for row in rows] == found["iterations_s"]
    assert [row["validation_loss"] != "" for row in rows] == [False, True] * 3
    assert all(float(row["gradient_norm"]) > 0 for row in rows)


def test_tensorboard_is_written_where_asked_for(done):
    pytest.importorskip("tensorboard")
    assert len(list((done / "wide" / "tensorboard").glob("events.*"))) == 1
    assert not (done / "plain" / "tensorboard").exists()


def test_spans_of_a_rank_do_not_overlap_on_one_stream(done):
    record = read_record(done / "plain")
    for rank in (0, 1):
        for stream in {span.stream for span in record.spans}:
            own = sorted(
                (span.start_ns, span.end_ns)
                for span in record.spans
                if span.rank == rank and span.stream == stream
            )
            assert all(end <= start + 1000 for (_, end), (start, _) in itertools.pairwise(own))


@pytest.mark.parametrize(
    ("first", "second"),
    [("plain", "resumed"), ("sgd", "sgd_resumed"), ("ddp_saved", "ddp_resumed"), ("ps_saved", "ps_resumed")],
)
def test_a_resumed_run_has_the_losses_of_the_whole_one(done, first, second):
    whole, resumed = result(done, first), result(done, second)
    step = resumed["first_step"]
    assert step == (4 if first == "sgd" else 3)
    assert [x.hex() for x in resumed["loss"]] == [x.hex() for x in whole["loss"][step:]]


def test_layouts_give_the_same_losses(done):
    """Up to the order of sums."""
    plain = result(done, "plain")["loss"]
    for name in ("recomputed", "ddp", "ps", "zero1", "zero2"):
        assert result(done, name)["loss"] == pytest.approx(plain, rel=2e-5), name
    assert result(done, "accumulated")["loss"] == pytest.approx(result(done, "wide")["loss"], rel=2e-5)
    assert result(done, "bf16")["loss"] == pytest.approx(plain, rel=0.02)
    assert result(done, "fp16")["loss"] == pytest.approx(plain, rel=0.02)


def test_an_overflow_skips_the_step(done):
    found = result(done, "overflowing")
    assert found["skipped_steps"] == 6
    with (done / "overflowing" / "metrics.csv").open() as file:
        assert all(row["skipped"] == "1" and row["gradient_norm"] == "" for row in csv.DictReader(file))
    assert find_checkpoint(done / "overflowing").loss_scale == {
        "scale": 2.0**24,
        "good_steps": 0,
        "skipped_steps": 6,
    }
    with (done / "fp16" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["skipped"]) for row in rows) == result(done, "fp16")["skipped_steps"] < 3
    for row, following in itertools.pairwise(rows):
        halved = float(row["loss_scale"]) / (2 if row["skipped"] == "1" else 1)
        assert float(following["loss_scale"]) == halved


def test_calibrated_parts_add_up_to_the_iteration(done):
    units = ["root", "block.0", "block.1"]
    for name in ("calibrated", "paced"):
        found = read_calibration(done / name)
        assert set(found.compute_ns) == {
            "step",
            *(f"{phase}/{unit}" for phase in ("forward", "backward") for unit in units),
        }
        assert found.sum_ns == pytest.approx(found.iteration_ns, rel=0.02)
    assert found.micro_batches == 1
    block_ns = 1e9 * 2 * 16 * (32 * (96 + 32 + 256) + 2 * 32 * 16) / 1e7
    for unit in units[1:]:
        assert found.compute_ns[f"forward/{unit}"] == pytest.approx(block_ns, rel=0.6)
        assert found.compute_ns[f"forward/{unit}"] >= block_ns
        assert found.compute_ns[f"backward/{unit}"] >= 2 * block_ns


def test_the_latest_whole_checkpoint_is_found(done, tmp_path):
    assert find_checkpoint(done / "plain").step == 6
    assert find_checkpoint(done / "plain" / "checkpoints").step == 6
    assert find_checkpoint(done / "plain" / "checkpoints" / "step_00000003").step == 3
    partial = tmp_path / "checkpoints" / ".step_00000009.partial"
    partial.mkdir(parents=True)
    (partial / "twinbed.json").write_text("{}")
    (tmp_path / "checkpoints" / "step_00000009").mkdir()
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps=6"], "6 steps are done; steps=6 must be more"),
        (["steps=9", "model.hidden=64"], "its model has hidden=32; model.hidden=64 here"),
        (["steps=9", "optimizer=sgd"], "written with optimizer=adamw; optimizer=sgd here"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(done, overrides, message):
    experiment = compose([*BASE, f"train.resume_from={done / 'plain'}", *overrides]).experiment
    with pytest.raises(ValueError, match=message):
        check_resume(experiment)


def test_a_server_with_a_dynamic_scale_is_refused():
    experiment = compose([*BASE, "comm=ps", "precision=fp16"]).experiment
    with pytest.raises(ValueError, match="give a fixed scale"):
        check_run(experiment)
    check_run(compose([*BASE, "comm=ps", "precision=fp16", "train.loss_scale=1024"]).experiment)


def test_a_gradient_that_is_not_finite_names_its_parameter(tmp_path):
    outcome = launch(tmp_path, [case("spoiled", kind=f"{CASES}:nan_gradient"), case("after")])
    assert outcome.exit_code == 1
    assert outcome.failed_rank == 1
    assert "rank 1 failed in step 2 of spoiled" in outcome.error
    assert "blocks.0.fc1.weight" in outcome.error
    assert "first in block 3 of 256 elements" in outcome.error
    assert result(tmp_path, "after")["error"] == outcome.error


def test_a_killed_rank_ends_the_run(tmp_path):
    killed_at = []

    def kill():
        while Heartbeat.read(tmp_path, 1)[1] < 3:
            time.sleep(0.01)
        os.kill(pid_of_rank(tmp_path, 1), signal.SIGKILL)
        killed_at.append(time.monotonic())

    threading.Thread(target=kill, daemon=True).start()
    outcome = launch(tmp_path, [case("first", "steps=5"), case("long", "steps=100000")])
    assert time.monotonic() - killed_at[0] < 30
    assert outcome.exit_code == 1
    assert "rank 1 was killed by SIGKILL in step" in outcome.error
    assert result(tmp_path, "long")["status"] == "failed"
    assert result(tmp_path, "long")["failed_rank"] == 1


def pid_of_rank(folder, rank):
    for path in Path("/proc").glob("[0-9]*"):
        try:
            mine = str(folder).encode() in (path / "cmdline").read_bytes()
            if mine and (path / "comm").read_text().strip() == f"rank{rank}":
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("no such rank")


@pytest.mark.netns
def test_the_interfaces_count_what_the_ledger_says(tmp_path):
    cluster = [
        "cluster.nodes=2",
        "cluster.devices_per_node=2",
        "cluster.shaped=true",
        "cluster.inter_node.bandwidth_Bps=12.5e6",
    ]
    larger = ["model.hidden=128", "steps=5", "precision=bf16"]
    cases = [case(comm, *cluster, *larger, f"comm={comm}") for comm in ("zero3", "zeropp")]
    outcome = launch(tmp_path, cases, *cluster)
    assert outcome.exit_code == 0, outcome.error
    if outcome.unshaped_reason:
        pytest.skip(outcome.unshaped_reason)
    for comm in ("zero3", "zeropp"):
        record = read_record(tmp_path / comm)
        interfaces = record.result["interfaces"]
        assert [entry["node"] for entry in interfaces] == [0, 1]
        for entry in interfaces:
            ranks = (2 * entry["node"], 2 * entry["node"] + 1)
            expected = sum(row.inter_node_bytes for row in record.ledger if row.rank in ranks)
            assert entry["sent_bytes"] == pytest.approx(expected, rel=0.05)
