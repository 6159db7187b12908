"""What scripts that run on each rank share: they join the others, run their cases, and save what these return."""

import faulthandler
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinbed.runtime.failure import Heartbeat
from twinbed.runtime.worker import WorkerContext


def run_cases(cases: Mapping[str, Callable[[], Any]]) -> None:
    """`script.py CASE RANK WORLD FOLDER TIMEOUT_S`: to FOLDER/RANK.pt goes what the case returns; of several, "a,b", by
    name.

    A rank that waits too long for the others fails, and one that hangs says where, before the launch is over.
    """
    names, rank, world, timeout_s = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), _timeout_s()
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s - 10, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{launch_folder() / 'store'}",
        rank=rank,
        world_size=world,
        timeout=_patience(),
    )
    found = {name: cases[name]() for name in names}
    torch.save(found if len(names) > 1 else found[names[0]], launch_folder() / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch_folder() -> Path:
    """Of all ranks, for what they write."""
    return Path(sys.argv[4])


@cache
def worker_context() -> WorkerContext:
    """As a worker gives it to a training; all ranks are on one node."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return WorkerContext(
        folder=launch_folder(),
        rank=rank,
        num_ranks=world,
        local_rank=rank,
        ranks_per_node=world,
        device=torch.device("cpu"),
        heartbeat=Heartbeat(launch_folder(), rank),
        git_commit="",
        timeout=_patience(),
    )


def _timeout_s() -> float:
    return float(sys.argv[5])


def _patience() -> timedelta:
    """Of a collective."""
    return timedelta(seconds=_timeout_s() / 3)
