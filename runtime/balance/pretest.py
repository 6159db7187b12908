"""Movements of units that are timed before the first step: what a policy is told of the way between ranks.

Set-up traffic: it leaves no rows. What `pretest_moves` says is lent and comes back; one movement before that is not
timed. To be called on all ranks, of all tensor groups, at once.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ...policies.balance import (
    Assignment,
    ColumnsTimed,
    Half,
    Leg,
    Migrate,
    MovementTimed,
    Product,
    lend_plans,
    pretest_moves,
    return_plans,
)
from ...policies.balance.columns import leg_plans
from ...policies.plan import Plan
from ..layout.functions import Context
from ..layout.interpreter import LayerInterpreter
from .balanced import Balanced
from .movements import Moving

REPEATS = 3  # of each timed movement


def time_movements(balanced: Balanced, *, device: torch.device) -> list[MovementTimed]:
    """One event for each half of which there is a unit."""
    found = []
    with balanced.ledger.set_up():
        for half in Half:
            moved = pretest_moves(balanced.work, half)
            few, many = (sum(action.units for action in moves) for moves in moved[:2])
            lenders = len({action.src for action in moved[-1]})
            _move(balanced, half, moved[0], device)
            times_ns = [_timed_ns(partial(_move, balanced, half, moves, device), device) for moves in moved]
            found.append(
                MovementTimed(half, (few, many), (times_ns[0], times_ns[1]), sum(times_ns[2:]), lenders)
            )
    return found


def time_columns(balanced: Balanced, *, device: torch.device) -> list[ColumnsTimed]:
    """The same of ways by columns, leg by leg: one event for each half of which a column can move."""
    found = []
    with balanced.ledger.set_up():
        for half in Half:
            moved = pretest_moves(balanced.work, half)
            if not moved:
                continue
            few, many = (sum(action.units for action in moves) for moves in moved[:2])
            lenders = len({action.src for action in moved[-1]})
            legs = _Legs(balanced, half, device)
            legs.times_ns(moved[0])
            times = [legs.times_ns(moves) for moves in moved]
            together = times[2] if len(times) > 2 else (0,) * len(Leg)
            found.append(ColumnsTimed(half, (few, many), times[0], times[1], together, lenders))
    return found


class _Legs:
    """Of one half of a block."""

    def __init__(self, balanced: Balanced, half: Half, device: torch.device) -> None:
        self._balanced, self._half, self._device = balanced, half, device
        groups = balanced.groups
        self._interpreter = LayerInterpreter(groups, balanced.ledger, balanced.collectives)
        self._context = Context(mesh=groups.mesh, rank=groups.rank)

    def times_ns(self, moves: tuple[Migrate, ...]) -> tuple[int, ...]:
        """[legs]."""
        balanced = self._balanced
        assignment, place = Assignment(balanced.work, moves), balanced.movements.index
        plans = {
            leg: (product, plan)
            for product in Product
            if product.half is self._half
            for leg, plan in leg_plans(assignment, product, place, balanced.conf.way).items()
        }
        return tuple(self._time_ns(*plans[leg]) for leg in Leg)

    def _time_ns(self, product: Product, plan: Plan) -> int:
        operands = self._operands(product)
        begin = {name: operands[name] for name in plan.operands}
        return _timed_ns(
            lambda: self._interpreter.run(plan, begin, label="", context=self._context, keep=()), self._device
        )

    def _operands(self, product: Product) -> dict[str, Tensor]:
        """Of this rank: [tokens, columns], [rows, columns] and twice [tokens, rows]."""
        work, like = self._balanced.work, torch.empty(0, dtype=self._balanced.dtype, device=self._device)
        columns, rows = work.columns(product, work.units[product.half]), work.rows(product)
        made = {"x": like.new_zeros(work.tokens, columns), "weight": like.new_zeros(rows, columns)}
        return made | {name: like.new_zeros(work.tokens, rows) for name in ("y", "dy")}


def _timed_ns(call: Callable[[], object], device: torch.device) -> int:
    """Of the slowest rank, all of which begin together; the median of some times, for a leg can be shorter than what
    other processes of a machine take of it once.
    """
    return int(median(_once_ns(call, device) for _ in range(REPEATS)))


def _once_ns(call: Callable[[], object], device: torch.device) -> int:
    dist.barrier()
    began_ns = time.monotonic_ns()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = torch.tensor([time.monotonic_ns() - began_ns], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return int(took)


def _move(balanced: Balanced, half: Half, moves: tuple[Migrate, ...], device: torch.device) -> None:
    """Out and back, until they are there: all ranks that lend at once."""
    work, movements = balanced.work, balanced.movements
    assignment = Assignment(work, moves)
    numel, like = work.unit_numel[half], torch.empty(0, dtype=balanced.dtype, device=device)
    lent = sum(assignment.lent(half, movements.index))
    rows = like.new_zeros(lent, numel) if lent else None
    there = [
        movements.begin(plan, rows, like=like, numel=numel, layer="")
        for plan in lend_plans(assignment, half)
        if movements.takes_part(plan)
    ]
    for moving in there:
        _arrive(moving, device)
    backs = [plan for plan in return_plans(assignment, half) if movements.takes_part(plan)]
    returned = [
        movements.begin(plan, None if lent else came.arrives, like=like, numel=numel, layer="")
        for plan, came in zip(backs, there, strict=True)
    ]
    for moving in returned:
        _arrive(moving, device)


def _arrive(moving: Moving, device: torch.device) -> None:
    moving.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
