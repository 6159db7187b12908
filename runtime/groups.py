"""Process groups for the axes of a mesh, on the default group that is already initialised."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..policies.mesh import HPZ, LOCAL, NODE, OF_REPLICAS, REPLICAS, WORLD, Mesh


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

    Groups of the same ranks share one process group; the whole world is the default group.

    Args:
        mesh: Its `num_ranks` must be the world size.
        timeout: Of collectives in the new groups; None: torch's default.

    Raises:
        ValueError: If the mesh is not of this world, naming both sizes.
    """

    def __init__(self, mesh: Mesh, *, timeout: timedelta | None = None) -> None:
        world = dist.get_world_size()
        if mesh.num_ranks != world:
            raise ValueError(f"the mesh has {mesh.num_ranks} ranks, but {world} are running")
        self.mesh = mesh
        self.rank = dist.get_rank()
        handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            tuple(range(world)): dist.group.WORLD if world > 1 else None
        }
        self._groups: dict[str, Group] = {}
        for axis in _axes(mesh):
            for ranks in mesh.groups(axis):  # every rank makes every group, in this order
                if ranks not in handles:
                    handles[ranks] = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
            mine = mesh.group(axis, self.rank)
            self._groups[axis] = Group(axis, mine, mine.index(self.rank), handles[mine])

    def __getitem__(self, axis: str) -> Group:
        if axis not in self._groups:
            raise ValueError(f"axis={axis!r} is not on the mesh; use one of {list(self._groups)}")
        return self._groups[axis]

    def of_replicas(self) -> "Groups":
        """What a communication policy's plans are carried out on: its axes are groups of the ranks that hold the same
        part of the model, `mesh` and `rank` number these from 0. Groups keep the names of their own axes ("replicas",
        "replicas_local", ...). The same object if every rank holds all of the model.
        """
        if self.mesh.is_plain:
            return self
        view = object.__new__(Groups)
        view.mesh = self.mesh.of_replicas()
        view.rank = self.mesh.index(REPLICAS, self.rank)
        view._groups = {axis: self._groups[of] for axis, of in OF_REPLICAS.items()}
        return view


def _axes(mesh: Mesh) -> tuple[str, ...]:
    """Those of which groups are made."""
    if mesh.is_plain:
        return (
            mesh.axes
        )  # the four of a communication policy, and others that are equal to them or of one rank
    return (WORLD, *(axis for axis in mesh.axes if axis not in (WORLD, LOCAL, NODE, HPZ)))


def device_mesh(groups: Groups, device: torch.device) -> DeviceMesh:
    """What FSDP2 shards over, as one dimension: the world, or of a view `of_replicas` those ranks. It reuses their
    process group.
    """
    group = groups[WORLD]
    if group.handle is None:
        return DeviceMesh(device.type, torch.tensor([dist.get_rank()]), mesh_dim_names=(WORLD,))
    return DeviceMesh.from_group(group.handle, device.type, mesh_dim_names=(WORLD,))
