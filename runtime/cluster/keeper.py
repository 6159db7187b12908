"""The process that holds a local cluster's namespaces: python keeper.py OWNER_PID CONTROL_FD NODES

Namespaces live as long as a process or a descriptor refers to them. Here only this process does, and nothing
of it has a name or lies on a disk; it ends when its owner closes the control socket or dies, however that
happens. So even SIGKILL leaves nothing behind. A script of its own, started with -I -S: it must be up in
milliseconds and free of threads.

The control socket carries one JSON object a message, a request and its reply in turn (see `_Keeper.serve`).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CLONE_NEWUTS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x04000000, 0x10000000, 0x40000000
_PIDFD_OPEN = (
    434  # the same number on every architecture that CPython runs on; os.pidfd_open is missing in some builds
)
_QUEUE_BYTES = 64 << 20  # a link of the switch: gloo's windows never fill it, so that nothing is dropped
_MAX_MESSAGE_BYTES = 1 << 17
_SYSCTLS = (
    # A child namespace may choose only what the host allows; reno is always allowed. Bulk flows of bbr pace
    # themselves below the link's rate.
    ("net/ipv4/tcp_congestion_control", "reno"),
    # Connections are idle while a step computes; the rate of the next collective must not start from scratch.
    ("net/ipv4/tcp_slow_start_after_idle", "0"),
    # What one connection learned must not slow the next one.
    ("net/ipv4/tcp_no_metrics_save", "1"),
    # Its neighbour discovery would be counted on the wire.
    ("net/ipv6/conf/all/disable_ipv6", "1"),
)
_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str]) -> None:
    owner, control, nodes = (int(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the owner, whose end ends this process
    owner_fd = _checked("pidfd_open", _libc.syscall(_PIDFD_OPEN, owner, 0))
    if os.getppid() != owner:
        return  # it died before it could be watched
    keeper = _Keeper(socket.socket(fileno=control), owner_fd, nodes)
    try:
        keeper.serve()
    finally:
        keeper.end_guests()
        keeper.stop_switch()


class _Keeper:
    """Namespaces, interfaces and switch of one cluster."""

    def __init__(self, control: socket.socket, owner_fd: int, nodes: int) -> None:
        self._control = control
        self._owner_fd = owner_fd
        self._num_nodes = nodes
        self._user_fd = -1
        self._base_fd = -1  # the namespace that this process lives in; it joins the nodes under tbf
        self._net_fds: list[int] = []
        self._uts_fds: list[int] = []
        self._switch: subprocess.Popen[str] | None = None
        self._switch_log = ""
        self._shaped_by = ""

    def serve(self) -> None:
        """Answer requests until the owner closes, or is gone."""
        requests: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "namespaces": self._make_namespaces,
            "tap": self._shape_by_switch,
            "tbf": self._shape_by_tbf,
            "counters": self._counters,
            "link": self._set_link,
            "check": self._check,
            "log": self._log,
        }
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._owner_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._owner_fd in ready:
                return
            message = self._control.recv(_MAX_MESSAGE_BYTES)
            if not message:
                return
            request = json.loads(message)
            try:
                if request["do"] == "close":
                    self.end_guests()
                    reply = self._log(request)
                else:
                    reply = requests[request["do"]](request)
            except (OSError, RuntimeError) as err:
                reply = {"error": str(err)}
            # The owner may be gone by now: the next poll says so.
            with contextlib.suppress(OSError):
                self._control.send(json.dumps(reply).encode())
            if request["do"] == "close":
                return

    def _make_namespaces(self, request: dict[str, Any]) -> dict[str, Any]:
        """One for the middle and one a node, in a user namespace of our own where we are not root."""
        uid, gid = os.geteuid(), os.getegid()
        if _libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS) != 0:
            denied = os.strerror(ctypes.get_errno())
            try:
                _checked("unshare", _libc.unshare(_CLONE_NEWUSER))
                _write("/proc/self/setgroups", "deny")
                _write("/proc/self/uid_map", f"0 {uid} 1")
                _write("/proc/self/gid_map", f"0 {gid} 1")
                _checked("unshare", _libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS))
            except OSError as err:
                raise RuntimeError(
                    f"no privilege to make network namespaces: {denied}; and in a user namespace: {err}"
                ) from err
            self._user_fd = os.open("/proc/self/ns/user", os.O_RDONLY)
        self._base_fd = os.open("/proc/self/ns/net", os.O_RDONLY)
        _set_sysctls()
        for node in range(self._num_nodes):
            _checked("unshare", _libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS))
            socket.sethostname(f"node{node}")
            self._net_fds.append(os.open("/proc/self/ns/net", os.O_RDONLY))
            self._uts_fds.append(os.open("/proc/self/ns/uts", os.O_RDONLY))
            notes = _set_sysctls()
            _ip("link set lo up")
        self._enter(self._base_fd)
        return {
            "user_fd": self._user_fd,
            "net_fds": self._net_fds,
            "net_inodes": [os.fstat(fd).st_ino for fd in self._net_fds],
            "uts_fds": self._uts_fds,
            "notes": notes,  # the same in each node
        }

    def _shape_by_switch(self, request: dict[str, Any]) -> dict[str, Any]:
        """TAP devices, and the switch between them."""
        tun_fds: list[int] = []
        try:
            for net_fd in self._net_fds:
                with self._inside(net_fd):  # the device is made in the namespace where this file is opened
                    tun_fds.append(os.open("/dev/net/tun", os.O_RDWR))
            ports = [
                f"{fd},{rate},{latency}"
                for fd, rate, latency in zip(
                    tun_fds, request["rates_Bps"], request["latencies_ns"], strict=True
                )
            ]
            self._switch = subprocess.Popen(
                [request["binary"], str(_QUEUE_BYTES), *ports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=tun_fds,
                text=True,
            )
        finally:
            for fd in tun_fds:
                os.close(fd)  # the devices live and die with the switch
        assert self._switch.stdout is not None
        for line in self._switch.stdout:
            if line == "ready\n":
                break
            self._switch_log += line
        else:
            self.stop_switch()
            raise RuntimeError(f"the switch did not start: {self._switch_log.strip()}")
        for node, rate in enumerate(request["rates_Bps"]):
            # A frame holds the link for its length: 1 ms at most, but not so small that each costs too much.
            frame_bytes = int(min(16384, max(4096, rate * 1e-3)))
            self._configure_node(node, f"link set eth0 gso_max_size {frame_bytes}")
        self._shaped_by = "tap"
        return {}

    def _shape_by_tbf(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pairs of virtual Ethernet devices to a bridge, a token bucket at both ends. Rate only."""
        _ip("link add br0 type bridge", "link set br0 up")
        for node, rate in enumerate(request["rates_Bps"]):
            bits = int(rate * 8)
            burst = int(
                max(8192, min(65536, rate * 0.0005))
            )  # 0.5 ms: less starves the timer, more is not shaped
            limit = int(max(131072, rate * 0.01))  # 10 ms
            shape = f"rate {bits}bit burst {burst} limit {limit}"
            namespace = f"/proc/{os.getpid()}/fd/{self._net_fds[node]}"
            _ip(
                f"link add port{node} type veth peer name eth0 netns {namespace}",
                f"link set port{node} master br0 up",
            )
            self._configure_node(node)
            _run("tc", "qdisc", "replace", "dev", f"port{node}", "root", "tbf", *shape.split())
            with self._inside(self._net_fds[node]):
                _run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape.split())
        self._shaped_by = "tbf"
        return {}

    def _configure_node(self, node: int, *more: str) -> None:
        """Address and static neighbours: nothing but what the ranks send is on the wire."""
        peers = [peer for peer in range(self._num_nodes) if peer != node]
        with self._inside(self._net_fds[node]):
            _ip(
                f"link set eth0 address {_hardware_address(node)}",
                *more,
                "link set eth0 up",
                f"addr add {node_address(node)}/24 dev eth0",
                *(
                    f"neigh add {node_address(peer)} lladdr {_hardware_address(peer)} dev eth0 nud permanent"
                    for peer in peers
                ),
            )

    def _counters(self, request: dict[str, Any]) -> dict[str, Any]:
        counted = []
        for net_fd in self._net_fds:
            with self._inside(net_fd), open("/proc/thread-self/net/dev", encoding="ascii") as devices:
                fields = (
                    next(line for line in devices if line.strip().startswith("eth0:")).split(":")[1].split()
                )
            counted.append((int(fields[8]), int(fields[0])))
        return {"counters": counted}

    def _set_link(self, request: dict[str, Any]) -> dict[str, Any]:
        node, connected = request["node"], request["connected"]
        if self._shaped_by == "tbf":
            _ip(f"link set port{node} {'up' if connected else 'down'}")
            return {}
        self._check(request)
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(f"{'restore' if connected else 'cut'} {node}\n")
        self._switch.stdin.flush()
        return {}

    def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._switch is not None and self._switch.poll() is not None:
            code = self._switch.returncode
            self.stop_switch()
            raise RuntimeError(f"the switch has ended with status {code}: {self._switch_log.strip()}")
        if self._shaped_by == "tap" and self._switch is None:
            raise RuntimeError(f"the switch has ended: {self._switch_log.strip()}")
        return {}

    def _log(self, request: dict[str, Any]) -> dict[str, Any]:
        """The switch prints its statistics as it ends, so this is for the end."""
        if self._shaped_by == "tbf":
            self._switch_log = _run("tc", "-s", "qdisc", "show")
        self.stop_switch()
        return {"log": self._switch_log}

    def stop_switch(self) -> None:
        if self._switch is None:
            return
        try:
            rest, _ = self._switch.communicate(timeout=5)  # closes its stdin, which ends it
        except subprocess.TimeoutExpired:
            self._switch.kill()
            rest, _ = self._switch.communicate()
        self._switch_log += rest
        self._switch = None

    def end_guests(self) -> None:
        """Kill whatever still runs inside the nodes: it could only wait for a network that is gone."""
        inodes = {os.fstat(fd).st_ino for fd in self._net_fds}
        for _ in range(100):  # a guest may fork while we look
            guests = [
                pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _net_inode(pid) in inodes
            ]
            if not guests:
                return
            for pid in guests:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _enter(self, net_fd: int) -> None:
        _checked("setns", _libc.setns(net_fd, _CLONE_NEWNET))

    @contextlib.contextmanager
    def _inside(self, net_fd: int) -> Iterator[None]:
        self._enter(net_fd)
        try:
            yield
        finally:
            self._enter(self._base_fd)


