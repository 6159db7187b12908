"""Where Inf or NaN stands: the first bad block, of a tensor before it is quantized or of messages after it.

Reading a tensor costs about what a sum of it does; in messages only the scales are read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import DTYPES, flat_of, messages_of
from .codec import check, native_for, native_layout
from .layout import SCALE_bytes, code_bytes, layout_of, num_blocks
from .native import load


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that was quantized from Inf or NaN: all of it reads back as NaN."""

    row: int
    segment: int
    block: int  # of the segment


def first_bad_block(x: Tensor, *, block: int, reference: bool = False) -> int | None:
    """Index of the first block of `x`, flattened, that holds Inf or NaN; None: all is finite.

    Args:
        x: fp32, bf16 or fp16, of any shape.
        block: Elements of a block, >= 1; 0: all are one block.
    """
    if block < 0:
        raise ValueError(f"block={block} must be >= 0 (0: all elements are one block)")
    flat = flat_of(x)
    numel = flat.numel()
    if numel == 0:
        return None
    library = load() if not reference and flat.device.type == "cpu" else None
    if library is not None:
        found = ctypes.c_int64()
        check(
            library.twinbed_first_bad(
                flat.data_ptr(), DTYPES[flat.dtype], numel, block or numel, ctypes.byref(found)
            )
        )
        return None if found.value < 0 else found.value
    bad = ~flat.isfinite()
    if not bool(bad.any()):
        return None
    return int(bad.to(torch.uint8).argmax()) // (block or numel)  # argmax: the first of equals


def first_bad_message(
    bufs: Tensor, *, segments: Sequence[int], bits: int, block: int, reference: bool = False
) -> BadBlock | None:
    """The first block, over rows, segments and blocks in this order, that was quantized from Inf or NaN.

    Args:
        bufs: uint8 [wire] or [rows, wire], as `encode_segments` gave it.
        segments, bits, block: As they were encoded.
    """
    layout = layout_of(segments, bits=bits, block=block)
    messages = messages_of(bufs, layout)
    library = None if reference else native_for(messages, bits)
    if library is not None:
        found = (ctypes.c_int64 * 3)()
        check(
            library.twinbed_first_bad_scale(
                messages.data_ptr(), messages.stride(0), messages.shape[0], *native_layout(layout), found
            )
        )
        return None if found[0] < 0 else BadBlock(*found)
    for row, message in enumerate(messages):
        for index, (length, offset) in enumerate(zip(layout.segments, layout.offsets_bytes, strict=True)):
            start = offset + code_bytes(length, bits=bits, block=block)
            scales = message[start : start + SCALE_bytes * num_blocks(length, block=block)].clone()
            first = first_bad_block(scales.view(torch.float32), block=1, reference=True)
            if first is not None:
                return BadBlock(row, index, first)
    return None
