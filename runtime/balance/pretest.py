"""Movements of units that are timed before the first step: what a policy is told of the way between ranks."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...policies.balance import (
    Assignment,
    Half,
    MovementTimed,
    lend_plans,
    moves,
    pretest_parts,
    return_plans,
)
from .balanced import Balanced
from .movements import Moving


def time_movements(balanced: Balanced, *, device: torch.device) -> list[MovementTimed]:
    """One event for each half of which there is a unit; to be called on all ranks, of all tensor groups, at once.

    Set-up traffic: it leaves no rows. The first rank of each group lends as many units as `pretest_parts` says, twice,
    and gets them back; one movement before them is not timed.
    """
    found = []
    ledger = balanced.ledger
    with ledger.set_up():
        for half in Half:
            both = few, many = pretest_parts(balanced.work, half)
            _move(balanced, half, few, device)
            times_ns = []
            for parts in both:
                dist.barrier()
                began_ns = time.monotonic_ns()
                _move(balanced, half, parts, device)
                took = torch.tensor([time.monotonic_ns() - began_ns], device=device)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times_ns.append(int(took))
            found.append(MovementTimed(half, (sum(few), sum(many)), (times_ns[0], times_ns[1])))
    return found


def _move(balanced: Balanced, half: Half, parts: Sequence[int], device: torch.device) -> None:
    """Out and back, until they are there."""
    work, movements = balanced.work, balanced.movements
    assignment = Assignment(work, tuple(moves(half, 0, parts)))
    (lend,), (back,) = lend_plans(assignment, half), return_plans(assignment, half)
    if not movements.takes_part(lend):
        return
    numel, like = work.unit_numel[half], torch.empty(0, dtype=balanced.dtype, device=device)
    lends = movements.index == 0
    rows = like.new_zeros(sum(parts), numel) if lends else None
    there = movements.begin(lend, rows, like=like, numel=numel, layer="")
    _arrive(there, device)
    returned = movements.begin(back, None if lends else there.arrives, like=like, numel=numel, layer="")
    _arrive(returned, device)


def _arrive(moving: Moving, device: torch.device) -> None:
    moving.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
