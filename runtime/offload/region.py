"""A place in the address space for the tensors of one file: they stay where they are, their memory comes and goes.

FSDP2 and optimizers keep references to tensors, so these must not move when their bytes leave memory. A region is
reserved once, costs nothing until it is written to, and gives its pages back to the system when it is released.
What is read from a released region is zeros: nobody may look before the bytes have been brought in again.
"""

import contextlib
import mmap
from collections.abc import Mapping

import torch

from .header import Layout

_MAP_NORESERVE = 0x4000  # asm-generic/mman.h; Python names it from 3.13 on


class Region:
    """Whole pages (so direct I/O can go there), of which the tensors are views.

    Attributes:
        layout: The tensors' places.
        tensors: By name, of the layout's dtypes and shapes. Zeros at first.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._pages = mmap.mmap(-1, layout.padded_bytes, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._pages.madvise(mmap.MADV_HUGEPAGE)  # to fault a page in costs more than to read 4 KiB
        self._bytes = memoryview(self._pages)
        whole = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.tensors: Mapping[str, torch.Tensor] = {
            name: whole[place.begin : place.end].view(place.dtype).view(place.shape)
            for name, place in layout.tensors.items()
        }

    def chunk(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end)."""
        return self._bytes[begin:end]

    def release(self) -> None:
        """Give the memory back."""
        self._pages.madvise(mmap.MADV_DONTNEED)
