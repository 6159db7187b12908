"""Intervals, interface counters, failures and launch scripts."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinbed.conf.compose import compose, model_spec
from twinbed.runtime.checkpoint import _first_line, check_resume
from twinbed.runtime.failure import (
    ElsewhereError,
    Failure,
    Kind,
    describe_failure,
    find_cause,
    read_failures,
    write_failure,
)
from twinbed.runtime.gradients import bad_place
from twinbed.runtime.interfaces import InterfaceBytes, parse_counters
from twinbed.runtime.intervals import clip, length_ns, subtract, union
from twinbed.runtime.script import script_text, write_script

GOLDEN = Path(__file__).with_name("golden")
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("index", "block"), [(0, 0), (255, 0), (256, 1), (1000, 3), (4 * 256, 4)])
def test_a_bad_gradient_is_placed_by_its_block(poison, index, block):
    gradient = torch.ones(5, 205)  # 1025 elements: the last block holds one
    gradient.view(-1)[index] = poison
    gradient.view(-1)[-1] = poison  # the first of them is named
    assert bad_place(gradient) == f"first in block {block} of 256 elements"


def points(intervals):
    return {t for start, end in intervals for t in range(start, end)}


@given(a=spans, b=spans, window=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_intervals_are_sets_of_time(a, b, window):
    one, two = union(a), union(b)
    assert points(one) == points(a)
    assert length_ns(one) == len(points(a))
    assert points(subtract(one, two)) == points(a) - points(b)
    assert length_ns(subtract(one, two)) == len(points(a) - points(b))
    assert points(clip(one, *window)) == points(a) & set(range(*window))


def test_the_kernel_counts_bytes_of_an_interface():
    text = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs\n"
        "    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n"
        "  eth0: 2000 20 0 0 0 0 0 0 3000 30 0 0 0 0 0 0\n"
    )
    counted = parse_counters(text, "eth0")
    assert counted == InterfaceBytes("eth0", sent_bytes=3000, received_bytes=2000)
    assert counted.since(InterfaceBytes("eth0", 1000, 500)) == InterfaceBytes("eth0", 2000, 1500)
    assert parse_counters(text, "eth1") is None


def failure(rank, kind, time_ns, error="boom"):
    return Failure(rank=rank, case="a", step=2, kind=kind, error=error, trace="", time_ns=time_ns)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("timeout must be > 0"), Kind.error),
        (RuntimeError("[.../pair.cc:537] Connection closed by peer [127.0.0.1]:1234"), Kind.disconnected),
        (RuntimeError("[...] Timed out waiting 5000ms for recv operation to complete"), Kind.timeout),
        (RuntimeError("shape [3] is invalid"), Kind.error),
        (ElsewhereError("the gradient norm is nan"), Kind.elsewhere),
    ],
)
def test_what_an_error_says_about_its_cause(tmp_path, error, kind):
    described = describe_failure(error, rank=3, case="a", step=2)
    assert described.kind is kind
    write_failure(tmp_path, described)
    assert read_failures(tmp_path) == {3: described}


def test_the_cause_is_found_behind_its_consequences():
    beats = {0: (0, 2), 1: (0, 2), 2: (0, 2)}
    closed = {0: failure(0, Kind.disconnected, 1)}

    def cause(failures, codes, silent=()):
        return find_cause(failures, codes, beats, ["a"], {1: "last words"}, list(silent))

    assert cause(closed, {0: 1, 1: -9}).rank == 1
    assert cause(closed, {0: 1, 1: 3}).error == "rank 1 ended in step 2 of a: last words"
    assert cause(closed | {2: failure(2, Kind.error, 5, "bad lr")}, {0: 1, 2: 1}).error == (
        "rank 2 failed in step 2 of a: bad lr"
    )
    late = {0: failure(0, Kind.timeout, 7), 2: failure(2, Kind.timeout, 6)}
    assert cause(late, {0: 1, 2: 1}).rank == 2
    silent = cause(late, {0: 1, 2: 1}, silent=[1])
    assert silent.rank == 1
    assert silent.error.startswith("rank 1 did not answer any more, last seen in step 2 of a; rank 2 failed")


def experiment(launch, backend):
    overrides = ["target=runtime", f"launch={launch}", f"cluster.backend={backend}"]
    return compose([*overrides, "cluster.devices_per_node=8"]).experiment


@pytest.mark.parametrize(("launch", "backend"), [("torchrun", "gloo"), ("slurm", "nccl")])
def test_scripts_are_as_reviewed(launch, backend, same_as_golden):
    text = script_text(Path("/runs/it's here/launch.sh"), experiment(launch, backend))
    same_as_golden(GOLDEN / f"launch.{launch}.sh", text)


def test_a_script_is_executable_and_sound(tmp_path):
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    for launch, name in (("torchrun", "launch.sh"), ("slurm", "launch.sbatch")):
        path = write_script(folder, experiment(launch, "gloo"))
        assert path.name == name
        assert path.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", path], check=True)
        line = next(line for line in path.read_text().splitlines() if line.startswith("FOLDER="))
        shown = subprocess.run(
            ["bash", "-c", f'{line}; echo "$FOLDER"'], capture_output=True, text=True, check=True
        )
        assert shown.stdout == f"{folder}\n"
    with pytest.raises(ValueError, match="launch=local"):
        script_text(path, experiment("local", "gloo"))


def test_a_rank_that_could_not_write_its_account_is_quoted_once():
    line = "rank 0 failed in step 3 of a: OSError: disk full"
    assert find_cause({}, {0: 1}, {0: (0, 3)}, ["a"], {0: line}, []).error == line
    silent = find_cause({}, {0: 1}, {0: (0, 3)}, ["a"], {}, [])
    assert silent.error == "rank 0 failed in step 3 of a: it said nothing"


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as `save_checkpoint` leaves it after three steps of hpz, and its experiment."""
    experiment = compose(["target=runtime", "comm=hpz", "steps=9"]).experiment
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"m" * 7)
    (folder / "__0_0.distcp").write_bytes(b"w" * 100)
    manifest = {
        "version": 2,
        "step": 3,
        "loss_scale": None,
        "model": asdict(model_spec(experiment)),
        "optimizer": "adamw",
        "placement": "sharded",
        "files": {".metadata": 7, "__0_0.distcp": 100},
    }
    (folder / "twinbed.json").write_text(json.dumps(manifest))
    return folder


