"""Runs on each rank for test_moves.py and test_pruning.py."""

import faulthandler
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.compose import compose
from twinbed.policies.balance import Assignment, BalanceEvent, GroupMeasured, Half, Migrate, Prune
from twinbed.runtime.failure import Heartbeat
from twinbed.runtime.trainer import Trainer
from twinbed.runtime.worker import WorkerContext

SMALL = (
    "target=runtime",
    "cluster=local_2x2",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "cluster.devices_per_node=4",
    "precision=fp32",
    "warmup_steps=0",
    "data=synthetic",
    "train.gradient_clipping=1",
    "optimizer.lr=1e-2",
    "steps=20",
    "balance.period=1",
    "balance.pretest=false",
)
GPT = (
    "model=gpt",
    "model.layers=4",
    "model.hidden=32",
    "model.heads=8",
    "model.ffn=32",
    "model.vocab=64",
    "model.sequence=8",
    "batch.micro=2",
    "batch.accumulation=2",
)
LLAMA = (
    "model=llama_tiny",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=16",
    "model.kv_heads=8",
    "model.ffn=32",
    "model.vocab=64",
    "model.sequence=8",
    "batch.micro=2",
    "batch.accumulation=2",
)
VIT = (
    "model=vit_tiny",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=8",
    "batch.micro=2",
    "batch.accumulation=2",
)
TENSOR = ("parallel.tensor=4", "comm=ddp")
A, F = Half.attention, Half.ffn


def move(src: int, dst: int, half: Half, units: int) -> Migrate:
    return Migrate(src, dst, half, units)


ONE = (move(0, 2, A, 1), move(0, 1, F, 2), move(0, 2, F, 2), move(0, 3, F, 1))
ALL = (move(3, 0, A, 1), move(3, 1, A, 1), move(3, 0, F, 3), move(3, 2, F, 5))
SEVERAL = (
    move(0, 2, A, 1),
    move(1, 2, A, 1),
    move(1, 3, A, 1),
    move(0, 2, F, 3),
    move(0, 3, F, 2),
    move(1, 3, F, 4),
)
PAIR = (move(1, 0, A, 3), move(1, 0, F, 7))
# name: keys, and what is in force from the step of the given number on
MOVES: Mapping[str, tuple[tuple[str, ...], Mapping[int, tuple[Any, ...]]]] = {
    "gpt": ((*GPT, *TENSOR), {1: ONE, 10: ()}),
    "gpt, none left": ((*GPT, *TENSOR), {1: ALL}),
    "gpt, several": ((*GPT, *TENSOR), {1: SEVERAL, 8: ONE}),
    "gpt, one replica of zero3": ((*GPT, "parallel.tensor=4", "comm=zero3"), {1: ONE}),
    "llama": ((*LLAMA, *TENSOR), {1: SEVERAL}),
    "qwen2": ((*LLAMA, *TENSOR, "model.family=qwen2"), {1: ONE}),
    "vit": ((*VIT, *TENSOR), {1: ONE, 12: ALL}),
    "data, zero3": ((*GPT, "parallel.tensor=2", "comm=zero3"), {1: PAIR}),
    "data, zero1": ((*GPT, "parallel.tensor=2", "comm=zero1"), {1: PAIR}),
    "data, ddp": ((*LLAMA, "parallel.tensor=2", "comm=ddp"), {1: PAIR}),
    "data, ps": ((*GPT, "parallel.tensor=2", "comm=ps"), {1: PAIR}),
    "pipeline": (
        (*GPT, "parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=4", "comm=ddp"),
        {1: PAIR},
    ),
    "pipeline, zero3": (
        (*GPT, "parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=4", "comm=zero3"),
        {1: PAIR},
    ),
    "interleaved": (
        (
            *GPT,
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "parallel.virtual_stages=2",
            "parallel.pipeline_schedule=interleaved",
            "batch.accumulation=4",
            "comm=ddp",
        ),
        {1: PAIR},
    ),
}


class Scripted:
    """Answers what it was given, by the step from which on it is to be in force."""

    name = "scripted"

    def __init__(self, answers: Mapping[int, tuple[Any, ...]]) -> None:
        self._answers = answers
        self.told: list[BalanceEvent] = []

    def decide(self, event: BalanceEvent) -> tuple[Any, ...] | None:
        self.told.append(event)
        return self._answers.get(event.step) if isinstance(event, GroupMeasured) else None


