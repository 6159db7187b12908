"""Movements of units that are timed before the first step: what a policy is told of the way between ranks."""

import time

import torch
import torch.distributed as dist

from ...policies.balance import Assignment, Half, MovementTimed, lend_plans, moves, return_plans
from .balanced import Balanced
from .movements import Moving


def time_movements(balanced: Balanced, *, device: torch.device) -> list[MovementTimed]:
    """One event for each half of which there is a unit; to be called on all ranks, of all tensor groups, at once.

    Set-up traffic: it leaves no rows. The first rank of each group lends as many units as `sizes` says, twice, and gets
    them back; one movement before them is not timed.
    """
    found = []
    ledger = balanced.ledger
    with ledger.set_up():
        for half in Half:
            units = sizes(balanced.work.units[half], balanced.work.ranks)
            _move(balanced, half, units[0], device)
            times_ns = []
            for count in units:
                dist.barrier()
                began_ns = time.monotonic_ns()
                _move(balanced, half, count, device)
                took = torch.tensor([time.monotonic_ns() - began_ns], device=device)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times_ns.append(int(took))
            found.append(MovementTimed(half, units, (times_ns[0], times_ns[1])))
    return found


def sizes(own: int, ranks: int) -> tuple[int, int]:
    """(few, many) units of one rank that move: one to each helper, and half of what it has; two different numbers,
    where it has two units.
    """
    few, many = min(own, ranks - 1), min(own, max(2, own // 2))
    if many > few:
        return few, many
    return (1, few) if few > 1 else (few, many)


def shares(units: int, ranks: int) -> tuple[int, ...]:
    """Of each rank when the first one lends as evenly as it can."""
    each, more = divmod(units, ranks - 1)
    return (0, *(each + (helper < more) for helper in range(ranks - 1)))


def _move(balanced: Balanced, half: Half, units: int, device: torch.device) -> None:
    """Out and back, until they are there."""
    work, movements = balanced.work, balanced.movements
    assignment = Assignment(work, tuple(moves(half, 0, shares(units, work.ranks))))
    (lend,), (back,) = lend_plans(assignment, half), return_plans(assignment, half)
    if not movements.takes_part(lend):
        return
    numel, like = work.unit_numel[half], torch.empty(0, dtype=balanced.dtype, device=device)
    lends = movements.index == 0
    rows = like.new_zeros(units, numel) if lends else None
    there = movements.begin(lend, rows, like=like, numel=numel, layer="")
    _arrive(there, device)
    returned = movements.begin(back, None if lends else there.arrives, like=like, numel=numel, layer="")
    _arrive(returned, device)


def _arrive(moving: Moving, device: torch.device) -> None:
    moving.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
