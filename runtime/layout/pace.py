"""Work at a device's rate: what is left of the time that each product and attention would take there is slept away
(`cluster.emulated_flops_per_s`, and `cluster.slowdown` of a rank). Here too the time of products is taken.

Operations are counted as the simulator does (`sim.layout.work`): products of matrices, and attention over the whole
square, also under a causal mask; backward takes twice as many. All else takes the time that it takes here.

Shape letters: B sequences, H heads, T queries, S keys, E features of a head.
"""

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...policies.balance import Half
from ...policies.layout.border import num_parts, part_index
from ...policies.layout.ring import BLOCK_GRADIENTS, BLOCKS
from ...policies.layout.tokens import block_pairs
from ...policies.plan import Apply, Multiply, Step
from ..balance.stopwatch import Mark, Stopwatch
from ..balance.straggle import Straggler
from ..laps import sleep_until
from .functions import Context

Call = Callable[..., Tensor]
Flop = Callable[[Sequence[Tensor], Tensor], int]  # of a forward, from what it was given and what it made


class Rate:
    """How long work takes.

    Args:
        flop_per_s: Of the device that the CPU stands for; where the CPU is slower, its own time stands. None: work
            takes the time that it takes.
        straggler: Makes this rank slow.
        stopwatch: Told of the products of balanced blocks, and of the sums behind them.
        synchronize: Waits for the device, where work runs asynchronously.
    """

    def __init__(
        self,
        flop_per_s: float | None,
        *,
        straggler: Straggler | None = None,
        stopwatch: Stopwatch | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._flop_per_s = flop_per_s
        self.straggler, self.stopwatch = straggler, stopwatch
        self._synchronize = synchronize

    def end(self, began_ns: int, flop: float) -> None:
        """Let time pass until work that began then would have ended."""
        if not flop:
            return
        factor = 1.0 if self.straggler is None else self.straggler.stretch
        if self._flop_per_s is not None:
            sleep_until(began_ns + round(factor * flop / self._flop_per_s * 1e9))
        elif factor > 1:
            if self._synchronize is not None:
                self._synchronize()
            sleep_until(began_ns + round(factor * (time.monotonic_ns() - began_ns)))

    def work(self, flop: float, half: Half | None) -> float:
        """Operations that a slow rank does in place of so many, where it repeats them and they are slept out."""
        again = self.straggler is not None and self._flop_per_s is not None and half is not None
        return flop * (1 + self.straggler.repeats) if again and self.straggler is not None else flop

    def around(self, call: Call, flop: Flop, half: Half | None = None) -> Call:
        """The same call, which takes its time, and whose backward does; of a product of `half`, it is measured."""

        def paced(*xs: Tensor) -> Tensor:
            timer = _Timer(self, half, ends=torch.is_grad_enabled() and any(x.requires_grad for x in xs))
            entered = _Enter.apply(timer, *xs)  # type: ignore[no-untyped-call]
            y = call(*entered)
            timer.flop = self.work(flop(entered, y), half)
            left: Tensor = _Leave.apply(timer, y)  # type: ignore[no-untyped-call]
            return left

        return paced


def linear_flop(xs: Sequence[Tensor], y: Tensor) -> int:
    """Of a product with a matrix; of DTensors this rank's part."""
    return 2 * _here(xs[0]).numel() * _here(y).shape[-1]


def attention_flop(xs: Sequence[Tensor], y_BTX: Tensor) -> int:
    """Of q, k and v [B, heads, tokens, E], mixed to [B, T, H E]."""
    return 4 * y_BTX.numel() * xs[1].shape[2]


def patches_flop(weight: Callable[[], Tensor]) -> Flop:
    """Of images whose patches the matrix [D, ...] makes to [B, P, D]."""
    return lambda _, y_BPD: 2 * y_BPD.numel() * prod(weight().shape[1:])


def step_flop(step: Step, context: Context, operands: Sequence[Tensor]) -> float:
    """Of a piece of local work in a plan; 0 of what is no product."""
    match step:
        case Multiply():
            left, right = operands
            out = right.shape[:-1] if step.transpose_right else right.shape[-1:]
            return 2 * left.numel() * prod(out)
        case Apply(function="attention"):
            return _whole_square(*operands[:2])
        case Apply(function="attention_gradient"):
            return 2 * _whole_square(*operands[1:3])
        case Apply() if step.function in BLOCKS:
            q, kv = operands
            return _whole_square(q, kv[0]) * _seen(step, context, BLOCKS[step.function])
        case Apply() if step.function in BLOCK_GRADIENTS:
            q, kv = operands[1:3]
            return 2 * _whole_square(q, kv[0]) * _seen(step, context, BLOCK_GRADIENTS[step.function])
    return 0


def _whole_square(q_BHTE: Tensor, k_BKSE: Tensor) -> int:
    return 4 * q_BHTE.numel() * k_BKSE.shape[2]


def _seen(step: Apply, context: Context, masks: tuple[bool, bool]) -> float:
    """The share of a block that counts: a causal mask's square is whole over all blocks together."""
    causal, zigzag = masks
    size, rank = num_parts(context.mesh, step.axes), part_index(context.mesh, step.axes, context.rank)
    pairs = block_pairs(size=size, zigzag=zigzag, causal=causal, rank=rank, step=step.number)
    return pairs * (2 if causal else 1)


def _here(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class _Timer:
    """Of one call: several may be under way before the first one's backward."""

    def __init__(self, rate: Rate, half: Half | None, *, ends: bool) -> None:
        self._rate, self._half, self._ends = rate, half, ends
        self._stopwatch = rate.stopwatch if half is not None and torch.is_grad_enabled() else None
        self.flop = 0.0
        self._mark: Mark | None = None
        self._backward = False
        self._begins()

    def forward_ends(self) -> None:
        self._over(self.flop)

    def backward_begins(self) -> None:
        self._backward = True
        self._begins()
        if not self._ends:  # no input has a gradient, so nobody says when it is over
            self.backward_ends()

    def backward_ends(self) -> None:
        self._over(2 * self.flop)

    def _begins(self) -> None:
        self._began_ns = time.monotonic_ns()
        if self._stopwatch is not None and self._half is not None:
            self._mark = self._stopwatch.begins(self._half, backward=self._backward)

    def _over(self, flop: float) -> None:
        self._rate.end(self._began_ns, flop)
        if self._stopwatch is not None and self._half is not None and self._mark is not None:
            self._stopwatch.ends(self._half, self._mark, backward=self._backward)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, timer: _Timer, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.timer = timer
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.timer.backward_ends()
        return None, *gradients


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, timer: _Timer, y: Tensor) -> Tensor:
        ctx.timer = timer
        timer.forward_ends()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        ctx.timer.backward_begins()
        return None, dy
