"""Lent units as items of a program: on their way beside computation, and waited for where they are needed.

A straggler packs what it lends and sends it; a helper lays its own and the borrowed units together. In backward a
helper packs the gradients of what it borrowed, and the straggler puts them in their places.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...policies.balance import Half
from ...policies.layout import Direction
from ..interpreter import Work
from ..program import COMPUTE, MAIN, Writer
from .columns import ColumnShare
from .rank_work import EVEN, RankWork
from .share import Share

COPIES = ("pack", "join", "unpack")  # last words of the names of what units that move make ranks copy


@dataclass(slots=True)
class Lending:
    """Of one program of a rank.

    Args:
        work: Of the rank.
        chunks: Names of the blocks of each chunk of its stage, in the order of forward.
        ahead: Whether units of a block are on their way one block early: where weights lie whole on the rank between
            the units of a pass.
    """

    work: RankWork = EVEN
    chunks: Sequence[Sequence[str]] = ()
    ahead: bool = False
    _numbers: Mapping[str, int] = field(init=False)
    _following: Mapping[str, str] = field(init=False)
    _firsts: frozenset[str] = field(init=False)
    _passes: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _lent: dict[tuple[str, Half], tuple[int, ...]] = field(default_factory=dict, init=False)
    _returning: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        names = [name for chunk in self.chunks for name in chunk]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._following = dict(pair for chunk in self.chunks for pair in pairwise(chunk))
        self._firsts = frozenset(chunk[0] for chunk in self.chunks if chunk)

    def share(self, unit: str) -> Share | ColumnShare | None:
        """Of a block; None: an even one, or the unit is no block."""
        return self.work.shares[self._numbers[unit]] if self.work.shares and unit in self._numbers else None

    def begin(
        self, writer: Writer, direction: Direction, phase: str, unit: str, waits: tuple[int, ...]
    ) -> tuple[int, ...]:
        """At the start of a block's forward: what is lent then goes on its way. What the main worker waits for next."""
        if not self.work.movements or unit not in self._numbers or direction is not Direction.forward:
            return waits
        if not self.ahead or unit in self._firsts:
            waits = self._lend(writer, phase, unit, waits)
        if self.ahead and unit in self._following:
            waits = self._lend(writer, phase, self._following[unit], waits)
        return waits

    def _lend(self, writer: Writer, phase: str, unit: str, waits: tuple[int, ...]) -> tuple[int, ...]:
        number = self._passes["lend", unit]
        self._passes["lend", unit] += 1
        for half in Half:
            self._lent[unit, half] = ()
        for move in self.work.movements:
            layer = f"{unit}.{move.half.value}"
            if move.lends:
                pack = Work("traffic", "pack", 0, 2 * move.own_bytes)
                writer.local(MAIN, COMPUTE, phase, unit, f"{phase}/{layer} pack", pack, waits)
                waits = ()
            after = (*waits, *writer.last(MAIN))
            tag = ("lend", layer, move.lend.root, number)
            index = writer.transfer(
                move.lend_stream, move.lend_stream, phase, layer, move.lend, after, tag=tag
            )
            if not move.lends:
                self._lent[unit, move.half] += (index,)
        return waits

    def before(
        self, writer: Writer, phase: str, unit: str, half: Half, waits: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Before the first product of a half, forward: borrowed units are there, and lie behind the rank's own."""
        lent = self._lent.pop((unit, half), ())
        if not lent:
            return waits
        computed = next(m.computed_bytes for m in self.work.movements if m.half is half and not m.lends)
        join = Work("traffic", "join", 0, 2 * computed)
        name = f"{phase}/{unit}.{half.value} join"
        writer.local(MAIN, COMPUTE, phase, unit, name, join, (*waits, *lent))
        return ()

    def after(self, writer: Writer, phase: str, unit: str, half: Half) -> None:
        """Behind the gradients of both products of a half: those of borrowed units go back."""
        number = self._passes[f"return {half.value}", unit]
        self._passes[f"return {half.value}", unit] += 1
        for move in self.work.movements:
            if move.half is not half:
                continue
            layer = f"{unit}.{half.value}"
            if not move.lends:
                pack = Work("traffic", "pack", 0, 2 * move.own_bytes)
                writer.local(MAIN, COMPUTE, phase, unit, f"{phase}/{layer} pack", pack)
            tag = ("return", layer, move.bring_back.root, number)
            stream = move.return_stream
            after = writer.last(MAIN)
            index = writer.transfer(stream, stream, phase, layer, move.bring_back, after, tag=tag)
            self._returning.append(index)

    def end(
        self, writer: Writer, direction: Direction, phase: str, unit: str, waits: tuple[int, ...]
    ) -> tuple[int, ...]:
        """At the end of a block's backward all gradients are in their places."""
        if not self._returning or direction is not Direction.backward:
            return waits
        waits, self._returning = (*waits, *self._returning), []
        nbytes = sum(move.own_bytes for move in self.work.movements if move.lends)
        if nbytes:
            unpack = Work("traffic", "unpack", 0, 2 * nbytes)
            writer.local(MAIN, COMPUTE, phase, unit, f"{phase}/{unit} unpack", unpack, waits)
            return ()
        return waits
