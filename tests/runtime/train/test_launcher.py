"""A launch ends soon after its first fault, says whose it was, and leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from twinbed.conf.compose import compose
from twinbed.runtime import launcher
from twinbed.runtime.case import Case, read_launch, write_launch
from twinbed.runtime.cluster.local import LocalCluster
from twinbed.runtime.failure import Heartbeat
from twinbed.runtime.launcher import launch_local

CASES = str(Path(__file__).with_name("rank_cases.py"))
SMALL = [
    "model=gpt",
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "model.vocab=256",
    "model.sequence=8",
]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def composed(*overrides, nodes=1, per_node=2, shaped=False):
    return compose(
        [
            *SMALL,
            "target=runtime",
            f"cluster.nodes={nodes}",
            f"cluster.devices_per_node={per_node}",
            f"cluster.shaped={shaped}",
            "train.timeout_s=5",
            *overrides,
        ]
    )


def run(folder, *kinds, timeout_s=90.0, made=None, **cluster):
    """Launch cases of kinds ("name", options); the outcome."""
    made = made or composed(**cluster)
    cases = [
        Case(
            name=f"{name}{i}",
            folder=f"{i}",
            experiment=made.resolved,
            kind=name if ":" in name or name == "train" else f"{CASES}:{name}",
            options=options,
        )
        for i, (name, options) in enumerate(kinds)
    ]
    return launch_local(
        folder, cluster=made.experiment.cluster, cases=cases, timeout_s=timeout_s, show_progress=False
    )


def processes_of(folder):
    """Pids whose command line names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_cases_of_one_launch_run_in_turn_and_two_launches_do_not_disturb_each_other(tmp_path):
    outcomes, made = {}, composed()

    def launch(name):
        outcomes[name] = run(tmp_path / name, ("add_up", {}), ("add_up", {}), made=made)

    threads = [threading.Thread(target=launch, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        assert outcomes[name].exit_code == 0
        assert outcomes[name].finished == ("add_up0", "add_up1")
        for i in (0, 1):
            assert (tmp_path / name / str(i) / "sum.txt").read_text() == "1.0"
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise", "rank 1 failed in step 3 of fault0: optimizer.lr=-1: must be > 0"),
        ("kill", "rank 1 was killed by SIGKILL in step 3 of fault0"),
        ("exit", "rank 1 ended in step 3 of fault0"),
        ("stop", "rank 1 did not answer any more, last seen in step 3 of fault0"),
    ],
)
def test_the_first_failing_rank_is_named(tmp_path, capfd, fault, says):
    started = time.monotonic()
    outcome = run(tmp_path, ("fault", {"rank": 1, "fault": fault}), ("train", {}))
    assert time.monotonic() - started < 30
    assert outcome.exit_code == 1
    assert says in outcome.error
    assert outcome.failed_rank == 1
    assert outcome.finished == ()
    result = json.loads((tmp_path / "1" / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"] == outcome.error
    assert says in capfd.readouterr().err
    assert processes_of(tmp_path) == []


@pytest.mark.netns
def test_a_cut_link_ends_the_run(tmp_path, monkeypatch):
    """A rank waits train.timeout_s, then says so; the nodes are gone afterwards."""
    made, clusters = composed(nodes=2, per_node=1, shaped=True), []

    class Watched(LocalCluster):
        def __init__(self, **keys):
            super().__init__(**keys)
            clusters.append(self)

    def cut():
        while not clusters or Heartbeat.read(tmp_path, 0)[1] < 5:
            time.sleep(0.05)
        clusters[0].cut_link(1)
        cut_at.append(time.monotonic())

    cut_at = []
    monkeypatch.setattr(launcher, "LocalCluster", Watched)
    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    outcome = run(tmp_path, ("fault", {"rank": -1, "fault": ""}), ("train", {}), made=made)
    if not cut_at:
        pytest.skip(f"links cannot be shaped here: {outcome.unshaped_reason}")
    assert time.monotonic() - cut_at[0] < 15
    assert outcome.exit_code == 1
    assert re.search(r"rank \d failed in step \d+ of fault0: .*[Tt]imed out", outcome.error)
    assert json.loads((tmp_path / "1" / "result.json").read_text())["error"] == outcome.error
    assert processes_of(tmp_path) == []


def test_a_thread_in_the_host_does_not_reach_the_ranks(tmp_path, monkeypatch):
    """Such as a profiler's. A fork would have its locks, and nobody who opens them."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]))
    outcome = run(tmp_path / "launch", ("add_up", {}))
    assert outcome.exit_code == 0, outcome.error
    assert (tmp_path / "launch/0/sum.txt").read_text() == "1.0"


@pytest.mark.parametrize("steps", [0, 3])
def test_a_host_that_is_killed_takes_its_ranks_along(tmp_path, steps):
    """While it imports, and while they train."""
    killed_at = []

    def kill():
        while not (hosts := processes_of(tmp_path)):
            time.sleep(0.01)
        while Heartbeat.read(tmp_path, 1)[1] < steps - 1:
            time.sleep(0.01)
        os.kill(min(hosts), signal.SIGKILL)
        killed_at.append(time.monotonic())

    threading.Thread(target=kill, daemon=True).start()
    outcome = run(tmp_path, ("train", {}), made=composed("steps=100000"))
    assert time.monotonic() - killed_at[0] < 10
    assert outcome.exit_code == 1
    assert processes_of(tmp_path) == []


def test_torchrun_starts_the_same_worker(tmp_path):
    made = composed()
    case = Case(name="c", folder="c", experiment=made.resolved, kind=f"{CASES}:add_up")
    write_launch(tmp_path, [case])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        [*command, "-m", "twinbed.runtime.worker", str(tmp_path)], env=environment, check=True, timeout=90
    )
    assert (tmp_path / "c" / "sum.txt").read_text() == "1.0"


def test_a_launch_has_a_time_limit(tmp_path):
    outcome = run(tmp_path, ("fault", {"rank": 0, "fault": "sleep"}), timeout_s=4.0)
    assert outcome.error == "the launch took longer than timeout_s=4"
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_is_ended(tmp_path, how):
    made = composed()
    program = (
        "import json, sys\nfrom pathlib import Path\n"
        "from twinbed.conf.compose import load_experiment\n"
        "from twinbed.runtime.case import read_launch\n"
        "from twinbed.runtime.launcher import launch_local\n"
        "folder = Path(sys.argv[1])\ncases = read_launch(folder).cases\n"
        "cluster = load_experiment(cases[0].experiment).cluster\n"
        "sys.exit(launch_local(folder, cluster=cluster, cases=cases).exit_code)\n"
    )
    case = Case(
        name="c",
        folder="c",
        experiment=made.resolved,
        kind=f"{CASES}:fault",
        options={"rank": 1, "fault": "sleep"},
    )
    write_launch(tmp_path, [case])
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(processes_of(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    parent.send_signal(how)
    assert parent.wait(timeout=20) != 0
    deadline = time.monotonic() + 5
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    outcome = run(tmp_path / "file" / "below", ("add_up", {}))
    assert outcome.exit_code == 1
    assert "cannot be written" in capfd.readouterr().err


@pytest.fixture
def small_disk(tmp_path):
    """A mounted folder of 1 MB, and how to make it read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "twinbed", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said(small_disk, capfd):
    outcome = run(small_disk, ("fill", {}), ("train", {}))
    assert outcome.exit_code == 1
    assert outcome.failed_rank == 0
    says = "rank 0 failed in step 0 of fill0: OSError: [Errno 28] No space left on device"
    assert says in outcome.error
    assert says in capfd.readouterr().err


def test_a_read_only_disk_is_said(small_disk, capfd):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    outcome = run(small_disk / "run", ("add_up", {}))
    assert outcome.exit_code == 1
    assert "cannot be written: Read-only file system" in capfd.readouterr().err


def test_the_launcher_needs_no_torch():
    rooms = "twinbed.runtime.launcher, twinbed.runtime.preflight, twinbed.runtime.script"
    program = f"import sys, {rooms}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


def test_a_launch_file_comes_back_and_bad_ones_are_refused(tmp_path):
    case = Case(name="a", folder="a", experiment={"steps": 1}, warnings=("odd",))
    write_launch(tmp_path, [case], git_commit="abc")
    assert read_launch(tmp_path).cases == (case,)
    assert read_launch(tmp_path).git_commit == "abc"
    with pytest.raises(ValueError, match="at least one case"):
        write_launch(tmp_path, [])
    with pytest.raises(ValueError, match="differ in name"):
        write_launch(tmp_path, [case, case])
    with pytest.raises(ValueError, match="kind='oops'"):
        Case(name="a", folder="a", experiment={}, kind="oops")
    (tmp_path / "launch.json").write_text("{")
    with pytest.raises(ValueError, match="is no launch file"):
        read_launch(tmp_path)


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_a_port_in_use_is_named(tmp_path):
    """Where the port is given, as under torchrun without its own store."""
    write_launch(tmp_path, [Case(name="one", folder="one", experiment=compose(["target=runtime"]).resolved)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "twinbed.runtime.worker", str(tmp_path)],
            env=os.environ
            | {
                "RANK": "0",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONSAFEPATH": "1",
            },
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert done.returncode != 0
    assert f"MASTER_PORT={port} is in use on 127.0.0.1" in done.stderr
    assert json.loads((tmp_path / "one" / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_launch_says_so_in_its_record(tmp_path, monkeypatch, error):
    def interrupted(self, timeout_s):
        raise error

    monkeypatch.setattr(launcher._Launch, "run", interrupted)
    with pytest.raises(type(error)):
        run(tmp_path, ("train", {}))
    assert json.loads((tmp_path / "0" / "result.json").read_text())["error"] == "interrupted"


def test_a_link_too_slow_to_shape_is_named_by_its_key(tmp_path):
    made = composed("cluster.inter_node.bandwidth_Bps=10", nodes=2, per_node=1, shaped=True)
    outcome = run(tmp_path, ("train", {}), made=made)
    assert outcome.status == "failed"
    assert "cluster.inter_node.bandwidth_Bps must be finite and at least 1e3, got 10" in outcome.error
    assert json.loads((tmp_path / "0" / "result.json").read_text())["error"] == outcome.error
