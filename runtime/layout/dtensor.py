"""1D tensor parallelism on DTensor: styles for `torch.distributed.tensor.parallel.parallelize_module`.

Parameters stay what they are, this rank's parts; a style sees them as DTensors while its module computes. So whatever
shards, reduces or steps them sees the same tensors in every mode, and a fused matrix of queries, keys and values is cut
as heads want it. What DTensor communicates is what the plan of the layer says, and the ledger has it in the same rows:
one all-reduce of each output of a matrix cut by its inputs, one of the input's gradient of those cut by their outputs.

Of a block that is balanced (`runtime.balance`) this rank's part of a product is computed as the assignment says, of
plain tensors; what is communicated, and when, stays DTensor's.

Shapes: B sequences, T tokens, D features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional

from ...policies.balance import Half
from ...policies.layout import ParallelLayout
from ...policies.layout.common import LAYER_STREAM
from ...policies.layout.layers import Kind, Layer, Role
from ...policies.mesh import TENSOR
from ..balance.products import BalancedProduct
from ..balance.stopwatch import Stopwatch
from ..ledger import Ledger, Library
from .modules import Source, Together, replace_call
from .pace import Rate, linear_flop


def is_served(layout: ParallelLayout, layer: Layer) -> bool:
    """Whether a layer can be computed so: products in pairs and words, of a mode that says so."""
    if not layout.mode.by_dtensor:
        return False
    return layer.kind in (Kind.embedding, Kind.tied) or (
        layer.kind is Kind.linear and layer.role is not Role.whole
    )


def parallelize(
    unit: nn.Module,
    layer: Layer,
    *,
    mesh: DeviceMesh,
    ledger: Ledger,
    label: str,
    weights: Sequence[Source],
    biases: Sequence[Source],
    rate: Rate | None = None,
    balanced: BalancedProduct | None = None,
) -> None:
    """Let DTensor compute a layer of a unit that `is_served`.

    Args:
        label: Of rows in the ledger.
        weights, biases: This rank's parts, one for each matrix that takes the same input; no biases: there are none.
        rate: Of products; None: they take the time that they take.
        balanced: Of a block in a tensor group that is balanced.
    """
    scope = _Scope(
        ledger, Library(LAYER_STREAM, label, TENSOR), rate, None if balanced is None else balanced.half
    )
    call = _Words if layer.kind is Kind.embedding else _Rows if layer.role is Role.rows else _Columns
    compute = call(mesh, scope, tuple(weights), tuple(biases), rate, balanced)
    members = (layer, *layer.others)
    if len(members) == 1:
        styles: dict[str, ParallelStyle] = {layer.path: _Calls(lambda x: compute(x)[0])}
    else:
        together = Together(compute, label)
        styles = {each.path: _Calls(together.member(place)) for place, each in enumerate(members)}
    parallelize_module(unit, mesh, styles)


class _Calls(ParallelStyle):
    """The module is computed by `call`."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._call = call

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replace_call(module, self._call)
        return module


@dataclass(frozen=True, slots=True)
class _Scope:
    """In whose rows a layer's communication is: forward's within `forward`, backward's between that of what `begins`
    and that of what `ends` with it.

    Of a product of a balanced `half` a stopwatch is told when forward has come to it, and when sums are there.
    """

    ledger: Ledger
    rows: Library
    rate: Rate | None = None
    half: Half | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self._stopwatch is not None and self.half is not None and torch.is_grad_enabled():
            self._stopwatch.reaches(self.half)
        before = self.ledger.library
        self.ledger.library = self.rows
        try:
            yield
        finally:
            self.ledger.library = before

    def begins(self, y: Tensor) -> Tensor:
        """An output, from whose gradient on backward is of this layer."""
        begun: Tensor = _Begins.apply(self, y)  # type: ignore[no-untyped-call]
        return begun

    def ends(self, x: Tensor) -> Tensor:
        """The input, whose gradient is the last of this layer."""
        ended: Tensor = _Ends.apply(self, x)  # type: ignore[no-untyped-call]
        return ended

    def arrived(self, x: Tensor, *, backward: bool = False) -> Tensor:
        """The tensor itself, when its collective has ended."""
        there: Tensor = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        self.ledger.library_over()
        trains = backward or torch.is_grad_enabled()
        if self._stopwatch is not None and self.half is not None and trains:
            self._stopwatch.sum_arrives(self.half, backward=backward)
        return there

    @property
    def _stopwatch(self) -> Stopwatch | None:
        return None if self.rate is None else self.rate.stopwatch


