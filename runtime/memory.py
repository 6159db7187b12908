"""Measured bytes of a rank's tensors by class, and the peak of the process."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor


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
