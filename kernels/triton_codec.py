# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The codec on a GPU: one Triton program a tile of whole blocks. Formats: layout.py. Twin in plain torch: reference.py.

Every float operation is one IEEE operation of the twin, so both give equal bits: divisions are `div_rn` (the plain one
of a GPU is not IEEE), rounding is the addition of 1.5 * 2^23 (libdevice's `rint` does not run in the interpreter), and
kernels are compiled without contraction to fused multiply-adds (`_STRICT`).

A block is held in two planes, its first and its second half: that is how 4-bit codes are packed. Shape letters: T
blocks of a tile, H columns of a plane, rounded up to a power of two.

With TRITON_INTERPRET=1 in the environment before the import the same kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from .layout import QMAX, Layout
from .tiles import Tiles, tiles_of
from .triton_memory import load_codes, load_planes, load_scales, store_codes, store_planes, store_scales

_STRICT: dict[str, Any] = {"enable_fp_fusion": False}

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum's low bits are the nearest even integer
_TINY = tl.constexpr(2.0**-60)  # as in reference.py
_LIFT = tl.constexpr(2.0**64)
_LARGEST = tl.constexpr(float.fromhex("0x1.fffff8p127"))
_INFINITE = tl.constexpr(0x7F800000)  # bits of Inf: NaN is above, every finite magnitude below
_QUIET_NAN = tl.constexpr(0x7FC00000)
_FLOAT16_MAX = tl.constexpr(65504.0)


# ---- what codec.py, reduce.py and feedback.py call ----


def encode(
    rows: Tensor,
    layout: Layout,
    order: Sequence[int] | None,
    out: Tensor,
    *,
    error: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """Write the message of each row, in `order`, into `out` [rows, wire]; with `error` [rows, n] in place."""
    _encode(rows, layout, order, out, out, tiles_of((layout,), rows.device), error, beta)


def encode_split(flat: Tensor, layout: Layout, codes: Tensor, scales: Tensor) -> None:
    """The same for one segment, with codes and scales apart."""
    tiles = tiles_of((layout,), flat.device, split=True)
    _encode(flat[None], layout, None, codes[None], scales.view(torch.uint8)[None], tiles, None, 0.0)


def decode(messages: Tensor, layout: Layout, out: Tensor, *, accumulate: bool) -> None:
    """Write, or add, the values of each message into `out` [rows, n]."""
    _decode(messages, messages, layout, out, tiles_of((layout,), messages.device), accumulate)


def decode_split(codes: Tensor, scales: Tensor, layout: Layout, out: Tensor) -> None:
    """The same for one segment, with codes and scales apart."""
    tiles = tiles_of((layout,), codes.device, split=True)
    _decode(codes[None], scales.view(torch.uint8)[None], layout, out[None], tiles, False)


def reduce(messages: Tensor, own: Tensor | None, layout: Layout, out: Tensor) -> None:
    """Sum of `own` and of the messages' values into `out` [n], fp32."""
    tiles = tiles_of((layout,), messages.device)
    if tiles.count:
        _reduce_kernel[(tiles.count,)](
            messages,
            messages.stride(0),
            messages.shape[0],
            messages if own is None else _words(own),
            tiles.table,
            out,
            HAS_OWN=own is not None,
            BITS=layout.bits,
            **_geometry(tiles, layout),
        )


def reduce_encode(
    messages: Tensor,
    own: Tensor | None,
    layout: Layout,
    target: Layout,
    out: Tensor,
    *,
    error: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """The message of that sum into `out` [wire]; `layout` and `target` have the same block."""
    tiles = tiles_of((layout, target), messages.device)
    if tiles.count:
        _reduce_encode_kernel[(tiles.count,)](
            messages,
            messages.stride(0),
            messages.shape[0],
            messages if own is None else _words(own),
            tiles.table,
            out,
            out if error is None else _words(error),
            beta,
            1.0 - beta,
            HAS_OWN=own is not None,
            HAS_ERROR=error is not None,
            BITS=layout.bits,
            OUT_BITS=target.bits,
            QMAX=QMAX[target.bits],
            **_geometry(tiles, layout),
        )


def _encode(
    rows: Tensor,
    layout: Layout,
    order: Sequence[int] | None,
    codes: Tensor,
    scales: Tensor,
    tiles: Tiles,
    error: Tensor | None,
    beta: float,
) -> None:
    num_out = codes.shape[0]
    if not tiles.count or not num_out:
        return
    _encode_kernel[(tiles.count, num_out)](
        _words(rows),
        rows.stride(0),
        rows if order is None else _on_device(tuple(order), rows.device),
        tiles.table,
        codes,
        scales,
        codes.stride(0),
        codes if error is None else _words(error),
        0 if error is None else error.stride(0),
        beta,
        1.0 - beta,
        HAS_ORDER=order is not None,
        HAS_ERROR=error is not None,
        BITS=layout.bits,
        QMAX=QMAX[layout.bits],
        **_geometry(tiles, layout),
    )


def _decode(
    codes: Tensor, scales: Tensor, layout: Layout, out: Tensor, tiles: Tiles, accumulate: bool
) -> None:
    if not tiles.count or not out.shape[0]:
        return
    _decode_kernel[(tiles.count, out.shape[0])](
        codes,
        scales,
        codes.stride(0),
        tiles.table,
        _words(out),
        out.stride(0),
        ADD=accumulate,
        BITS=layout.bits,
        **_geometry(tiles, layout),
    )


def _words(x: Tensor) -> Tensor:
    """bf16 as the words that it is stored in: the interpreter truncates where a GPU rounds."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _geometry(tiles: Tiles, layout: Layout) -> dict[str, Any]:
    half = layout.block // 2
    return {
        "T": tiles.blocks,
        "BLOCK": layout.block,
        "H": triton.next_power_of_2(half),
        "ALIGN": 16 if tiles.aligned else 1,
        "num_warps": 8 if layout.block > 4096 else 4,
        **_STRICT,
    }


@lru_cache(maxsize=256)
def _on_device(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, dtype=torch.int64, device=device)


# ---- on the device: the arguments are pointers, numbers and, in capitals, constants of the compilation ----


@triton.jit
def _encode_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    order: tl.tensor,
    table: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out_stride: tl.tensor,
    error: tl.tensor,
    error_stride: tl.tensor,
    keep: tl.tensor,
    take: tl.tensor,
    HAS_ORDER: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    BITS: tl.constexpr,
    QMAX: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    tile = table + tl.program_id(0) * 4
    start = tl.multiple_of(tl.load(tile), ALIGN)
    numel = tl.multiple_of(tl.load(tile + 1), ALIGN)
    codes_at = tl.multiple_of(tl.load(tile + 2), ALIGN)
    row = tl.program_id(1).to(tl.int64)
    source = row
    if HAS_ORDER:
        source = tl.load(order + row)
    low, high = load_planes(x + source * x_stride + start, numel, T, BLOCK, H)
    if HAS_ERROR:
        at = error + row * error_stride + start
        old_low, old_high = load_planes(at, numel, T, BLOCK, H)
        low = low + old_low
        high = high + old_high
    low_codes, high_codes, scale, poisoned = _quantize(low, high, QMAX, T)
    store_codes(codes + row * out_stride + codes_at, low_codes, high_codes, numel, BITS, T, BLOCK, H)
    store_scales(scales + row * out_stride + tl.load(tile + 3), scale, numel, T, BLOCK)
    if HAS_ERROR:
        new_low = _new_error(old_low, low, low_codes, scale, poisoned, keep, take)
        new_high = _new_error(old_high, high, high_codes, scale, poisoned, keep, take)
        if error.dtype.element_ty == tl.float16:
            new_low = tl.minimum(tl.maximum(new_low, -_FLOAT16_MAX), _FLOAT16_MAX)
            new_high = tl.minimum(tl.maximum(new_high, -_FLOAT16_MAX), _FLOAT16_MAX)
        store_planes(at, new_low, new_high, numel, T, BLOCK, H)


@triton.jit
def _decode_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    ADD: tl.constexpr,
    BITS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    tile = table + tl.program_id(0) * 4
    start = tl.multiple_of(tl.load(tile), ALIGN)
    numel = tl.multiple_of(tl.load(tile + 1), ALIGN)
    codes_at = tl.multiple_of(tl.load(tile + 2), ALIGN)
    row = tl.program_id(1).to(tl.int64)
    scale = load_scales(scales + row * stride + tl.load(tile + 3), numel, T, BLOCK)
    low, high = load_codes(codes + row * stride + codes_at, scale, numel, BITS, T, BLOCK, H)
    to = out + row * out_stride + start
    if ADD:
        old_low, old_high = load_planes(to, numel, T, BLOCK, H)
        low = old_low + low
        high = old_high + high
    store_planes(to, low, high, numel, T, BLOCK, H)


@triton.jit
def _reduce_kernel(
    messages: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    own: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    HAS_OWN: tl.constexpr,
    BITS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    tile = table + tl.program_id(0) * 4
    start = tl.multiple_of(tl.load(tile), ALIGN)
    numel = tl.multiple_of(tl.load(tile + 1), ALIGN)
    codes_at = tl.multiple_of(tl.load(tile + 2), ALIGN)
    low, high = _sum(
        messages, stride, count, own + start, codes_at, tl.load(tile + 3), numel, HAS_OWN, BITS, T, BLOCK, H
    )
    store_planes(out + start, low, high, numel, T, BLOCK, H)


@triton.jit
def _reduce_encode_kernel(
    messages: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    own: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    error: tl.tensor,
    keep: tl.tensor,
    take: tl.tensor,
    HAS_OWN: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    BITS: tl.constexpr,
    OUT_BITS: tl.constexpr,
    QMAX: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    tile = table + tl.program_id(0) * 6
    start = tl.multiple_of(tl.load(tile), ALIGN)
    numel = tl.multiple_of(tl.load(tile + 1), ALIGN)
    codes_at = tl.multiple_of(tl.load(tile + 2), ALIGN)
    out_codes_at = tl.multiple_of(tl.load(tile + 4), ALIGN)
    low, high = _sum(
        messages, stride, count, own + start, codes_at, tl.load(tile + 3), numel, HAS_OWN, BITS, T, BLOCK, H
    )
    if HAS_ERROR:
        old_low, old_high = load_planes(error + start, numel, T, BLOCK, H)
        low = low + old_low
        high = high + old_high
    low_codes, high_codes, scale, poisoned = _quantize(low, high, QMAX, T)
    store_codes(out + out_codes_at, low_codes, high_codes, numel, OUT_BITS, T, BLOCK, H)
    store_scales(out + tl.load(tile + 5), scale, numel, T, BLOCK)
    if HAS_ERROR:
        new_low = _new_error(old_low, low, low_codes, scale, poisoned, keep, take)
        new_high = _new_error(old_high, high, high_codes, scale, poisoned, keep, take)
        if error.dtype.element_ty == tl.float16:
            new_low = tl.minimum(tl.maximum(new_low, -_FLOAT16_MAX), _FLOAT16_MAX)
            new_high = tl.minimum(tl.maximum(new_high, -_FLOAT16_MAX), _FLOAT16_MAX)
        store_planes(error + start, new_low, new_high, numel, T, BLOCK, H)


@triton.jit
def _sum(
    messages: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    own: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    numel: tl.tensor,
    HAS_OWN: tl.constexpr,
    BITS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
) -> tl.tensor:
    """Own part plus all messages, in order: they never leave the registers."""
    if HAS_OWN:
        low, high = load_planes(own, numel, T, BLOCK, H)
    else:
        low = tl.zeros([T, H], tl.float32)
        high = tl.zeros([T, H], tl.float32)
    message = messages
    for _ in range(count):
        scale = load_scales(message + scales_at, numel, T, BLOCK)
        more_low, more_high = load_codes(message + codes_at, scale, numel, BITS, T, BLOCK, H)
        low = low + more_low
        high = high + more_high
        message += stride
    return low, high


@triton.jit
def _quantize(low: tl.tensor, high: tl.tensor, QMAX: tl.constexpr, T: tl.constexpr) -> tl.tensor:
    """Codes [T, H] of both planes as int32 whose low bits count, bits of the scales [T], and which are poisoned."""
    low_top = tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    high_top = tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    top = tl.maximum(low_top, high_top)  # as integers NaN > Inf > every finite number
    poisoned = top >= _INFINITE
    absmax = tl.where(poisoned, 0, top).to(tl.float32, bitcast=True)
    qmax = tl.full([T], QMAX, tl.float32)
    scale = tl.div_rn(tl.minimum(absmax, _LARGEST), qmax)
    lift = tl.where(absmax < _TINY, _LIFT, 1.0)
    empty = absmax == 0.0  # all zeros, or poisoned
    inverse = tl.where(empty, 0.0, tl.div_rn(qmax, tl.where(empty, 1.0, absmax * lift)))
    low = tl.where(poisoned[:, None], 0.0, low) * lift[:, None] * inverse[:, None] + _ROUND
    high = tl.where(poisoned[:, None], 0.0, high) * lift[:, None] * inverse[:, None] + _ROUND
    scale_bits = tl.where(poisoned, _QUIET_NAN, scale.to(tl.int32, bitcast=True))
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True), scale_bits, poisoned


@triton.jit
def _new_error(
    old: tl.tensor,
    total: tl.tensor,
    codes: tl.tensor,
    scale_bits: tl.tensor,
    poisoned: tl.tensor,
    keep: tl.tensor,
    take: tl.tensor,
) -> tl.tensor:
    """The moving average of what the codes lost; a poisoned block starts anew, or it would never recover."""
    scale = tl.where(poisoned, 0, scale_bits).to(tl.float32, bitcast=True)
    decoded = ((codes << 24) >> 24).to(tl.float32) * scale[:, None]
    lost = tl.where(poisoned[:, None], 0.0, total) - decoded
    old = tl.where(poisoned[:, None], 0.0, old)
    return keep * old + take * lost