@dataclass
class Trained:
    """A training on this rank."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    decisions: list[Any] = field(default_factory=list)
    told: list[BalanceEvent] = field(default_factory=list)
    validation: float | None = None
    seconds: list[float] = field(default_factory=list)
    report: Any = None


def new_trainer(
    keys: Sequence[str], folder: Path, answers: Mapping[int, tuple[Any, ...]] | None, balance: str = "migrate"
) -> tuple[Trainer, Scripted | None]:
    keys = [*SMALL, *keys]
    policy = None
    if answers is not None:
        policy = Scripted(answers)
        keys.append(f"balance={balance}")
    experiment = compose(keys).experiment
    rank = dist.get_rank()
    context = CONTEXTS.get(0)
    if context is None:
        context = CONTEXTS[0] = WorkerContext(
            folder=folder,
            rank=rank,
            num_ranks=dist.get_world_size(),
            local_rank=rank,
            ranks_per_node=dist.get_world_size(),
            device=torch.device("cpu"),
            heartbeat=Heartbeat(folder, rank),
            git_commit="",
            timeout=timedelta(seconds=60),
        )
    return Trainer(experiment, context, balance=policy), policy


CONTEXTS: dict[int, WorkerContext] = {}


def train(
    keys: Sequence[str],
    folder: Path,
    answers: Mapping[int, tuple[Any, ...]] | None = None,
    *,
    steps: int = 20,
    balance: str = "migrate",
    first: tuple[Any, ...] = (),
    gradients: bool = True,
    before_step: Callable[[Trainer, int], None] | None = None,
) -> Trained:
    """`first`: in force from the first step on."""
    trainer, policy = new_trainer(keys, folder, answers, balance)
    found = Trained()
    if first:
        assert trainer.balancer is not None
        balanced = trainer.balancer.balanced
        balanced.assignment = Assignment(balanced.work, first)
    apply = trainer._apply

    def seen(rate: float, scale: float) -> Any:
        if gradients:
            found.gradients.append({n: g.clone() for n, g in trainer.engine.full_gradients().items()})
        return apply(rate, scale)

    trainer._apply = seen  # type: ignore[method-assign]
    if trainer.balancer is not None:
        trainer.balancer.run_begins(0)
    for step in range(steps):
        if before_step is not None:
            before_step(trainer, step)
        metrics = trainer.step(step)
        found.losses.append(metrics.loss)
        found.seconds.append(metrics.iteration_s)
    found.validation = trainer.validate(steps - 1)[0]
    found.parameters = trainer.engine.full_parameters()
    found.rows, found.decisions = trainer.ledger.rows, trainer.ledger.decisions
    found.told = [] if policy is None else policy.told
    found.report = None if trainer.balancer is None else trainer.balancer.report
    trainer.close()
    return found


def error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Relative L2 over all."""
    assert got.keys() == want.keys()
    if not got:
        return 0.0
    one, other = (torch.cat([x[name].flatten() for name in want]) for x in (got, want))
    return float((one - other).norm() / other.norm())


def same_bits(got: Trained, want: Trained) -> bool:
    pairs = [*zip(got.gradients, want.gradients, strict=True), (got.parameters, want.parameters)]
    return got.losses == want.losses and all(
        torch.equal(one[name], other[name]) for one, other in pairs for name in other
    )


def plain_rows(rows: Sequence[Any]) -> list[Any]:
    """Without those of balancing."""
    return [row for row in rows if row.stream not in ("lend", "return", "balance")]


def moved(folder: Path) -> dict[str, Any]:
    """Of each case: errors of gradients and losses against plain tensor parallelism, and the rows of balancing."""
    found: dict[str, Any] = {}
    for name, (keys, answers) in MOVES.items():
        print(name, flush=True)
        want, got = train(keys, folder), train(keys, folder, answers)
        found[name] = {
            "gradients": max(
                error(one, other) for one, other in zip(got.gradients, want.gradients, strict=True)
            ),
            "parameters": error(got.parameters, want.parameters),
            "losses": max(abs(one / other - 1) for one, other in zip(got.losses, want.losses, strict=True)),
            "validation": abs(got.validation / want.validation - 1),
            "same_rows": plain_rows(got.rows) == plain_rows(want.rows),
            "rows": [row for row in got.rows if row.stream in ("lend", "return", "balance")],
            "decisions": [
                (d.iteration, d.event, d.action) for d in got.decisions if "GroupMeasured" in d.event
            ],
            "told": got.told,
            "learns": want.losses[-1] < want.losses[0],
        }
    return found


def even(folder: Path) -> dict[str, bool]:
    """Whether nothing that is moved or left out gives the bits of no balancing at all."""
    found = {}
    keep: dict[int, tuple[Any, ...]] = {}
    ratio_0: dict[int, tuple[Any, ...]] = {1: (Prune(0, 0.0), Prune(2, 0.0, "block.0.fc1"))}
    for name, keys in {"gpt": GPT, "llama": LLAMA, "vit": VIT}.items():
        want = train((*keys, *TENSOR), folder, steps=4)
        for balance, answers, more in (
            ("migrate", keep, ()),
            ("resize", ratio_0, ()),
            ("resize", ratio_0, ("balance.imputation=same",)),
            ("semi", ratio_0, ("balance.selection=differentiated", "balance.refresh=2")),
        ):
            got = train((*keys, *TENSOR, *more), folder, answers, steps=4, balance=balance)
            found[f"{name} {balance} {more}"] = same_bits(got, want)
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
    torch.save({name: globals()[name](folder) for name in case.split(",")}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
