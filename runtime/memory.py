"""Measured bytes of a rank's tensors by class, and the peak of the process."""

import contextlib
import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

# M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h, at the values that glibc begins with; set, they do
# not grow any more
_RETURN = {-1: 1 << 17, -2: 1 << 17, -3: 1 << 17}
_KEEP = {  # with the variables that set them, and what the thresholds grow to where nothing does
    -1: ("MALLOC_TRIM_THRESHOLD_", 1 << 26),
    -2: ("MALLOC_TOP_PAD_", 1 << 17),
    -3: ("MALLOC_MMAP_THRESHOLD_", 1 << 25),
}
_INT_MAX = 2**31 - 1  # mallopt takes an int


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes on this rank; of a sharded tensor its shard. A storage that two tensors share counts once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen[local.data_ptr()] = max(seen.get(local.data_ptr(), 0), local.numel() * local.element_size())
    return sum(seen.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    return local_bytes(
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    )


class PeakMemory:
    """The most that the process held since this object was made: of the device, or resident on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):  # then it is the peak since the process started
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM

    def read_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0


def use_huge_pages() -> None:
    """Ask torch for huge pages under tensors of 2 MiB and more; to be called before it makes the first one.

    A process that returns freed memory faults it in again and again: a copy of 12.6 MB into a new tensor took 5.1 ms
    with pages of 4 KiB and 1.4 ms with huge ones. Kernels without them give small pages.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def return_freed_memory() -> None:
    """From now on large blocks go back to the system when they are freed, and so does what is free already.

    glibc keeps freed blocks for later ones (up to 32 MiB each, once it has seen such), which is faster, and of no
    use to a process that must stay small. On other C libraries nothing happens.
    """
    _set_malloc(_RETURN)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """The opposite, as the process began: by what its environment says, or about as glibc comes to do by itself."""
    _set_malloc({key: int(os.environ.get(name, default)) for key, (name, default) in _KEEP.items()})


def _set_malloc(values: Mapping[int, int]) -> None:
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        for parameter, value in values.items():
            libc.mallopt(parameter, min(value, _INT_MAX))
