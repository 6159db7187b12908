"""Collectives on flat tensors, by backend. Each is asked for once and blocks (NCCL: its stream), unless it is asked
for `later`: then it is only started, and the caller waits for what is returned.

gloo: the library's all-gather, all-reduce, broadcast and reduce; a ring reduce-scatter and an all-to-all of
our own, as gloo's reduce-scatter moves an all-reduce's bytes and its all-to-all is erratic unless receives
come first. NCCL: the library's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..conf.schema import Backend
from .groups import Group
from .ring import Codec, ring_reduce_scatter

_ALL_TO_ALL_TAG = 1_000  # apart from the ring's, which are 0, 1, 2, ...


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

    def all_reduce(self, group: Group, x: Tensor, *, later: bool = False) -> Pending | None:
        """Sum, in place."""
        ...

    def broadcast(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        """In place, from the rank at place `root` of the group."""
        ...

    def reduce(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        """Sum, in place at `root`; what the others hold afterwards is undefined."""
        ...


class _Library:
    """What both backends take from torch.distributed."""

    def all_gather(self, group: Group, x: Tensor, out: Tensor, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.all_gather_single(out, x, group=group.handle, async_op=later)
        return work

    def all_reduce(self, group: Group, x: Tensor, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.all_reduce(x, group=group.handle, async_op=later)
        return work

    def broadcast(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.broadcast(x, group.ranks[root], group=group.handle, async_op=later)
        return work

    def reduce(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> Pending | None:
        work: dist.Work | None = dist.reduce(x, group.ranks[root], group=group.handle, async_op=later)
        return work


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
        posted = _Posted(waiting, (*sends, *receives))
        if later:
            return posted
        posted.wait()
        return None


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


@dataclass(frozen=True, slots=True)
class _Posted:
    """Sends and receives, and the buffers that must live until they have ended."""

    works: Sequence[dist.Work]
    buffers: Sequence[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def build_collectives(backend: Backend) -> Collectives:
    """Those of a backend."""
    return Gloo() if backend is Backend.gloo else Nccl()


def backend_of(device: torch.device) -> Backend:
    """What serves tensors of `device`."""
    return Backend.nccl if device.type == "cuda" else Backend.gloo


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
