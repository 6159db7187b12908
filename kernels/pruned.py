"""A matmul over kept columns only: what balancing gives a slow rank to compute.

y = x[:, kept] @ w[kept, :]. The kept columns of x and rows of w are gathered once, in the forward, and saved instead of
x and w: no gradient gathers again. All three products shrink by the share of columns that are left out, whose gradients
are zero (SEMI: resized GEMMs). On a GPU the products read and write through the indices, with no gather at all.

Shape letters: M rows, K columns before pruning, P kept ones, N columns of the result.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .codec import check
from .gpu import matmul_for
from .native import load

_WORDS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def pruned_matmul(x_MK: Tensor, w_KN: Tensor, kept: tuple[int, ...], *, reference: bool = False) -> Tensor:
    """The product over the kept columns, with gradients for `x_MK` and `w_KN`; these have none of their own.

    Args:
        x_MK: [..., K], fp32, bf16 or fp16.
        w_KN: [K, N] of the same dtype, with any strides: `linear.weight.t()` costs no copy.
        kept: Distinct indices into K, in any order; a tuple, for it is looked up again at each call.
        reference: Use plain indexing, and autograd's own gradients.

    Returns:
        [..., N].
    """
    K = x_MK.shape[-1] if x_MK.dim() else -1
    if w_KN.dim() != 2 or w_KN.shape[0] != K or w_KN.dtype != x_MK.dtype or x_MK.dtype not in _WORDS:
        raise ValueError(
            f"x is {x_MK.dtype} {tuple(x_MK.shape)} and w {w_KN.dtype} {tuple(w_KN.shape)}; they must be [..., K] and "
            f"[K, N] of one dtype, one of {[str(known) for known in _WORDS]}"
        )
    indices = _indices(tuple(kept), K, x_MK.device)
    if reference:
        return x_MK.index_select(-1, indices.kept) @ w_KN.index_select(0, indices.kept)
    device = x_MK.device.type
    if torch.is_autocast_enabled(device):  # as `@` does
        x_MK, w_KN = (t.to(torch.get_autocast_dtype(device)) for t in (x_MK, w_KN))
    x_2d = x_MK.reshape(math.prod(x_MK.shape[:-1]), K)
    with torch.autocast(device, enabled=False):
        product: Tensor = _PrunedMatmul.apply(x_2d, w_KN, indices)  # type: ignore[no-untyped-call]
    return product.view(*x_MK.shape[:-1], w_KN.shape[1])


class _Indices:
    """The kept columns as each backend reads them."""

    def __init__(self, kept: tuple[int, ...], columns: int, device: torch.device) -> None:
        self.columns = columns
        self.kept = torch.tensor(kept, dtype=torch.int64)
        place = torch.full((columns,), -1, dtype=torch.int32)
        place[self.kept] = torch.arange(len(kept), dtype=torch.int32)
        self.native_kept, self.native_place = self.kept.int(), place
        self.kept = self.kept.to(device)


@lru_cache(maxsize=1024)
def _indices(kept: tuple[int, ...], columns: int, device: torch.device) -> _Indices:
    for index in kept:
        if not isinstance(index, int):
            raise ValueError(f"kept names column {index!r}: must be whole numbers")
        if not 0 <= index < columns:
            raise ValueError(f"kept names column {index}, but x has {columns}")
    if len(set(kept)) != len(kept):
        raise ValueError("kept names a column twice; its gradient would be counted once")
    return _Indices(kept, columns, device)


class _PrunedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_KN: Tensor, indices: _Indices) -> Tensor:
        ctx.indices, ctx.gpu = indices, matmul_for(x_MK)
        if ctx.gpu is not None:
            ctx.save_for_backward(x_MK, w_KN)
            y_MN = x_MK.new_empty(x_MK.shape[0], w_KN.shape[1])
            ctx.gpu.indexed_matmul(x_MK, w_KN, y_MN, inner=indices.kept)
            return y_MN
        x_MP, w_PN = gather_columns(x_MK, indices), gather_rows(w_KN, indices)
        ctx.save_for_backward(x_MP, w_PN)
        ctx.w_is_transposed = _is_transposed(w_KN)
        return x_MP @ w_PN

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # The kernels leave no graph: what is differentiated again would lack a part
        if torch.is_grad_enabled():
            raise RuntimeError(
                "pruned_matmul has no second derivative (create_graph=True); reference=True has one"
            )
        (dy_MN,) = gradients
        indices = ctx.indices
        x, w = ctx.saved_tensors
        dx = dw = None
        wants_x, wants_w = ctx.needs_input_grad[:2]
        if ctx.gpu is not None:
            if wants_x:
                dx = torch.zeros_like(x)
                ctx.gpu.indexed_matmul(dy_MN, w.t(), dx, columns=indices.kept)
            if wants_w:
                dw = torch.zeros_like(w)
                ctx.gpu.indexed_matmul(x.t(), dy_MN, dw, rows=indices.kept)
            return dx, dw, None
        if wants_x:
            dx = scatter_columns(dy_MN @ w.t(), indices)
        if wants_w and ctx.w_is_transposed:
            dw = scatter_columns(dy_MN.t() @ x, indices).t()
        elif wants_w:
            dw = x.new_zeros(indices.columns, dy_MN.shape[1]).index_copy_(0, indices.kept, x.t() @ dy_MN)
        return dx, dw, None


def gather_columns(x_MK: Tensor, indices: _Indices) -> Tensor:
    """x[:, kept], contiguous, in one pass over what is kept."""
    library = load() if x_MK.device.type == "cpu" else None
    if library is None or (x_MK.shape[1] > 1 and x_MK.stride(1) != 1):
        return x_MK.index_select(1, indices.kept)
    M, P = x_MK.shape[0], len(indices.native_kept)
    x_MP = x_MK.new_empty(M, P)
    check(
        library.twinbed_gather_columns(
            x_MK.data_ptr(),
            x_MK.stride(0),
            M,
            _WORDS[x_MK.dtype],
            indices.native_kept.data_ptr(),
            P,
            x_MP.data_ptr(),
        )
    )
    return x_MP


def gather_rows(w_KN: Tensor, indices: _Indices) -> Tensor:
    """w[kept, :]; of a transposed w its columns are rows in memory, and stay so."""
    return (
        gather_columns(w_KN.t(), indices).t() if _is_transposed(w_KN) else w_KN.index_select(0, indices.kept)
    )


def scatter_columns(y_MP: Tensor, indices: _Indices) -> Tensor:
    """The kept columns back in their places [M, K], zeros elsewhere: each element is written once."""
    library = load() if y_MP.device.type == "cpu" else None
    if library is None:
        return y_MP.new_zeros(y_MP.shape[0], indices.columns).index_copy_(1, indices.kept, y_MP)
    y_MP = y_MP.contiguous()
    x_MK = y_MP.new_empty(y_MP.shape[0], indices.columns)
    check(
        library.twinbed_scatter_columns(
            y_MP.data_ptr(),
            y_MP.shape[0],
            y_MP.shape[1],
            _WORDS[y_MP.dtype],
            indices.native_place.data_ptr(),
            indices.columns,
            x_MK.data_ptr(),
        )
    )
    return x_MK


def _is_transposed(w_KN: Tensor) -> bool:
    return w_KN.stride(0) == 1 and w_KN.stride(1) != 1
