"""What stands for gradients that a pruned product does not compute, of its input and of its weight.

Of a product y = x W^T with columns K kept (x [tokens, columns], W [rows, columns]):

* zero: 0 in the columns that are left out, of both gradients.
* average: of both, in each row (a token of dx, an output feature of dW), the mean of the row's computed columns.
* same: of dW, what was computed in that place last, in whatever micro-batch that was; of dx, whose tokens are others
  each time, the mean over tokens of what was computed in that column last. Both are 0 before a column was first
  computed, and begin anew when the shape of what this rank computes changes. It takes as much memory again as the
  gradients, and is kept up to date in products that leave nothing out.

How SEMI defines the latter two is not known; these are readings of their names. Matrices that share an input are one
product, whose dx is filled in once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...conf.schema import Imputation


class Filler:
    """Of one gradient of one product. It has a memory where `how` is `same`.

    Args:
        of_input: Rows are tokens, which are others each time.
    """

    def __init__(self, how: Imputation, *, of_input: bool) -> None:
        self._how, self._of_input = how, of_input
        self._last: Tensor | None = None

    @property
    def remembers(self) -> bool:
        return self._how is Imputation.same

    def around(self, x: Tensor, kept: Sequence[int] | None) -> Tensor:
        """`x`, whose gradient is filled in; None: it is computed everywhere."""
        if self._how is Imputation.zero or (kept is None and not self.remembers):
            return x
        filled: Tensor = _Fills.apply(x, self, kept)  # type: ignore[no-untyped-call]
        return filled

    def filled(self, gradient: Tensor, kept: Sequence[int] | None) -> Tensor:
        """The gradient [..., columns], 0 where it was not computed, with what stands there instead."""
        return gradient if self._how is Imputation.zero else self.fill(gradient, kept)

    def fill(self, gradient: Tensor, kept: Sequence[int] | None) -> Tensor:
        """The gradient [..., columns] with all columns."""
        columns = gradient.shape[-1]
        computed = None if kept is None else _mask(tuple(kept), columns, gradient.device)
        if self._how is Imputation.average:
            assert computed is not None
            assert kept is not None
            mean = (gradient * computed).sum(-1, keepdim=True) / len(kept)
            return torch.where(computed, gradient, mean)
        rows = gradient.flatten(0, -2)
        now = rows.mean(0, keepdim=True) if self._of_input else rows
        if self._last is None or self._last.shape != now.shape:
            self._last = torch.zeros_like(now)
        if computed is None:
            self._last.copy_(now)
            return gradient
        self._last = torch.where(computed, now, self._last)
        return torch.where(computed, gradient, self._last if self._of_input else self._last.view_as(gradient))


class _Fills(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, filler: Filler, kept: Sequence[int] | None) -> Tensor:
        ctx.filler, ctx.kept = filler, kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.filler.fill(gradient, ctx.kept), None, None


@lru_cache(maxsize=1024)
def _mask(kept: tuple[int, ...], columns: int, device: torch.device) -> Tensor:
    """[columns], whether each is kept."""
    mask = torch.zeros(columns, dtype=torch.bool)
    mask[list(kept)] = True
    return mask.to(device)
