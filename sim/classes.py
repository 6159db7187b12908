"""Ranks that behave alike, of which one is simulated for all: colour refinement over the groups they meet in."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..policies.mesh import WORLD, Mesh
from .reach import groups_of, peers_of, slots_of

Vector = NDArray[np.int64]  # [num_ranks] unless another length is given

Meeting = tuple[str, int]  # an axis, and the distance of a message along it (0: a collective)


class Circle(NamedTuple):
    """The classes that meet in the groups of an axis. `number`: equal for equal circles of one axis."""

    number: int
    classes: tuple[int, ...]


class Fold:
    """Classes of ranks: two of one class have equal colours and meet equal classes, in every group.

    So a slow rank splits the classes of those that it meets otherwise than they meet others, and no more: under
    ZeRO-3, whose collectives are all over the world, it is a class of its own and all others stay one.

    Attributes:
        of: The class of each rank; classes are numbered by their lowest rank.
        ranks: The lowest rank of each class, which is simulated.
        counts: Ranks in each class.
    """

    def __init__(
        self, mesh: Mesh, colours: Vector, meetings: Iterable[Meeting] = (), blocks: Iterable[int] = ()
    ) -> None:
        """`blocks`: sizes of runs of slots whose ranks share links, such as those of a node."""
        self.mesh = mesh
        _, of = np.unique(colours, return_inverse=True)
        kept = [m for m in dict.fromkeys(meetings) if m[0] != WORLD or m[1]]
        shifts = [(axis, shift) for axis, shift in kept if shift]
        groups = [groups_of(mesh, axis) for axis, shift in kept if not shift]
        if kept:
            slots = slots_of(mesh)
            groups += [slots // block for block in dict.fromkeys(blocks) if 1 < block < mesh.num_ranks]
        self.of: Vector = _refine(mesh, of.astype(np.int64), groups, shifts)
        _, first, self.of = np.unique(self.of, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        rename = np.empty_like(order)
        rename[order] = np.arange(len(order))
        self.of = rename[self.of]
        self.ranks: tuple[int, ...] = tuple(int(rank) for rank in first[order])
        self._circles: dict[str, list[Circle | None]] = {}
        self._known: dict[str, dict[tuple[int, ...], Circle]] = {}

    @classmethod
    def alike(cls, mesh: Mesh) -> "Fold":
        """One class of all ranks."""
        return cls(mesh, np.zeros(mesh.num_ranks, dtype=np.int64))

    @classmethod
    def apart(cls, mesh: Mesh) -> "Fold":
        """Every rank a class of its own."""
        return cls(mesh, np.arange(mesh.num_ranks))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(int(n) for n in np.bincount(self.of))

    def __len__(self) -> int:
        return len(self.ranks)

    def representative(self, rank: int) -> int:
        """The rank that is simulated for `rank`."""
        return self.ranks[int(self.of[rank])]

    def circle(self, axis: str, of_class: int) -> Circle:
        """The classes that meet in a group of `axis` with a rank of `of_class`, itself among them."""
        circles = self._circles.get(axis)
        if circles is None:
            circles = self._circles[axis] = [None] * len(self.ranks)
        circle = circles[of_class]
        if circle is None:
            classes = self._classes(axis, of_class)
            known = self._known.setdefault(axis, {})
            circle = known.setdefault(classes, Circle(len(known), classes))
            for each in classes:
                circles[each] = circle
        return circle

    def _classes(self, axis: str, of_class: int) -> tuple[int, ...]:
        if len(self.ranks) == 1:
            return (0,)
        if axis == WORLD:
            return tuple(range(len(self.ranks)))
        size, step = self.mesh.lattice(axis)
        rank = self.ranks[of_class]
        first = rank - rank // step % size * step
        return tuple(sorted(set(self.of[first : first + size * step : step].tolist())))


def _refine(mesh: Mesh, of: Vector, groups: list[Vector], shifts: list[Meeting]) -> Vector:
    """The coarsest classes within `of` such that equal ranks meet equal multisets of classes.

    `groups`: a number for each rank's group. `shifts`: messages along an axis.
    """
    num = int(of.max()) + 1
    while (groups or shifts) and num > 1:
        mixed = _hashes(of)
        for axis, shift in shifts:
            for there in (shift, -shift):
                mixed = _hashes(mixed * 3 + _hashes(of)[peers_of(mesh, axis, there)])
        for group in groups:
            sums: NDArray[np.uint64] = np.zeros(int(group.max()) + 1, dtype=np.uint64)
            np.add.at(sums, group, _hashes(of))
            mixed = _hashes(mixed * 3 + sums[group])
        found, of = np.unique(mixed, return_inverse=True)
        of = of.astype(np.int64)
        if len(found) == num:
            break
        num = len(found)
    return of


def _hashes(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers of 64 bits that look random (splitmix64, Steele et al. 2014), so that sums stand for multisets."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
