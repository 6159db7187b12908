"""Runs on each rank for test_moves.py and test_pruning.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.compose import compose
from twinbed.policies.balance import Assignment, BalanceEvent, GroupMeasured, Half, Migrate, Prune
from twinbed.runtime.trainer import Trainer

from ranks_run import run_cases, worker_context

SMALL = (
    "target=runtime",
    "cluster=local_2x2",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "cluster.devices_per_node=4",
    "precision=fp32",
    "warmup_steps=0",
    "train.gradient_clipping=1",
    # of gradients that are 0 but for rounding, such as those of keys' biases, Adam would make steps of full length
    "optimizer=sgd",
    "optimizer.lr=0.3",
    "optimizer.weight_decay=0",
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
    "model.vocab=257",
    "data=text",
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
    "model.vocab=257",
    "data=text",
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
    "data=synthetic",
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
# name: keys, what is in force from the step of the given number on, and steps
MOVES: Mapping[str, tuple[tuple[str, ...], Mapping[int, tuple[Any, ...]], int]] = {
    "gpt": ((*GPT, *TENSOR), {1: ONE, 10: ()}, 20),
    "llama": ((*LLAMA, *TENSOR), {1: SEVERAL, 2: ONE}, 3),
    "data, zero3": ((*GPT, "parallel.tensor=2", "comm=zero3"), {1: PAIR}, 3),
}
# of `make test-long`
MORE_MOVES: Mapping[str, tuple[tuple[str, ...], Mapping[int, tuple[Any, ...]], int]] = {
    "gpt, several": ((*GPT, *TENSOR), {1: SEVERAL, 2: ONE}, 4),
    "gpt, none left": ((*GPT, *TENSOR), {1: ALL}, 4),
    "gpt, one replica of zero3": ((*GPT, "parallel.tensor=4", "comm=zero3"), {1: ONE}, 4),
    "llama": ((*LLAMA, *TENSOR), {1: SEVERAL}, 20),
    "qwen2": ((*LLAMA, *TENSOR, "model.family=qwen2"), {1: ONE}, 4),
    "vit": ((*VIT, *TENSOR), {1: ONE, 12: ALL}, 20),
    "data, zero3": ((*GPT, "parallel.tensor=2", "comm=zero3"), {1: PAIR}, 20),
    "data, zero3, overlapped": (
        (*GPT, "parallel.tensor=2", "comm=zero3", "comm.overlap=true", "batch.accumulation=1"),
        {1: PAIR},
        4,
    ),
    "bf16": ((*GPT, "precision=bf16", *TENSOR), {1: ONE}, 4),
    "bf16, one replica of zero3": ((*GPT, "precision=bf16", "parallel.tensor=4", "comm=zero3"), {1: ONE}, 4),
    "data, zero1": ((*GPT, "parallel.tensor=2", "comm=zero1"), {1: PAIR}, 4),
    "data, ddp": ((*LLAMA, "parallel.tensor=2", "comm=ddp"), {1: PAIR}, 4),
    "data, ps": ((*GPT, "parallel.tensor=2", "comm=ps"), {1: PAIR}, 4),
    "pipeline": (
        (*GPT, "parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=4", "comm=ddp"),
        {1: PAIR},
        4,
    ),
    "pipeline, zero3": (
        (*GPT, "parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=4", "comm=zero3"),
        {1: PAIR},
        4,
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
        4,
    ),
}


# Units are shares of every matrix' columns: 8 of them, 16 of the Llama's
COLUMNS: Mapping[str, tuple[tuple[str, ...], Mapping[int, tuple[Any, ...]], int]] = {
    f"{name}, {way}": ((*keys, f"balance.way={way}"), answers, steps)
    for way in ("broadcast", "scatter")
    for name, keys, answers, steps in (
        ("gpt", (*GPT, *TENSOR), {1: (*(move(0, r, A, 2) for r in (1, 2, 3)), move(0, 3, F, 5)), 5: ()}, 6),
        (
            "llama",
            (*LLAMA, *TENSOR),
            {1: (move(0, 2, A, 1), move(1, 2, A, 2), move(1, 3, A, 3), move(3, 0, F, 3), move(2, 1, F, 4))},
            4,
        ),
        ("vit", (*VIT, *TENSOR), {1: (move(2, 0, A, 7), move(2, 0, F, 3), move(2, 1, F, 4))}, 4),
        (
            "data, zero3",
            (*GPT, "parallel.tensor=2", "comm=zero3"),
            {1: (move(1, 0, A, 3), move(1, 0, F, 7))},
            4,
        ),
        (
            "pipeline",
            (*GPT, "parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=4", "comm=ddp"),
            {1: (move(0, 1, A, 5),)},
            4,
        ),
    )
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
    keys: Sequence[str], answers: Mapping[int, tuple[Any, ...]] | None, balance: str = "migrate"
) -> tuple[Trainer, Scripted | None]:
    keys = [*SMALL, *keys]
    policy = None
    if answers is not None:
        policy = Scripted(answers)
        keys.append(f"balance={balance}")
    experiment = compose(keys).experiment
    return Trainer(experiment, worker_context(), balance=policy), policy


def train(
    keys: Sequence[str],
    answers: Mapping[int, tuple[Any, ...]] | None = None,
    *,
    steps: int = 20,
    balance: str = "migrate",
    first: tuple[Any, ...] = (),
    gradients: bool = True,
    before_step: Callable[[Trainer, int], None] | None = None,
) -> Trained:
    """`first`: in force from the first step on."""
    trainer, policy = new_trainer(keys, answers, balance)
    found = Trained()
    if first:
        assert trainer.balancer is not None
        balanced = trainer.balancer.balanced
        balanced.assignment = Assignment(balanced.work, first)
    apply = trainer._apply

    def seen(rate: float, scale: float) -> Any:
        if gradients and (len(found.losses) < 3 or len(found.losses) % 5 == 4):
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


def moved() -> dict[str, Any]:
    """Of each case: errors of gradients and losses against plain tensor parallelism, and the rows of balancing."""
    return _compared(MOVES)


def more_moves() -> dict[str, Any]:
    return _compared(MORE_MOVES)


def columns() -> dict[str, Any]:
    """As `moved`, of the paper's ways."""
    few = ("gpt, broadcast", "llama, scatter", "data, zero3, scatter")
    return _compared({name: COLUMNS[name] for name in few})


