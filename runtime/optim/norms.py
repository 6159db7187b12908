"""L2 norms of whole parameters, of which this rank may hold only a part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# On a CPU torch adds up the squares of a whole tensor in one row (of each vector lane): of 10 million equal elements
# the norm is 4e-3 too small, of normal ones 4e-4. Of rows of this length, added pairwise, it is right to 2e-7.
_ROW = 256
_SHORT = 1024  # elements; up to here one row does, to 5e-7

AllReduce = Callable[[Tensor, dist.ProcessGroup], None]


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the ranks of `group`, in place."""
    dist.all_reduce(values, group=group)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; it shares the storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds the parts of parameters, where a layout has cut them and they do not say so themselves.

    Args:
        group: Ranks that hold all parts of the same parameters; all of them must step together.
        shares: Of each parameter by its identity, one over the ranks of `group` that hold the same elements.
    """

    group: dist.ProcessGroup
    shares: Mapping[int, float]


class WholeNorms:
    """Norms of parameters, and of other tensors that are cut as they are.

    Each rank sums the squares of its parts; the sums of all parameters, and of all that is asked for at once, are
    then added over the ranks in a single all-reduce. Only where parameters are cut over different groups of ranks
    is it one for each group. A parameter that is whole on each rank takes part in none.

    Args:
        parameters: Tensors, or DTensors that are sharded or replicated on each axis of their mesh.
        all_reduce: Sums in place over a group.
        holders: Of all parameters, in place of what DTensors say: one all-reduce over their group, in which each
            element counts once.

    Raises:
        ValueError: If a parameter is a sum that is not there yet (`Partial`).
    """

    def __init__(
        self, parameters: Sequence[Tensor], all_reduce: AllReduce, holders: Holders | None = None
    ) -> None:
        self._all_reduce = all_reduce
        self._num_parameters = len(parameters)
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = torch.float64 if wide else torch.float32  # norms of 16-bit weights too
        self._shares: Tensor | None = None
        if holders is not None and parameters:
            shares = [holders.shares[id(parameter)] for parameter in parameters]
            self._shares = torch.tensor(shares, dtype=self._dtype, device=parameters[0].device)
            self._cuts = [([holders.group], list(range(len(parameters))))]
            return
        # By ranks, not by the groups' names: meshes of the same ranks and names are equal to torch, which may give a
        # DTensor the mesh of an earlier training in this process, with another group
        cuts: dict[tuple[tuple[int, ...], ...], tuple[list[dist.ProcessGroup], list[int]]] = {}
        for place, parameter in enumerate(parameters):
            groups = _holders(parameter)
            if groups:
                ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
                cuts.setdefault(ranks, (groups, []))[1].append(place)
        self._cuts = list(cuts.values())

    @torch.no_grad()
    def of(self, *kinds: Sequence[Tensor]) -> Tensor:
        """Norms of several lists of this rank's parts, each in the order of the parameters.

        A part may be empty. All ranks must call this together.

        Returns:
            [len(kinds), num_parameters], fp32 (fp64 if a parameter is).
        """
        if not self._num_parameters:
            return torch.zeros(len(kinds), 0)
        parts = [part for kind in kinds for part in kind]
        squares = square_sums(parts, self._dtype).view(len(kinds), -1)
        if self._shares is not None:
            squares *= self._shares
        for groups, places in self._cuts:
            some = squares if len(places) == self._num_parameters else squares[:, places].contiguous()
            for group in groups:
                self._all_reduce(some, group)
            if some is not squares:
                squares[:, places] = some
        return squares.sqrt_()


def square_sums(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of squares of each tensor, [len(tensors)] of `dtype`; an empty one has 0."""
    on_cpu = tensors[0].device.type == "cpu"
    long = [i for i, tensor in enumerate(tensors) if on_cpu and tensor.numel() > _SHORT]
    nothing = tensors[0].new_empty(0)
    short = list(tensors)
    for i in long:
        short[i] = nothing
    sums = torch.stack(torch._foreach_norm(short, 2, dtype)).square_()
    if long:
        sums[long] = torch.stack([_long_square_sum(tensors[i].reshape(-1).to(dtype)) for i in long])
    return sums


def _long_square_sum(flat: Tensor) -> Tensor:
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    total: Tensor = rows.square_().sum() + rest.square_()  # torch sums pairwise
    return total


def _holders(parameter: Tensor) -> list[dist.ProcessGroup]:
    """Groups of ranks, one for each axis of the mesh on which `parameter` is cut, that hold it together."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, groups = parameter.device_mesh, []
    for axis, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}: a sum that is "
                "not there yet has no norm; redistribute it to Shard or Replicate"
            )
        if not placement.is_replicate() and mesh.size(axis) > 1:
            groups.append(mesh.get_group(axis))
    return groups