def node_address(node: int) -> str:
    """IPv4 address of the node; each cluster is a world of its own, so all use the same ones."""
    return f"10.77.0.{node + 1}"


def _hardware_address(node: int) -> str:
    """The switch finds the port in the last two bytes."""
    return f"02:00:00:00:{(node + 1) >> 8:02x}:{(node + 1) & 255:02x}"


def _net_inode(pid: int) -> int:
    """Of the network namespace of the process; 0 for zombies, and where it is not ours to see."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def _set_sysctls() -> list[str]:
    """In the present network namespace; returns what could not be set."""
    problems = []
    for key, value in _SYSCTLS:
        try:
            _write(f"/proc/sys/{key}", value)
        except OSError as err:
            # Without IPv6 there is nothing to switch off.
            if not (isinstance(err, FileNotFoundError) and "ipv6" in key):
                problems.append(f"could not set {key.replace('/', '.')}={value}: {err.strerror}")
    return problems


def _checked(call: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _ip(*lines: str) -> None:
    _run("ip", "-batch", "-", stdin="".join(f"{line}\n" for line in lines))


def _run(*command: str, stdin: str = "") -> str:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError as err:
        raise RuntimeError(f"no command {command[0]!r} in PATH (package iproute2)") from err
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()} ({stdin.strip()})")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
