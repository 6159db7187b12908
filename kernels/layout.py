"""Sizes of quantized data: what a block, a code region and a message weigh, in bytes.

A message is what a collective sends: one after the other the segments, each as its codes followed by its
fp32 scales, one a block. A segment is a range that must not share a block with its neighbour, say one
parameter of a flat buffer.

    segment   codes: ceil(padded * bits / 8) bytes    scales: 4 bytes a block
    padded    block > 0: the length rounded up to whole blocks; block = 0: rounded up to an even number

Codes within a block (`padded` of them, the missing ones zero):

    8 bits    one signed byte a code
    4 bits    byte i holds code i in its low half and code i + block / 2 in its high half (planar: each half
              is a run of neighbours, so that packing is plain vector work); two's complement
    6, 2      four neighbours in three bytes or one, lowest bits first; two's complement
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Largest code per width: symmetric, so that -absmax and +absmax are equally far from zero.
QMAX = {8: 127, 6: 31, 4: 7, 2: 1}
SCALE_bytes = 4


def wire_bytes(numel: int, *, bits: int, block: int) -> int:
    """Bytes of a message of one segment: its codes and 4 per scale. No elements weigh nothing.

    Args:
        numel: Elements before padding.
        bits: 8, 6, 4 or 2.
        block: Elements that share a scale, a multiple of 4; 0: one scale for all.
    """
    return code_bytes(numel, bits=bits, block=block) + SCALE_bytes * num_blocks(numel, block=block)


def code_bytes(numel: int, *, bits: int, block: int) -> int:
    """Bytes of the codes alone, padding included."""
    check_format(bits=bits, block=block)
    return -(-padded_numel(numel, block=block) * bits // 8)


def num_blocks(numel: int, *, block: int) -> int:
    """Scales of a segment: one a block, short last block included; block = 0: one, if there is anything."""
    if block == 0:
        return min(numel, 1)
    return -(-numel // block)


def padded_numel(numel: int, *, block: int) -> int:
    """Codes of a segment: whole blocks; with block = 0 an even number, for two 4-bit codes share a byte."""
    if numel < 0:
        raise ValueError(f"numel must be >= 0, got {numel}")
    unit = block or 2
    return -(-numel // unit) * unit


def check_format(*, bits: int, block: int) -> None:
    """Raise ValueError unless codes of `bits` in blocks of `block` are defined."""
    if bits not in QMAX:
        raise ValueError(f"bits={bits} is not a code width; use one of {sorted(QMAX, reverse=True)}")
    if block < 0 or block % 4:
        raise ValueError(f"block={block} must be 0 (one scale for all) or a positive multiple of 4")


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One message's geometry, checked and summed up once; obtained from `layout_of`."""

    segments: tuple[int, ...]
    bits: int
    block: int
    numel: int
    wire_bytes: int
    lengths: ctypes.Array[ctypes.c_int64]  # the segments again, as the native code reads them

    @property
    def offsets_bytes(self) -> list[int]:
        """Where each segment starts in the message, [num_segments]."""
        offsets, at = [], 0
        for length in self.segments:
            offsets.append(at)
            at += wire_bytes(length, bits=self.bits, block=self.block)
        return offsets


def layout_of(segments: Sequence[int], *, bits: int, block: int) -> Layout:
    """The layout of a message of these segments; the same one is built only once."""
    return _layout(tuple(segments), bits, block)


@lru_cache(maxsize=4096)  # a model has a few hundred; a codec call must not walk them again in Python
def _layout(segments: tuple[int, ...], bits: int, block: int) -> Layout:
    check_format(bits=bits, block=block)
    for index, length in enumerate(segments):
        if length < 0:
            raise ValueError(f"segments[{index}]={length} must be >= 0")
    return Layout(
        segments=segments,
        bits=bits,
        block=block,
        numel=sum(segments),
        wire_bytes=sum(wire_bytes(length, bits=bits, block=block) for length in segments),
        lengths=(ctypes.c_int64 * len(segments))(*segments),
    )