def more_columns() -> dict[str, Any]:
    return _compared(COLUMNS)


def _compared(
    cases: Mapping[str, tuple[tuple[str, ...], Mapping[int, tuple[Any, ...]], int]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain: dict[tuple[Any, ...], Trained] = {}
    for name, (given, answers, steps) in cases.items():
        keys = tuple(key for key in given if not key.startswith("balance.way"))
        if (keys, steps) not in plain:
            plain[keys, steps] = train(keys, steps=steps)
        want, got = plain[keys, steps], train(given, answers, steps=steps)
        # a communication thread's rows lie between the others as time wills
        ordered = partial(sorted, key=repr) if "comm.overlap=true" in keys else list
        found[name] = {
            "case": ((*SMALL, *given), answers, steps),
            "gradients": max(
                error(one, other) for one, other in zip(got.gradients, want.gradients, strict=True)
            ),
            "parameters": error(got.parameters, want.parameters),
            "losses": max(abs(one / other - 1) for one, other in zip(got.losses, want.losses, strict=True)),
            "validation": abs(got.validation / want.validation - 1),
            "same_rows": ordered(plain_rows(got.rows)) == ordered(plain_rows(want.rows)),
            "rows": [row for row in got.rows if row.stream in ("lend", "return", "balance")],
            "decisions": [
                (d.iteration, d.event, d.action) for d in got.decisions if "GroupMeasured" in d.event
            ],
            "told": got.told,
            "learned": want.losses[0] - want.losses[-1],
        }
    return found


PRUNING: Mapping[str, tuple[tuple[str, ...], str, tuple[Any, ...]]] = {
    "priority": (GPT, "resize", (Prune(0, 0.5), Prune(2, 0.25, "block.1.fc1"))),
    "random": ((*GPT, "balance.selection=random"), "resize", (Prune(1, 0.75),)),
    "contiguous, llama": ((*LLAMA, "balance.selection=contiguous"), "resize", (Prune(0, 0.5), Prune(3, 0.3))),
    "with units moved": (GPT, "semi", (Prune(0, 0.5), move(0, 1, A, 1), move(0, 2, F, 3))),
    "with units moved, gated": (LLAMA, "semi", (Prune(0, 0.5), move(0, 1, A, 1), move(0, 2, F, 3))),
    # rank 0 lends others than it leaves out, rank 3 lends none; of columns of attention nobody does in the latter
    "with columns moved, broadcast": (
        (*GPT, "balance.way=broadcast"),
        "semi",
        (Prune(0, 0.5), Prune(3, 0.25), move(0, 1, A, 2), move(0, 2, F, 3)),
    ),
    "with columns moved, scatter, gated": (
        (*LLAMA, "balance.way=scatter", "balance.selection=random"),
        "semi",
        (Prune(0, 0.5), Prune(3, 0.25, "block.1.fc1"), move(0, 1, F, 3), move(0, 2, F, 2)),
    ),
}


def masks(trainer: Trainer) -> dict[str, Tensor]:
    """Of each weight of a block, whole: 1 where it takes part in this step."""
    balanced = trainer.balancer.balanced
    (part,) = trainer.engine._parts
    local = {name: torch.ones_like(p) for name, p in part.model.named_parameters() if p.ndim == 2}
    for product in balanced.products():
        left = [column for column in product.left_out if column < product.own_columns]
        for name, rows in zip(product.names, product.own_rows(), strict=True):
            if left:
                local[name][rows[:, None], torch.tensor(left)] = 0
    with trainer.ledger.set_up():
        return part.laid.wholes(local)


def _look(trainer: Trainer, got: dict[str, Any], apply: Any, rate: float, scale: float) -> Any:
    """Before the optimizer's step."""
    got |= {n: g.clone() for n, g in trainer.engine.full_gradients().items()}
    got["masks"] = masks(trainer)
    return apply(rate, scale)


def pruned() -> dict[str, Any]:
    """Gradients of pruned steps against those of a whole model whose weights are masked, in one process."""
    from twinbed.runtime.stack import build_model

    found: dict[str, Any] = {}
    for name, (keys, balance, actions) in PRUNING.items():
        kept: list[list[tuple[int, ...] | None]] = []
        trainer, _ = new_trainer(
            (*keys, *TENSOR, "balance.refresh=2", "train.gradient_clipping=0"), {}, balance
        )
        balanced = trainer.balancer.balanced
        balanced.assignment = Assignment(balanced.work, actions)
        whole = build_model(trainer.spec, seed=trainer.experiment.seed)
        worst, shares = 0.0, []
        for step in range(5):
            whole.load_state_dict(trainer.engine.full_parameters())
            got: dict[str, Any] = {}
            apply = trainer._apply
            trainer._apply = partial(_look, trainer, got, apply)  # type: ignore[method-assign]
            loss = trainer.step(step).loss
            trainer._apply = apply  # type: ignore[method-assign]
            mask: dict[str, Tensor] = got.pop("masks")
            kept.append([product.kept for product in balanced.products()])
            masked = {n: p * mask.get(n, 1) for n, p in whole.named_parameters()}
            losses = []
            for index in range(2):
                inputs, targets = trainer.feed.train(step, index)
                losses.append(torch.func.functional_call(whole, masked, (inputs, targets)))
            total = sum(losses) / 2
            names = list(dict(whole.named_parameters()))
            gradients = torch.autograd.grad(total, list(whole.parameters()))
            want = dict(zip(names, gradients, strict=True))
            worst = max(worst, error({n: got[n] for n in want}, want), abs(loss / float(total) - 1))
            shares.append(min(float(m.mean()) for m in mask.values()))
        unlike = [one != other for one, other in pairwise(kept)]
        found[name] = {
            "worst": worst,
            "least": min(shares),
            "changed": unlike,
            "validation": validation(trainer),
        }
        trainer.close()
    return found


def validation(trainer: Trainer) -> float:
    """How far a validation under pruning is from that of the same weights without."""
    balanced = trainer.balancer.balanced
    rows = len(trainer.ledger.rows)
    under = trainer.validate(4)[0]
    sent = trainer.ledger.rows[rows:]
    assert not [row for row in sent if row.stream == "lend"]
    balanced.assignment = Assignment(balanced.work)
    return abs(under / trainer.validate(4)[0] - 1)


def frozen() -> dict[str, Any]:
    """What a step did to columns that were left out, and to the others: (moved at all, share of them that moved)."""
    found = {}
    for how, way in (("frozen", "paired"), ("moving", "paired"), ("frozen", "scatter")):
        trainer, _ = new_trainer(
            (
                *GPT,
                *TENSOR,
                "optimizer=adamw",
                "optimizer.lr=1e-2",
                "optimizer.weight_decay=0.3",
                f"balance.pruned_state={how}",
                f"balance.way={way}",
            ),
            {},
            "semi",
        )
        balanced = trainer.balancer.balanced
        trainer.step(0)  # momentum for all columns
        balanced.assignment = Assignment(balanced.work, (Prune(0, 0.5), move(0, 1, A, 1), move(0, 2, F, 3)))
        parameters = trainer.engine.named_parameters()
        before = {
            n: (p.detach().clone(), trainer.optimizer.state[p]["exp_avg"].clone())
            for n, p in parameters.items()
        }
        trainer.step(1)
        left, taken = [], []
        for product in balanced.products():
            columns = [column for column in product.left_out if column < product.own_columns]
            for name, rows in zip(product.names, product.own_rows(), strict=True):
                now = (parameters[name], trainer.optimizer.state[parameters[name]]["exp_avg"])
                moved = torch.stack([one != other for one, other in zip(now, before[name], strict=True)])
                mask = torch.zeros_like(moved[0])
                mask[rows[:, None], torch.tensor(columns, dtype=torch.int64)] = True
                left.append(moved[:, mask])
                taken.append(moved[:, ~mask])
        found[how if way == "paired" else f"{how}, {way}"] = [
            float(torch.cat(x, 1).float().mean()) for x in (left, taken)
        ]
        trainer.close()
    return found


def changes() -> dict[str, Any]:
    """What a policy is told of how weights changed, and the same worked out from whole weights."""
    from twinbed.policies.balance import ChangesMeasured

    keys = (*GPT, *TENSOR, "balance.selection=differentiated", "balance.refresh=2")
    trainer, policy = new_trainer(keys, {1: (Prune(0, 0.5), Prune(0, 0.25, "block.2.fc2"))}, "resize")
    weights: list[list[list[Tensor]]] = []
    shares = []
    for step in range(4):
        products = list(trainer.balancer.balanced.products())
        weights.append([[weight().detach().clone() for weight in p._weights] for p in products])
        trainer.step(step)
        shares.append({p.name: len(p.left_out) / p.own_columns for p in products})
    told = [event for event in policy.told if isinstance(event, ChangesMeasured)]
    rows = [row for row in trainer.ledger.rows if row.layer == "changes"]
    trainer.close()

    def between(old: int, new: int) -> list[float]:
        found = []
        for before, after in zip(weights[old], weights[new], strict=True):
            change = sum(float((b - a).abs().sum()) for a, b in zip(before, after, strict=True))
            found.append(change / sum(float(b.abs().sum()) for b in after))
        return found

    return {
        "told": [(event.step, event.changes[dist.get_rank()]) for event in told],
        "expected": [between(0, 1), between(1, 3)],
        "rows": [(r.iteration, r.phase, r.stream, r.op, r.axis, r.payload_bytes, r.wire_bytes) for r in rows],
        "shares": shares,
        "decisions": [d.event.partition("(")[0] for d in trainer.ledger.decisions if "Measured" in d.event],
    }


def even() -> dict[str, bool]:
    """Whether nothing that is moved or left out gives the bits of no balancing at all."""
    found = {}
    keep: dict[int, tuple[Any, ...]] = {}
    ratio_0: dict[int, tuple[Any, ...]] = {1: (Prune(0, 0.0), Prune(2, 0.0, "block.0.fc1"))}
    for name, keys in {"gpt": GPT, "llama": LLAMA}.items():
        want = train((*keys, *TENSOR), steps=2)
        for balance, answers, more in (
            ("resize", ratio_0, ()),
            ("semi", ratio_0, ("balance.selection=differentiated", "balance.refresh=2")),
            *(
                (("migrate", keep, ()), ("resize", ratio_0, ("balance.imputation=same",)))
                if name == "gpt"
                else ()
            ),
        ):
            got = train((*keys, *TENSOR, *more), answers, steps=2, balance=balance)
            found[f"{name} {balance} {more}"] = same_bits(got, want)
    return found


if __name__ == "__main__":
    cases = (moved, more_moves, columns, more_columns, pruned, frozen, changes, even)
    run_cases({case.__name__: case for case in cases})
