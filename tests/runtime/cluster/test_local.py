"""The shaped local cluster: rates, delays, fairness, counters and cuts, as the processes inside see them."""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinbed.runtime.cluster.local import LinkShape, LocalCluster

RATE_BPS = 12.5e6  # 100 Mbit/s
FAST = LinkShape(bandwidth_Bps=RATE_BPS, latency_ns=0)

shaped = [pytest.mark.netns, pytest.mark.distributed, pytest.mark.timeout(90)]


def two_nodes(link=FAST, backend="tap"):
    return LocalCluster(nodes=2, ranks_per_node=2, link=link, backend=backend)


@pytest.mark.parametrize("backend", ["tap", "tbf"])
class TestBothShapers:
    pytestmark = shaped

    @pytest.fixture(autouse=True)
    def _possible(self, backend, namespaces, request):
        if backend == "tap":
            request.getfixturevalue("tap")
        elif shutil.which("tc") is None:
            pytest.skip("no tc command")

    def test_payload_of_one_stream_gets_the_nominal_rate(self, backend, traffic, quiet_retry):
        num_bytes = int(RATE_BPS)
        with two_nodes(backend=backend) as cluster:
            traffic.serve(cluster, 1)

            def check():
                (seconds,) = traffic.run(cluster, 0, "send", cluster.address(1), num_bytes, 1)
                assert num_bytes / seconds == pytest.approx(RATE_BPS, rel=0.05)

            quiet_retry(check)

    def test_counters_see_what_was_sent(self, backend, traffic):
        num_bytes = 4_000_000
        with two_nodes(backend=backend) as cluster:
            traffic.serve(cluster, 1)
            before = cluster.counters()
            traffic.run(cluster, 0, "send", cluster.address(1), num_bytes, 1)
            after = cluster.counters()
        assert after[0][0] - before[0][0] == pytest.approx(num_bytes, rel=0.05)
        assert after[1][1] - before[1][1] == pytest.approx(num_bytes, rel=0.05)
        assert after[1][0] - before[1][0] < 0.05 * num_bytes  # acknowledgements

    def test_own_address_is_reached_without_the_wire(self, backend, traffic):
        with two_nodes(backend=backend) as cluster:
            traffic.serve(cluster, 0)
            before = cluster.counters()
            (seconds,) = traffic.run(cluster, 0, "send", cluster.address(0), 10_000_000, 1)
            after = cluster.counters()
        # a bridge tells of itself now and then: some frames of 54 bytes
        for node in (0, 1):
            for way in (0, 1):
                assert after[node][way] - before[node][way] < 1_000
        assert seconds < 10_000_000 / RATE_BPS

    def test_a_cut_link_carries_nothing_until_it_is_restored(self, backend, traffic):
        with two_nodes(backend=backend) as cluster:
            traffic.serve(cluster, 1)
            assert traffic.run(cluster, 0, "ping", cluster.address(1), 5)
            cluster.cut_link(1)
            received = cluster.counters()[1][1]
            with pytest.raises(ConnectionError, match=r"timed out|unreachable|No route"):
                traffic.run(cluster, 0, "ping", cluster.address(1), 5)
            assert cluster.counters()[1][1] == received
            cluster.restore_link(1)
            assert traffic.run(cluster, 0, "ping", cluster.address(1), 5)

    def test_log_tells_of_the_traffic(self, backend, traffic):
        with two_nodes(backend=backend) as cluster:
            assert (cluster.backend, cluster.reason, cluster.interface) == (backend, "", "eth0")
            traffic.serve(cluster, 1)
            traffic.run(cluster, 0, "send", cluster.address(1), 100_000, 1)
            assert cluster.switch_log() == ""
        assert "dropped" in cluster.switch_log()
        assert "forwarded" in cluster.switch_log() or "qdisc tbf" in cluster.switch_log()


