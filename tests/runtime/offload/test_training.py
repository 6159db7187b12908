"""Trainings on two ranks whose states lie on disk: the same losses, and what a crash leaves."""

import json
import os
from pathlib import Path

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.policies.offload import parse_offload_event
from twinbed.runtime.calibrate import read_calibration
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.preflight import check_offload_path, check_run

CASES = str(Path(__file__).with_name("offload_cases.py"))
SIZES = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 256, "sequence": 16}
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
# Each is trained without and with offload.
SETTINGS = {
    "zero3": [],
    "zeropp": ["comm=zeropp"],
    "zero1": ["comm=zero1", "batch.accumulation=2"],
    "bf16": ["precision=bf16", "batch.accumulation=2", "train.gradient_clipping=0"],
    "fp16": ["precision=fp16", "train.loss_scale=16777216"],  # overflows: steps are skipped
    "momentum": ["optimizer=sgd", "optimizer.momentum=0.9", "recompute=full"],
    "sgd": ["optimizer=sgd"],
    "overlap": ["comm.overlap=true"],
    "evaluated": ["train.eval_every=2", "train.save_every=3"],
}
OFFLOADS = {
    "half": ["offload.parameters=0.5", "offload.optimizer=0.5"],
    "auto": ["offload.policy=auto", "offload.memory_bytes=300000"],
    "no_prefetch": ["offload.prefetch=0", "offload.direct=false", "offload.commit_every=0"],
}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


def case(name, *overrides, kind="train", resume_from=None, **options):
    resolved = compose([*BASE, *overrides]).resolved
    if resume_from is not None:  # written by an earlier case of the launch
        resolved["train"]["resume_from"] = str(resume_from)
    return Case(name=name, folder=name, experiment=resolved, kind=kind, options=options)


