"""Collectives on flat tensors, by backend. Each is asked for once and blocks (NCCL: its stream), unless it is asked
for `later`: then it is only started, and the caller waits for what is returned.

gloo: the library's all-gather, all-reduce, broadcast and reduce; a ring reduce-scatter and an all-to-all of
our own, as gloo's reduce-scatter moves an all-reduce's bytes and its all-to-all is erratic unless receives
come first. NCCL: the library's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..conf.schema import Backend
from ..policies.wire import binomial_children
from .groups import Group
from .ring import Codec, ring_reduce_scatter

# Apart from the ring's, which are 0, 1, 2, ...
_ALL_TO_ALL_TAG = 1_000
_TREE_TAG = 1_001
_SHIFT_TAG = 1_002  # and on: one a message
_SCATTER_TAG = 3_000
_GATHER_TAG = 3_001


_Message = tuple[Tensor, int]  # and the rank that it goes to, or comes from


class Pending(Protocol):
    """A collective under way, whose tensors are to be left alone."""

    def wait(self) -> object:
        """Until it has ended (NCCL: on the current stream)."""
        ...


class Collectives(Protocol):
    """All tensors are contiguous; sums are in the dtype that is sent. None is returned by what has ended."""

    def all_gather(self, group: Group, x: Tensor, out: Tensor, *, later: bool = False) -> Pending | None:
        """`out` [g * n] becomes the `x` [n] of all ranks, in the group's order."""
        ...

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        """`out` [n] becomes the sum of all ranks' slices i of `x` [g, n], on rank i.

        `codec`: re-quantize at each hop of the ring.
        """
        ...

    def all_to_all(
        self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor], *, later: bool = False
    ) -> Pending | None:
        """The k-th of the g - 1 `sends` goes to the k-th peer (this rank left out); so for `receives`."""
        ...

    def all_reduce(
        self, group: Group, x: Tensor, *, largest: bool = False, later: bool = False
    ) -> Pending | None:
        """Sum, or the largest of each element, in place."""
        ...

    def broadcast(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        """In place, from the rank at place `root` of the group."""
        ...

    def reduce(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        """Sum, in place at `root`; what the others hold afterwards is undefined."""
        ...

    def reduce_tree(self, group: Group, x: Tensor, root: int) -> None:
        """As `reduce`, up the mirror image of a broadcast's binomial tree where the backend leaves us the choice."""
        ...

    def shift(
        self,
        group: Group,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        by: int,
        *,
        later: bool = False,
    ) -> Pending | None:
        """Messages to the rank `by` places further in the group, and as many from the one as far before; a ring."""
        ...

    def scatter(
        self,
        group: Group,
        rows: Tensor | None,
        out: Tensor | None,
        root: int,
        parts: Sequence[int],
        *,
        later: bool = False,
    ) -> Pending | None:
        """`parts[i]` of the root's `rows` [sum of parts, n], one after the other, become `out` [parts[i], n] at place
        i.

        To be called where `parts` has something to send or to get; `rows` is of the root, `out` of the others. Between
        two ranks messages go in the order of calls.
        """
        ...

    def gather(
        self,
        group: Group,
        rows: Tensor | None,
        out: Tensor | None,
        root: int,
        parts: Sequence[int],
        *,
        later: bool = False,
    ) -> Pending | None:
        """Undoes a scatter: `rows` [parts[i], n] of place i come to the root's `out` [sum of parts, n]."""
        ...


class _Library(ABC):
    """What both backends take from torch.distributed."""

    def all_gather(self, group: Group, x: Tensor, out: Tensor, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.all_gather_single(out, x, group=group.handle, async_op=later)
        return work

    def all_reduce(
        self, group: Group, x: Tensor, *, largest: bool = False, later: bool = False
    ) -> Pending | None:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work: dist.Work | None = dist.all_reduce(x, op, group=group.handle, async_op=later)
        return work

    def broadcast(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.broadcast(x, group.ranks[root], group=group.handle, async_op=later)
        return work

    def reduce(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.reduce(x, group.ranks[root], group=group.handle, async_op=later)
        return work

    def scatter(
        self,
        group: Group,
        rows: Tensor | None,
        out: Tensor | None,
        root: int,
        parts: Sequence[int],
        *,
        later: bool = False,
    ) -> Pending | None:
        if group.index == root:
            sends, receives = _by_part(group, rows, parts), []
        else:
            sends, receives = [], [(_there(out), group.ranks[root])]
        return self._messages(group, sends, receives, _SCATTER_TAG).or_wait(later=later)

    def gather(
        self,
        group: Group,
        rows: Tensor | None,
        out: Tensor | None,
        root: int,
        parts: Sequence[int],
        *,
        later: bool = False,
    ) -> Pending | None:
        if group.index == root:
            sends, receives = [], _by_part(group, out, parts)
        else:
            sends, receives = [(_there(rows), group.ranks[root])], []
        return self._messages(group, sends, receives, _GATHER_TAG).or_wait(later=later)

    @abstractmethod
    def _messages(
        self, group: Group, sends: Sequence[_Message], receives: Sequence[_Message], tag: int
    ) -> "_Posted":
        """Start all of them."""


class Gloo(_Library):
    """On CPUs."""

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        ring_reduce_scatter(group, x, out, codec)

    def all_to_all(
        self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor], *, later: bool = False
    ) -> Pending | None:
        peers = [rank for i, rank in enumerate(group.ranks) if i != group.index]
        # Receives first: two ranks that send to each other on one connection take turns otherwise.
        waiting = [
            _started(dist.irecv(buffer, peer, group=group.handle, tag=_ALL_TO_ALL_TAG))
            for peer, buffer in zip(peers, receives, strict=True)
        ]
        # Each rank begins with the peer after it, so that not all send to the same one at a time.
        first = group.index % max(len(peers), 1)
        order = [*range(first, len(peers)), *range(first)]
        waiting += [
            _started(dist.isend(sends[k], peers[k], group=group.handle, tag=_ALL_TO_ALL_TAG)) for k in order
        ]
        return _Posted(waiting, (*sends, *receives)).or_wait(later=later)

    def reduce_tree(self, group: Group, x: Tensor, root: int) -> None:
        me, size = group.ranks[group.index], group.size
        children = binomial_children(group.ranks, group.ranks[root], me)
        arrived = list(x.new_empty(len(children), x.numel()))
        receives = [
            _started(dist.irecv(row, child, group=group.handle, tag=_TREE_TAG))
            for row, child in zip(arrived, children, strict=True)
        ]
        # The last child of a broadcast has the smallest tree beneath it, and so is ready first.
        for row, receive in zip(reversed(arrived), reversed(receives), strict=True):
            receive.wait()
            x.view(-1).add_(row)
        place = (group.index - root) % size
        if place:
            parent = group.ranks[(place - (1 << (place.bit_length() - 1)) + root) % size]
            _started(dist.isend(x, parent, group=group.handle, tag=_TREE_TAG)).wait()

    def shift(
        self,
        group: Group,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        by: int,
        *,
        later: bool = False,
    ) -> Pending | None:
        after, before = _neighbours(group, by)
        waiting = [
            _started(dist.irecv(buffer, before, group=group.handle, tag=_SHIFT_TAG + i))
            for i, buffer in enumerate(receives)
        ]
        waiting += [
            _started(dist.isend(message, after, group=group.handle, tag=_SHIFT_TAG + i))
            for i, message in enumerate(sends)
        ]
        return _Posted(waiting, (*sends, *receives)).or_wait(later=later)

    def _messages(
        self, group: Group, sends: Sequence[_Message], receives: Sequence[_Message], tag: int
    ) -> "_Posted":
        waiting = [_started(dist.irecv(x, peer, group=group.handle, tag=tag)) for x, peer in receives]
        waiting += [_started(dist.isend(x, peer, group=group.handle, tag=tag)) for x, peer in sends]
        return _Posted(waiting, [x for x, _ in (*sends, *receives)])


class Nccl(_Library):
    """On GPUs. Calls return once they are on the current stream."""

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        if codec is not None:
            raise ValueError(
                "comm.gradient_path='ring' re-quantizes at each hop, which nccl cannot; use gloo"
            )
        dist.reduce_scatter_tensor(out, x.view(-1), group=group.handle)

    def all_to_all(
        self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor], *, later: bool = False
    ) -> Pending | None:
        empty = receives[0].new_empty(0)
        outs, ins = list(receives), list(sends)
        outs.insert(group.index, empty)
        ins.insert(group.index, empty)
        work: dist.Work | None = dist.all_to_all(outs, ins, group=group.handle, async_op=later)
        return work

    def reduce_tree(self, group: Group, x: Tensor, root: int) -> None:
        self.reduce(group, x, root)

    def shift(
        self,
        group: Group,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        by: int,
        *,
        later: bool = False,
    ) -> Pending | None:
        after, before = _neighbours(group, by)
        ops = [dist.P2POp(dist.isend, message, after, group.handle) for message in sends]
        ops += [dist.P2POp(dist.irecv, buffer, before, group.handle) for buffer in receives]
        return _Posted(dist.batch_isend_irecv(ops), (*sends, *receives)).or_wait(later=later)

    def _messages(
        self, group: Group, sends: Sequence[_Message], receives: Sequence[_Message], tag: int
    ) -> "_Posted":
        ops = [dist.P2POp(dist.isend, x, peer, group.handle) for x, peer in sends]
        ops += [dist.P2POp(dist.irecv, x, peer, group.handle) for x, peer in receives]
        return _Posted(dist.batch_isend_irecv(ops), [x for x, _ in (*sends, *receives)])


@dataclass(frozen=True, slots=True)
class _Posted:
    """Sends and receives, and the buffers that must live until they have ended."""

    works: Sequence[dist.Work]
    buffers: Sequence[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def or_wait(self, *, later: bool) -> "_Posted | None":
        """What a collective returns that may be waited for `later`."""
        if later:
            return self
        self.wait()
        return None


def build_collectives(backend: Backend) -> Collectives:
    """Those of a backend."""
    return Gloo() if backend is Backend.gloo else Nccl()


def backend_of(device: torch.device) -> Backend:
    """What serves tensors of `device`."""
    return Backend.nccl if device.type == "cuda" else Backend.gloo


def _neighbours(group: Group, by: int) -> tuple[int, int]:
    """The ranks to send to and to receive from."""
    return group.ranks[(group.index + by) % group.size], group.ranks[(group.index - by) % group.size]


def _by_part(group: Group, rows: Tensor | None, parts: Sequence[int]) -> list[_Message]:
    """The rows of each rank that has some, and the rank."""
    pieces = torch.split(_there(rows), list(parts))
    return [(piece, rank) for piece, rank in zip(pieces, group.ranks, strict=True) if len(piece)]


def _there(x: Tensor | None) -> Tensor:
    assert x is not None, "of a rank that sends or gets it"
    return x


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
