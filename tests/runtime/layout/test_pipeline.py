"""Pipelines: the gradients and losses of one process, rows in the order that docs/architecture.md writes down, whole
trainings through the launcher, and what ends them.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinbed.conf.compose import compose
from twinbed.policies.comm import Phase
from twinbed.policies.layout.schedule import Pass, stage_passes
from twinbed.policies.plan import AllGather, LoadCopy, Plan, StoreCopy
from twinbed.runtime.case import Case
from twinbed.runtime.checkpoint import check_resume
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.preflight import check_run
from twinbed.runtime.secondary import SecondaryShard

CASES = str(Path(__file__).with_name("pipeline_cases.py"))
BASE = [
    "target=runtime",
    "model=gpt",
    *(
        f"model.{key}={value}"
        for key, value in {"layers": 4, "hidden": 32, "heads": 4, "vocab": 256, "sequence": 16}.items()
    ),
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.shaped=false",
    "comm=zero3",
    "precision=fp32",
    "batch.micro=2",
    "steps=5",
    "train.gradient_clipping=1",
    "train.timeout_s=20",
]
# The same sequences in a step: four micro-batches for two replicas, two for four
PIPELINE = ["parallel.pipeline=2", "batch.accumulation=4"]
PLAIN = ["batch.accumulation=2"]


def case(name, *overrides, kind="train", resume=None, **options):
    resolved = compose([*BASE, *overrides]).resolved
    if resume is not None:  # written by an earlier case of the launch
        resolved["train"]["resume_from"] = str(resume)
    return Case(name=name, folder=name, experiment=resolved, kind=kind, options=options)


def launch(folder, *cases):
    cluster = compose(BASE).experiment.cluster
    return launch_local(folder, cluster=cluster, cases=cases, timeout_s=150, show_progress=False)


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


# ---- the mathematics


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_gradients_and_losses_are_those_of_one_process(launch):
    found = launch("ranks_pipeline", "gradients", 4)
    for name in found[0]:
        names = set()
        for rank in range(4):
            gradients, losses, own, wanted, owns_nothing = found[rank][name]
            assert gradients < 1e-5, f"{name} on rank {rank}"
            assert losses < 1e-5, f"{name} on rank {rank}"
            assert bool(own) != owns_nothing
            names |= set(own)
        assert names == set(wanted), name


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_zeropp_over_replicas_on_two_nodes(launch):
    found = launch("ranks_pipeline", "quantized", 8)
    for rank in range(8):
        for name, (off, losses, wanted, small, secondary) in found[rank].items():
            assert 1e-4 < off < 0.2, f"{name}: weights and gradients are of 8 bits"
            assert losses[0] == pytest.approx(wanted[0], rel=2e-3)  # weights of 8 bits
            assert losses == pytest.approx(wanted, rel=0.01)
            axes = {(stream, axis) for stream, axis, _ in small}
            assert {("gather", "replicas"), ("reduce", "replicas_local"), ("reduce", "replicas_node")} <= axes
            assert secondary > 0


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_norms_over_ranks_that_hold_parts_count_each_element_once(launch):
    for cut, alike in launch("ranks_pipeline", "holders", 2):
        assert cut < 1e-6
        assert alike < 1e-6


# ---- the order


def messages(stages, chunks, stage, which):
    """Whether a pass ends with a message, and of which part."""
    part = which.chunk * stages + stage
    sends = part > 0 if which.backward else part < stages * chunks - 1
    return [
        ("library", "backward" if which.backward else "forward", f"stage.{part}", "send", "pipeline", stages)
    ] * sends


def gather(phase, unit, replicas):
    return [("gather", phase, unit, "all_gather", "replicas", replicas)] if replicas > 1 else []


def reduce(comm, unit, replicas):
    op = "all_reduce" if comm == "ddp" else "reduce_scatter"
    return [("reduce", "backward", unit, op, "replicas", replicas)] if replicas > 1 else []


def expected(stages, schedule, chunks, comm, tied, stage, world):
    """What docs/architecture.md says of a step of 4 micro-batches and 4 blocks, then of a validation of 3."""
    replicas, count = world // stages, 4
    each = 4 // (stages * chunks)
    blocks = {c: [f"block.{(c * stages + stage) * each + i}" for i in range(each)] for c in range(chunks)}
    first = {c: stage == 0 and c == 0 for c in range(chunks)}
    last = {c: stage == stages - 1 and c == chunks - 1 for c in range(chunks)}
    rows, gathered = [], set()
    for which in stage_passes(
        schedule, stage=stage, stages=stages, chunks=chunks, micro_batches=count, megatron=False
    ):
        chunk = which.chunk
        root = ["root"] if first[chunk] or last[chunk] else []
        own = blocks[chunk]
        if not which.backward:
            if comm == "zero3" or (comm == "zero1" and chunk not in gathered):
                gathered.add(chunk)
                rows += [row for unit in (*root, *own) for row in gather("forward", unit, replicas)]
        else:
            ahead = own[::-1]
            reduces = comm == "zero3" or which.micro_batch == count - 1
            if comm == "zero3":
                rows += [row for unit in (*root, *ahead[:1]) for row in gather("backward", unit, replicas)]
            if comm == "ddp" and reduces and last[chunk]:
                rows += reduce(comm, "root", replicas)  # norm and head come first
            for i, unit in enumerate(ahead):
                if comm == "zero3" and i + 1 < len(ahead):
                    rows += gather("backward", ahead[i + 1], replicas)
                rows += reduce(comm, unit, replicas) if reduces else []
            if root and reduces and not (comm == "ddp" and last[chunk]):
                rows += reduce(comm, "root", replicas)
        rows += messages(stages, chunks, stage, which)
    if tied and stage in (0, stages - 1):
        rows.append(("reduce", "backward", "root.embedding", "send", "pipeline", stages))
    rows.append(("library", "step", "", "all_reduce", "world", world))
    for _ in range(3):
        for chunk in range(chunks):
            root = ["root"] if first[chunk] or last[chunk] else []
            if comm == "zero3" or (comm == "zero1" and _ == 0):
                rows += [row for unit in (*root, *blocks[chunk]) for row in gather("eval", unit, replicas)]
            if not last[chunk]:
                rows.append(
                    ("library", "eval", f"stage.{chunk * stages + stage}", "send", "pipeline", stages)
                )
    rows.append(("library", "eval", f"stage.{(chunks - 1) * stages + stage}", "all_reduce", "world", world))
    return rows


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rows_stand_in_the_written_order(launch):
    found = launch("ranks_pipeline", "rows", 4)
    for name in found[0]:
        for rank in range(4):
            keys, comm, tied, rows, off = found[rank][name]
            stages, chunks = keys["pipeline"], keys.get("virtual_stages", 1)
            schedule, stage = keys.get("pipeline_schedule", "1f1b"), rank // (4 // stages)
            wanted = expected(stages, schedule, chunks, comm, tied, stage, 4)
            assert [row[:-1] for row in rows] == wanted, f"{name} on rank {rank}"
            assert abs(off) < 1e-5, f"validation of {name}"
            nbytes = {row[-1] for row in rows if row[3] == "send" and row[2].startswith("stage.")}
            assert nbytes == {2 * 6 * 12 * 4}  # sequences, tokens, features, fp32


def test_torch_runs_another_interleaved_order_than_megatron_where_micro_batches_are_stages():
    sizes = {"stage": 1, "stages": 2, "chunks": 2, "micro_batches": 2}
    order = stage_passes("interleaved", **sizes, megatron=False)
    assert [str(each) for each in order] == ["F0.0", "F1.0", "F0.1", "B0.1", "F1.1", "B1.1", "B0.0", "B1.0"]
    assert stage_passes("interleaved", **sizes)[:4] == tuple(
        Pass(m, c, backward=False) for c in (0, 1) for m in (0, 1)
    )


def test_a_secondary_copy_serves_each_micro_batch_that_is_under_way():
    store = Plan((AllGather(axis="world"), StoreCopy(axis="hpz")))
    load = Plan((LoadCopy(axis="hpz"), AllGather(axis="hpz")))
    copy = SecondaryShard("block.0")

    def forward(training=True):
        copy.issued(store, Phase.forward, outlives_micro_batch=False, training=training)

    def backward():
        copy.issued(load, Phase.backward, outlives_micro_batch=False)

    forward()
    forward()
    backward()
    assert copy.valid
    backward()
    assert not copy.valid
    forward(training=False)  # a validation's
    forward()
    backward()
    assert not copy.valid
    forward()
    copy.invalidate()
    assert not copy.valid
    forward()
    backward()
    assert not copy.valid


# ---- whole trainings


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of one launch with many cases."""
    folder = tmp_path_factory.mktemp("pipelines")
    interleaved = ["parallel.pipeline_schedule=interleaved", "parallel.virtual_stages=2"]
    evaluated = ["train.eval_every=2"]
    outcome = launch(
        folder,
        case("plain", *PLAIN, *evaluated, "train.eval_batches=2"),
        case("piped", *PIPELINE, *evaluated, "train.eval_batches=4", "train.save_every=3"),
        case("resumed", *PIPELINE, resume=folder / "piped/checkpoints/step_00000003"),
        case(
            "ddp_saved",
            *PIPELINE,
            *interleaved,
            "comm=ddp",
            "model.tied_embeddings=true",
            "train.save_every=3",
        ),
        case(
            "ddp_resumed",
            *PIPELINE,
            *interleaved,
            "comm=ddp",
            "model.tied_embeddings=true",
            resume=folder / "ddp_saved/checkpoints/step_00000003",
        ),
        case("lamb", *PLAIN, "optimizer=lamb", "model.tied_embeddings=true"),
        case("lamb_piped", *PIPELINE, "optimizer=lamb", "model.tied_embeddings=true"),
        case("fp16", *PLAIN, "precision=fp16", "train.loss_scale=16777216", "recompute=full"),
        case("fp16_piped", *PIPELINE, "precision=fp16", "train.loss_scale=16777216", "recompute=full"),
    )
    assert outcome.exit_code == 0, outcome.error
    return folder


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("plain", "piped"), [("plain", "piped"), ("lamb", "lamb_piped")])
def test_losses_are_those_without_a_pipeline(done, plain, piped):
    want, got = result(done, plain), result(done, piped)
    assert got["status"] == "ok"
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["loss"][-1] < got["loss"][0]
    assert [step for step, _ in got["validation_loss"]] == [step for step, _ in want["validation_loss"]]
    assert [x for _, x in got["validation_loss"]] == pytest.approx(
        [x for _, x in want["validation_loss"]], rel=1e-5
    )
    rate = 2 * 2 * 4 * 16  # replicas, sequences, micro-batches, tokens
    assert got["tokens_per_s"] == pytest.approx(rate / got["iteration_s"]["mean"])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_overflow_anywhere_skips_the_step_on_all_stages(done):
    want, got = result(done, "fp16"), result(done, "fp16_piped")
    assert want["skipped_steps"] == got["skipped_steps"] > 0
    assert got["loss"] == pytest.approx(want["loss"], rel=2e-3)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pipeline_resumes_from_its_checkpoint(done):
    for whole, resumed in (("piped", "resumed"), ("ddp_saved", "ddp_resumed")):
        assert result(done, resumed)["first_step"] == 3
        assert result(done, resumed)["loss"] == result(done, whole)["loss"][3:]
    # another layout may go on too; a placement of the weights that has other optimizer states may not
    check_resume(compose([*BASE, *PLAIN, f"train.resume_from={done / 'piped'}"]).experiment)
    tied = "model.tied_embeddings=true"
    with pytest.raises(ValueError, match="written with replicated weights; comm=zero3 keeps them sharded"):
        check_resume(
            compose(
                [*BASE, *PIPELINE, "comm=zero3", tied, f"train.resume_from={done / 'ddp_saved'}"]
            ).experiment
        )


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "rank", "says"),
    [
        ("raise", 2, r"rank 2 failed in step 2 of torn: .*stage of rank 2 fails in"),
        ("kill", 1, r"rank 1 .*(killed|SIGKILL).*step 2"),
    ],
)
def test_a_stage_that_dies_ends_the_run(tmp_path, fault, rank, says):
    torn = case("torn", *PIPELINE, kind=f"{CASES}:fault", rank=rank, fault=fault)
    outcome = launch(tmp_path, torn)
    ended = time.monotonic()
    assert outcome.status == "failed"
    assert outcome.failed_rank == rank
    assert re.search(says, outcome.error), outcome.error
    assert ended - float((tmp_path / "fault.txt").read_text()) < 15  # 3 on an idle machine; timeout_s is 20
    if fault == "raise":
        assert "ArithmeticError" in (tmp_path / f"rank{rank}.log").read_text()


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_trains_a_pipeline(tmp_path):
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    for name, overrides in (("piped", PIPELINE), ("plain", PLAIN)):
        run = subprocess.run(
            [sys.executable, str(root / "run.py"), *BASE, *overrides, f"hydra.run.dir={tmp_path / name}"],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert run.returncode == 0, run.stderr
    assert result(tmp_path, "piped")["status"] == "ok"
    assert result(tmp_path, "piped")["loss"] == pytest.approx(result(tmp_path, "plain")["loss"], rel=1e-5)


# ---- refusals


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["offload=disk"], r"offload=disk with parallel\.pipeline=2: .*use offload=none"),
        (["comm.overlap=true"], r"comm\.overlap=true with parallel\.pipeline=2"),
        (["batch.accumulation=1"], r"batch\.accumulation=1 must be >= parallel\.pipeline=2"),
        (["model.layers=3"], r"must divide model\.layers=3"),
        (
            ["parallel.pipeline_schedule=interleaved", "parallel.virtual_stages=2", "batch.accumulation=3"],
            r"batch\.accumulation=3 micro-batches must be a multiple of parallel\.pipeline=2",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_said_before_the_start(overrides, says):
    with pytest.raises(ValueError, match=says):
        check_run(compose([*BASE, *PIPELINE, *overrides]).experiment)
