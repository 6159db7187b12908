"""Carries out what an offload policy decides: brings chunks near and takes them away, beside the computation."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from ...policies.offload import (
    ChunkNeeded,
    ChunkReleased,
    ChunkStep,
    Evict,
    Fetch,
    IterationBegins,
    OffloadAction,
    OffloadEvent,
    OffloadPolicy,
    Place,
    Prefetch,
)
from ..ledger import COMMIT_STREAM, EVICT_STREAM, FETCH_STREAM
from .region import Region
from .store import Store

Log = Callable[[OffloadEvent, tuple[OffloadAction, ...]], None]
Wait = Callable[[str, int], AbstractContextManager[None]]
Moved = Callable[[str, str, int, int, int], None]


class Residency:
    """Between the program, which says what it computes with, and the policy, which says what moves.

    Args:
        policy: Chunks that it has and `regions` has not hold nothing.
        store: With an entry for each region.
        regions: Where each chunk is computed with.
        log: Told of every decision.
        wait: A `with` block around the time in which the program waits for a chunk of so many bytes.
        moved: Told of every move that has ended: stream, name, start and end in ns, bytes. From any thread.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        store: Store,
        regions: Mapping[str, Region],
        *,
        log: Log,
        wait: Wait,
        moved: Moved,
    ) -> None:
        self.policy: Final = policy
        self.store: Final = store
        self.regions: Final = regions
        self._log = log
        self._wait = wait
        self._moved = moved
        self._arriving: dict[str, Future[None]] = {}
        self._leaving: list[Future[None]] = []
        self._last_read: Future[None] | None = None
        self._changed: set[str] = set()  # near, and not on disk as they are
        self._last_ns: dict[str, int] = {}  # when each stream's last move ended
        self._kind = ""  # of iteration
        self._moved_bytes: dict[str, dict[str, int]] = {}  # in the last iteration of each kind

    # ---- what the program says

    def begins(self, kind: str) -> None:
        """An iteration begins whose order of uses repeats."""
        self._kind = kind
        self._moved_bytes[kind] = _nothing()
        self._decide(IterationBegins(kind))

    def needed(self, chunk: str) -> None:
        """Until the chunk is near; it stays until it is released."""
        self._decide(ChunkNeeded(chunk))
        self._arrive(chunk)

    def step(self, chunk: str) -> None:
        """As `needed`, for optimizer states that are stepped next."""
        self._decide(ChunkStep(chunk))
        self._arrive(chunk)

    def released(self, chunk: str, *, changed: bool) -> None:
        """The use that `needed` or `step` began has ended."""
        if changed and chunk in self.regions:
            self._changed.add(chunk)
        self._decide(ChunkReleased(chunk, changed))

    def commit(self, notes: Mapping[str, Any]) -> None:
        """Make all chunks, as they are, what a crash leaves."""
        for chunk in sorted(self._changed):
            self._report(COMMIT_STREAM, chunk, self.store.write(chunk, self.regions[chunk]))
        self._changed.clear()
        self._leaving.clear()
        with self._wait("commit", 0):
            self.store.commit(notes)

    def moved_bytes(self, kind: str) -> dict[str, int]:
        """What the last iteration of this kind fetched, evicted, and wrote for a commit of what stays near."""
        return dict(self._moved_bytes.get(kind, _nothing()))

    # ---- beside the policy's order

    def adopt(self, chunk: str) -> None:
        """A region has been filled for the first time: to the store with it, and out if it begins far."""
        far = self.policy.place(chunk) is Place.far
        done = self.store.write(chunk, self.regions[chunk], release=far)
        if far:
            done.result()  # or a model as large as the disk would be in memory at once

    @contextmanager
    def visit(self, chunk: str, *, changed: bool = False) -> Iterator[Mapping[str, torch.Tensor]]:
        """Look at a chunk without telling the policy: for a checkpoint, or a test.

        Args:
            changed: It is written to.
        """
        region = self.regions[chunk]
        near = self.policy.place(chunk) is Place.near
        if near:
            self._arrive(chunk)
        else:
            self.store.read(chunk, region).result()
        yield region.tensors
        if changed:
            self.store.write(chunk, region, release=not near).result()
        elif not near:
            region.release()

    # ---- actions

    def _decide(self, event: OffloadEvent) -> None:
        actions = self.policy.decide(event)
        self._log(event, actions)
        wanted = [action.chunk for action in actions if self._carry_out(action)]
        for chunk in wanted:
            self._arrive(chunk)

    def _carry_out(self, action: OffloadAction) -> bool:
        """Begin it; whether it has to be waited for."""
        if action.chunk not in self.regions:
            return False
        match action:
            case Evict():
                self._evict(action.chunk, write_back=action.write_back)
            case Fetch() | Prefetch():
                self._read(action.chunk)
        return isinstance(action, Fetch)

    def _evict(self, chunk: str, *, write_back: bool) -> None:
        arriving = self._arriving.pop(chunk, None)
        if arriving is not None:
            arriving.result()
        if write_back:
            self._changed.discard(chunk)
            done = self.store.write(chunk, self.regions[chunk], release=True)
            self._leaving.append(done)
            self._report(EVICT_STREAM, chunk, done)
        else:
            self.regions[chunk].release()

    def _read(self, chunk: str) -> None:
        """Begin when the memory of what has left before is free, and when what was asked for before has come.

        One at a time, as the policy orders them: side by side what is needed now would wait for what is needed next.
        """
        self._leaving = [leaving for leaving in self._leaving if not _ended(leaving)]
        before = [self._last_read] if self._last_read is not None and not self._last_read.done() else []
        done = self.store.read(chunk, self.regions[chunk], after=[*self._leaving, *before])
        self._last_read = self._arriving[chunk] = done
        self._report(FETCH_STREAM, chunk, done)

    def _arrive(self, chunk: str) -> None:
        arriving = self._arriving.pop(chunk, None)
        if arriving is None:
            return
        if arriving.done():
            arriving.result()
            return
        with self._wait(chunk, self.regions[chunk].layout.nbytes):
            arriving.result()

    def _report(self, stream: str, chunk: str, done: "Future[None]") -> None:
        asked_ns, nbytes = time.monotonic_ns(), self.regions[chunk].layout.nbytes
        if self._kind:
            self._moved_bytes[self._kind][stream] += nbytes

        def ended(_: "Future[None]") -> None:
            now_ns = time.monotonic_ns()
            start_ns = max(asked_ns, self._last_ns.get(stream, 0))  # one after the other
            self._last_ns[stream] = now_ns
            self._moved(stream, f"{stream} {chunk}", start_ns, now_ns, nbytes)

        done.add_done_callback(ended)


def _nothing() -> dict[str, int]:
    return {FETCH_STREAM: 0, EVICT_STREAM: 0, COMMIT_STREAM: 0}


def _ended(future: "Future[None]") -> bool:
    """Raises what it raised."""
    if future.done():
        future.result()
        return True
    return False
