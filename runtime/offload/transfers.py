"""Reads and writes beside the computation: a few threads that each move one chunk at a time.

xxhash and the system calls let go of the interpreter's lock, so checksums of one chunk are computed while another
is on its way.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Transfers:
    """First in, first out.

    Args:
        num_threads: Requests in flight at once.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="twinbed-offload")

    def start(
        self,
        chunks: Sequence[Callable[[], T]],
        finish: Callable[[list[T]], None],
        *,
        after: Sequence["Future[None]"] = (),
    ) -> "Future[None]":
        """Run all chunks, then `finish` with what they gave.

        Args:
            chunks: At least one.
            finish: On one of the threads.
            after: Nothing begins before these have ended.

        Returns:
            Done when nobody touches the memory any more, also after an error, which it then raises.
        """
        job = _Job(self._pool, chunks, finish)
        job.begin_after(after)
        return job.done

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown(wait=True, cancel_futures=False)


class _Job(Generic[T]):
    def __init__(
        self, pool: ThreadPoolExecutor, chunks: Sequence[Callable[[], T]], finish: Callable[[list[T]], None]
    ) -> None:
        self.done: Future[None] = Future()
        self._pool = pool
        self._chunks = chunks
        self._finish = finish
        self._results: dict[int, T] = {}
        self._error: BaseException | None = None
        self._left = len(chunks)
        self._lock = threading.Lock()
        self._waits_for = 0

    def begin_after(self, others: Sequence["Future[None]"]) -> None:
        self._waits_for = len(others)
        for other in others:
            other.add_done_callback(self._other_ended)
        if not others:
            self._begin()

    def _other_ended(self, other: "Future[None]") -> None:
        with self._lock:
            self._waits_for -= 1
            last = self._waits_for == 0
        if last:
            self._begin()

    def _begin(self) -> None:
        for index in range(len(self._chunks)):
            self._pool.submit(self._run, index)

    def _run(self, index: int) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._chunks[index]()
        except BaseException as err:
            error = err
        with self._lock:
            if error is None:
                self._results[index] = result  # type: ignore[assignment]
            elif self._error is None:
                self._error = error
            self._left -= 1
            last = self._left == 0
        if not last:
            return
        if self._error is None:
            try:
                self._finish([self._results[i] for i in range(len(self._chunks))])
            except BaseException as err:
                self._error = err
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(None)
