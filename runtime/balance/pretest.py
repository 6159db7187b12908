"""Movements of units that are timed before the first step: what a policy is told of the way between ranks."""

import time

import torch
import torch.distributed as dist

from ...policies.balance import (
    Assignment,
    Half,
    Migrate,
    MovementTimed,
    lend_plans,
    pretest_moves,
    return_plans,
)
from .balanced import Balanced
from .movements import Moving


def time_movements(balanced: Balanced, *, device: torch.device) -> list[MovementTimed]:
    """One event for each half of which there is a unit; to be called on all ranks, of all tensor groups, at once.

    Set-up traffic: it leaves no rows. What `pretest_moves` says is lent and comes back; one movement before that is
    not timed.
    """
    found = []
    ledger = balanced.ledger
    with ledger.set_up():
        for half in Half:
            moved = pretest_moves(balanced.work, half)
            few, many = (sum(action.units for action in moves) for moves in moved[:2])
            lenders = len({action.src for action in moved[-1]})
            _move(balanced, half, moved[0], device)
            times_ns = []
            for moves in moved:
                dist.barrier()
                began_ns = time.monotonic_ns()
                _move(balanced, half, moves, device)
                took = torch.tensor([time.monotonic_ns() - began_ns], device=device)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times_ns.append(int(took))
            found.append(
                MovementTimed(half, (few, many), (times_ns[0], times_ns[1]), sum(times_ns[2:]), lenders)
            )
    return found


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
