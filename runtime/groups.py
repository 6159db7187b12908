"""Process groups for the axes of a mesh, on the default group that is already initialised."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..policies.mesh import OF_REPLICAS, PIPELINE, REPLICAS, WORLD, Mesh

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
        """The mesh's world as the one dimension over which FSDP2 shards; to be asked for on all ranks."""
        if self._device_mesh is None:
            self._device_mesh = self._new_device_mesh(device)
        return self._device_mesh

    def _new_device_mesh(self, device: torch.device) -> DeviceMesh:
        return DeviceMesh(device.type, torch.arange(self.mesh.num_ranks), mesh_dim_names=(WORLD,))


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
        mine = self._groups[WORLD].handle
        if mine is None:  # FSDP2 wants a group also of one rank
            for rank in range(self._whole.mesh.num_ranks):
                group = dist.new_group([rank])
                if rank == self.world_rank:
                    mine = group
        assert mine is not None, "a group was made for each rank"
        return DeviceMesh.from_group(mine, device.type, mesh_dim_names=(REPLICAS,))


def _stages(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    ranks = range(mesh.num_ranks)
    return tuple(
        tuple(rank for rank in ranks if mesh.index(PIPELINE, rank) == stage) for stage in range(mesh.pipeline)
    )
