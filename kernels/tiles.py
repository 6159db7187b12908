"""Where a GPU's programs find their share of a message: whole blocks of one segment each.

Shape letters: G tiles, L layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .layout import Layout, code_bytes, num_blocks

# Elements of a tile, where blocks are no longer: 32 a thread of 4 warps. A guess; `make gpu-check` measures it.
TILE_ELEMENTS = 4096
# A block is held in registers as a whole; what is longer (and block = 0) is left to plain torch.
MAX_BLOCK = 16384
_ALIGNED = 16  # elements or bytes: enough for the widest load or store of a thread


@dataclass(frozen=True, slots=True)
class Tiles:
    """A table for a kernel, and what its author may rely on.

    Args:
        table: int64 [G, 2 + 2 L] on the device: first element in a row, number of elements, and for each layout the
            byte offsets of the first codes and of the first scale.
        blocks: Of a tile, a power of two; the last tile of a segment may have fewer.
        aligned: All starts and lengths are multiples of 16, and so are the offsets of codes.
    """

    table: Tensor
    blocks: int
    aligned: bool

    @property
    def count(self) -> int:
        return self.table.shape[0]


@lru_cache(maxsize=4096)  # layouts are few and live as long (layout_of)
def tiles_of(layouts: tuple[Layout, ...], device: torch.device, *, split: bool = False) -> Tiles:
    """Tiles over the layouts, which have the same segments and the same block.

    Args:
        split: Codes and scales lie in tensors of their own, so that each starts at 0; one segment only.
    """
    first = layouts[0]
    block = first.block
    assert 0 < block <= MAX_BLOCK
    assert all((one.segments, one.block) == (first.segments, block) for one in layouts)
    assert not split or len(first.segments) == 1
    blocks = 1
    while 2 * blocks * block <= TILE_ELEMENTS:
        blocks *= 2
    parts = []
    start = 0
    offsets = [one.offsets_bytes for one in layouts]
    for index, length in enumerate(first.segments):
        skipped = torch.arange(0, num_blocks(length, block=block), blocks)  # blocks before each tile
        columns = [start + skipped * block, (length - skipped * block).clamp(max=blocks * block)]
        for one, at in zip(layouts, offsets, strict=True):
            codes = code_bytes(length, bits=one.bits, block=block)
            columns.append(at[index] + skipped * (block * one.bits // 8))
            columns.append((0 if split else at[index] + codes) + skipped * 4)
        parts.append(torch.stack(columns, dim=1))
        start += length
    table = torch.cat(parts) if parts else torch.empty(0, 2 + 2 * len(layouts), dtype=torch.int64)
    to_align = [0, 1, *range(2, table.shape[1], 2)]  # not the scales: four bytes each, and few
    aligned = bool((table[:, to_align] % _ALIGNED == 0).all()) and block % (2 * _ALIGNED) == 0
    return Tiles(table.to(device), blocks, aligned)
