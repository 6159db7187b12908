"""What products took, by half of a block: between a clock's marks on a CPU, between events of a stream on a GPU."""

import time

import torch

from ...policies.balance import Half

Mark = int | torch.cuda.Event


class Stopwatch:
    """Adds up until it is read.

    A GPU's events are only looked at then: nothing waits for the device in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._ns = dict.fromkeys(Half, 0)
        self._events: list[tuple[Half, torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self) -> Mark:
        """Now: on the current stream, of a GPU."""
        if not self._on_gpu:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, half: Half, since: Mark) -> None:
        """What has passed since a mark was of a product of `half`."""
        if isinstance(since, int):
            self._ns[half] += time.monotonic_ns() - since
            return
        until = self.mark()
        assert isinstance(until, torch.cuda.Event)
        self._events.append((half, since, until))

    def read(self) -> dict[Half, int]:
        """Nanoseconds of each half since the last time; begins anew."""
        for half, since, until in self._events:
            until.synchronize()
            self._ns[half] += round(since.elapsed_time(until) * 1e6)
        self._events.clear()
        found, self._ns = self._ns, dict.fromkeys(Half, 0)
        return found
