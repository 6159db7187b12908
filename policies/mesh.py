"""Named mesh axes: which ranks form a group. Ranks lie in block order, node by node."""

from dataclasses import dataclass
from typing import Final

WORLD: Final = "world"
LOCAL: Final = "local"
NODE: Final = "node"
HPZ: Final = "hpz"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of a cluster and the groups that plans name.

    `world`: all ranks. `local`: the ranks of one node. `node`: the ranks with one local index, one on
    each node. `hpz`: consecutive ranks that together hold one copy of the weights (ZeRO++, section 3.2).

    Raises:
        ValueError: If the sizes do not divide, naming both.
    """

    num_ranks: int
    ranks_per_node: int
    hpz_size: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"num_ranks and ranks_per_node must be >= 1, got {self.num_ranks} and {self.ranks_per_node}"
            )
        if self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} must divide num_ranks={self.num_ranks}; "
                f"use one of {divisors(self.num_ranks)}"
            )
        if self.hpz_size < 1 or self.num_ranks % self.hpz_size:
            raise ValueError(
                f"comm.zero_hpz_partition_size={self.hpz_size} must divide the world size "
                f"{self.num_ranks}; use one of {divisors(self.num_ranks)}"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def size(self, axis: str) -> int:
        """Ranks in one group of `axis`."""
        return len(self.group(axis, 0))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of `axis` that holds `rank`, in ascending rank order."""
        if axis == WORLD:
            return tuple(range(self.num_ranks))
        if axis == LOCAL:
            first = self.node_of(rank) * self.ranks_per_node
            return tuple(range(first, first + self.ranks_per_node))
        if axis == NODE:
            return tuple(range(rank % self.ranks_per_node, self.num_ranks, self.ranks_per_node))
        if axis == HPZ:
            first = rank // self.hpz_size * self.hpz_size
            return tuple(range(first, first + self.hpz_size))
        raise ValueError(f"axis={axis!r} is not on the mesh; use one of {[WORLD, LOCAL, NODE, HPZ]}")

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, each once, ordered by their first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.num_ranks)}))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