def launch(folder, cases):
    cluster = compose(BASE).experiment.cluster
    return launch_local(folder, cluster=cluster, cases=cases, timeout_s=200, show_progress=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of one launch with all settings."""
    folder = tmp_path_factory.mktemp("launch")
    cases = []
    for name, overrides in SETTINGS.items():
        cases += [case(name, *overrides), case(f"{name}_disk", *overrides, "offload=disk")]
    cases += [case(f"zero3_{name}", "offload=disk", *overrides) for name, overrides in OFFLOADS.items()]
    cases += [
        case("plain_resumed", resume_from=folder / "evaluated_disk/checkpoints/step_00000003"),
        case("disk_resumed", "offload=disk", resume_from=folder / "evaluated/checkpoints/step_00000003"),
        case("calibrated", "offload=disk", kind="calibrate", warmup=2, iterations=4),
    ]
    outcome = launch(folder, cases)
    assert outcome.exit_code == 0, outcome.error
    return folder


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


def losses(folder, name):
    return [loss.hex() for loss in result(folder, name)["loss"]]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_disk_trains_to_bit_equal_losses(done, name):
    assert losses(done, f"{name}_disk") == losses(done, name)
    assert len(set(losses(done, name))) > 3


@pytest.mark.parametrize("name", list(SETTINGS))
def test_disk_changes_no_collective(done, name):
    assert read_record(done / f"{name}_disk").ledger == read_record(done / name).ledger


@pytest.mark.parametrize("name", list(OFFLOADS))
def test_what_stays_near_changes_nothing(done, name):
    assert losses(done, f"zero3_{name}") == losses(done, "zero3")


def test_computation_is_calibrated_beside_moves_without_their_waits(done):
    found = read_calibration(done / "calibrated")
    assert {"step", "forward/block.2", "backward/block.0"} <= set(found.compute_ns)
    assert found.sum_ns == pytest.approx(found.iteration_ns, rel=0.02)  # neither has waits, or moves, in it
    assert [p.name for p in (done / "calibrated").rglob("*") if p.is_file()] == ["calibration.json"]


def test_a_path_is_refused_before_ranks_start_and_a_killed_calibration_is_forgotten(tmp_path):
    stale = tmp_path / "states" / "calibration" / "rank_0" / "store.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("of a calibration that was killed")
    one = case("again", "offload=disk", f"offload.path={tmp_path / 'states'}", kind="calibrate", iterations=1)
    outcome = launch(tmp_path / "launch", [one])
    assert outcome.exit_code == 0, outcome.error
    (tmp_path / "file").write_text("")
    (tmp_path / "states" / "rank_1").mkdir(exist_ok=True)
    (tmp_path / "states" / "rank_1" / "store.json").write_text("")
    for keys, said in (
        ([f"offload.path={tmp_path / 'file' / 'in'}"], "file is a file; must be a folder"),
        ([f"offload.path={tmp_path / 'states'}"], "rank_1 is of a training that did not end"),
        ([f"offload.path={tmp_path / 'states'}", "offload.resume=true"], "there is no .*rank_0/store.json"),
    ):
        with pytest.raises(ValueError, match=said):
            check_offload_path(compose([*BASE, "offload=disk", *keys]).experiment)


def test_validation_is_the_same(done):
    plain, disk = result(done, "evaluated"), result(done, "evaluated_disk")
    assert disk["validation_loss"] == plain["validation_loss"]
    assert len(plain["validation_loss"]) == 3


@pytest.mark.parametrize("name", ["plain_resumed", "disk_resumed"])
def test_a_checkpoint_serves_with_and_without_offload(done, name):
    assert losses(done, name) == losses(done, "zero3")[3:]


def test_nothing_is_left_on_disk_after_a_training(done):
    assert not list(done.rglob("*.safetensors"))


def test_far_states_take_no_memory_between_steps(done):
    memory = result(done, "zero3_disk")["memory_bytes"]
    assert memory["parameters"] == memory["optimizer"] == 0
    assert memory["gradients"] == result(done, "zero3")["memory_bytes"]["gradients"]
    half = result(done, "zero3_half")["memory_bytes"]
    assert 0 < half["parameters"] < result(done, "zero3")["memory_bytes"]["parameters"]


def test_decisions_can_be_read_again(done):
    found = [
        d for d in read_record(done / "zero3_disk").decisions if "Chunk" in d.event or "Begins" in d.event
    ]
    events = [parse_offload_event(d.event) for d in found if d.iteration == 4]
    units = ["root", "block.0", "block.1", "block.2"]
    needed = [e.chunk for e in events if type(e).__name__ == "ChunkNeeded"]
    gathered = [*units, "root", "block.2", "block.1", "block.0"]
    assert needed == [f"parameters/{unit}" for unit in (*gathered, *units)]
    assert [e.chunk for e in events if type(e).__name__ == "ChunkStep"] == [
        f"optimizer/{unit}" for unit in units
    ]


def kill(folder, **options):
    """A training whose rank dies in step 3; where its files are."""
    path = folder / "store"
    files = ["offload=disk", f"offload.path={path}"]
    outcome = launch(folder / "killed", [case("killed", *files, kind=f"{CASES}:killed", step=3, **options)])
    assert outcome.exit_code != 0
    return path


@pytest.mark.parametrize(("rank", "writes"), [(0, 1), (1, 5), (0, 8)])
def test_a_killed_training_goes_on_from_its_last_commit(done, tmp_path, rank, writes):
    path = kill(tmp_path, rank=rank, writes=writes)
    goes_on = ["offload=disk", f"offload.path={path}", "offload.resume=true"]
    if rank == 0:
        other = launch(tmp_path / "other", [case("other", *goes_on, "seed=7")])
        assert "holds a store of another run: seed=0 there, 7 here" in other.error
    outcome = launch(tmp_path / "again", [case("again", *goes_on)])
    assert outcome.exit_code == 0, outcome.error
    found = result(tmp_path / "again", "again")
    assert found["first_step"] in (2, 3)
    assert losses(tmp_path / "again", "again") == losses(done, "zero3")[found["first_step"] :]


def test_damage_is_named_and_not_trained_on(tmp_path):
    path = kill(tmp_path, rank=1, writes=3)
    outcome = launch(tmp_path / "anew", [case("anew", "offload=disk", f"offload.path={path}")])
    assert "of a training that did not end: offload.resume=true goes on from it" in outcome.error
    damaged = []
    for slot in (0, 1):
        damaged.append(path / "rank_0" / f"optimizer.block.1.{slot}.safetensors")
        data = bytearray(damaged[-1].read_bytes())
        data[9000] ^= 16
        damaged[-1].write_bytes(data)
    goes_on = case("again", "offload=disk", f"offload.path={path}", "offload.resume=true")
    outcome = launch(tmp_path / "again", [goes_on])
    assert outcome.exit_code != 0
    assert "1 of 8 files of generation" in outcome.error
    assert "optimizer.block.1." in outcome.error
    assert "do not have the checksum" in outcome.error


@needs_root
def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_is_intact(done, small_disk, tmp_path):
    disk = small_disk(1_400_000)  # one checkpoint of 0.57 MB and half of the next
    states = tmp_path / "states"
    saved = case("saved", "offload=disk", f"offload.path={states}", "train.save_every=2")
    outcome = launch(disk, [saved])
    assert outcome.exit_code != 0
    assert "checkpoint" in outcome.error
    assert "No space left" in outcome.error
    checkpoints = sorted(disk.glob("saved/checkpoints/step_*"))
    assert checkpoints
    resumed = case("resumed", "offload=disk", resume_from=checkpoints[-1])
    outcome = launch(tmp_path / "on", [resumed])
    assert outcome.exit_code == 0, outcome.error
    step = int(checkpoints[-1].name.removeprefix("step_"))
    assert losses(tmp_path / "on", "resumed") == losses(done, "zero3")[step:]


@needs_root
def test_a_disk_too_small_for_the_states_is_refused_before_the_first_step(small_disk, tmp_path):
    disk = small_disk(1_000_000)
    outcome = launch(tmp_path, [case("big", "offload=disk", f"offload.path={disk}/states")])
    assert outcome.exit_code != 0
    assert "the disk is too small" in outcome.error
    assert "bytes are needed" in outcome.error


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["offload=disk", "offload.chunk_bytes=1000"], r"offload.chunk_bytes=1000 is only simulated"),
        (["offload=disk", "offload.resume=true"], r"offload.resume=true needs offload.path"),
        (["offload=cpu"], r"offload=cpu needs GPUs"),
        (["offload=disk", "comm=ddp"], r"offload=disk needs sharded weights"),
        (["offload=disk", "optimizer=lamb"], r"optimizer=lamb with offload=disk"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(overrides, said):
    with pytest.raises(ValueError, match=said):
        check_run(compose([*BASE, *overrides]).experiment)