def resume(folder, comm):
    check_resume(
        compose(["target=runtime", f"comm={comm}", "steps=9", f"train.resume_from={folder}"]).experiment
    )


def test_a_checkpoint_goes_on_where_weights_live_alike(checkpoint):
    for comm in ("hpz", "zero3", "zero1", "zeropp"):
        resume(checkpoint, comm)
    for comm, placement in (("ddp", "replicated"), ("ps", "server")):
        with pytest.raises(
            ValueError, match=f"written with sharded weights; comm={comm} keeps them {placement} here"
        ):
            resume(checkpoint, comm)


def test_a_damaged_checkpoint_is_refused_with_its_reason(checkpoint):
    (checkpoint / "__0_0.distcp").write_bytes(b"w" * 60)
    with pytest.raises(ValueError, match=r"__0_0\.distcp has 60 bytes, but 100 were written: it is damaged"):
        resume(checkpoint, "hpz")
    (checkpoint / "__0_0.distcp").write_bytes(b"w" * 100)
    (checkpoint / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: No such file or directory"):
        resume(checkpoint, "hpz")


def test_the_reason_of_a_checkpoint_that_cannot_be_read_is_never_empty():
    assert _first_line(EOFError()) == "EOFError"
    assert _first_line(ValueError("one\ntwo")) == "ValueError: one"
