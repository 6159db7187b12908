"""Runs on each rank for test_straggle.py."""

import faulthandler
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinbed.conf.compose import compose
from twinbed.policies.balance import GroupMeasured, Half, Migrate, Prune
from twinbed.runtime.failure import Heartbeat
from twinbed.runtime.trainer import Trainer
from twinbed.runtime.worker import WorkerContext

KEYS = (
    "target=runtime",
    "cluster=local_2x2",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "cluster.devices_per_node=2",
    "precision=fp32",
    "warmup_steps=0",
    "model=gpt",
    "model.layers=2",
    "model.vocab=64",
    "model.sequence=32",
    "batch.micro=2",
    "data=synthetic",
    "comm=ddp",
    "steps=16",
)
STEPS = 16
TENSOR = (
    "parallel.tensor=2",
    "balance=semi",
    "balance.period=1",
    "balance.pretest=false",
    "balance.selection=random",
)
SMALL = ("model.hidden=64", "model.heads=8", "model.ffn=128")
BIG = ("model.hidden=256", "model.heads=8", "model.ffn=1024", "model.sequence=64", "batch.micro=4")
SLEPT = ("cluster.emulated_flops_per_s=5e8",)


class Scripted:
    name = "scripted"

    def __init__(self, answers: dict[int, Any]) -> None:
        self.answers, self.told = answers, []

    def decide(self, event: Any) -> Any:
        if isinstance(event, GroupMeasured):
            self.told.append(event)
            return self.answers.get(event.step)
        return None


def times(context: WorkerContext, keys: tuple[str, ...], answers: dict[int, Any] | None = None) -> list[Any]:
    """Of each step, nanoseconds of rank 1's products, by half."""
    policy = Scripted(answers or {})
    trainer = Trainer(compose([*KEYS, *TENSOR, *keys]).experiment, context, balance=policy)
    for step in range(STEPS):
        trainer.step(step)
    trainer.close()
    return [(told.attention_ns[1], told.ffn_ns[1]) for told in policy.told]


def straggling(context: WorkerContext) -> dict[str, Any]:
    slow = ("cluster.slowdown=[{rank:1,factor:3,from_step:4,until_step:10}]",)
    found: dict[str, Any] = {
        how: times(context, (*keys, *slow, f"cluster.slowdown_by={how}"))
        for how, keys in (("sleep", BIG), ("device", (*SMALL, *SLEPT)), ("repeat", BIG))
    }
    found["repeat, slept"] = times(context, (*SMALL, *SLEPT, *slow, "cluster.slowdown_by=repeat"))
    found["2.5 times"] = times(
        context, (*BIG, "cluster.slowdown=[{rank:1,factor:2.5,from_step:8}]", "cluster.slowdown_by=repeat")
    )
    # what is left out or lent is not slept for
    found["pruned"] = times(
        context,
        (*SMALL, *SLEPT, "cluster.slowdown=[{rank:1,factor:3,from_step:4}]"),
        {7: (Prune(1, 0.5),), 10: (), 13: _lends()},
    )
    return found


def _lends() -> tuple[Any, ...]:
    return (Migrate(1, 0, Half.attention, 2), Migrate(1, 0, Half.ffn, 32))


def units(context: WorkerContext) -> dict[str, Any]:
    """Without a layout: milliseconds of a block's forward and backward laps, by step."""
    found = {}
    for name, keys in (("slept", (*SMALL, *SLEPT)), ("measured", BIG)):
        slow = "cluster.slowdown=[{rank:1,factor:4,from_step:8}]"
        trainer = Trainer(compose([*KEYS, *keys, slow]).experiment, context)
        ends = []
        for step in range(STEPS):
            trainer.step(step)
            ends.append(len(trainer.laps.laps))
        laps = trainer.laps.laps
        found[name] = [
            sum(lap.end_ns - lap.start_ns for lap in laps[begin:end] if lap.name == "forward/block.1") / 1e6
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        trainer.close()
    return found


def main() -> None:
    faulthandler.enable()
    case, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    context = WorkerContext(
        folder=folder,
        rank=rank,
        num_ranks=world,
        local_rank=rank,
        ranks_per_node=world,
        device=torch.device("cpu"),
        heartbeat=Heartbeat(folder, rank),
        git_commit="",
        timeout=timedelta(seconds=60),
    )
    torch.save({name: globals()[name](context) for name in case.split(",")}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
