"""Measured bytes of what autograd keeps for backward, unit by unit: each piece of memory once.

What counts is memory, not tensors: a view keeps all that it is a view of, and what two functions keep is there once.
Left out are parameters (also those that a library has gathered for the time of a unit) and the data that a model is
given. Kept by a recomputation (`torch.utils.checkpoint`) is what it begins with; what it makes anew in backward
is not seen.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .stack import Stack

BEFORE, BEHIND = "before", "behind"  # what the root computes before its first block, and behind its last one
ROOT: Final = "root"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The first that was kept of a piece of memory, whose bytes these are."""

    unit: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class SavedTensors:
    """While this context lasts, counts what the models' forward passes keep.

    Args:
        models: The parts of a model that this rank holds, as they are trained: whoever wraps them has done so.

    Attributes:
        first: What the first forward pass of each unit kept, in order.
        peak_bytes: The most that was kept at a time, of all passes.
    """

    def __init__(self, models: Iterable[Stack]) -> None:
        self.first: list[SavedTensor] = []
        self.peak_bytes = 0
        self._live_bytes = 0
        self._uses: Counter[int] = Counter()  # of a piece of memory that is kept, by its address in torch
        self._models = list(models)
        self._within: list[_Pass] = []
        self._done: set[str] = set()  # units that have been passed once
        self._handles: list[RemovableHandle] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @property
    def unit_bytes(self) -> dict[str, int]:
        """Of the first pass, by unit: `BEFORE`, "block.0", ..., `BEHIND`; what kept nothing is left out."""
        found: dict[str, int] = {}
        for each in self.first:
            found[each.unit] = found.get(each.unit, 0) + each.nbytes
        return found

    def __enter__(self) -> Self:
        for model in self._models:
            for name, module in model.units().items():
                self._handles += [
                    module.register_forward_pre_hook(self._begins(name), with_kwargs=True),
                    module.register_forward_hook(self._ends, always_call=True),
                ]
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- passes

    def _begins(self, name: str) -> Callable[..., None]:
        def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            known: set[int] = set(self._within[-1].known) if self._within else set()
            known |= {_memory(parameter) for parameter in module.parameters()}
            if name == ROOT:
                assert isinstance(module, Stack)
                # Between two stages activations are given, not data
                given = [*args, *kwargs.values()] if module.is_first else [*args[1:], *kwargs.values()]
                known |= {_memory(x) for x in given if isinstance(x, Tensor)}
            elif self._within:
                self._within[-1].passed_blocks = True
            self._within.append(_Pass(name, known, is_first=name not in self._done))

        return begins

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        ended = self._within.pop()
        if ended.name != ROOT:
            self._done.add(ended.name)
            return
        self._done |= {BEFORE, BEHIND} if isinstance(module, Stack) and module.is_last else {BEFORE}

    # ---- tensors

    def _pack(self, tensor: Tensor) -> "Tensor | _Kept":
        if not self._within:
            return tensor
        now, memory = self._within[-1], _memory(tensor)
        if memory in now.known:
            return tensor
        return _Kept(tensor, memory, self)

    def hold(self, tensor: Tensor, memory: int) -> None:
        """One more function keeps it."""
        self._uses[memory] += 1
        if self._uses[memory] > 1:
            return
        now, nbytes = self._within[-1], _nbytes(tensor)
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        unit = now.name
        if unit == ROOT:
            unit = BEHIND if now.passed_blocks else BEFORE
        if unit not in self._done:
            self.first.append(SavedTensor(unit, tuple(tensor.shape), tensor.dtype, nbytes))

    def let_go(self, tensor: Tensor, memory: int) -> None:
        """One function less does."""
        self._uses[memory] -= 1
        if not self._uses[memory]:
            del self._uses[memory]
            self._live_bytes -= _nbytes(tensor)


@dataclass(slots=True)
class _Pass:
    """A forward pass of a unit under way. `known`: memory that is not counted."""

    name: str
    known: set[int]
    is_first: bool
    passed_blocks: bool = False


class _Kept:
    """In the place of a tensor that autograd keeps, for as long as it does."""

    __slots__ = ("_memory", "_saved", "tensor")

    def __init__(self, tensor: Tensor, memory: int, saved: SavedTensors) -> None:
        self.tensor, self._memory, self._saved = tensor, memory, saved
        saved.hold(tensor, memory)

    def __del__(self) -> None:
        self._saved.let_go(self.tensor, self._memory)


def _unpack(packed: "Tensor | _Kept") -> Tensor:
    return packed.tensor if isinstance(packed, _Kept) else packed


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def _memory(tensor: Tensor) -> int:
    """The same for all views of one piece of memory, while one of them lives."""
    return int(_local(tensor).untyped_storage()._cdata)


def _nbytes(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().nbytes()
