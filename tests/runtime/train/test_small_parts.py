"""Intervals, interface counters, failures and launch scripts."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.conf.compose import compose
from twinbed.runtime.failure import (
    ElsewhereError,
    Failure,
    Kind,
    describe_failure,
    find_cause,
    read_failures,
    write_failure,
)
from twinbed.runtime.interfaces import InterfaceBytes, parse_counters
from twinbed.runtime.intervals import clip, length_ns, subtract, union
from twinbed.runtime.script import script_text, write_script

GOLDEN = Path(__file__).with_name("golden")
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


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