class _Begins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scope: _Scope, y: Tensor) -> Tensor:
        ctx.scope = scope
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        scope: _Scope = ctx.scope
        scope.ledger.library = scope.rows
        return None, dy


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scope: _Scope, x: Tensor) -> Tensor:
        ctx.scope = scope
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor]:
        dx = ctx.scope.arrived(dx, backward=True)
        ctx.scope.ledger.library = None
        return None, dx


@dataclass(frozen=True, slots=True)
class _Styled:
    """What the three ways to compute share: parts seen as DTensors.

    A matrix' parts are views of the parameters, whose gradients come back as this rank's parts of theirs.
    """

    mesh: DeviceMesh
    scope: _Scope
    weights: tuple[Source, ...]
    biases: tuple[Source, ...]
    rate: Rate | None
    balanced: BalancedProduct | None

    def parameters(self) -> tuple[Tensor, ...]:
        """This rank's parts, as they are now: of the matrices, then of their biases."""
        return tuple(source() for source in (*self.weights, *self.biases))

    def seen(self, part: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(part, self.mesh, [placement], run_check=False)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of DTensors; what is communicated for it comes before or behind the time that it takes."""

        def call(x: Tensor) -> Tensor:
            return functional.linear(x, weight, bias)

        if self.rate is None:
            return call(x)
        half = None if self.balanced is None else self.balanced.half
        return self.rate.around(call, linear_flop, half)(x)

    def summed(self, y: Tensor) -> Tensor:
        """The sum of partial results, for every rank."""
        assert isinstance(y, DTensor)
        whole: Tensor = y.redistribute(placements=[Replicate()]).to_local()
        return self.scope.arrived(whole)


@dataclass(frozen=True, slots=True)
class _Columns(_Styled):
    """Matrices that are cut by their outputs. The gradient of the input is a sum, taken once for all of them."""

    def __call__(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        program = None if self.balanced is None else self.balanced.migrates_columns()
        if program is not None:
            return program(x_BTD, *self.parameters())
        with self.scope.forward():
            needs = x_BTD.requires_grad
            x = self.seen(self.scope.ends(x_BTD) if needs else x_BTD, Replicate())
            if self.balanced is not None and self.balanced.begins():
                # of the input this rank's gradient is one summand, as of a product of DTensors
                outputs = self.balanced.outputs(x.to_local(grad_placements=[Partial()]))
                return tuple(self.scope.begins(y) if needs else y for y in outputs)
            made = []
            for i, weight in enumerate(self.weights):
                bias = self.seen(self.biases[i](), Shard(0)) if self.biases else None
                y = self.product(x, self.seen(weight(), Shard(0)), bias)
                assert isinstance(y, DTensor)
                made.append(self.scope.begins(y.to_local()) if needs else y.to_local())
            return tuple(made)


@dataclass(frozen=True, slots=True)
class _Rows(_Styled):
    """A matrix that is cut by its inputs."""

    def __call__(self, x_BTF: Tensor) -> tuple[Tensor, ...]:
        program = None if self.balanced is None else self.balanced.migrates_columns()
        if program is not None:
            return program(x_BTF, *self.parameters())
        with self.scope.forward():
            if self.balanced is not None and self.balanced.begins():
                (part,) = self.balanced.outputs(x_BTF)
                y = self.summed(self.seen(part, Partial()))
                self.balanced.over()
            else:
                x = self.seen(x_BTF, Shard(x_BTF.ndim - 1))
                y = self.summed(self.product(x, self.seen(self.weights[0](), Shard(1))))
        return (y + self.biases[0](),) if self.biases else (y,)


@dataclass(frozen=True, slots=True)
class _Words(_Styled):
    """A table that is cut by its rows."""

    def __call__(self, ids_BT: Tensor) -> tuple[Tensor, ...]:
        with self.scope.forward():
            table = self.seen(self.weights[0](), Shard(0))
            return (self.summed(functional.embedding(self.seen(ids_BT, Replicate()), table)),)
