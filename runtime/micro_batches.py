"""The micro-batches of a step, and how an engine runs them that has the whole model: one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from .laps import Clock
from .ledger import Ledger


class NoClock:
    """Nobody measures."""

    def lap(self, name: str) -> None:
        """Nothing."""


def nothing() -> None:
    """Nothing."""


def nothing_begins(_: int) -> None:
    """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """Those of one step, or of one validation, of this rank's replica of the model.

    Args:
        read: Inputs and targets of one of them, on the device.
        factor: What each loss is multiplied with before backward.
        clock: Told when computation passes from unit to unit.
        begins: Called with a micro-batch's number before each of its passes.
        before_last_backward: Called between the last forward and its backward.
    """

    count: int
    read: Callable[[int], tuple[Tensor, Tensor]]
    factor: float = 1.0
    clock: Clock = field(default_factory=NoClock)
    begins: Callable[[int], None] = nothing_begins
    before_last_backward: Callable[[], None] = nothing


class RunsPasses(Protocol):
    """What a step needs of an engine that runs one pass at a time."""

    @property
    def model(self) -> nn.Module: ...

    def begin_micro_batch(self, index: int, count: int) -> None: ...

    def finish_gradients(self) -> None: ...


def train_in_turn(engine: RunsPasses, ledger: Ledger, batches: MicroBatches) -> Tensor:
    """Forward and backward of each micro-batch, to complete gradients; all losses, [count], not multiplied."""
    losses: list[Tensor] = []
    for index in range(batches.count):
        inputs, targets = batches.read(index)
        batches.begins(index)
        ledger.at(phase="forward", layer="")
        engine.begin_micro_batch(index, batches.count)
        batches.clock.lap("step")
        loss: Tensor = engine.model(inputs, targets)
        batches.clock.lap("forward/root")
        ledger.at(phase="backward", layer="")
        if index == batches.count - 1:
            batches.before_last_backward()
        (loss * batches.factor).backward()  # type: ignore[no-untyped-call]
        if index == batches.count - 1:
            engine.finish_gradients()
        batches.clock.lap("backward/root")
        losses.append(loss.detach())
    return torch.stack(losses)


def num_right(model: nn.Module) -> Tensor:
    """Of a classifier, answers of the last forward without gradients that were right; 0 of another model."""
    return getattr(model, "num_right", torch.zeros(()))


@torch.no_grad()
def evaluate_in_turn(model: nn.Module, batches: MicroBatches, count_right: Callable[[], Tensor]) -> Tensor:
    """[2]: the sum of all losses, and of what `count_right` says after each forward."""
    total: Tensor | None = None
    model.eval()
    for index in range(batches.count):
        loss: Tensor = model(*batches.read(index))
        both = torch.stack([loss.float(), count_right().to(loss.device).float()])
        total = both if total is None else total + both
    model.train()
    assert total is not None, "a validation has a batch"
    return total
