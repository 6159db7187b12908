"""Which part of a parameter a rank holds, and the whole from the parts of all."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ...policies.layout.border import Axes, Cut
from ...policies.mesh import Mesh
from ..collectives import Collectives
from ..groups import Groups

Place = Mapping[str, int]  # an index on each axis


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter that is cut.

    Args:
        shape: Of the whole.
        padded: Of the whole with the rows by which its vocabulary is padded: zeros.
        cut: Of each dimension of `padded`.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    cut: Cut

    def local_part(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        """What the rank holds, as a tensor of its own."""
        part = _pad(whole, self.padded)
        for dim, rows in enumerate(self._rows(mesh, _place(mesh, self.cut.axes, rank))):
            if len(rows) < self.padded[dim]:
                part = part.index_select(dim, rows.to(part.device))
        return part.clone(memory_format=torch.contiguous_format) if part is whole else part.contiguous()

    def put(self, padded: Tensor, part: Tensor, mesh: Mesh, place: Place) -> None:
        """Write the part of the ranks at `place` where it lies in the whole."""
        rows = self._rows(mesh, place)
        index = [
            row.view(*(-1 if i == dim else 1 for i in range(len(rows)))).to(part.device)
            for dim, row in enumerate(rows)
        ]
        padded[tuple(index)] = part

    def without_padding(self, padded: Tensor) -> Tensor:
        """The whole."""
        for dim, size in enumerate(self.shape):
            padded = padded.narrow(dim, 0, size)
        return padded.contiguous()

    def _rows(self, mesh: Mesh, place: Place) -> list[Tensor]:
        """Of each dimension, the indices that lie at `place`."""
        found = []
        for dim, size in enumerate(self.padded):
            axes = self.cut.dims[dim] if dim < len(self.cut.dims) else ()
            sections = self.cut.sections if dim == 0 and self.cut.sections else (size,)
            found.append(_rows_of(sections, *_part(mesh, axes, place)))
        return found


def gather_wholes(
    tensors: Mapping[str, Tensor],
    placed: Mapping[str, Placed],
    groups: Groups,
    collectives: Collectives,
) -> dict[str, Tensor]:
    """The whole of each tensor, on every rank; what is not `placed` is whole already. A collective."""
    return {
        name: _gather(tensor, placed[name], groups, collectives) if name in placed else tensor
        for name, tensor in tensors.items()
    }


def _gather(part: Tensor, placed: Placed, groups: Groups, collectives: Collectives) -> Tensor:
    """Over one axis after another: then each place's part is here."""
    axes = tuple(axis for axis in dict.fromkeys(placed.cut.axes) if groups[axis].size > 1)
    parts = part.detach().contiguous()[None]
    for axis in reversed(axes):
        group = groups[axis]
        out = parts.new_empty(group.size, *parts.shape)
        collectives.all_gather(group, parts.view(-1), out.view(-1))
        parts = out.flatten(0, 1)  # the axis gathered last counts slowest
    padded = parts.new_zeros(placed.padded)
    places = product(*(range(groups[axis].size) for axis in axes))
    for one, indices in zip(parts, places, strict=True):
        placed.put(padded, one, groups.mesh, dict(zip(axes, indices, strict=True)))
    return placed.without_padding(padded)


def _pad(whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(whole.shape) == shape:
        return whole
    padded = whole.new_zeros(shape)
    padded[tuple(slice(size) for size in whole.shape)] = whole
    return padded


def _place(mesh: Mesh, axes: Axes, rank: int) -> Place:
    return {axis: mesh.index(axis, rank) for axis in axes}


def _part(mesh: Mesh, axes: Axes, place: Place) -> tuple[int, int]:
    """(index, number) of the parts in which `axes` cut a dimension."""
    index, parts = 0, 1
    for axis in axes:
        size = mesh.size(axis)
        index, parts = index * size + place.get(axis, 0), parts * size
    return index, parts


def _rows_of(sections: tuple[int, ...], index: int, parts: int) -> Tensor:
    """The index-th of `parts` parts of each section."""
    rows, first = [], 0
    for size in sections:
        each = size // parts
        rows.append(torch.arange(first + index * each, first + (index + 1) * each))
        first += size
    return torch.cat(rows)
