"""Units of a block's half as rows: what lies where in the matrices of this rank.

A unit's numbers lie side by side: its rows of each first matrix, its biases, its columns of the second matrix.

Shapes: U units, D hidden features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Of one half. Its tensors are in this order: first matrices [rows, D], biases of all of them or none [rows], the
    second matrix [D, features of all units].

    Args:
        rows: Of a unit in each first matrix, one number for each section of it: queries, keys and values may share
            one.
        biased: Whether first matrices have biases.
        features: Columns of the second matrix that a unit is.
    """

    rows: tuple[tuple[int, ...], ...]
    biased: bool
    features: int

    def pieces(self, tensors: Sequence[Tensor], units: int) -> list[Tensor]:
        """Views of the tensors of `units` units, in the order of a row, each [U, ...]."""
        *firsts, second = tensors
        found = []
        for sections, tensor in zip(self.rows * (1 + self.biased), firsts, strict=True):
            begin = 0
            for rows in sections:
                section = tensor.narrow(0, begin, units * rows)
                found.append(torch.unflatten(section, 0, (units, rows)))
                begin += units * rows
        found.append(torch.unflatten(second, 1, (units, self.features)).transpose(0, 1))
        return found

    def empty(self, tensors: Sequence[Tensor], units: int) -> list[Tensor]:
        """Room for so many units, of the kinds of the tensors."""
        *firsts, second = tensors
        sums = [sum(sections) for sections in self.rows * (1 + self.biased)]
        made = [x.new_empty(units * rows, *x.shape[1:]) for x, rows in zip(firsts, sums, strict=True)]
        return [*made, second.new_empty(second.shape[0], units * self.features)]

    def pack(self, tensors: Sequence[Tensor], units: int, first: int, last: int) -> Tensor:
        """Units `first` to before `last` of `units` as rows, [last - first, numbers of one]."""
        return torch.cat([piece[first:last].flatten(1) for piece in self.pieces(tensors, units)], 1)

    def write(self, tensors: Sequence[Tensor], units: int, first: int, rows: Tensor) -> None:
        """Undoes `pack`, into the tensors."""
        begin = 0
        for piece in self.pieces(tensors, units):
            target = piece[first : first + len(rows)]
            numel = target[0].numel() if len(target) else 0
            target.copy_(torch.unflatten(rows[:, begin : begin + numel], 1, target.shape[1:]))
            begin += numel

    def copy(
        self,
        source: Sequence[Tensor],
        source_units: int,
        target: Sequence[Tensor],
        target_units: int,
        units: int,
    ) -> None:
        """The first `units` units of one into those of the other."""
        pairs = zip(self.pieces(source, source_units), self.pieces(target, target_units), strict=True)
        for here, there in pairs:
            there[:units].copy_(here[:units])

    def first_of(self, tensors: Sequence[Tensor], units: int, kept: int) -> list[Tensor]:
        """The tensors of the first `kept` units; views, where a matrix has one section."""
        *firsts, second = tensors
        found = []
        for sections, tensor in zip(self.rows * (1 + self.biased), firsts, strict=True):
            parts, begin = [], 0
            for rows in sections:
                parts.append(tensor.narrow(0, begin, kept * rows))
                begin += units * rows
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return [*found, second.narrow(1, 0, kept * self.features)]
