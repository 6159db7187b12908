"""Named mesh axes: which ranks form a group, and where they lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ..conf.placement import Placement
from ..conf.schema import Backend, ClusterConf

WORLD: Final = "world"
LOCAL: Final = "local"
NODE: Final = "node"
HPZ: Final = "hpz"
TENSOR: Final = "tensor"
SEQUENCE: Final = "sequence"
DATA: Final = "data"
PIPELINE: Final = "pipeline"
REPLICAS: Final = "replicas"
STAGE: Final = "stage"

# What a communication policy calls an axis -> its counterpart among the ranks that hold the same part of the model
OF_REPLICAS: Final[Mapping[str, str]] = {
    WORLD: REPLICAS,
    LOCAL: "replicas_local",
    NODE: "replicas_node",
    HPZ: "replicas_hpz",
}

Dims = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks of a cluster and the groups that plans name.

    `world`: all ranks. `local`: as many consecutive ranks as a node has, which in block order are those of one node.
    `node`: one rank of each `local` group. `hpz`: consecutive ranks that together hold one copy of the weights
    (ZeRO++, section 3.2). Groups follow the numbers of ranks alone, as a launcher's LOCAL_WORLD_SIZE does: where ranks
    lie in another order (`cyclic`), a `local` group spans nodes.

    `dims`: the axes of a layout and their sizes, the one whose neighbours are consecutive ranks first; by default
    the world is `data`. Megatron's order is tensor, data, pipeline (Narayanan et al. 2021, section 3): tensor groups
    are consecutive ranks within a node, the stages of a pipeline lie farthest apart.

    `replicas`: the ranks that hold the same part of the model, over `data` and `sequence`, which must be neighbours.
    A communication policy's `world` is that group, its `local` the ranks of it on one node (`replicas_local`), its
    `node` one of each of those (`replicas_node`), its `hpz` `replicas_hpz`; without other axes they are the same.

    `stage`: all ranks with the same place on `pipeline`, which must be the first or the last axis for that.

    `cyclic`: rank r lies on node r % nodes. `rings_by_node`: a collective's ring goes through the ranks of a node
    before it leaves it, as NCCL's do (src/graph/connect.cc); else from rank to rank by number, as gloo's do.

    Raises:
        ValueError: If the sizes do not divide, naming both.
    """

    num_ranks: int
    ranks_per_node: int
    hpz_size: int = 1
    dims: Dims = ()
    cyclic: bool = False
    rings_by_node: bool = False

    @classmethod
    def of(cls, cluster: ClusterConf, hpz_size: int = 1, dims: Dims = ()) -> "Mesh":
        """On the nodes of a cluster, as its ranks lie there."""
        return cls(
            cluster.num_ranks,
            cluster.devices_per_node,
            hpz_size,
            dims,
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
        if not self.dims:
            object.__setattr__(self, "dims", ((DATA, self.num_ranks),))
        product = 1
        for name, size in self.dims:
            if size < 1:
                raise ValueError(f"parallel.{name}={size} must be >= 1")
            product *= size
        if product != self.num_ranks:
            raise ValueError(f"{times(self.dims)} must be the {self.num_ranks} ranks of the cluster")
        names = [name for name, size in self.dims if size > 1 and name in (DATA, SEQUENCE)]
        between = [name for name, size in self.dims if size > 1]
        if len(names) > 1 and abs(between.index(names[0]) - between.index(names[1])) > 1:
            raise ValueError(
                f"parallel.order: {DATA!r} and {SEQUENCE!r} must be neighbours, got {[n for n, _ in self.dims]}"
            )
        if self.hpz_size < 1 or self.num_replicas % self.hpz_size:
            raise ValueError(
                f"comm.zero_hpz_partition_size={self.hpz_size} must divide {self._replicas_said}; "
                f"use one of {divisors(self.num_replicas)}"
            )
        tensor = self._sizes.get(TENSOR, 1)
        if self.ranks_per_node % tensor and tensor % self.ranks_per_node:
            raise ValueError(
                f"parallel.tensor={tensor} must divide the {self.ranks_per_node} ranks of a node, or be "
                f"a multiple of them: tensor groups would lie askew on the nodes"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def tensor(self) -> int:
        return self._sizes.get(TENSOR, 1)

    @property
    def pipeline(self) -> int:
        return self._sizes.get(PIPELINE, 1)

    @property
    def data(self) -> int:
        """Replicas of the model: what its layout leaves of the ranks."""
        return self._sizes.get(DATA, 1)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.data * self._sizes.get(SEQUENCE, 1)

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds all of the model, or its shard of all."""
        return self.data == self.num_ranks

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

    def of_replicas(self) -> "Mesh":
        """What a communication policy sees: the ranks that hold the same part of the model, numbered from 0."""
        return Mesh(self.num_replicas, self.size(OF_REPLICAS[LOCAL]), self.hpz_size)

    def lattice(self, axis: str) -> tuple[int, int]:
        """(size of a group, distance between its neighbours): all groups of an axis are alike.

        Raises:
            ValueError: If there is no such axis.
        """
        if axis not in self._lattices:
            raise ValueError(f"axis={axis!r} is not on the mesh; use one of {list(self._lattices)}")
        return self._lattices[axis]

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

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes."""
        return tuple(self._lattices)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.dims)

    @cached_property
    def _lattices(self) -> dict[str, tuple[int, int]]:
        found = {WORLD: (self.num_ranks, 1), LOCAL: (self.ranks_per_node, 1)}
        found[NODE] = (self.num_nodes, self.ranks_per_node)
        found[HPZ] = (self.hpz_size if self.is_plain else 1, 1)
        for axis in (TENSOR, DATA, PIPELINE):
            found[axis] = (1, self.num_ranks)
        step = 1
        replicas = 0  # the distance between neighbours
        for name, size in self.dims:
            found[name] = (size, step)
            if name in (DATA, SEQUENCE) and size > 1 and not replicas:
                replicas = step
            step *= size
        found[STAGE] = (1, self.num_ranks)
        between = [name for name, size in self.dims if size > 1]
        if PIPELINE in between and PIPELINE in (between[0], between[-1]):
            apart = self.num_ranks // self.pipeline
            found[STAGE] = (apart, self.pipeline if between[0] == PIPELINE else 1)
        elif PIPELINE not in between:
            found[STAGE] = (self.num_ranks, 1)
        replicas = replicas or self.num_ranks
        local = self.ranks_per_node // replicas if self.ranks_per_node % replicas == 0 else 1
        local = max(1, min(local, self.num_replicas))
        if self.num_replicas % local:
            local = 1  # askew on the nodes
        found[REPLICAS] = (self.num_replicas, replicas)
        found[OF_REPLICAS[LOCAL]] = (local, replicas)
        found[OF_REPLICAS[NODE]] = (self.num_replicas // local, replicas * local)
        found[OF_REPLICAS[HPZ]] = (self.hpz_size, replicas)
        return found

    @property
    def _replicas_said(self) -> str:
        if self.is_plain:
            return f"the world size {self.num_ranks}"
        return f"the {self.num_replicas} ranks that hold the same part of the model"


def times(dims: Dims) -> str:
    """The product of all axes larger than 1, in words, with what it comes to."""
    product = 1
    for _, size in dims:
        product *= size
    shown = " times ".join(f"parallel.{name}={size}" for name, size in reversed(dims) if size > 1)
    return f"{shown or 'the axes of the mesh'} = {product}"


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