@pytest.mark.usefixtures("tap")
class TestSwitch:
    pytestmark = shaped

    def test_latency_is_one_traversal(self, traffic, quiet_retry):
        with two_nodes(LinkShape(bandwidth_Bps=RATE_BPS, latency_ns=5_000_000)) as cluster:
            traffic.serve(cluster, 1)

            def check():
                seconds = traffic.run(cluster, 0, "ping", cluster.address(1), 30)
                assert min(seconds) >= 0.010
                assert statistics.median(seconds) < 0.013

            quiet_retry(check)

    def test_two_flows_share_a_link_evenly(self, traffic, quiet_retry):
        num_bytes = 4_000_000
        with two_nodes() as cluster:
            traffic.serve(cluster, 1)

            def check():
                one, other = traffic.run(cluster, 0, "send", cluster.address(1), num_bytes, 2)
                # Served one after the other, the first would be done at half the time.
                assert one == pytest.approx(other, rel=0.1)
                assert 2 * num_bytes / max(one, other) == pytest.approx(RATE_BPS, rel=0.05)

            quiet_retry(check)

    def test_flows_from_two_nodes_share_the_downlink_of_a_third(self, traffic, quiet_retry):
        num_bytes = 4_000_000
        with LocalCluster(nodes=3, ranks_per_node=1, link=FAST, backend="tap") as cluster:
            traffic.serve(cluster, 2)

            def check():
                clients = [
                    traffic.start(cluster, n, "send", cluster.address(2), num_bytes, 1) for n in (0, 1)
                ]
                seconds = [traffic.finish(client)[0] for client in clients]
                for each in seconds:  # their starts differ by that of an interpreter
                    assert num_bytes / each == pytest.approx(RATE_BPS / 2, rel=0.25)

            quiet_retry(check)

    def test_small_messages_do_not_wait_behind_bulk(self, traffic, quiet_retry):
        with two_nodes() as cluster:
            traffic.serve(cluster, 1)

            def check():
                bulk = traffic.start(cluster, 0, "send", cluster.address(1), 12_000_000, 1)
                seconds = traffic.run(cluster, 0, "ping", cluster.address(1), 50)
                assert bulk.poll() is None, "the bulk transfer must outlast the pings"
                traffic.finish(bulk)
                # The bulk queue is megabytes long, 80 ms each.
                assert statistics.median(seconds) < 0.005

            quiet_retry(check)

    def test_each_node_has_its_own_rate(self, traffic, quiet_retry):
        slow = LinkShape(bandwidth_Bps=RATE_BPS / 4, latency_ns=0)
        with two_nodes([FAST, slow]) as cluster:
            traffic.serve(cluster, 1)

            def check():
                (seconds,) = traffic.run(cluster, 0, "send", cluster.address(1), 2_000_000, 1)
                assert 2_000_000 / seconds == pytest.approx(RATE_BPS / 4, rel=0.05)

            quiet_retry(check)

    def test_two_clusters_at_once_do_not_meet(self, traffic):
        with two_nodes() as one, two_nodes() as other:
            traffic.serve(one, 1)
            before = other.counters()
            assert traffic.run(one, 0, "ping", one.address(1), 5)
            assert other.counters() == before
            with pytest.raises(ConnectionError, match="refused"):  # nobody serves there
                traffic.run(other, 0, "ping", other.address(1), 5)
            one.close()
            traffic.serve(other, 1)
            assert traffic.run(other, 0, "ping", other.address(1), 5)

    def test_a_dead_switch_is_named(self):
        with two_nodes() as cluster:
            cluster.check()
            (switch,) = _children(cluster.argv_prefix(0)[4])
            os.kill(switch, signal.SIGKILL)
            while _alive(switch):
                time.sleep(0.01)
            with pytest.raises(RuntimeError, match="switch has ended with status -9"):
                cluster.check()
            with pytest.raises(RuntimeError, match="switch has ended"):
                cluster.cut_link(0)

    def test_a_command_keeps_its_pid_signals_and_status(self):
        with two_nodes() as cluster:
            code = "import os, socket; print(os.getpid(), socket.gethostname(), flush=True); input()"
            command = [*cluster.argv_prefix(1), sys.executable, "-c", code]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout.readline().split() == [str(process.pid), "node1"]
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=10) == -signal.SIGTERM
            done = subprocess.run(
                [*cluster.argv_prefix(0), "no-such-command"], capture_output=True, text=True
            )
            assert done.returncode == 1
            assert "no-such-command" in done.stderr
            prefix = cluster.argv_prefix(0)
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True)
        assert done.returncode == 1
        assert "is the cluster still open?" in done.stderr

    def test_an_interrupted_request_does_not_leave_its_reply_to_the_next(self, monkeypatch):
        class Interrupted:
            def __init__(self, control):
                self._control = control

            def recv(self, size):
                raise KeyboardInterrupt

            def __getattr__(self, name):
                return getattr(self._control, name)

        with two_nodes() as cluster:
            keeper = cluster._keeper
            monkeypatch.setattr(keeper, "_control", Interrupted(keeper._control))
            with pytest.raises(KeyboardInterrupt):
                cluster.counters()
            monkeypatch.setattr(keeper, "_control", keeper._control._control)
            with pytest.raises(RuntimeError, match="does not answer"):
                cluster.counters()
        assert not Path(f"/proc/{keeper.pid}").exists()

    def test_closed_means_closed(self):
        cluster = two_nodes()
        cluster.close()
        cluster.close()
        with pytest.raises(RuntimeError, match="closed"):
            cluster.counters()


