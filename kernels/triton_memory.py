# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Where the codec's Triton kernels read and write: elements in two planes, codes and scales of a message.

Shape letters as in triton_codec: T blocks of a tile, H columns of a plane, rounded up to a power of two.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def load_planes(
    at: tl.tensor, numel: tl.tensor, T: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr
) -> tl.tensor:
    """Elements [T, H] of the first and of the second halves, fp32; 0 where there are none."""
    column = tl.arange(0, H)[None, :]
    first = tl.arange(0, T)[:, None] * BLOCK + column
    second = first + BLOCK // 2
    inside = column < BLOCK // 2
    low = load_float(at + first, inside & (first < numel))
    high = load_float(at + second, inside & (second < numel))
    return low, high


@triton.jit
def store_planes(
    at: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    numel: tl.tensor,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
) -> None:
    column = tl.arange(0, H)[None, :]
    first = tl.arange(0, T)[:, None] * BLOCK + column
    second = first + BLOCK // 2
    inside = column < BLOCK // 2
    store_float(at + first, low, inside & (first < numel))
    store_float(at + second, high, inside & (second < numel))


@triton.jit
def load_float(at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """fp32 from fp32, fp16, or bf16 given as int16 (`_words`); 0 where the mask leaves out."""
    word = tl.load(at, mask=mask, other=0)
    if at.dtype.element_ty == tl.int16:
        value = (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = word.to(tl.float32)
    return value


@triton.jit
def store_float(at: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    if at.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        tl.store(at, tl.where(value != value, 0x7FC0, nearest).to(tl.int16), mask=mask)
    else:
        tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load_codes(
    at: tl.tensor,
    scale: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
) -> tl.tensor:
    """Decoded planes [T, H], fp32."""
    block = tl.arange(0, T)[:, None]
    column = tl.arange(0, H)[None, :]
    present = (column < BLOCK // 2) & (block * BLOCK < numel)
    if BITS == 8:
        low = tl.load(at + block * BLOCK + column, mask=present, other=0).to(tl.int32) << 24
        high = tl.load(at + block * BLOCK + BLOCK // 2 + column, mask=present, other=0).to(tl.int32) << 24
        low = low >> 24
        high = high >> 24
    else:
        both = tl.load(at + block * (BLOCK // 2) + column, mask=present, other=0).to(tl.int32)
        low = (both << 28) >> 28
        high = (both << 24) >> 28
    return low.to(tl.float32) * scale[:, None], high.to(tl.float32) * scale[:, None]


@triton.jit
def store_codes(
    at: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
) -> None:
    block = tl.arange(0, T)[:, None]
    column = tl.arange(0, H)[None, :]
    present = (column < BLOCK // 2) & (block * BLOCK < numel)
    if BITS == 8:
        tl.store(at + block * BLOCK + column, (low & 0xFF).to(tl.uint8), mask=present)
        tl.store(at + block * BLOCK + BLOCK // 2 + column, (high & 0xFF).to(tl.uint8), mask=present)
    else:
        both = (low & 15) | ((high & 15) << 4)
        tl.store(at + block * (BLOCK // 2) + column, both.to(tl.uint8), mask=present)


@triton.jit
def load_scales(at: tl.tensor, numel: tl.tensor, T: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Scales [T], fp32, byte by byte: they follow the codes, so at any address."""
    block = tl.arange(0, T)
    present = block * BLOCK < numel
    byte = at + 4 * block
    bits = tl.load(byte, mask=present, other=0).to(tl.int32)
    bits = bits | (tl.load(byte + 1, mask=present, other=0).to(tl.int32) << 8)
    bits = bits | (tl.load(byte + 2, mask=present, other=0).to(tl.int32) << 16)
    bits = bits | (tl.load(byte + 3, mask=present, other=0).to(tl.int32) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_scales(
    at: tl.tensor, bits: tl.tensor, numel: tl.tensor, T: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    block = tl.arange(0, T)
    present = block * BLOCK < numel
    byte = at + 4 * block
    tl.store(byte, (bits & 0xFF).to(tl.uint8), mask=present)
    tl.store(byte + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=present)
    tl.store(byte + 2, ((bits >> 16) & 0xFF).to(tl.uint8), mask=present)
    tl.store(byte + 3, ((bits >> 24) & 0xFF).to(tl.uint8), mask=present)
