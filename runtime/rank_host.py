"""Starts the ranks of a local launch: imports what they need once, and forks them.

    python -m twinbed.runtime.rank_host FOLDER STATUS_FD < ranks.json

To import torch takes longer than many a training lasts, and ranks share the cores. Forked, they also share the pages of
its code. Where a thread was started meanwhile, each rank begins anew in its place. What a rank does from then on is
`worker`'s, as where torchrun starts it.

On STATUS_FD it tells of each rank "started RANK PID" and "ended RANK EXIT_CODE".
"""

import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .case import read_launch
from .cluster.enter import enter
from .worker import die_with_parent
from .worker import main as run_rank

# Of torch: what the first steps would import on each rank
_OF_ALL = ("twinbed.runtime.trainer", "twinbed.runtime.calibrate", "twinbed.runtime.probe", "torch._dynamo")
_OF_PIPELINES = ("torch.distributed.pipelining",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """One rank.

    Args:
        environment: Beside the host's.
        fds: Its own descriptors: for what it prints, and others that its environment names.
        node: What `cluster.enter` needs; empty: the ranks share this machine's network.
    """

    rank: int
    environment: Mapping[str, str]
    fds: tuple[int, ...]
    node: tuple[int, ...] = ()


def write_ranks(ranks: Sequence[RankStart]) -> bytes:
    return json.dumps([asdict(rank) for rank in ranks]).encode()


def read_ranks(text: bytes) -> list[RankStart]:
    return [
        RankStart(**each | {name: tuple(each[name]) for name in ("fds", "node")}) for each in json.loads(text)
    ]


def main(arguments: Sequence[str]) -> None:
    """Ends when all ranks have ended."""
    die_with_parent()
    folder, status = Path(arguments[0]), int(arguments[1])
    ranks = read_ranks(sys.stdin.buffer.read())
    alone = _import(folder)
    os.environ["TWINBED_LAUNCHER_PID"] = str(os.getpid())  # ranks end with the process that watches them
    running: dict[int, int] = {}
    for each in ranks:
        pid = os.fork()
        if pid == 0:
            _become(each, [status, *(fd for other in ranks if other is not each for fd in other.fds)])
            if not alone:  # a lock that another thread held would stay held
                os.execv(sys.executable, [sys.executable, "-m", "twinbed.runtime.worker", str(folder)])
            run_rank([str(folder)])
        running[pid] = each.rank
        os.write(status, f"started {each.rank} {pid}\n".encode())
    for fd in (fd for each in ranks for fd in each.fds):
        os.close(fd)
    while running:
        pid, code = os.wait()
        os.write(status, f"ended {running.pop(pid)} {os.waitstatus_to_exitcode(code)}\n".encode())


def _import(folder: Path) -> bool:
    """What ranks need; whether this is the only thread, as it is unless the environment has another one started."""
    pipelines = any(
        case.experiment.get("parallel", {}).get("pipeline", 1) > 1 for case in read_launch(folder).cases
    )
    for name in (*_OF_ALL, *(_OF_PIPELINES if pipelines else ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection on a rank would copy pages that are shared
    tasks = Path("/proc/self/task")
    return not tasks.is_dir() or len(list(tasks.iterdir())) == 1


def _become(rank: RankStart, others: Sequence[int]) -> None:
    """What lies between a fork and a process of its own."""
    os.setsid()  # the launcher ends a rank with all that it has started
    for standard in (1, 2):
        os.dup2(rank.fds[0], standard)
    for fd in (*others, rank.fds[0]):
        os.close(fd)
    os.environ.update(rank.environment)
    _name_process(f"rank{rank.rank}")
    if rank.node:
        enter(*rank.node)


def _name_process(name: str) -> None:
    """As `ps` and `top` show it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    main(sys.argv[1:])
