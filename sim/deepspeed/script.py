"""Writes the program of one rank under DeepSpeed: its host thread, its streams, and NCCL's communicators."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..interpreter import Interpreted, LocalWork, Transfer, Work
from ..program import COMPUTE, HOST, LIBRARY, MAIN, QUANTIZE, Item, Program

GATHER, REDUCE = "gather", "reduce"  # streams of local work
WAIT = "gather.wait"  # the gather stream again, from where a gather is waited for
COPY_CUT = "store_copy"  # what the interpreter calls the cutting of the node copy


@dataclass(frozen=True, slots=True)
class Row:
    """One item of a plan. `after`: rows of the same plan; without any it waits for what the plan waits for."""

    worker: str
    stream: str
    after: tuple[int, ...]
    parts: tuple[LocalWork, ...]
    transfer: Transfer | None


@dataclass(frozen=True, slots=True)
class Rows:
    """A plan for tensors of one size, ready to be written any number of times.

    Attributes:
        ends: Rows that no other waits for.
        late: What a gather leaves to whoever waits for it: local work behind its last collective.
        cut: The cutting of the node copy, which is done on release.
    """

    rows: tuple[Row, ...]
    ends: tuple[int, ...]
    late: tuple[LocalWork, ...]
    cut: LocalWork | None


def rows_of(interpreted: Interpreted, *, before: tuple[LocalWork, ...], stream: str) -> Rows:
    """The items of a plan: collectives on their communicator, local work on the stream of DeepSpeed's.

    Args:
        before: Local work that precedes the plan.
        stream: "gather" or "reduce". Only a gather leaves its last local work to who waits for it.
    """
    rows: list[Row] = []
    if before:
        rows.append(Row(stream, QUANTIZE, (), before, None))
    start = (0,) if before else ()
    late: list[LocalWork] = []
    cut: LocalWork | None = None
    stands: list[tuple[int, ...]] = []  # the rows that stand for a piece
    last_transfer = max(
        (i for i, p in enumerate(interpreted.pieces) if isinstance(p.what, Transfer)), default=-1
    )
    for number, piece in enumerate(interpreted.pieces):
        after = tuple(dict.fromkeys(row for at in piece.after for row in stands[at])) or start
        what = piece.what
        if isinstance(what, Transfer):
            rows.append(Row(f"nccl.{what.axis}", piece.stream, after, (), what))
        elif what.name == COPY_CUT:
            cut = what
            stands.append(after)
            continue
        elif stream == GATHER and number > last_transfer:
            late.append(what)
            stands.append(after)
            continue
        elif rows and rows[-1].transfer is None and after == (len(rows) - 1,):
            last = rows[-1]
            rows[-1] = Row(last.worker, QUANTIZE, last.after, (*last.parts, what), None)
        else:
            rows.append(Row(stream, QUANTIZE, after, (what,), None))
        stands.append((len(rows) - 1,))
    waited = {at for row in rows for at in row.after}
    ends = tuple(at for at in range(len(rows)) if at not in waited)
    return Rows(tuple(rows), ends, tuple(late), cut)


class Script:
    """Items in the order in which the host issues them.

    The host's time and the computation of calls between which nothing else is issued are one item each.
    """

    def __init__(self) -> None:
        self.program = Program()
        self._host_ns = 0
        self._host_waits: list[int] = []
        self._host: tuple[int, ...] = ()  # the last item of the host
        self._computation: list[LocalWork] = []
        self._at = ("", "")  # phase and unit of the computation that is not written yet
        self._waits: list[int] = []  # of the next computation
        self.computed: tuple[int, ...] = ()  # the last item of the compute stream

    def host(self, ns: int) -> None:
        self._host_ns += ns

    def host_waits(self, items: Iterable[int]) -> None:
        """The host goes on when `items` have ended. What it has launched and is not written waits with it."""
        self._host_waits += items

    def compute_waits(self, items: Sequence[int]) -> None:
        """The next computation begins when `items` have ended."""
        if items:
            self.flush()
            self._waits += items

    def compute(self, phase: str, unit: str, name: str, work: Work) -> None:
        if self._computation and self._at != (phase, unit):
            self.flush()
        self._computation.append(LocalWork(name, work))
        self._at = (phase, unit)

    def flush(self) -> None:
        """Write the computation so far; what is issued next follows it."""
        self._write_host()
        if not self._computation:
            return
        after = (*self._host, *self._waits)
        self._waits = []
        parts = tuple(self._computation)
        self._computation = []
        phase, unit = self._at
        self.computed = (self._add(MAIN, COMPUTE, phase, unit, after, parts, None),)

    def plan(self, rows: Rows, phase: str, unit: str, after: Iterable[int]) -> tuple[int, ...]:
        """Issue a plan; it begins when `after` has ended. Returns the items with which it ends."""
        self._write_host()
        begin = (*self._host, *after)
        items = self.program.items
        first = len(items)
        for row in rows.rows:
            waits = tuple([first + at for at in row.after]) if row.after else begin
            items.append(
                Item(len(items), row.worker, row.stream, phase, unit, waits, row.parts, row.transfer)
            )
        return tuple([first + at for at in rows.ends])

    def late(
        self, parts: tuple[LocalWork, ...], phase: str, unit: str, after: Iterable[int]
    ) -> tuple[int, ...]:
        """What is left of a gather, issued by who waits for it."""
        self._write_host()
        return (self._add(WAIT, QUANTIZE, phase, unit, (*self._host, *after), parts, None),)

    def main(
        self, stream: str, phase: str, unit: str, what: LocalWork | Transfer, after: Iterable[int]
    ) -> int:
        """One item on the compute stream, in its place among the computations."""
        self.flush()
        waits = (*self._host, *self._waits, *after)
        self._waits = []
        transfer = what if isinstance(what, Transfer) else None
        parts = (what,) if isinstance(what, LocalWork) else ()
        index = self._add(MAIN, stream, phase, unit, waits, parts, transfer)
        self.computed = (index,)
        return index

    def library(self, phase: str, transfer: Transfer, after: Iterable[int] = ()) -> int:
        """A collective that no plan asked for, and that the computation waits for."""
        return self.main(LIBRARY, phase, "", transfer, after)

    def everything(self) -> tuple[int, ...]:
        """The last item of each worker."""
        self.flush()
        last: dict[str, int] = {}
        for item in self.program.items:
            last[item.worker] = item.index
        return tuple(last.values())

    def _write_host(self) -> None:
        if self._host_ns or self._host_waits:
            work = LocalWork("hooks", Work("fixed", "hooks", 0, self._host_ns))
            after = tuple(self._host_waits)
            self._host = (self._add(HOST, HOST, "", "", after, (work,), None),)
            self._host_ns, self._host_waits = 0, []

    def _add(
        self,
        worker: str,
        stream: str,
        phase: str,
        unit: str,
        after: tuple[int, ...],
        parts: tuple[LocalWork, ...],
        transfer: Transfer | None,
    ) -> int:
        items = self.program.items
        items.append(Item(len(items), worker, stream, phase, unit, after, parts, transfer))
        return len(items) - 1
