"""Memory that a rank may still use, for what others would lend it."""

from pathlib import Path

import torch


def free_bytes(device: torch.device, *, device_bytes: float, ranks_here: int) -> int:
    """Of a GPU what its driver says; of a CPU what is left of `cluster.device.memory_bytes` beside the process's
    resident set, at most this rank's share of what the machine has left.

    Args:
        ranks_here: Ranks on this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    left = int(device_bytes) - bytes_of(Path("/proc/self/status"), "VmRSS")
    return max(0, min(left, bytes_of(Path("/proc/meminfo"), "MemAvailable") // ranks_here))


def bytes_of(path: Path, field: str) -> int:
    """A line such as "VmRSS:  1234 kB"."""
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise RuntimeError(f"{path} has no {field}")
