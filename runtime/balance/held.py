"""The weights of a block's half as this rank computes with them: some of its own units, and those that it is lent.

Two autograd functions enclose them. `_Begins`, at the start of the block, changes nothing; as it was called before all
products of the block, its backward is the last of it: there the gradients of lent units are waited for, before anybody
reduces or counts this block's gradients. `_Takes`, at the half's first product, gives the weights that are computed
with; its backward has the gradients of both products, and sends those of borrowed units on their way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...policies.balance import Assignment, Half, lend_plans, return_plans
from ...policies.plan import Plan
from .movements import Movements, Moving, wait_for
from .units import UnitShape

Source = Callable[[], Tensor]


@dataclass(slots=True)
class _Pass:
    """One forward of a block's half, and its backward."""

    assignment: Assignment
    lending: list[tuple[int, Moving]] = field(default_factory=list)  # and the rank that lends
    returning: list[tuple[int, Moving]] = field(default_factory=list)
    started: tuple[Tensor, ...] = ()  # the half's own tensors, at the start of the block


class HeldHalf:
    """Of one block and one half, in every pass of which units move.

    Args:
        label: Of rows in the ledger, "block.3.ffn".
        sources: Tensors in the order of `UnitShape`, as they are when they are asked for.
        units: That this rank has.
        numel: Numbers of a unit.
        dtype: In which weights are computed with.
    """

    def __init__(
        self,
        label: str,
        half: Half,
        shape: UnitShape,
        sources: Sequence[Source],
        movements: Movements,
        *,
        units: int,
        numel: int,
        dtype: torch.dtype,
    ) -> None:
        self.label, self.half, self.shape = label, half, shape
        self.movements, self.units, self.numel = movements, units, numel
        self._sources, self._dtype = tuple(sources), dtype
        self._now: _Pass | None = None  # the forward that is under way
        self._taken: list[Tensor] = []

    def lend(self, assignment: Assignment) -> None:
        """Start this rank's part of what is lent for the forward that comes next."""
        self._now = made = _Pass(assignment)
        me = self.movements.index
        for plan in lend_plans(assignment, self.half):
            if not self.movements.takes_part(plan):
                continue
            root, rows = _root(plan), None
            if root == me:
                own = [_as_computed(source(), self._dtype) for source in self._sources]
                rows = self.shape.pack(own, self.units, assignment.kept(self.half, me), self.units)
            like = torch.empty(0, dtype=self._dtype, device=self._sources[0]().device)
            moving = self.movements.begin(plan, rows, like=like, numel=self.numel, layer=self.label)
            made.lending.append((root, moving))

    @property
    def moves(self) -> bool:
        """Whether this rank lends or is lent units in the forward that is under way."""
        return self._now is not None and bool(self._now.lending)

    def starts(self) -> None:
        """The block begins, and its weights are there."""
        if self._now is not None and self._now.lending:
            begun: tuple[Tensor, ...] = _Begins.apply(self, self._now, *(s() for s in self._sources))  # type: ignore[no-untyped-call]
            self._now.started = begun

    def take(self) -> list[Tensor]:
        """What the half's first product computes with, and its second (`taken`): waits for what this rank is lent."""
        assert self._now is not None, "units are lent at the start of a block"
        now = self._now
        wait_for([moving for _, moving in now.lending if moving.arrives is not None])
        self._taken = list(_Takes.apply(self, now, *now.started))  # type: ignore[no-untyped-call]
        now.started = ()
        return self._taken

    @property
    def taken(self) -> list[Tensor]:
        return self._taken

    def over(self) -> None:
        """The sum of the half has arrived: all ranks have computed with what they were lent, so it has gone."""
        if self._now is not None:
            wait_for([moving for _, moving in self._now.lending])
            self._now.lending.clear()  # and with it what was sent
        self._now, self._taken = None, []

    # ---- what the autograd functions do

    def compose(self, now: _Pass, own: Sequence[Tensor]) -> list[Tensor]:
        """The weights that this rank computes with."""
        me, of = self.movements.index, now.assignment
        kept = of.kept(self.half, me)
        if kept < self.units:
            return self.shape.first_of(own, self.units, kept)
        units = of.computed(self.half, me)
        made = self.shape.empty(own, units)
        self.shape.copy(own, self.units, made, units, kept)
        first = kept
        for _, moving in now.lending:  # from ascending ranks
            assert moving.arrives is not None
            self.shape.write(made, units, first, moving.arrives)
            first += len(moving.arrives)
            moving.arrives = None
        return made

    def give_back(self, now: _Pass, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of this rank's own tensors; those of units that it has lent come later (`complete`)."""
        me, of = self.movements.index, now.assignment
        kept, computed = of.kept(self.half, me), of.computed(self.half, me)
        own = self.shape.empty(gradients, self.units)
        self.shape.copy(gradients, computed, own, self.units, kept)
        first = kept
        for plan in return_plans(of, self.half):
            if not self.movements.takes_part(plan):
                continue
            root, rows = _root(plan), None
            if root != me:
                last = first + _parts(plan)[me]
                rows = self.shape.pack(gradients, computed, first, last)
                first = last
            moving = self.movements.begin(plan, rows, like=gradients[0], numel=self.numel, layer=self.label)
            now.returning.append((root, moving))
        return own

    def complete(self, now: _Pass, gradients: Sequence[Tensor]) -> None:
        """Wait for what comes back, and write it where it lies."""
        kept = now.assignment.kept(self.half, self.movements.index)
        for _, moving in now.returning:
            moving.wait()
            if moving.arrives is not None:
                self.shape.write(gradients, self.units, kept, moving.arrives)
                moving.arrives = None


class _Begins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: HeldHalf, now: _Pass, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.held, ctx.now = held, now
        return tuple(x.view_as(x) for x in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.held.complete(ctx.now, gradients)
        return None, None, *gradients


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: HeldHalf, now: _Pass, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.held, ctx.now = held, now
        return tuple(held.compose(now, own))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.held.give_back(ctx.now, gradients)


def _as_computed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Between units FSDP2 has its own shard in fp32 in a parameter's place; of one replica it is all of it."""
    local = weight.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.to(dtype)


def _root(plan: Plan) -> int:
    root: int = plan.steps[0].root  # type: ignore[attr-defined]
    return root


def _parts(plan: Plan) -> Sequence[int]:
    parts: Sequence[int] = plan.steps[0].parts  # type: ignore[attr-defined]
    return parts
