"""A low-bandwidth cluster on one machine: nodes are network namespaces, the links between them are shaped.

Imports neither torch nor anything else outside the standard library, so that a launcher can use it.
"""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .build import netswitch_binary
from .keeper import node_address

_FRAME_BYTES, _PAYLOAD_BYTES = 1514, 1448  # Ethernet, IPv4 and TCP with timestamps, at an MTU of 1500
_MAX_NODES = 64
_MAX_LATENCY_NS = 10_000_000_000
_BACKENDS = ("auto", "tap", "tbf", "none")
# Beyond these the FIFO queues of tbf share unevenly and its software segmentation takes the cores:
# collectives were measured at up to 2.2 times what the rates allow.
_TBF_MAX_BANDWIDTH_BPS = 25e6
_TBF_MAX_RANKS = 4
_REPLY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkShape:
    """A node's network card.

    Attributes:
        bandwidth_Bps: TCP payload in bytes per second, each direction.
        latency_ns: One traversal, node to node. Between two nodes that differ it is the mean of both.
    """

    bandwidth_Bps: float
    latency_ns: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth_Bps) and self.bandwidth_Bps >= 1e3):
            raise ValueError(
                f"link.bandwidth_Bps must be finite and at least 1e3, got {self.bandwidth_Bps:g}"
            )
        if not 0 <= self.latency_ns <= _MAX_LATENCY_NS:
            raise ValueError(f"link.latency_ns must be in [0, {_MAX_LATENCY_NS}], got {self.latency_ns}")

    @property
    def frame_rate_Bps(self) -> float:
        """What the wire must carry so that the payload of full frames gets `bandwidth_Bps`."""
        return self.bandwidth_Bps * _FRAME_BYTES / _PAYLOAD_BYTES