def _alive(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class TestWithoutAShaper:
    def test_backend_none_is_plain_processes(self):
        with two_nodes(backend="none") as cluster:
            assert cluster.backend == "none"
            assert cluster.reason == "backend=none was asked for"
            assert cluster.argv_prefix(1) == []
            assert (cluster.address(1), cluster.interface) == ("127.0.0.1", "lo")
            assert cluster.counters() == []
            with pytest.raises(RuntimeError, match="not shaped"):
                cluster.cut_link(0)

    def test_without_privilege_the_reason_says_so(self):
        # SETFCAP too: without it the kernel refuses to map root into a user namespace.
        auto, named = _without_capabilities("sys_admin", "setfcap")
        assert auto.startswith("none no privilege to make network namespaces: ")
        assert named.startswith("backend=tap is not possible here: no privilege")

    @pytest.mark.netns
    def test_without_any_tool_the_reason_names_it(self, namespaces, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with two_nodes(backend="auto") as cluster:
            assert cluster.backend == "none"
            assert "no command 'ip' in PATH" in cluster.reason

    @pytest.mark.netns
    def test_without_a_compiler_tbf_is_taken_or_refuses_by_name(self, namespaces, monkeypatch, tmp_path):
        for tool in ("ip", "tc"):
            if (path := shutil.which(tool)) is None:
                pytest.skip(f"no {tool} command")
            (tmp_path / tool).symlink_to(path)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with two_nodes(backend="auto") as cluster:
            assert (cluster.backend, cluster.reason) == ("tbf", "")
            assert "no C compiler" in cluster.notes[-1]
        with pytest.raises(ValueError, match=r"link\.latency_ns must be 0, got 7: .*no C compiler"):
            two_nodes(LinkShape(bandwidth_Bps=1e6, latency_ns=7), backend="auto")


@pytest.mark.usefixtures("tap")
class TestUserNamespace:
    pytestmark = shaped

    def test_serves_those_who_are_not_privileged(self):
        try:
            Path("/proc/sys/user/max_user_namespaces").read_text()
        except FileNotFoundError:
            pytest.skip("no user namespaces")
        auto, named = _without_capabilities("sys_admin")
        if "in a user namespace:" in auto:
            pytest.skip(f"user namespaces are refused here: {auto}")
        assert (auto, named) == ("tap node1", "tap node1")


_CAPABILITIES = {"sys_admin": 21, "setfcap": 31}


def _without_capabilities(*names):
    """What a cluster makes of it (auto, then tap) when these capabilities are dropped for good."""
    if os.geteuid() != 0:
        pytest.skip("needs root to drop capabilities from")
    code = """
import ctypes, subprocess, sys
from twinbed.runtime.cluster.local import LinkShape, LocalCluster
for capability in map(int, sys.argv[1:]):
    # PR_CAPBSET_DROP, in force from the next exec on
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
for backend in ("auto", "tap"):
    try:
        link = LinkShape(bandwidth_Bps=1e7, latency_ns=0)
        with LocalCluster(nodes=2, ranks_per_node=1, link=link, backend=backend) as cluster:
            command = [*cluster.argv_prefix(1), "hostname"]
            name = cluster.reason or subprocess.check_output(command, text=True)
            print(cluster.backend, name.strip())
    except RuntimeError as err:
        print(err)
"""
    numbers = [str(_CAPABILITIES[name]) for name in names]
    done = subprocess.run([sys.executable, "-c", code, *numbers], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


class TestBadArguments:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"nodes": 0}, r"nodes must be in \[1, 64\], got 0"),
            ({"nodes": 65}, r"nodes must be in \[1, 64\], got 65"),
            ({"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
            ({"link": [FAST]}, "link must be .* got 1 for nodes=2"),
            ({"backend": "netem"}, "backend must be one of auto, tap, tbf, none, got 'netem'"),
        ],
    )
    def test_names_key_and_value(self, changed, message):
        arguments = {"nodes": 2, "ranks_per_node": 1, "link": FAST, "backend": "none"}
        with pytest.raises(ValueError, match=message):
            LocalCluster(**(arguments | changed))

    @pytest.mark.parametrize(
        ("bandwidth_Bps", "latency_ns", "message"),
        [
            (0.0, 0, r"link\.bandwidth_Bps must be .* got 0"),
            (float("nan"), 0, r"link\.bandwidth_Bps must be .* got nan"),
            (float("inf"), 0, r"link\.bandwidth_Bps must be .* got inf"),
            (1e6, -1, r"link\.latency_ns must be .* got -1"),
        ],
    )
    def test_link_names_key_and_value(self, bandwidth_Bps, latency_ns, message):
        with pytest.raises(ValueError, match=message):
            LinkShape(bandwidth_Bps=bandwidth_Bps, latency_ns=latency_ns)

    @pytest.mark.parametrize(
        ("link", "ranks_per_node", "message"),
        [
            (LinkShape(bandwidth_Bps=1e6, latency_ns=5), 1, r"link\.latency_ns must be 0, got 5"),
            (LinkShape(bandwidth_Bps=26e6, latency_ns=0), 1, r"link\.bandwidth_Bps must be at most 2.5e\+07"),
            (FAST, 3, r"nodes \* ranks_per_node must be at most 4, got 6"),
        ],
    )
    def test_tbf_names_what_it_cannot_do(self, link, ranks_per_node, message):
        with pytest.raises(ValueError, match=message):
            LocalCluster(nodes=2, ranks_per_node=ranks_per_node, link=link, backend="tbf")

    def test_node_out_of_range(self):
        with (
            two_nodes(backend="none") as cluster,
            pytest.raises(ValueError, match=r"node must be in \[0, 1\], got 2"),
        ):
            cluster.address(2)
