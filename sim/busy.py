"""Computation that goes slower while a collective runs on the same device."""

from collections.abc import Generator, Sequence
from typing import Any

from .costs import Costs
from .interpreter import LocalWork


class Busy:
    """Whether collectives run on one rank.

    A collective's kernels hold multiprocessors from their launch on, also while they wait for other ranks. Messages
    between two ranks, of one or two channels, are not counted.
    """

    def __init__(self) -> None:
        self._running = 0
        self._watchers: list[Any] = []

    @property
    def running(self) -> bool:
        return self._running > 0

    def watch(self, event: Any) -> None:
        """Let `event` fire when the first collective begins or the last one ends."""
        self._watchers.append(event)

    def begin(self) -> None:
        self._running += 1
        if self._running == 1:
            self._changed()

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            self._changed()

    def _changed(self) -> None:
        watchers, self._watchers = self._watchers, []
        for event in watchers:
            if not event.triggered:
                event.succeed()


def beside_collectives(
    env: Any, busy: Busy, parts: Sequence[LocalWork], costs: Costs
) -> Generator[Any, Any, None]:
    """Do `parts`, each at its own pace while no collective runs and slower while one does."""
    for part in parts:
        left_ns, slowdown = float(costs.ns(part.work)), costs.slowdown(part.work)
        while left_ns >= 0.5:
            pace = 1.0 / slowdown if busy.running else 1.0
            since_ns, over = env.now, env.event()
            if slowdown > 1.0:
                busy.watch(over)
            env.timeout(max(1, round(left_ns / pace))).callbacks.append(
                lambda _, over=over: None if over.triggered else over.succeed()
            )
            yield over
            left_ns -= (env.now - since_ns) * pace
