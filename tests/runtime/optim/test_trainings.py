"""Whole trainings with LAMB and LARS: they learn, resume bit by bit, and are the same under every policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.runtime.calibrate import read_calibration
from twinbed.runtime.case import Case
from twinbed.runtime.checkpoint import check_resume
from twinbed.runtime.launcher import launch_local

ROOT = Path(__file__).resolve().parents[3]
BASE = (
    "target=runtime",
    "model=gpt",
    "model.layers=2",
    "model.hidden=36",
    "model.heads=4",
    "model.vocab=257",
    "model.sequence=16",
    "cluster.nodes=1",
    "cluster.devices_per_node=2",
    "cluster.shaped=false",
    "precision=fp32",
    "steps=6",
    "train.timeout_s=10",
)
KEYS = {"lamb": ("optimizer=lamb", "optimizer.lr=0.03"), "lars": ("optimizer=lars",)}
COMMS = ("zero3", "ddp", "ps", "zero1")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


def case(name, *overrides, kind="train", resume=None, **options):
    resolved = compose([*BASE, *overrides]).resolved
    if resume is not None:  # written by an earlier case of the launch
        resolved["train"]["resume_from"] = str(resume)
    return Case(name=name, folder=name, experiment=resolved, kind=kind, options=options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of one launch with all cases."""
    folder = tmp_path_factory.mktemp("launch")
    cases = []
    for optimizer, keys in KEYS.items():
        for comm in COMMS:
            name = f"{optimizer}_{comm}"
            cases.append(case(name, *keys, f"comm={comm}", "train.save_every=3"))
            half = folder / name / "checkpoints/step_00000003"
            cases.append(case(f"{name}_resumed", *keys, f"comm={comm}", resume=half))
        cases.append(
            case(f"{optimizer}_calibrated", *keys, "comm=zero3", kind="calibrate", warmup=1, iterations=3)
        )
        scale = ("precision=fp16", "train.loss_scale=16777216", "steps=2")
        cases.append(case(f"{optimizer}_skipping", *keys, "comm=zero3", *scale))
    cluster = compose([*BASE, "comm=zero3"]).experiment.cluster
    outcome = launch_local(folder, cluster=cluster, cases=cases, timeout_s=150, show_progress=False)
    assert outcome.exit_code == 0, outcome.error
    return folder


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("optimizer", list(KEYS))
def test_a_resumed_run_has_the_losses_of_the_whole_one(done, optimizer, comm):
    whole, resumed = (result(done, f"{optimizer}_{comm}{which}") for which in ("", "_resumed"))
    assert resumed["first_step"] == 3
    assert [x.hex() for x in resumed["loss"]] == [x.hex() for x in whole["loss"][3:]]
    assert whole["loss"][-1] < whole["loss"][0]


@pytest.mark.parametrize("optimizer", list(KEYS))
def test_all_policies_give_the_same_losses(done, optimizer):
    """Up to the order of sums."""
    first, *others = (result(done, f"{optimizer}_{comm}")["loss"] for comm in COMMS)
    for losses in others:
        assert losses == pytest.approx(first, rel=2e-5)


@pytest.mark.parametrize(("optimizer", "moments"), [("lamb", 2), ("lars", 1)])
def test_states_are_counted(done, optimizer, moments):
    memory = result(done, f"{optimizer}_zero3")["memory_bytes"]
    assert memory["optimizer"] == pytest.approx(moments * memory["parameters"], rel=0.01)


@pytest.mark.parametrize("optimizer", list(KEYS))
def test_calibrated_parts_add_up_without_the_all_reduce(done, optimizer):
    found = read_calibration(done / f"{optimizer}_calibrated")
    assert found.compute_ns["step"] > 0
    assert found.sum_ns == pytest.approx(found.iteration_ns, rel=0.02)


@pytest.mark.parametrize("optimizer", list(KEYS))
def test_a_skipped_step_sends_what_every_other_does(done, optimizer):
    assert result(done, f"{optimizer}_skipping")["skipped_steps"] == 2
    rows = [row for row in read_record(done / f"{optimizer}_skipping").ledger if row.phase == "step"]
    sizes = {(row.rank, row.iteration): [] for row in rows}
    for row in rows:
        sizes[row.rank, row.iteration].append(row.payload_bytes)
    assert len(sizes) == 4
    # 4 bytes tell of the overflow; two norms for each matrix: 4 a block, 2 embeddings and the head
    assert set(map(tuple, sizes.values())) == {(4, 2 * 4 * (2 * 4 + 3))}


def test_a_checkpoint_of_another_optimizer_is_refused(done):
    keys = ("optimizer=lars", "steps=9", "comm=zero3", f"train.resume_from={done / 'lamb_zero3'}")
    with pytest.raises(ValueError, match="written with optimizer=lamb; optimizer=lars here"):
        check_resume(compose([*BASE, *keys]).experiment)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("optimizer", ["lamb", pytest.param("lars", marks=pytest.mark.long)])
def test_gpt_tiny_learns_and_is_predicted_by_the_command(optimizer, tmp_path):
    """The choice as it is shipped, on two nodes of two ranks; one prediction beside it, and one alone."""
    out = tmp_path / "out"
    link = "cluster.inter_node.bandwidth_Bps=62.5e6"
    keys = (f"optimizer={optimizer}", "comm=zero3", "batch.sequence=64", "steps=8", link)
    both = command(*keys, f"hydra.run.dir={out}", cwd=tmp_path)
    assert "ledgers: equal" in both.stdout
    real = read_record(out / "runtime").result
    assert real["loss"][-1] < real["loss"][0] - 0.2, real["loss"]
    alone = tmp_path / "alone"
    command(*keys, "target=sim", f"hydra.run.dir={alone}", cwd=tmp_path)
    said = read_record(alone)
    assert said.result["status"] == "ok"
    assert said.result["experiment"]["optimizer"]["name"] == optimizer
    assert len(said.ledger) == len(read_record(out / "runtime").ledger)


def command(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
