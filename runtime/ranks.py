"""The rank processes of a local launch: started, read, asked how they are, and ended. Imports no torch."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ..conf.schema import Backend, ClusterConf
from .cluster.local import LocalCluster
from .rank_host import RankStart, write_ranks

_PORT_IN_NODE = 29500  # a node of a shaped cluster is a namespace: no port in it is taken
_TAIL_LINES = 40
_READ_S = 5.0  # for what ranks have printed, after they have ended

# Gradients and gathered weights come and go every layer: glibc would give their pages back to the kernel and
# fault them in again, which costs a third of an iteration on two cores.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}


@dataclass(slots=True)
class _Output:
    """What a rank prints."""

    reader: threading.Thread
    tail: deque[str]  # the last lines


class RankProcesses:
    """All ranks of one launch, forked by one host (`rank_host`).

    Logs are `rank<k>.log` in the folder; what the host itself prints is in rank 0's.
    """

    def __init__(
        self, folder: Path, nodes: LocalCluster, cluster: ClusterConf, *, show_progress: bool
    ) -> None:
        self._folder, self._nodes, self._cluster = folder, nodes, cluster
        self._show_progress = show_progress
        self._host: subprocess.Popen[bytes] | None = None
        self._status: threading.Thread | None = None
        self._outputs: list[_Output] = []
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int | None] = dict.fromkeys(range(cluster.num_ranks))

    def start(self) -> None:
        """All of them; returns before they run."""
        with contextlib.ExitStack() as stack:
            port, listener = _PORT_IN_NODE, -1
            if self._nodes.backend == "none":
                # Bound here and handed to rank 0: between a search for a free port and its use another run
                # could take it.
                server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
                port, listener = server.getsockname()[1], server.fileno()
            ranks = []
            for rank in range(self._cluster.num_ranks):
                readable, writable = os.pipe()
                stack.callback(os.close, writable)
                self._read(rank, readable)
                ranks.append(self._rank(rank, writable, listener if rank == 0 else -1))
            readable, status = os.pipe()
            stack.callback(os.close, status)
            self._status = threading.Thread(target=self._read_status, args=(readable,), daemon=True)
            self._status.start()
            self._host = subprocess.Popen(
                [sys.executable, "-m", "twinbed.runtime.rank_host", str(self._folder.resolve()), str(status)],
                env=self._environment(port),
                stdin=subprocess.PIPE,
                stdout=ranks[0].fds[0],
                stderr=subprocess.STDOUT,
                pass_fds=[status, *(fd for rank in ranks for fd in rank.fds)],
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher, which then ends the ranks
            )
        assert self._host.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._host.stdin as told:
            told.write(write_ranks(ranks))  # where it has died, its status says so

    def codes(self) -> dict[int, int | None]:
        """The exit status of each rank; None: it runs, or is about to."""
        if self._status is not None and not self._status.is_alive() and self._host is not None:
            code = self._host.wait()
            for rank, known in self._codes.items():
                if known is None:  # the host has ended before it could tell: ranks end with it
                    self._codes[rank] = code or 1
        return dict(self._codes)

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank has printed."""
        return list(self._outputs[rank].tail) if rank < len(self._outputs) else []

    def signal(self, rank: int, number: int) -> None:
        if rank in self._pids and self._codes[rank] is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def kill(self) -> None:
        """End what still runs, and wait for it; stopped processes too."""
        for rank, pid in list(self._pids.items()):
            if self._codes[rank] is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        if self._host is not None:
            self._host.kill()  # a rank that it forks just now ends with it
            self._host.wait()
        for thread in (self._status, *(output.reader for output in self._outputs)):
            if thread is not None:
                thread.join(timeout=_READ_S)  # a pipe ends with the last process that holds it

    def _environment(self, port: int) -> dict[str, str]:
        """Of all ranks."""
        found = {key: value for key, value in os.environ.items() if not _is_stale(key)}
        found |= {
            "WORLD_SIZE": str(self._cluster.num_ranks),
            "LOCAL_WORLD_SIZE": str(self._cluster.placement.per_node),
            "MASTER_ADDR": self._nodes.address(0),
            "MASTER_PORT": str(port),
            "TWINBED_LAUNCHER_PID": str(os.getpid()),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self._nodes.interface,
            **_MALLOC,
        }
        if self._cluster.backend is Backend.nccl:
            found["NCCL_SOCKET_IFNAME"] = self._nodes.interface
        return found

    def _rank(self, rank: int, output: int, listener: int) -> RankStart:
        placement = self._cluster.placement
        environment = {"RANK": str(rank), "LOCAL_RANK": str(placement.local(rank))}
        if listener >= 0:
            environment["TWINBED_STORE_FD"] = str(listener)
        return RankStart(
            rank=rank,
            environment=environment,
            fds=(output, listener) if listener >= 0 else (output,),
            node=self._nodes.entry(placement.node(rank)),
        )

    def _read(self, rank: int, readable: int) -> None:
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        shown = rank == 0 and self._show_progress
        reader = threading.Thread(
            target=_copy_output,
            args=(readable, self._folder / f"rank{rank}.log", tail, shown),
            daemon=True,
        )
        self._outputs.append(_Output(reader, tail))
        reader.start()

    def _read_status(self, readable: int) -> None:
        with os.fdopen(readable) as status:
            for line in status:
                what, rank, number = line.split()
                (self._pids if what == "started" else self._codes)[int(rank)] = int(number)


def _copy_output(readable: int, log: Path, tail: deque[str], shown: bool) -> None:
    """Keep a rank's output in its log and its last lines here; rank 0's is passed on. Ends with the rank."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, readable)
        file = None
        with contextlib.suppress(OSError):  # a full disk must not stop the ranks' output
            file = stack.enter_context(log.open("wb", buffering=0))
        rest = ""
        while chunk := os.read(readable, 1 << 16):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.write(chunk)
            text = chunk.decode(errors="replace")
            if shown:
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(text)
                    sys.stderr.flush()
            *lines, rest = (rest + text).split("\n")
            tail.extend(line.rpartition("\r")[2] for line in lines if line.strip())
        if rest.strip():
            tail.append(rest)


def _is_stale(key: str) -> bool:
    """Variables of a launch around this one, which would confuse the ranks."""
    return key.startswith(("TORCHELASTIC_", "TWINBED_")) or key in ("GROUP_RANK", "ROLE_RANK")
