"""Where an iteration's time goes: consecutive laps, each named after the unit that was at work.

Nothing is left out between two laps, so that the laps of an iteration add up to it. A lap holds all that was
done for its unit on this thread: its own computation, and FSDP's copies and collectives for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

PIPELINE_LAP: Final = "pipeline"  # between two passes of a stage: messages, and waits for them


class Clock(Protocol):
    def lap(self, name: str) -> None:
        """The time since the last lap belongs to `name`."""


@dataclass(frozen=True, slots=True)
class Lap:
    name: str  # "forward/root", "forward/block.0", "backward/block.0", "step", ...
    start_ns: int
    end_ns: int


class Laps:
    """A stopwatch on the clock that the ledger's spans use.

    Args:
        synchronize: Waits for the device before the watch is read, where work runs asynchronously.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._last_ns: int | None = None
        self.laps: list[Lap] = []

    def start(self) -> int:
        """Begin to measure; returns the time."""
        self._last_ns = self._now_ns()
        return self._last_ns

    def lap(self, name: str) -> None:
        if self._last_ns is None:  # between iterations, as in a validation
            return
        now = self._now_ns()
        self.laps.append(Lap(name, self._last_ns, now))
        self._last_ns = now

    def stop(self, name: str) -> int:
        """The last lap of an iteration; returns the time."""
        self.lap(name)
        assert self._last_ns is not None, "stop without start"
        end_ns, self._last_ns = self._last_ns, None
        return end_ns

    def _now_ns(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return time.monotonic_ns()


class _Boundary(torch.autograd.Function):
    """Ends a lap when the activations pass forward, and another when their gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, forward: str, backward: str) -> torch.Tensor:
        ctx.clock, ctx.name = clock, backward
        clock.lap(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.clock.lap(ctx.name)
        return gradients[0], None, None, None


def boundary(x: torch.Tensor, clock: Clock | None, *, forward: str, backward: str) -> torch.Tensor:
    """Mark a border between two units.

    Args:
        x: The activations that cross it.
        forward: The lap that ends when they do.
        backward: The lap that ends when their gradient does.
    """
    if clock is None:
        return x
    marked: torch.Tensor = _Boundary.apply(x, clock, forward, backward)  # type: ignore[no-untyped-call]
    return marked


def _at_full_speed() -> float:
    return 1.0


class Pace:
    """Stretches a unit's computation to a calibrated length: the device that the CPU stands for, or a rank made slow.

    The real mathematics is done within that time; what is left of it is slept away. If the CPU is slower than
    the pace, its own time stands.

    Args:
        sequence_ns: Forward, of one of the sequences that go in together, at full speed; None: what was measured.
        recompute: Backward repeats forward first.
        slow: Says how many times as long it takes now.
        synchronize: Waits for the device, where work runs asynchronously.
    """

    def __init__(
        self,
        sequence_ns: float | None,
        *,
        recompute: bool,
        slow: Callable[[], float] = _at_full_speed,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._sequence_ns = sequence_ns
        self._times_backward = 3 if recompute else 2
        self.forward_ns: int | None = None  # of the sequences that are here
        self._slow, self._synchronize = slow, synchronize
        self._forward_began_ns = self._backward_began_ns = 0

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """At the unit's input, [sequences, ...]."""
        if self._sequence_ns is not None:
            self.forward_ns = round(len(x) * self._sequence_ns)
        entered: torch.Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """At the unit's output."""
        left: torch.Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]
        return left

    def forward_begins(self) -> None:
        self._forward_began_ns = time.monotonic_ns()

    def forward_ends(self) -> None:
        self._end(self._forward_began_ns, self.forward_ns)

    def backward_begins(self) -> None:
        self._backward_began_ns = time.monotonic_ns()

    def backward_ends(self) -> None:
        self._end(self._backward_began_ns, self.forward_ns, self._times_backward)

    def _end(self, began_ns: int, forward_ns: int | None, times: int = 1) -> None:
        factor = self._slow()
        at_full_speed_ns = None if forward_ns is None else times * forward_ns
        if at_full_speed_ns is None:
            if factor == 1:
                return
            if self._synchronize is not None:
                self._synchronize()
            at_full_speed_ns = time.monotonic_ns() - began_ns
        sleep_until(began_ns + round(factor * at_full_speed_ns))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace) -> torch.Tensor:
        ctx.pace = pace
        pace.forward_begins()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.pace.backward_ends()
        return gradients[0], None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace) -> torch.Tensor:
        ctx.pace = pace
        pace.forward_ends()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.pace.backward_begins()
        return gradients[0], None


def sleep_until(end_ns: int) -> None:
    """On the clock of `time.monotonic_ns`."""
    left_ns = end_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
