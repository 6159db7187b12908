"""What this rank communicated: one row for each collective, the spans, and the decisions behind them.

Bytes come from beneath (`dispatch`): what reached torch.distributed, not what somebody meant to send. The
interpreter only says which sends belong together (`collective`); anything dispatched outside of that is a row
of its own, on the stream `library`.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, cast

from ..analysis.record import Decision, LedgerRow, Span
from ..policies.balance import (
    BalanceAction,
    BalanceEvent,
    describe_balance_actions,
    describe_balance_event,
)
from ..policies.comm import CommEvent, describe_action, describe_event
from ..policies.layout import LayerRuns, describe_layer_event
from ..policies.mesh import HPZ, LOCAL, NODE, OF_REPLICAS, PIPELINE, REPLICAS, WORLD, Mesh
from ..policies.offload import (
    OffloadAction,
    OffloadEvent,
    describe_offload_actions,
    describe_offload_event,
)
from ..policies.plan import Plan
from ..policies.wire import Sent

SETUP: Final = "setup"  # the phase that leaves no rows and no spans
LIBRARY_STREAM: Final = "library"
QUANTIZE_STREAM: Final = "quantize"
WAIT_STREAM: Final = "wait"  # the main thread waits for the communication thread
OFFLOAD_STREAM: Final = "offload"  # the main thread waits for far memory
FETCH_STREAM: Final = "fetch"  # moves from far memory and back, beside the main thread
EVICT_STREAM: Final = "evict"
COMMIT_STREAM: Final = "commit"  # copies of what stays near, for a generation that a crash leaves
BESIDE: Final = (FETCH_STREAM, EVICT_STREAM, COMMIT_STREAM)

_Event = CommEvent | OffloadEvent | LayerRuns | BalanceEvent
_Answer = Plan | tuple[OffloadAction, ...] | tuple[BalanceAction, ...] | None

_open = threading.local()  # .ledger: the one in which this thread's collective is a row


def open_ledger() -> "Ledger | None":
    """Whose collective this thread is carrying out, if any."""
    ledger: Ledger | None = getattr(_open, "ledger", None)
    return ledger


@dataclass(frozen=True, slots=True)
class Labels:
    """What a row says about the time at which its collective was asked for."""

    iteration: int = 0
    phase: str = SETUP
    layer: str = ""  # of library rows


@dataclass(frozen=True, slots=True)
class Library:
    """What rows say of a library's collectives; no axis: by the group's ranks."""

    stream: str
    layer: str
    axis: str = ""


class Ledger:
    """The record of one rank. Safe to use from several threads.

    Args:
        rank: This rank.
        mesh: Says which messages leave the node, and how groups are called.
    """

    def __init__(self, *, rank: int, mesh: Mesh) -> None:
        self.rank = rank
        self.mesh = mesh
        # Plain tuples until somebody asks: to make a record costs several times what to append a tuple does.
        self._rows: list[tuple[Any, ...]] = []
        self._spans: list[tuple[int, str, str, int, int, int]] = []
        self._decided: list[tuple[int, _Event, _Answer]] = []
        self._labels = Labels()
        self._local = (
            threading.local()
        )  # .labels: of a thread that works for an earlier time; .scope: open row
        # Of library rows. Groups of equal ranks: the last name wins
        self._axes = {mesh.group(axis, rank): axis for axis in _named(mesh)}
        self._pipeline = mesh.group(PIPELINE, rank)

    # ---- labels

    def at(self, *, iteration: int | None = None, phase: str | None = None, layer: str | None = None) -> None:
        """From now on rows are of this iteration and phase (forward, backward, step, eval or setup)."""
        now = self._labels
        self._labels = Labels(
            now.iteration if iteration is None else iteration,
            now.phase if phase is None else phase,
            now.layer if layer is None else layer,
        )

    @property
    def labels(self) -> Labels:
        """What a row of this thread would be labelled now."""
        labels: Labels = getattr(self._local, "labels", self._labels)
        return labels

    @contextmanager
    def as_of(self, labels: Labels) -> Iterator[None]:
        """On this thread, label rows as of another time: when the work was queued."""
        before = getattr(self._local, "labels", None)
        self._local.labels = labels
        try:
            yield
        finally:
            if before is None:
                del self._local.labels
            else:
                self._local.labels = before

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """What this thread communicates meanwhile is set-up, and left out."""
        with self.as_of(replace(self.labels, phase=SETUP)):
            yield

    @property
    def library(self) -> "Library | None":
        """Whose is what a library communicates on this thread, to be set around a layer that a library computes; None:
        rows are on `LIBRARY_STREAM`, of the layer that `at` was told.
        """
        of: Library | None = getattr(self._local, "library", None)
        return of

    @library.setter
    def library(self, of: "Library | None") -> None:
        self._local.library = of

    # ---- what happened

    def collective(
        self,
        *,
        op: str,
        axis: str,
        group: Sequence[int],
        payload_bytes: int,
        stream: str,
        layer: str,
        later: bool = False,
    ) -> "Collecting":
        """A `with` block: all that this thread sends inside is one row, and one span.

        Args:
            op: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, reduce_tree or send.
            axis: Mesh axis, and `group` its ranks.
            payload_bytes: The whole logical tensor before quantization.
            stream: The plan's.
            layer: The unit.
            later: The block only starts it; it has ended when `over` is called. Its row has the place of its start.
        """
        return Collecting(self, op, axis, len(group), payload_bytes, stream, layer, later=later)

    def observe(self, group: tuple[int, ...], op: str, payload_bytes: int, sent: Sent) -> None:
        """Something reached torch.distributed on this thread (called by `dispatch`)."""
        scope: Collecting | None = getattr(self._local, "scope", None)
        if scope is not None:
            scope.wire_bytes += sent.wire_bytes
            scope.inter_node_bytes += sent.inter_node_bytes
            return
        labels = self.labels
        if labels.phase == SETUP or len(group) == 1 or not payload_bytes:
            return
        of = self.library or Library(LIBRARY_STREAM, labels.layer)
        between_stages = op == "send" and group == self._pipeline
        axis = of.axis or (PIPELINE if between_stages else self._axes.get(group, "other"))
        where = (self.rank, of.stream, labels.iteration, labels.phase, of.layer)
        sizes = (payload_bytes, sent.wire_bytes, sent.inter_node_bytes)
        self._rows.append((*where, op, axis, len(group), *sizes))
        if self.library is not None:
            self._local.begun = (of.stream, f"{op} {of.layer}", time.monotonic_ns(), sent.wire_bytes)

    def library_over(self) -> None:
        """What a library began on this thread, within the layer that `library` says, was waited for: write its span."""
        begun: tuple[str, str, int, int] | None = getattr(self._local, "begun", None)
        if begun is not None:
            stream, name, start_ns, nbytes = begun
            self._spans.append((self.rank, stream, name, start_ns, time.monotonic_ns(), nbytes))
            self._local.begun = None

    def span(self, stream: str, name: str, nbytes: int = 0) -> "Timed":
        """A `with` block that takes time on `stream` (CLOCK_MONOTONIC, which all ranks of a host share)."""
        return Timed(self, stream, name, nbytes)

    def decided(self, event: CommEvent, plan: Plan | None) -> None:
        """The policy was asked, and answered."""
        self._decided.append((self.labels.iteration, event, plan))

    def decided_layer(self, event: LayerRuns, plan: Plan | None) -> None:
        """The layout was asked about a layer, and answered."""
        self._decided.append((self.labels.iteration, event, plan))

    def decided_offload(self, event: OffloadEvent, actions: tuple[OffloadAction, ...]) -> None:
        """The offload policy was asked, and answered."""
        self._decided.append((self.labels.iteration, event, actions))

    def decided_balance(self, event: BalanceEvent, actions: tuple[BalanceAction, ...] | None) -> None:
        """A balancing policy was told, and answered; None: what is in force stays."""
        self._decided.append((self.labels.iteration, event, actions))

    def moved(self, stream: str, name: str, start_ns: int, end_ns: int, nbytes: int) -> None:
        """Bytes went between near and far memory, beside what this thread does."""
        self._spans.append((self.rank, stream, name, start_ns, end_ns, nbytes))

    @property
    def rows(self) -> list[LedgerRow]:
        """All collectives so far, in the order in which they were issued."""
        return [LedgerRow(*row) for row in self._rows]

    @property
    def spans(self) -> list[Span]:
        """All spans so far, in the order in which they ended."""
        return [Span(*span) for span in self._spans]

    @property
    def num_spans(self) -> int:
        return len(self._spans)

    def spans_from(self, first: int) -> list[Span]:
        """All but the first so many of `spans`."""
        return [Span(*span) for span in self._spans[first:]]

    @property
    def decisions(self) -> list[Decision]:
        """All decisions, in the order in which the policies were asked."""
        return [
            Decision(self.rank, iteration, *_describe(event, answer))
            for iteration, event, answer in self._decided
        ]

    # ---- for the blocks above

    @property
    def open_scope(self) -> "Collecting | None":
        scope: Collecting | None = getattr(self._local, "scope", None)
        return scope

    @open_scope.setter
    def open_scope(self, scope: "Collecting | None") -> None:
        self._local.scope = scope


def _named(mesh: Mesh) -> tuple[str, ...]:
    """Axes by which groups are called, the weightiest name last."""
    if mesh.is_plain:
        return (HPZ, NODE, LOCAL, WORLD)
    replicas = tuple(OF_REPLICAS[axis] for axis in (HPZ, NODE, LOCAL))
    return (*(name for name, _ in mesh.dims), *replicas, REPLICAS, WORLD)


def _describe(event: _Event, answer: _Answer) -> tuple[str, str]:
    if isinstance(event, BalanceEvent):
        balance = cast(tuple[BalanceAction, ...] | None, answer)
        return describe_balance_event(event), describe_balance_actions(balance)
    if isinstance(answer, tuple):
        return describe_offload_event(cast(OffloadEvent, event)), describe_offload_actions(
            cast(tuple[OffloadAction, ...], answer)
        )
    if isinstance(event, LayerRuns):
        return describe_layer_event(event), describe_action(answer)
    return describe_event(cast(CommEvent, event)), describe_action(answer)


class Collecting:
    """One collective of ours, whatever it is made of."""

    __slots__ = (
        "_axis",
        "_counts",
        "_group_size",
        "_later",
        "_layer",
        "_ledger",
        "_op",
        "_payload_bytes",
        "_start_ns",
        "_stream",
        "inter_node_bytes",
        "wire_bytes",
    )

    def __init__(
        self,
        ledger: Ledger,
        op: str,
        axis: str,
        group_size: int,
        payload_bytes: int,
        stream: str,
        layer: str,
        *,
        later: bool,
    ) -> None:
        self._ledger = ledger
        self._op = op
        self._axis = axis
        self._group_size = group_size
        self._payload_bytes = payload_bytes
        self._stream = stream
        self._layer = layer
        self._later = later
        self.wire_bytes = 0
        self.inter_node_bytes = 0

    def __enter__(self) -> None:
        if self._ledger.open_scope is not None:
            raise RuntimeError(f"{self._op} of {self._layer!r} began inside of another collective")
        self._ledger.open_scope = self
        _open.ledger = self._ledger
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger.open_scope = _open.ledger = None
        if kind is not None:
            return
        ledger = self._ledger
        labels = ledger.labels
        self._counts = labels.phase != SETUP
        if self._counts:
            where = (ledger.rank, self._stream, labels.iteration, labels.phase, self._layer)
            sizes = (self._payload_bytes, self.wire_bytes, self.inter_node_bytes)
            ledger._rows.append((*where, self._op, self._axis, self._group_size, *sizes))
        if not self._later:
            self.over()

    def over(self) -> None:
        """It has ended: write its span."""
        end_ns = time.monotonic_ns()
        if not self._counts:
            return
        ledger = self._ledger
        name = f"{self._op} {self._layer}".rstrip()
        ledger._spans.append((ledger.rank, self._stream, name, self._start_ns, end_ns, self.wire_bytes))


class Timed:
    __slots__ = ("_ledger", "_name", "_nbytes", "_start_ns", "_stream")

    def __init__(self, ledger: Ledger, stream: str, name: str, nbytes: int) -> None:
        self._ledger = ledger
        self._stream = stream
        self._name = name
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = time.monotonic_ns()
        ledger = self._ledger
        if kind is None and ledger.labels.phase != SETUP:
            ledger._spans.append(
                (ledger.rank, self._stream, self._name, self._start_ns, end_ns, self._nbytes)
            )
