"""How a script calls its model, and what it gets: ours return the loss, foreign ones what their class returns."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...policies.layout import ParallelLayout
from ...policies.mesh import Mesh
from ..stack import Stack


class Caller(Protocol):
    """Between a script and a stack.

    Attributes:
        counts_forwards: The dropouts' clock goes on with each forward by itself; else the script sets it.
    """

    counts_forwards: bool

    def read_batch(self, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the whole batch; raises ValueError for arguments that have no meaning here."""
        ...

    def output(self, loss: Tensor) -> Any:
        """What the script's call returns."""
        ...

    def original(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters as the script's model has them."""
        ...


@runtime_checkable
class SizedInside(Protocol):
    """A stack in which something knows the sizes of the whole."""

    def laid_out(self, layout: ParallelLayout, mesh: Mesh) -> None:
        """Its modules have become parts."""
        ...


class OwnCaller:
    """Of a model of ours, which is called with inputs and targets."""

    counts_forwards = False

    def __init__(self, model: Stack) -> None:
        self._kind = type(model).__name__
        self._signature = inspect.signature(model.forward)

    def read_batch(self, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        try:
            bound = self._signature.bind(*args, **given)
        except TypeError as err:
            raise ValueError(
                f"{self._kind} is called with {', '.join(self._signature.parameters)}: {err}"
            ) from err
        inputs, targets = (*bound.arguments.values(), None)[:2]
        if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
            raise ValueError(
                f"{self._kind} is called with {', '.join(self._signature.parameters)}, two tensors"
            )
        return inputs, targets

    def output(self, loss: Tensor) -> Tensor:
        return loss

    def original(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(wholes)
