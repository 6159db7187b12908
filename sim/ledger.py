"""Which collectives each rank leaves in the ledger, and which ranks leave the same."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..analysis.record import LedgerRow
from ..policies import wire
from ..policies.mesh import WORLD, Mesh
from .executor import Segment
from .interpreter import Transfer, peer_of
from .program import Item, Program
from .reach import groups_of, ring_peers, slots_of

Vector = NDArray[np.int64]  # [num_ranks]
_Columns = tuple[Sequence[Any], ...]  # stream, phase, ... as of a LedgerRow; empty: no rows


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that send the same in every collective. `ranks`: arithmetic runs (start, stop, step)."""

    rank: int  # the lowest
    count: int
    ranks: tuple[tuple[int, int, int], ...]

    def members(self) -> list[int]:
        return sorted(rank for start, stop, step in self.ranks for rank in range(start, stop, step))


class _Issued(NamedTuple):
    """A program's rows by column, up to `payload_bytes`, the transfer of each, and how often it is there."""

    columns: _Columns
    transfers: list[Transfer]
    distinct: list[Transfer]
    times: list[int]


def rank_classes(mesh: Mesh, programs: Iterable[Mapping[int, Program]]) -> tuple[RankClass, ...]:
    """The ranks, sorted by what they send in the programs of a run's segments; the class of rank 0 first."""
    ranks: Vector = np.arange(mesh.num_ranks)
    key: Vector = np.zeros_like(ranks)

    def split(figure: Vector) -> None:
        nonlocal key
        key = key * (int(figure.max()) + 1) + figure
        if int(key.max()) > mesh.num_ranks:  # keep it small: only equality counts
            key = np.unique(key, return_inverse=True)[1]

    each = list({id(of_segment): of_segment for of_segment in programs}.values())
    for of_segment in each:
        split(np.searchsorted(np.array(list(of_segment)), ranks, side="right") - 1)
    for op, axis, root, peer in dict.fromkeys(
        (t.op, t.axis, t.root, t.peer)
        for of_segment in each
        for p in of_segment.values()
        for t in transfers_of(p)
    ):
        for figure in _signature(mesh, ranks, op, axis, root, peer):
            split(figure)
    members = [ranks[key == value] for value in np.flatnonzero(np.bincount(key))]
    members.sort(key=lambda m: int(m[0]))
    return tuple(RankClass(int(m[0]), len(m), _runs(m, mesh.ranks_per_node)) for m in members)


def transfers_of(program: Program) -> Iterator[Transfer]:
    """All that its items do, or contain."""
    for item in program.items:
        if item.transfer is not None:
            yield item.transfer
        for transfer, _, _ in item.inside:
            yield transfer


def _signature(mesh: Mesh, ranks: Vector, op: str, axis: str, root: int, peer: int) -> list[Vector]:
    """Per rank, numbers that fix what it sends in one kind of collective."""
    size, step = mesh.lattice(axis)
    place = ranks // step % size
    first = ranks - place * step
    node = slots_of(mesh) // mesh.ranks_per_node

    def outside(shift: Vector | int) -> Vector:
        return leaves(first + (place + shift) % size * step)

    def leaves(there: Vector) -> Vector:
        left: Vector = np.not_equal(node[there], node).astype(np.int64)
        return left

    if op == "recv":
        return []
    if op == "send":
        return [outside(peer)]
    if op in ("all_gather", "reduce_scatter"):
        return [leaves(ring_peers(mesh, axis))]
    if op == "all_reduce":
        return [leaves(ring_peers(mesh, axis, -1))]
    if op == "all_to_all":
        # ranks of its group on its own node
        _, at, beside = np.unique(
            groups_of(mesh, axis) * (mesh.num_nodes + 1) + node, return_inverse=True, return_counts=True
        )
        return [beside[at]]
    virtual = (place - root) % size
    if op == "reduce":
        return [leaves(ring_peers(mesh, axis, -1)), (virtual == 0).astype(np.int64), outside(root - place)]
    if op == "reduce_tree":
        above = np.zeros_like(ranks)
        for bit in range(size.bit_length()):
            above = np.where(virtual >> bit == 1, 1 << bit, above)
        return [(virtual > 0) * (1 + outside(-above))]
    children, leaving = np.zeros_like(ranks), np.zeros_like(ranks)
    bit = 1
    while bit < size:
        sends = (virtual < bit) & (virtual + bit < size)
        children += sends
        leaving += sends * outside(bit)
        bit <<= 1
    return [children, leaving]


def _runs(members: Vector, period: int) -> tuple[tuple[int, int, int], ...]:
    """Arithmetic runs: ranks of one local index on consecutive nodes are one."""
    runs = []
    for index in np.flatnonzero(np.bincount(members % period)):
        column = members[members % period == index]
        for run in np.split(column, np.flatnonzero(np.diff(column) != period) + 1):
            runs.append((int(run[0]), int(run[-1]) + period, period))
    return tuple(runs)


