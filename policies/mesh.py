"""Named mesh axes: which ranks form a group, and where they lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..conf.placement import Placement
from ..conf.schema import Backend, ClusterConf

WORLD: Final = "world"
LOCAL: Final = "local"
NODE: Final = "node"
HPZ: Final = "hpz"
TENSOR: Final = "tensor"
DATA: Final = "data"
PIPELINE: Final = "pipeline"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of a cluster and the groups that plans name.

    `world`: all ranks. `local`: as many consecutive ranks as a node has, which in block order are those of one node.
    `node`: one rank of each `local` group. `hpz`: consecutive ranks that together hold one copy of the weights
    (ZeRO++, section 3.2). Groups follow the numbers of ranks alone, as a launcher's LOCAL_WORLD_SIZE does: where ranks
    lie in another order (`cyclic`), a `local` group spans nodes.

    `tensor`, `data`, `pipeline`: a rank is (pipeline * data size + data) * tensor size + tensor, as Megatron
    orders ranks (Narayanan et al. 2021, section 3): tensor groups are consecutive ranks within a node, the
    stages of a pipeline lie farthest apart. Without a layout `data` is the world.

    `cyclic`: rank r lies on node r % nodes. `rings_by_node`: a collective's ring goes through the ranks of a node
    before it leaves it, as NCCL's do (src/graph/connect.cc); else from rank to rank by number, as gloo's do.

    Raises:
        ValueError: If the sizes do not divide, naming both.
    """

    num_ranks: int
    ranks_per_node: int
    hpz_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    cyclic: bool = False
    rings_by_node: bool = False

    @classmethod
    def of(cls, cluster: ClusterConf, hpz_size: int = 1, tensor: int = 1, pipeline: int = 1) -> "Mesh":
        """On the nodes of a cluster, as its ranks lie there."""
        return cls(
            cluster.num_ranks,
            cluster.devices_per_node,
            hpz_size,
            tensor,
            pipeline,
            cyclic=cluster.placement.cyclic,
            rings_by_node=cluster.backend is Backend.nccl,
        )

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
        for key in (TENSOR, PIPELINE):
            if getattr(self, key) < 1:
                raise ValueError(f"parallel.{key}={getattr(self, key)} must be >= 1")
        if self.num_ranks % (self.tensor * self.pipeline):
            raise ValueError(
                f"parallel.tensor={self.tensor} times parallel.pipeline={self.pipeline} must divide the "
                f"{self.num_ranks} ranks; their product can be one of {divisors(self.num_ranks)}"
            )
        if self.ranks_per_node % self.tensor and self.tensor % self.ranks_per_node:
            raise ValueError(
                f"parallel.tensor={self.tensor} must divide the {self.ranks_per_node} ranks of a node, or be "
                f"a multiple of them: tensor groups would lie askew on the nodes"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def data(self) -> int:
        """Replicas of the model: what tensor and pipeline parallelism leave of the ranks."""
        return self.num_ranks // (self.tensor * self.pipeline)

    @property
    def placement(self) -> Placement:
        return Placement(self.num_nodes, self.ranks_per_node, self.cyclic)

    def node_of(self, rank: int) -> int:
        return rank % self.num_nodes if self.cyclic else rank // self.ranks_per_node

    def ring(self, group: Sequence[int]) -> Sequence[int]:
        """The ranks of a group in the order in which the library's ring goes through them."""
        if self.cyclic and self.rings_by_node:
            return sorted(group, key=self.placement.slot)
        return group

    def lattice(self, axis: str) -> tuple[int, int]:
        """(size of a group, distance between its neighbours): all groups of an axis are alike.

        Raises:
            ValueError: If there is no such axis.
        """
        lattices = {
            WORLD: (self.num_ranks, 1),
            LOCAL: (self.ranks_per_node, 1),
            NODE: (self.num_nodes, self.ranks_per_node),
            HPZ: (self.hpz_size, 1),
            TENSOR: (self.tensor, 1),
            DATA: (self.data, self.tensor),
            PIPELINE: (self.pipeline, self.tensor * self.data),
        }
        if axis not in lattices:
            raise ValueError(f"axis={axis!r} is not on the mesh; use one of {list(lattices)}")
        return lattices[axis]

    def size(self, axis: str) -> int:
        """Ranks in one group of `axis`."""
        return self.lattice(axis)[0]

    def index(self, axis: str, rank: int) -> int:
        """The position of `rank` in its group of `axis`."""
        size, step = self.lattice(axis)
        return rank // step % size

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of `axis` that holds `rank`, in ascending rank order."""
        size, step = self.lattice(axis)
        first = rank - rank // step % size * step
        return tuple(range(first, first + size * step, step))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, each once, ordered by their first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.num_ranks)}))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
