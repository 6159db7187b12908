"""Overlap on gloo: one communication thread a rank, first in first out, as a stream would be.

FSDP2 blocks in its collectives on a CPU. Here a gather is queued and FSDP2 waits for its Work where it needs
the weights; a reduction is queued and waited for before the optimizer. Ranks queue in the same order, so the
thread's collectives match.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from .ledger import WAIT_STREAM, Ledger

_STOP: Final = None


class Queued(dist.Work):
    """A task of the thread, as FSDP2 waits for it."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        super().__init__()
        self._ledger = ledger
        self._name = name
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the task is done; raises what it raised."""
        if not self._done.is_set():
            with self._ledger.span(WAIT_STREAM, f"wait {self._name}"):
                self._done.wait()  # ends: a collective whose peers are gone runs into its own timeout
        if self._error is not None:
            raise self._error
        return True


class CommThread:
    """Runs tasks in the order in which they come.

    After a task has failed the later ones are not run (their peers would wait for a rank that has lost its
    place): they fail with the same error.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Queued] | None] = queue.SimpleQueue()
        self._pending: list[Queued] = []
        self._thread = threading.Thread(target=self._loop, name="twinbed-comm", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None], name: str) -> Queued:
        """Queue a task; its rows are labelled as of now."""
        ledger, labels = self._ledger, self._ledger.labels

        def labelled() -> None:
            with ledger.as_of(labels):
                task()

        work = Queued(ledger, name)
        self._pending.append(work)
        self._tasks.put((labelled, work))
        return work

    def drain(self) -> None:
        """Wait for all tasks; raises what the first failed one raised."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()

    def close(self) -> None:
        """Let the thread end after the tasks that are queued."""
        self._tasks.put(_STOP)
        self._thread.join(timeout=1.0)

    def _loop(self) -> None:
        failed: BaseException | None = None
        with torch.no_grad():
            while (item := self._tasks.get()) is not _STOP:
                task, work = item
                if failed is None:
                    try:
                        task()
                    except BaseException as err:
                        failed = err
                work.finish(failed)
                del item, task, work  # they hold tensors
