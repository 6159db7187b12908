"""Runs on each rank for test_straggle.py."""

from typing import Any

from twinbed.conf.compose import compose
from twinbed.policies.balance import GroupMeasured, Half, Migrate, Prune
from twinbed.runtime.trainer import Trainer

from ranks_run import run_cases, worker_context

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


def times(keys: tuple[str, ...], answers: dict[int, Any] | None = None) -> list[Any]:
    """Of each step, nanoseconds of rank 1: products, by half; between attention's; around them all."""
    policy = Scripted(answers or {})
    trainer = Trainer(compose([*KEYS, *TENSOR, *keys]).experiment, worker_context(), balance=policy)
    for step in range(STEPS):
        trainer.step(step)
    trainer.close()
    return [
        (told.attention_ns[1], told.ffn_ns[1], told.attention_between_ns[1], told.around_ns[1])
        for told in policy.told
    ]


FOR_SOME_STEPS = "cluster.slowdown=[{rank:1,factor:3,from_step:4,until_step:10}]"


def measured() -> dict[str, Any]:
    """Products that take the time that they take."""
    found: dict[str, Any] = {
        how: times((*BIG, FOR_SOME_STEPS, f"cluster.slowdown_by={how}")) for how in ("sleep", "repeat")
    }
    found["2.5 times"] = times(
        (*BIG, "cluster.slowdown=[{rank:1,factor:2.5,from_step:8}]", "cluster.slowdown_by=repeat")
    )
    found["units"] = units(BIG)
    return found


def slept() -> dict[str, Any]:
    """Products that are slept out, to a device's rate: other processes of the machine hardly tell."""
    found: dict[str, Any] = {
        how: times((*SMALL, *SLEPT, FOR_SOME_STEPS, f"cluster.slowdown_by={how}"))
        for how in ("device", "repeat")
    }
    found["units"] = units((*SMALL, *SLEPT))
    # what is left out or lent is not slept for
    found["pruned"] = times(
        (*SMALL, *SLEPT, "cluster.slowdown=[{rank:1,factor:3,from_step:4}]"),
        {7: (Prune(1, 0.5),), 10: (), 13: _lends()},
    )
    return found


def _lends() -> tuple[Any, ...]:
    return (Migrate(1, 0, Half.attention, 2), Migrate(1, 0, Half.ffn, 32))


def units(keys: tuple[str, ...]) -> list[float]:
    """Without a layout: milliseconds of a block's forward laps, by step."""
    slow = "cluster.slowdown=[{rank:1,factor:4,from_step:8}]"
    trainer = Trainer(compose([*KEYS, *keys, slow]).experiment, worker_context())
    ends = []
    for step in range(STEPS):
        trainer.step(step)
        ends.append(len(trainer.laps.laps))
    laps = trainer.laps.laps
    trainer.close()
    return [
        sum(lap.end_ns - lap.start_ns for lap in laps[begin:end] if lap.name == "forward/block.1") / 1e6
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


if __name__ == "__main__":
    run_cases({"slept": slept, "measured": measured})
