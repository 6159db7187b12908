"""Collectives that send nothing, for the time that their data would be on the way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
from torch import Tensor

from ..policies import wire
from ..policies.mesh import Mesh
from ..policies.wire import Sent
from .groups import Group
from .ring import Codec

# Long enough for a core to fall idle; past the longer, what follows hardly grows slower
_SHORTEST_S: Final = 0.004
_LONGEST_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Way:
    """A node's way to the others, as the config has it.

    Attributes:
        Bps: Payload bytes a second, one direction.
        latency_s: One traversal, node to node.
    """

    Bps: float
    latency_s: float


class Silent:
    """Sends no data: ranks take their own for that of the others, right in shape and wrong in value.

    To time what an iteration does besides sending: its computation, its quantizing, the engine's own copies. Each
    collective is a pause and a barrier, for both leave their mark on what follows: the longer cores were idle,
    the slower they begin, and ranks that waited for each other compete for the cores together. What is asked for
    `later` has ended at once: computation is measured beside nothing.

    Args:
        mesh: All ranks.
        rank: This one.
        way: A pause is as long as the node's bytes are on it; None: just long enough for a core to fall idle.
    """

    def __init__(self, mesh: Mesh, rank: int, way: Way | None) -> None:
        self._mesh = mesh
        self._way = way
        first = rank - rank % mesh.ranks_per_node
        self._node = range(first, first + mesh.ranks_per_node)

    def all_gather(self, group: Group, x: Tensor, out: Tensor, *, later: bool = False) -> None:
        self._pause(group, lambda rank, ranks: wire.all_gather(self._mesh, rank, ranks, x.nbytes))
        out.view(group.size, -1).copy_(x.clone().expand(group.size, -1))  # `x` may be a part of `out`

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        self._pause(group, lambda rank, ranks: wire.reduce_scatter(self._mesh, rank, ranks, x[0].nbytes))
        out.copy_(x[group.index])

    def all_to_all(
        self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor], *, later: bool = False
    ) -> None:
        largest = max((x.nbytes for x in sends), default=0)
        self._pause(group, lambda rank, ranks: wire.all_to_all(self._mesh, rank, ranks, largest))
        for sent, received in zip(sends, receives, strict=True):
            received.copy_(sent)

    def all_reduce(self, group: Group, x: Tensor, *, later: bool = False) -> None:
        numel, size = x.numel(), x.element_size()
        self._pause(group, lambda rank, ranks: wire.all_reduce(self._mesh, rank, ranks, numel, size))

    def broadcast(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> None:
        self._pause(group, lambda rank, ranks: wire.broadcast(self._mesh, rank, ranks, ranks[root], x.nbytes))

    def reduce(self, group: Group, x: Tensor, root: int, *, later: bool = False) -> None:
        numel, size = x.numel(), x.element_size()
        self._pause(
            group, lambda rank, ranks: wire.reduce_to(self._mesh, rank, ranks, ranks[root], numel, size)
        )

    def _pause(self, group: Group, sent: Callable[[int, tuple[int, ...]], Sent]) -> None:
        pause_s = _SHORTEST_S
        if self._way is not None:
            ranks = [(rank, self._mesh.group(group.axis, rank)) for rank in self._node]
            nbytes = sum(sent(rank, its).inter_node_bytes for rank, its in ranks)
            if nbytes:
                pause_s += self._way.latency_s + nbytes / self._way.Bps
        time.sleep(min(pause_s, _LONGEST_S))
        dist.barrier(group=group.handle)
