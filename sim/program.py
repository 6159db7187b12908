"""What one rank does in a stretch of training, as a list of items on first-in-first-out workers.

An engine model writes it; `executor` runs it in simulated time, one copy a rank.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from ..policies.balance import Half
from .far import Move
from .interpreter import Interpreted, LocalWork, Transfer, Work

MAIN = "main"  # the worker of the thread that computes
COMPUTE = "compute"  # the stream that shows it
QUANTIZE = "quantize"
LIBRARY = "library"
HOST = "host"  # a host thread's own time: no work of the device


@dataclass(slots=True, eq=False)
class Item:
    """A stretch of one worker. `after`: indices of items on other workers that must end first.

    `product`: a product, or attention. `half`: of a block, of whose products it is one; None: something else.
    `tag` names a transfer among those of its segment: ranks with programs of their own meet where it is equal.
    None: the item's index, which is right where all ranks run one program.
    """

    index: int
    worker: str
    stream: str  # where ledger and timeline show it
    phase: str
    unit: str
    after: tuple[int, ...]
    parts: tuple[LocalWork, ...] = ()
    transfer: Transfer | None = None
    only_root: bool = False  # the other ranks have nothing to do here
    tag: Hashable = None
    # collectives that `parts` contain, with the stream that shows them and how often each is there: their time is
    # part of the item's, for nothing else of the rank can come between
    inside: tuple[tuple[Transfer, str, int], ...] = ()
    move: Move | None = (
        None  # in place of all these: a copy between near and far memory, or a step in the host's
    )
    product: bool = False
    half: Half | None = None


@dataclass(slots=True)
class Program:
    """Items in the order of issue; each worker takes its own in that order.

    `compact`: equal collectives of a step are one row of the ledger (a pipeline has thousands).
    """

    items: list[Item] = field(default_factory=list)
    compact: bool = False

    def tag_by_axis(self) -> None:
        """Let collectives without a tag meet by their number among those of their axis: right where ranks that run
        programs of different length issue the same ones in the same order.
        """
        numbers: Counter[str] = Counter()
        for item in self.items:
            if item.transfer is not None and item.tag is None:
                item.tag = ("nth", item.transfer.axis, numbers[item.transfer.axis])
                numbers[item.transfer.axis] += 1

    def workers(self) -> dict[str, list[Item]]:
        by_worker: dict[str, list[Item]] = {MAIN: []}
        for item in self.items:
            by_worker.setdefault(item.worker, []).append(item)
        return by_worker


class Writer:
    """Writes a program.

    Args:
        merge: Let consecutive local steps of one stream be one item: right where nothing shares the device.
    """

    def __init__(self, *, merge: bool) -> None:
        self.program = Program()
        self._merge = merge
        self._last: dict[str, Item] = {}
        self._joins: dict[str, tuple[int, ...]] = {}  # what the next item of a worker waits for besides

    def last(self, worker: str) -> tuple[int, ...]:
        """The item that `worker` will have ended when it has ended all so far."""
        item = self._last.get(worker)
        return () if item is None else (item.index,)

    def catch_up(self) -> None:
        """Take note of items that were put into the program past the writer."""
        self._last = {item.worker: item for item in self.program.items}

    def everything(self, besides: Collection[str] = ()) -> tuple[int, ...]:
        """The last items of all workers but some."""
        return tuple(item.index for worker, item in self._last.items() if worker not in besides)

    def local(
        self,
        worker: str,
        stream: str,
        phase: str,
        unit: str,
        name: str,
        work: Work,
        after: Iterable[int] = (),
        *,
        only_root: bool = False,
        product: bool = False,
        half: Half | None = None,
    ) -> int:
        part = LocalWork(name, work)
        item = self._add(worker, stream, phase, unit, after, (part,), None, only_root)
        item.product, item.half = product, half
        return item.index

    def transfer(
        self,
        worker: str,
        stream: str,
        phase: str,
        unit: str,
        transfer: Transfer,
        after: Iterable[int] = (),
        *,
        tag: Hashable = None,
    ) -> int:
        return self._add(worker, stream, phase, unit, after, (), transfer, False, tag).index

    def move(self, phase: str, unit: str, name: str, move: Move, after: Iterable[int] = ()) -> int:
        """A move on the worker of its way."""
        worker = move.way.value
        part = LocalWork(name, Work("fixed"))
        item = self._add(worker, worker, phase, unit, after, (part,), None, False)
        item.move = move
        return item.index

    def plan(
        self,
        interpreted: Interpreted,
        phase: str,
        unit: str,
        *,
        worker: str | None,
        after: Iterable[int] = (),
        tag: Hashable = None,
    ) -> tuple[int, ...]:
        """All pieces of a plan. What runs beside has workers of its own, apart from its local work and its other
        collectives.

        Args:
            worker: Carries the plan out, and is not done with it before all of it has ended; collectives beside are
                posted at once. None: the plan's stream, and each other stream is first in, first out.
            after: Holds for every piece that waits for no other.
            tag: Of the plan; its transfers are counted behind it.

        Returns:
            Indices of the items with which the plan ends.
        """
        begin = tuple(after)
        index: list[int] = []
        open_ends: dict[int, None] = {}
        for piece in interpreted.pieces:
            if not piece.beside:
                on = worker if worker is not None else interpreted.stream
            else:
                on = f"{piece.stream}/{piece.chunk}" if worker is not None else piece.stream
            waits = tuple(index[at] for at in piece.after) if piece.after else begin
            for at in waits if piece.after else ():
                open_ends.pop(at, None)
            if isinstance(piece.what, Transfer):
                own = None if tag is None else (tag, len(index))
                item = self._add(on, piece.stream, phase, unit, waits, (), piece.what, False, own)
            else:
                last = self._last.get(on)
                joins = (
                    self._merge and last is not None and waits == (last.index,) and last.stream == QUANTIZE
                )
                if joins and last is not None and piece.after:
                    last.parts = (*last.parts, piece.what)
                    item = last
                else:
                    item = self._add(on, QUANTIZE, phase, unit, waits, (piece.what,), None, False)
            index.append(item.index)
            open_ends[item.index] = None
        if worker is not None:
            self._joins[worker] = tuple(open_ends)
        return tuple(open_ends)

    def _add(
        self,
        worker: str,
        stream: str,
        phase: str,
        unit: str,
        after: Iterable[int],
        parts: tuple[LocalWork, ...],
        transfer: Transfer | None,
        only_root: bool,
        tag: Hashable = None,
    ) -> Item:
        items = self.program.items
        before = (*after, *self._joins.pop(worker, ()))
        waits = tuple(dict.fromkeys(at for at in before if items[at].worker != worker))
        item = Item(len(items), worker, stream, phase, unit, waits, parts, transfer, only_root, tag)
        items.append(item)
        self._last[worker] = item
        return item
