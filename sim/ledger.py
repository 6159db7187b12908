"""Which collectives each rank leaves in the ledger, and which ranks leave the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..analysis.record import LedgerRow
from ..policies import wire
from ..policies.mesh import HPZ, NODE, WORLD, Mesh
from .executor import Segment
from .interpreter import Transfer, axis_size

Vector = NDArray[np.int64]  # [num_ranks]


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that send the same in every collective. `ranks`: arithmetic runs (start, stop, step)."""

    rank: int  # the lowest
    count: int
    ranks: tuple[tuple[int, int, int], ...]

    def members(self) -> list[int]:
        return sorted(rank for start, stop, step in self.ranks for rank in range(start, stop, step))


def rank_classes(mesh: Mesh, transfers: Sequence[Transfer]) -> tuple[RankClass, ...]:
    """The ranks, sorted by what they send in `transfers`; the class of rank 0 first."""
    shapes = dict.fromkeys((t.op, t.axis, t.root) for t in transfers)
    ranks: Vector = np.arange(mesh.num_ranks)
    key: Vector = np.zeros_like(ranks)
    for op, axis, root in shapes:
        for figure in _signature(mesh, ranks, op, axis, root):
            key = key * (int(figure.max()) + 1) + figure
            if int(key.max()) > mesh.num_ranks:  # keep it small: only equality counts
                key = np.unique(key, return_inverse=True)[1]
    members = [ranks[key == value] for value in np.flatnonzero(np.bincount(key))]
    members.sort(key=lambda m: int(m[0]))
    return tuple(RankClass(int(m[0]), len(m), _runs(m, mesh.ranks_per_node)) for m in members)


def _signature(mesh: Mesh, ranks: Vector, op: str, axis: str, root: int) -> list[Vector]:
    """Per rank, numbers that fix what it sends in one kind of collective."""
    local = mesh.ranks_per_node
    size = axis_size(mesh, axis)
    step = local if axis == NODE else 1
    place = ranks // local if axis == NODE else ranks % size if axis in (WORLD, HPZ) else ranks % local
    first = ranks - place * step
    node = ranks // local

    def outside(shift: Vector | int) -> Vector:
        there: Vector = (first + (place + shift) % size * step) // local
        leaves: Vector = np.not_equal(there, node).astype(np.int64)
        return leaves

    if op in ("all_gather", "reduce_scatter"):
        return [outside(1)]
    if op == "all_reduce":
        return [outside(-1)]
    if op == "all_to_all":
        # ranks of its group on its own node: the run of the group that lies there
        low = np.maximum(first, node * local)
        high = np.minimum(first + size, (node + 1) * local)
        return [np.ones_like(ranks) if axis == NODE else high - low]
    virtual = (place - root) % size
    if op == "reduce":
        return [outside(-1), (virtual == 0).astype(np.int64), outside(root - place)]
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

    def rows(self, segments: Sequence[Segment], classes: Sequence[RankClass]) -> list[LedgerRow]:
        """Rows of all segments, in the order of issue, class by class."""
        rows: list[LedgerRow] = []
        for each in classes:
            rank, count = each.rank, each.count
            templates: dict[int, list[tuple[str, str, str, str, str, int, int, int, int]]] = {}
            for segment in segments:
                program = segment.program
                template = templates.get(id(program))
                if template is None:
                    template = templates[id(program)] = []
                    for item in program.items:
                        t = item.transfer
                        if t is None:
                            continue
                        sent = self.sent(rank, t)
                        row = (item.phase, item.unit, t.op, t.axis, t.group_size, t.payload_bytes)
                        template.append((item.stream, *row, sent.wire_bytes, sent.inter_node_bytes))
                iteration = segment.iteration
                rows += [LedgerRow(rank, row[0], iteration, *row[1:], count) for row in template]
        return rows

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
            case "reduce":
                return wire.reduce_to(mesh, rank, group, group[t.root], t.numel, t.element_bytes)
        raise ValueError(f"no wire bytes are known for {t.op}")
