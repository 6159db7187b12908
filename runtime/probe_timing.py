"""Timing calls on all ranks at once."""

import time
from collections.abc import Callable, Sequence
from typing import Any

BATCHES = 5  # spread over the probe, each of REPEATS in a row: fixed costs wander within a second
REPEATS = 8
MATMUL_SIZE = 256
WORK_BYTES = 4 << 20


def agreed_mean(values: Sequence[float]) -> list[float]:
    """Means over ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return list((tensor / dist.get_world_size()).tolist())


def timed(call: Callable[[], object], repeats: int) -> float:
    """Mean seconds of one call, all ranks having started together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():  # calls return once they are on their stream
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


class Work:
    """A few milliseconds of computation that leave caches cold, as an iteration has between two collectives."""

    def __init__(self, device: Any) -> None:
        import torch

        self._a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
        self._memory = torch.zeros(WORK_BYTES // 4, device=device)

    def __call__(self) -> None:
        self._a @ self._a
        self._memory.add_(1.0)


def timed_between_work(call: Callable[[], object], work: Callable[[], object], repeats: int) -> float:
    """Mean seconds that `call` adds to a loop of `work`: with the waking of threads and the waiting for each other
    that calls in a row do not show."""

    def both() -> None:
        work()
        call()

    return max(0.0, timed(both, repeats) - timed(work, repeats))
