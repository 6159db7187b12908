"""Collectives on flat tensors, by backend. Each is asked for once and blocks (NCCL: its stream).

gloo: the library's all-gather, all-reduce, broadcast and reduce; a ring reduce-scatter and an all-to-all of
our own, as gloo's reduce-scatter moves an all-reduce's bytes and its all-to-all is erratic unless receives
come first. NCCL: the library's.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..conf.schema import Backend
from .groups import Group
from .ring import Codec, ring_reduce_scatter

_ALL_TO_ALL_TAG = 1_000  # apart from the ring's, which are 0, 1, 2, ...


class Collectives(Protocol):
    """All tensors are contiguous; sums are in the dtype that is sent."""

    def all_gather(self, group: Group, x: Tensor, out: Tensor) -> None:
        """`out` [g * n] becomes the `x` [n] of all ranks, in the group's order."""
        ...

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        """`out` [n] becomes the sum of all ranks' slices i of `x` [g, n], on rank i.

        `codec`: re-quantize at each hop of the ring.
        """
        ...

    def all_to_all(self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """The k-th of the g - 1 `sends` goes to the k-th peer (this rank left out); so for `receives`."""
        ...

    def all_reduce(self, group: Group, x: Tensor) -> None:
        """Sum, in place."""
        ...

    def broadcast(self, group: Group, x: Tensor, root: int) -> None:
        """In place, from the rank at place `root` of the group."""
        ...

    def reduce(self, group: Group, x: Tensor, root: int) -> None:
        """Sum, in place at `root`; what the others hold afterwards is undefined."""
        ...


class _Library:
    """What both backends take from torch.distributed."""

    def all_gather(self, group: Group, x: Tensor, out: Tensor) -> None:
        dist.all_gather_single(out, x, group=group.handle)

    def all_reduce(self, group: Group, x: Tensor) -> None:
        dist.all_reduce(x, group=group.handle)

    def broadcast(self, group: Group, x: Tensor, root: int) -> None:
        dist.broadcast(x, group.ranks[root], group=group.handle)

    def reduce(self, group: Group, x: Tensor, root: int) -> None:
        dist.reduce(x, group.ranks[root], group=group.handle)


class Gloo(_Library):
    """On CPUs."""

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        ring_reduce_scatter(group, x, out, codec)

    def all_to_all(self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
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
        for work in waiting:
            work.wait()


class Nccl(_Library):
    """On GPUs. Calls return once they are on the current stream."""

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        if codec is not None:
            raise ValueError(
                "comm.gradient_path='ring' re-quantizes at each hop, which nccl cannot; use gloo"
            )
        dist.reduce_scatter_tensor(out, x.view(-1), group=group.handle)

    def all_to_all(self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        empty = receives[0].new_empty(0)
        outs, ins = list(receives), list(sends)
        outs.insert(group.index, empty)
        ins.insert(group.index, empty)
        dist.all_to_all(outs, ins, group=group.handle)


def build_collectives(backend: Backend) -> Collectives:
    """Those of a backend."""
    return Gloo() if backend is Backend.gloo else Nccl()


def backend_of(device: torch.device) -> Backend:
    """What serves tensors of `device`."""
    return Backend.nccl if device.type == "cuda" else Backend.gloo


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
