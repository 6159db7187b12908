"""Calls that take the place of modules' own, and hold their parameters where they are: a layer's plans are run on the
module's parameters as they are at the time (a library may have gathered them a moment before).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...policies.plan import Apply
from .autograd import Program
from .functions import IGNORED

Source = Callable[[], Tensor]  # a parameter, as it is now


@dataclass(slots=True)
class Planned:
    """Of a layer with one input: the activation, or ids, or images."""

    program: Program
    parameters: Sequence[Source]

    def __call__(self, x: Tensor) -> Tensor:
        (y,) = self.program(x, *(source() for source in self.parameters))
        return y


@dataclass(slots=True)
class PlannedPositions:
    """As `Positions`, whose tokens' positions are the context's."""

    program: Program
    parameters: Sequence[Source]

    def __call__(self, x_BTD: Tensor, first: int = 0) -> Tensor:
        if first:
            raise ValueError(f"first={first}: tokens that follow others are not laid out over ranks")
        (y_BTD,) = self.program(x_BTD, *(source() for source in self.parameters))
        return y_BTD


@dataclass(slots=True)
class PlannedCore:
    """As `AttentionCore`."""

    program: Program

    def __call__(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        (mixed_BHTE,) = self.program(q_BHTE, k_BKTE, v_BKTE)
        return mixed_BHTE.transpose(1, 2).flatten(2)


@dataclass(slots=True)
class PlannedLoss:
    """As `CrossEntropy`; and, in an evaluation, what `CountRight` counts of the same logits.

    Args:
        counts: Whether this rank counts: of those that hold classes of the same tokens one does.
    """

    program: Program
    counts: bool
    _num_right: Tensor | None = field(default=None, init=False)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            (loss,) = self.program(logits, targets)
            return loss
        steps = self.program.forward.steps
        (here,) = (step.reads[2] for step in steps if isinstance(step, Apply) and step.function == "losses")
        made = self.program.evaluate(
            {"logits": logits, "targets": targets}, {"loss", "exponentials", here, "targets"}
        )
        _, right = made["exponentials"]  # the right class's logit less the largest
        self._num_right = ((right >= 0) & (made[here] != IGNORED)).sum() * int(self.counts)
        return made["loss"]

    def count_right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of the logits that the loss was just computed of."""
        if self._num_right is None:
            raise RuntimeError(
                "what was right is counted with the loss, in an evaluation: compute that first"
            )
        found, self._num_right = self._num_right, None
        return found


@dataclass(slots=True)
class Together:
    """Several matrices with one input, whose products the first of them takes at once.

    The others hand their share out: they are called with the same tensor, in the order of forward.
    """

    compute: Callable[[Tensor], tuple[Tensor, ...]]
    label: str
    _x: Tensor | None = field(default=None, init=False)
    _shares: list[Tensor | None] = field(default_factory=list, init=False)

    def member(self, place: int) -> Callable[[Tensor], Tensor]:
        """What takes the place of the `place`-th matrix' call."""

        def call(x: Tensor) -> Tensor:
            if place == 0:
                self._shares = list(self.compute(x))
                self._x = x
            if self._x is not x or len(self._shares) <= place or self._shares[place] is None:
                raise RuntimeError(
                    f"{self.label}: matrix {place + 1} of those that share one input was called with another tensor "
                    "than the first, or before it"
                )
            share = self._shares[place]
            assert share is not None
            self._shares[place] = None
            if not any(other is not None for other in self._shares):
                self._x = None
            return share

        return call


def replace_call(module: nn.Module, call: Callable[..., object]) -> None:
    """From now on `module(...)` is `call(...)`; its type, parameters and hooks stay."""
    module.__dict__["forward"] = call