class Ledger:
    """Rows of one rank class after the other."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sent: dict[tuple[int, int], wire.Sent] = {}
        self._issued: dict[int, _Issued] = {}
        self._columns: dict[tuple[int, int], _Columns] = {}
        self._programs: list[Program] = []  # kept, so that no identity comes twice

    def rows(self, segments: Sequence[Segment], classes: Sequence[RankClass]) -> list[LedgerRow]:
        """Rows of all segments, in the order of issue, class by class."""
        rows: list[LedgerRow] = []
        for each in classes:
            rank, count = each.rank, each.count
            for segment in segments:
                program = segment.program(rank)
                found = self._of(rank, program)
                if found:
                    streams, *rest, times = found
                    counts = [count * n for n in times] if program.compact else repeat(count)
                    rows += map(LedgerRow, repeat(rank), streams, repeat(segment.iteration), *rest, counts)
        return rows

    def trained(self, segments: Sequence[Segment], classes: Sequence[RankClass]) -> tuple[int, int, int, int]:
        """Of all ranks, validation left out: bytes of payload, on the wire and between nodes, and collectives."""
        totals = [0, 0, 0, 0]
        for each in classes:
            programs = [segment.program(each.rank) for segment in segments]
            for program in {id(program): program for program in programs}.values():
                ranks = each.count * sum(other is program for other in programs)
                found = self._of(each.rank, program)
                if not found:
                    continue
                _, phases, _, _, _, _, payloads, wires, inters, times = found
                kept = [0 if phase == "eval" else n for phase, n in zip(phases, times, strict=True)]
                for at, column in enumerate((payloads, wires, inters, repeat(1))):
                    totals[at] += ranks * sum(map(mul, column, kept))
        payload, wired, inter, collectives = totals
        return payload, wired, inter, collectives

    def num_rows(self, rank: int, program: Program) -> int:
        """Rows of one segment."""
        if program.compact:
            found = self._of(rank, program)
            return len(found[0]) if found else 0
        return len(self._issues(program).transfers)

    def _of(self, rank: int, program: Program) -> "_Columns":
        """A segment's rows by column, without rank and iteration; the last is how often each is there."""
        known = self._columns.get((rank, id(program)))
        if known is None:
            issued = self._issues(program)
            sent = {id(t): self.sent(rank, t) for t in issued.distinct}
            of_row = [sent[id(t)] for t in issued.transfers]
            wires, inters = [s.wire_bytes for s in of_row], [s.inter_node_bytes for s in of_row]
            known = (*issued.columns, wires, inters, issued.times) if of_row else ()
            if program.compact and of_row:
                counts: dict[tuple[Any, ...], int] = {}
                for *row, times in zip(*known, strict=True):
                    counts[tuple(row)] = counts.get(tuple(row), 0) + times
                known = (*zip(*counts, strict=True), list(counts.values()))
            self._columns[rank, id(program)] = known
        return known

    def _issues(self, program: Program) -> "_Issued":
        """What is the same on all ranks that run a program."""
        known = self._issued.get(id(program))
        if known is not None:
            return known
        self._programs.append(program)
        items = [(item, 1) for item in program.items if item.transfer is not None or item.inside]
        if program.compact:
            alike: dict[tuple[object, ...], tuple[Item, int]] = {}
            for item, _ in items:
                key = (item.phase, item.unit, item.stream, id(item.transfer), id(item.inside))
                alike[key] = (item, alike[key][1] + 1 if key in alike else 1)
            items = list(alike.values())
        rows: list[tuple[Any, ...]] = []
        transfers: list[Transfer] = []
        counts: list[int] = []
        for item, repeats in items:
            own = ((item.transfer, item.stream, 1),) if item.transfer is not None else ()
            for t, stream, times in (*own, *item.inside) if item.inside else own:
                if not t.listed:
                    continue
                row = (stream, item.phase, item.unit, t.op, t.axis, t.group_size, t.payload_bytes)
                many = 1 if program.compact else times * repeats  # apart, or one row for all
                rows += [row] * many
                transfers += [t] * many
                counts += [times * repeats if program.compact else 1] * many
        known = self._issued[id(program)] = _Issued(
            tuple(zip(*rows, strict=True)), transfers, list({id(t): t for t in transfers}.values()), counts
        )
        return known

    def sent(self, rank: int, transfer: Transfer) -> wire.Sent:
        """What `rank` sends in `transfer`."""
        key = (rank, id(transfer))
        known = self._sent.get(key)
        if known is None:
            known = self._sent[key] = self._find(rank, transfer)
        return known

    def _find(self, rank: int, t: Transfer) -> wire.Sent:
        mesh = self._mesh
        group = range(mesh.num_ranks) if t.axis == WORLD else mesh.group(t.axis, rank)
        match t.op:
            case "all_gather":
                return wire.all_gather(mesh, rank, group, t.message_bytes)
            case "reduce_scatter":
                return wire.reduce_scatter(mesh, rank, group, t.message_bytes)
            case "all_to_all":
                return wire.all_to_all(mesh, rank, group, t.message_bytes)
            case "all_reduce":
                return wire.all_reduce(mesh, rank, group, t.numel, t.element_bytes)
            case "broadcast":
                return wire.broadcast(mesh, rank, group, group[t.root], t.message_bytes)
            case "reduce_tree":
                return wire.reduce_tree(mesh, rank, group, group[t.root], t.message_bytes)
            case "scatter":
                return wire.scatter(mesh, rank, group, group[t.root], t.parts)
            case "gather":
                return wire.gather(mesh, rank, group, group[t.root], t.parts)
            case "send":
                return wire.to_peers(mesh, rank, [(peer_of(group, rank, t), t.message_bytes)])
            case "recv":
                return wire.Sent(0, 0)
            case "reduce":
                return wire.reduce_to(mesh, rank, group, group[t.root], t.numel, t.element_bytes)
        raise ValueError(f"no wire bytes are known for {t.op}")
