"""A product that is done over and over, and thrown away but for the first time: SEMI's way to make a rank slow."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def repeated(
    y: Tensor, x: Tensor, weight: Tensor, kept: Sequence[int] | None, times: Callable[[], float]
) -> Tensor:
    """`y` = x W^T, after as much work again, and before as much in its backward: two products.

    Args:
        x: [..., columns].
        weight: [rows, columns].
        kept: Columns that the product has; None: all.
        times: So many times more; of a fraction as many of the rows.
    """
    again: Tensor = _Repeats.apply(y, x.detach(), weight.detach(), kept, times)  # type: ignore[no-untyped-call]
    return again


class _Repeats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        kept: Sequence[int] | None,
        times: Callable[[], float],
    ) -> Tensor:
        ctx.kept, ctx.times = kept, times
        if y.requires_grad:
            ctx.save_for_backward(x, weight)
        x_2d, w = _resized(x, weight, kept)
        for rows in _rows(times(), len(x_2d)):
            _discard(x_2d[:rows] @ w.t())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        x_2d, w = _resized(x, weight, ctx.kept)
        dy_2d = dy.flatten(0, -2)
        for rows in _rows(ctx.times(), len(x_2d)):
            _discard(dy_2d[:rows] @ w)
            _discard(dy_2d[:rows].t() @ x_2d[:rows])
        return dy, None, None, None, None


def _resized(x: Tensor, weight: Tensor, kept: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    x_2d = x.flatten(0, -2)
    if kept is None:
        return x_2d, weight
    columns = torch.tensor(kept, device=x.device)
    return x_2d.index_select(1, columns), weight.index_select(1, columns)


def _rows(times: float, rows: int) -> list[int]:
    """Of each repetition."""
    whole = math.floor(times)
    rest = round((times - whole) * rows)
    return [rows] * whole + ([rest] if rest else [])


def _discard(_: Tensor) -> None:
    """Computed to take time."""