class LocalCluster:
    """Nodes with an interface `eth0` each, joined by a switch; a context manager.

    Nothing has a name outside this process and nothing is written to a disk (but for the switch's binary in
    the user's cache): clusters do not see each other, and all of one is gone when it is closed or when its
    process ends, by SIGKILL too. Processes that still run inside a node are then killed.

    Backends: "tap", a user-space switch with rate, latency and fair queueing by flow (needs a C compiler,
    /dev/net/tun and `ip`); "tbf", the kernel's token bucket (needs `ip` and `tc`; rate only, small clusters);
    "none", plain processes on the loopback interface, unshaped. "auto" takes the first that this machine
    allows.

    Args:
        nodes: 1 to 64.
        ranks_per_node: How many processes the caller means to start on each; only tbf's limits depend on it.
        link: One for all nodes, or one a node.
        backend: "auto", "tap", "tbf" or "none".

    Raises:
        ValueError: an argument is out of range, or tbf is what is left and cannot make this shape.
        RuntimeError: the backend was named and this machine does not allow it.
    """

    backend: str  # the one taken
    reason: str  # why the links are not shaped; empty when they are
    notes: tuple[str, ...]  # what else the figures may suffer from, and why a better backend was not taken

    def __init__(
        self, *, nodes: int, ranks_per_node: int, link: LinkShape | Sequence[LinkShape], backend: str = "auto"
    ) -> None:
        if not 1 <= nodes <= _MAX_NODES:
            raise ValueError(f"nodes must be in [1, {_MAX_NODES}], got {nodes}")
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
        links = (link,) * nodes if isinstance(link, LinkShape) else tuple(link)
        if len(links) != nodes:
            raise ValueError(f"link must be one shape, or one a node: got {len(links)} for nodes={nodes}")
        if backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        if backend == "tbf":
            _check_tbf(links, nodes * ranks_per_node, why="backend=tbf was asked for")
        self.nodes = nodes
        self.backend, self.reason, self.notes = "none", "", ()
        self._keeper: _KeeperProcess | None = None
        self._log = ""
        if backend == "none":
            self.reason = "backend=none was asked for"
            return
        try:
            self._keeper = _KeeperProcess(nodes)
            self._namespaces = self._keeper.ask("namespaces")
            self.notes = tuple(self._namespaces["notes"])
            self._shape(backend, links, nodes * ranks_per_node)
        except RuntimeError as err:
            self.close()
            if backend != "auto":
                raise RuntimeError(f"backend={backend} is not possible here: {err}") from err
            self.reason = str(err)
        except BaseException:
            self.close()
            raise

    def _shape(self, backend: str, links: Sequence[LinkShape], num_ranks: int) -> None:
        assert self._keeper is not None
        rates_Bps = [link.frame_rate_Bps for link in links]
        failed_tap = ""
        if backend in ("auto", "tap"):
            try:
                # The way from node to node is an uplink and a downlink: each has half of it.
                latencies_ns = [link.latency_ns // 2 for link in links]
                binary = str(netswitch_binary())
                self._keeper.ask("tap", binary=binary, rates_Bps=rates_Bps, latencies_ns=latencies_ns)
                self.backend = "tap"
                return
            except RuntimeError as err:
                if backend == "tap":
                    raise
                failed_tap = str(err)
        if failed_tap:
            _check_tbf(links, num_ranks, why=f"the user-space switch is not possible here ({failed_tap})")
        try:
            self._keeper.ask("tbf", rates_Bps=rates_Bps)
        except RuntimeError as err:
            raise RuntimeError(f"{failed_tap}; {err}" if failed_tap else str(err)) from err
        self.backend = "tbf"
        if failed_tap:
            self.notes += (f"shaped by tbf, which shares a link unevenly between flows: {failed_tap}",)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def interface(self) -> str:
        """For GLOO_SOCKET_IFNAME."""
        return "lo" if self.backend == "none" else "eth0"

    def address(self, node: int) -> str:
        """IPv4 address of the node. Ranks of one node that use it reach each other unshaped."""
        self._check_node(node)
        return "127.0.0.1" if self.backend == "none" else node_address(node)

    def argv_prefix(self, node: int) -> list[str]:
        """What to put before a command so that it runs inside the node, with the node's host name.

        The command takes the place of the prefix (exec): its pid, signals and exit status are those of the
        process that is started. Empty when unshaped.
        """
        numbers = self.entry(node)
        script = str(Path(__file__).with_name("enter.py"))
        return [sys.executable, "-I", "-S", script, *map(str, numbers)] if numbers else []

    def entry(self, node: int) -> tuple[int, ...]:
        """What `enter.enter` needs, for a process that goes inside the node by itself; empty when unshaped."""
        self._check_node(node)
        if self.backend == "none":
            return ()
        keeper, made = self._open_keeper(), self._namespaces
        return (
            keeper.pid,
            made["user_fd"],
            made["net_fds"][node],
            made["uts_fds"][node],
            made["net_inodes"][node],
        )

    def counters(self) -> list[tuple[int, int]]:
        """(sent, received) bytes of each node's eth0 until now, headers included; empty when unshaped."""
        if self.backend == "none":
            return []
        return [(sent, received) for sent, received in self._open_keeper().ask("counters")["counters"]]

    def cut_link(self, node: int) -> None:
        """Nothing reaches the node or leaves it any more, and what is under way is lost; nobody is told."""
        self._set_link(node, connected=False)

    def restore_link(self, node: int) -> None:
        """End `cut_link`; connections go on when TCP tries again."""
        self._set_link(node, connected=True)

    def check(self) -> None:
        """Raise RuntimeError if the nodes or the switch are gone though the cluster is open."""
        if self.backend != "none":
            self._open_keeper().ask("check")

    def switch_log(self) -> str:
        """Frames forwarded, dropped and late, as the shaper counted them. Empty before `close`."""
        return self._log

    def close(self) -> None:
        """Kill what still runs inside the nodes and take all down. Again, or in a forked child: no effect."""
        if self._keeper is not None and self._keeper.owner == os.getpid():
            self._log = self._keeper.close()
            self._keeper = None

    def _set_link(self, node: int, *, connected: bool) -> None:
        self._check_node(node)
        if self.backend == "none":
            raise RuntimeError(f"node {node} has no link to cut: the cluster is not shaped ({self.reason})")
        self._open_keeper().ask("link", node=node, connected=connected)

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise ValueError(f"node must be in [0, {self.nodes - 1}], got {node}")

    def _open_keeper(self) -> "_KeeperProcess":
        if self._keeper is None:
            raise RuntimeError("the local cluster is closed")
        return self._keeper


def _check_tbf(links: Sequence[LinkShape], num_ranks: int, *, why: str) -> None:
    needs = "backend=tap needs a C compiler (cc) and access to /dev/net/tun"
    way_out = f"{why}, and tbf cannot do more; {needs}; backend=none is unshaped"
    for link in links:
        if link.latency_ns > 0:
            raise ValueError(f"link.latency_ns must be 0, got {link.latency_ns}: {way_out}")
        if link.bandwidth_Bps > _TBF_MAX_BANDWIDTH_BPS:
            limit = f"link.bandwidth_Bps must be at most {_TBF_MAX_BANDWIDTH_BPS:g}"
            raise ValueError(f"{limit}, got {link.bandwidth_Bps:g}: {way_out}")
    if num_ranks > _TBF_MAX_RANKS:
        raise ValueError(
            f"nodes * ranks_per_node must be at most {_TBF_MAX_RANKS}, got {num_ranks}: {way_out}"
        )


class _KeeperProcess:
    """The owner's end of `keeper.py`."""

    def __init__(self, nodes: int) -> None:
        self.owner = os.getpid()
        try:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (AttributeError, OSError) as err:
            raise RuntimeError(f"namespaces need Linux: {err}") from err
        self._control.settimeout(_REPLY_TIMEOUT_S)
        self._lock = threading.Lock()
        script = str(Path(__file__).with_name("keeper.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(self.owner), str(theirs.fileno()), str(nodes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,  # the terminal's Ctrl-C is the owner's affair
            )
        self.pid = self._process.pid

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """One request and its reply; RuntimeError if it failed or the keeper is gone."""
        with self._lock:
            try:
                self._control.send(json.dumps({"do": what, **more}).encode())
                message = self._control.recv(1 << 17)
            except BaseException as err:
                # Ctrl-C in between too: the reply is still to come, and the next request would take it.
                self._control.close()
                if not isinstance(err, OSError):
                    raise
                raise RuntimeError(
                    f"the process that keeps the local cluster does not answer: {err}"
                ) from err
        if not message:
            raise RuntimeError(f"the process that keeps the local cluster has ended ({self._process.poll()})")
        reply: dict[str, Any] = json.loads(message)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def close(self) -> str:
        """End it; returns the switch's log, or why there is none."""
        try:
            log = str(self.ask("close")["log"])
        except RuntimeError as err:
            log = str(err)
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        return log
