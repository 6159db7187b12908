"""Nothing is left of a cluster, however its owner ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.distributed,
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("tap"),
]

# Prints the pids of all that belongs to the cluster, waits for a line, then does `{then}`. The forked child
# holds a copy of every descriptor of the owner and lives on: the keeper must not wait for its end.
OWNER = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started deaf to it
from twinbed.runtime.cluster.local import LinkShape, LocalCluster
link = LinkShape(bandwidth_Bps=1e7, latency_ns=0)
with LocalCluster(nodes=2, ranks_per_node=1, link=link, backend="tap") as cluster:
    prefix = cluster.argv_prefix(1)
    keeper = prefix[4]
    switch = pathlib.Path(f"/proc/{{keeper}}/task/{{keeper}}/children").read_text().split()
    guest = subprocess.Popen([*prefix, "sleep", "300"], start_new_session=True)
    child = os.fork()
    if child == 0:
        os.close(1)
        os.close(2)
        time.sleep(300)
    while pathlib.Path(f"/proc/{{guest.pid}}/comm").read_text() != "sleep\\n":
        time.sleep(0.01)
    print(child, keeper, *switch, guest.pid, flush=True)
    input()
    {then}
"""

ENDS = {
    "returns": ("pass", None, 0),
    "raises": ("raise SystemExit(3)", None, 3),
    "_exit": ("os._exit(4)", None, 4),
    "interrupted": ("time.sleep(300)", signal.SIGINT, -signal.SIGINT),
    "terminated": ("time.sleep(300)", signal.SIGTERM, -signal.SIGTERM),
    "killed": ("time.sleep(300)", signal.SIGKILL, -signal.SIGKILL),
}


@pytest.fixture
def owner_that(tmp_path):
    """Starts OWNER; gives the process and the pids that it printed, and ends the forked child."""
    children = []

    def start(then):
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER.format(then=then)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            text=True,
        )
        child, *pids = map(int, process.stdout.readline().split())
        assert len(pids) == 3, "keeper, switch and guest"
        children.append(child)
        return process, child, pids

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_when_the_owner(end, owner_that, tmp_path):
    then, number, status = ENDS[end]
    owner, child, pids = owner_that(then)
    with owner:
        namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids}
        assert len(namespaces) == 2  # the node's, and the one of keeper and switch
        owner.stdin.write("\n")
        owner.stdin.flush()
        if number is not None:
            owner.send_signal(number)
        assert owner.wait(timeout=20) == status
    left = _eventually_none(lambda: _living(pids) + _inhabitants(namespaces))
    assert left == []
    assert _living([child]), "else the inherited descriptors were not tested"
    assert list(tmp_path.iterdir()) == []


def test_the_switch_dies_with_a_killed_keeper(owner_that):
    owner, _, (keeper, switch, guest) = owner_that("pass")
    with owner:
        os.kill(keeper, signal.SIGKILL)
        assert _eventually_none(lambda: _living([switch])) == []
        os.kill(guest, signal.SIGKILL)  # its keeper cannot
        owner.communicate("\n", timeout=20)
        assert owner.returncode == 0


def _eventually_none(look):
    deadline = time.monotonic() + 10
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _living(pids):
    """Those that are not gone; a zombie whose parent was killed is about to be."""
    alive = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            alive.append(pid)
    return alive


def _inhabitants(namespaces):
    """Processes that still hold one of the network namespaces."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{process}/ns/net").st_ino in namespaces:
                found.append(int(process))
        except OSError:
            continue
    return found
