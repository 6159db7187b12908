"""What the kernels take: tensors checked, as the native code and Triton read them by their addresses alone."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from .layout import Layout

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers as in element.h


def messages_of(buf: Tensor, layout: Layout) -> Tensor:
    """`buf` as [rows, wire], checked."""
    if buf.dtype != torch.uint8:
        raise ValueError(f"messages are uint8, got {buf.dtype}")
    return rows_of(buf, layout.wire_bytes, "buf")


def rows_of(x: Tensor, width: int, name: str) -> Tensor:
    """`x` as [rows, width], its last dimension contiguous, outside of autograd."""
    if x.dim() not in (1, 2) or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but these segments take [{width}] or [rows, {width}]"
        )
    x = _plain(x)
    x = x if x.dim() == 2 else x[None]
    return x if x.stride(1) == 1 or width <= 1 else x.contiguous()


def flat_of(x: Tensor) -> Tensor:
    """`x` as [numel], contiguous."""
    check_dtype(x.dtype)
    return _plain(x).reshape(-1).contiguous()


def out_rows(
    out: Tensor, rows: int, width: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Tensor:
    """`out` as [rows, width], each row with memory of its own."""
    return _written("out", out, rows, width, dtypes, device)


def out_vector(out: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out` as [numel], contiguous."""
    if out.dim() != 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be [{numel}]")
    return _written("out", out, 1, numel, (dtype,), device)[0]


def error_rows(error: Tensor, rows: int, numel: int, device: torch.device) -> Tensor:
    """Errors of as many rows, changed in place."""
    return _written("error", error, rows, numel, tuple(DTYPES), device)


def own_part(own: Tensor | None, numel: int, device: torch.device) -> Tensor | None:
    """What never travelled, contiguous."""
    if own is None:
        return None
    if own.shape != (numel,) or own.dtype not in DTYPES or own.device != device:
        raise ValueError(
            f"own is {_said(own)}; it must be [{numel}], one of {[str(d) for d in DTYPES]}, on {device}"
        )
    return _plain(own).contiguous()


@lru_cache(maxsize=256)
def row_indices(order: tuple[int, ...], rows: int) -> ctypes.Array[ctypes.c_int64]:
    """Rows in the order asked for, as the native code reads them."""
    for index in order:
        if not 0 <= index < rows:
            raise ValueError(f"order names row {index}, but x has {rows} rows")
    return (ctypes.c_int64 * len(order))(*order)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a type of elements that is not quantized."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is not supported; use one of {[str(known) for known in DTYPES]}")


def _written(
    name: str, at: Tensor, rows: int, width: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Tensor:
    view = at if at.dim() == 2 else at[None]
    apart = rows <= 1 or not width or view.stride(0) >= width
    dense = width <= 1 or view.stride(-1) == 1
    right = view.shape == (rows, width) and at.dtype in dtypes and at.device == device
    if not (right and apart and dense) or at.is_neg():
        raise ValueError(
            f"{name} is {_said(at)} with strides {at.stride()}; it must be [{rows}, {width}]"
            f"{f' or [{width}]' if rows == 1 else ''}, one of {[str(d) for d in dtypes]}, on {device}, last stride 1, "
            "rows apart"
        )
    return view.detach() if view.requires_grad else view


def _plain(x: Tensor) -> Tensor:
    """Outside of autograd, and with its signs in its memory: torch may keep a negation for later."""
    x = x.detach() if x.requires_grad else x
    return x.resolve_neg() if x.is_neg() else x


def _said(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"
