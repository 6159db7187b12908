"""Process groups for the axes of a mesh, on the default group that is already initialised."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..policies.mesh import DATA, OF_REPLICAS, PIPELINE, REPLICAS, SEQUENCE, WORLD, Mesh

STAGE = "stage"  # all ranks that hold the same layers


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's group on one axis."""

    axis: str
    ranks: tuple[int, ...]
    index: int  # this rank's place in `ranks`
    handle: dist.ProcessGroup | None  # None: nobody else is in it

    @property
    def size(self) -> int:
        return len(self.ranks)


class Groups:
    """This rank's group on each axis. To be made on all ranks, at the same place in the program.

    Groups of the same ranks share one process group; the whole world is the default group. Beside the axes of the
    mesh there is `stage`: the ranks with the same place on `pipeline`.

    Args:
        mesh: Its `num_ranks` must be the world size.
        timeout: Of collectives in the new groups; None: torch's default.

    Attributes:
        rank: This rank's number in `mesh`.
        world_rank: Among all ranks; another number where `mesh` is that of replicas.

    Raises:
        ValueError: If the mesh is not of this world, naming both sizes.
    """

    def __init__(self, mesh: Mesh, *, timeout: timedelta | None = None) -> None:
        world = dist.get_world_size()
        if mesh.num_ranks != world:
            raise ValueError(f"the mesh has {mesh.num_ranks} ranks, but {world} are running")
        self.mesh = mesh
        self.rank = self.world_rank = dist.get_rank()
        handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            tuple(range(world)): dist.group.WORLD if world > 1 else None
        }
        self._groups: dict[str, Group] = {}
        axes = {axis: mesh.groups(axis) for axis in mesh.axes} | {STAGE: _stages(mesh)}
        for axis, groups in axes.items():
            for ranks in groups:  # every rank makes every group, in this order
                if ranks not in handles:
                    handles[ranks] = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
            mine = next(ranks for ranks in groups if self.rank in ranks)
            self._groups[axis] = Group(axis, mine, mine.index(self.rank), handles[mine])
        self._of_replicas: Groups | None = None
        self._device_mesh: DeviceMesh | None = None

    def __getitem__(self, axis: str) -> Group:
        if axis not in self._groups:
            raise ValueError(f"axis={axis!r} is not on the mesh; use one of {list(self._groups)}")
        return self._groups[axis]

    def of_replicas(self) -> "Groups":
        """What a communication policy sees: its `world` is the ranks that hold the same part of the model.

        The groups keep the names that the whole mesh gives them, such as "replicas_local".
        """
        if self.mesh.is_plain:
            return self
        if self._of_replicas is None:
            seen = {axis: self._groups[name] for axis, name in OF_REPLICAS.items()}
            self._of_replicas = _View(self, self.mesh.of_replicas(), seen)
        return self._of_replicas

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """All axes as one mesh of torch's on these groups, to be asked for on all ranks.

        Its dimensions are those of `Mesh.dims` that have several ranks, consecutive ranks last; in the place of data
        and sequence stands `replicas`, over which FSDP2 shards, also of one rank.
        """
        if self._device_mesh is None:
            self._device_mesh = self._new_device_mesh(device)
        return self._device_mesh

    def _new_device_mesh(self, device: torch.device) -> DeviceMesh:
        names = [name for name, size in reversed(self.mesh.dims) if size > 1]
        names = list(dict.fromkeys(REPLICAS if name in (DATA, SEQUENCE) else name for name in names))
        names = names if REPLICAS in names else [REPLICAS, *names]
        return DeviceMesh.from_group(
            [self._group_of_torch(name) for name in names],
            device.type,
            mesh=torch.arange(self.mesh.num_ranks).reshape([self._groups[name].size for name in names]),
            mesh_dim_names=tuple(names),
        )

    def _group_of_torch(self, axis: str) -> dist.ProcessGroup:
        """Also of one rank: torch wants a group for it."""
        mine = self._groups[axis].handle
        if mine is None:
            for rank in range(self.mesh.num_ranks):
                group = dist.new_group([rank])
                if rank == self.rank:
                    mine = group
        assert mine is not None, "a group was made for each rank"
        return mine


class _View(Groups):
    """Some of the groups of another mesh, under other names."""

    def __init__(self, whole: Groups, mesh: Mesh, groups: Mapping[str, Group]) -> None:
        self.mesh = mesh
        self.rank, self.world_rank = groups[WORLD].index, whole.world_rank
        self._whole = whole
        self._groups = dict(groups)
        self._of_replicas = self
        self._device_mesh = None

    def _new_device_mesh(self, device: torch.device) -> DeviceMesh:
        return self._whole.device_mesh(device)[REPLICAS]


def _stages(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    ranks = range(mesh.num_ranks)
    return tuple(
        tuple(rank for rank in ranks if mesh.index(PIPELINE, rank) == stage) for stage in range(mesh.pipeline)
    )
