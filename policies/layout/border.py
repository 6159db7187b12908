"""How activations and parameters are cut over the axes of a mesh."""

from dataclasses import dataclass

from ..mesh import Mesh

Axes = tuple[
    str, ...
]  # the outermost cut first: ("x", "y") cuts in size(x) parts, and each of them in size(y)


@dataclass(frozen=True, slots=True)
class Border:
    """An activation [batch, tokens, features] between two layers: by which axes each dimension is cut.

    Ranks of an axis that is not named hold the same.
    """

    batch: Axes = ()
    tokens: Axes = ()
    features: Axes = ()

    def __str__(self) -> str:
        shown = [f"{name}/{'+'.join(getattr(self, name))}" for name in self.__slots__ if getattr(self, name)]
        return " ".join(shown) or "whole"

    @classmethod
    def parse(cls, text: str) -> "Border":
        """What `str` wrote.

        Raises:
            ValueError: If it did not.
        """
        cuts: dict[str, Axes] = {}
        for part in () if text == "whole" else text.split(" "):
            name, _, axes = part.partition("/")
            if name not in cls.__slots__ or not axes:
                raise ValueError(f"{text!r} is no border of two layers")
            cuts[name] = tuple(axes.split("+"))
        return cls(**cuts)

    @property
    def axes(self) -> Axes:
        return (*self.batch, *self.tokens, *self.features)

    @property
    def positions(self) -> Axes:
        """By which tokens are shared out: each rank of these has seen some of them only."""
        return (*self.batch, *self.tokens)


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter: by which axes each of its dimensions is cut. What it lacks is whole.

    `sections`: shares of dimension 0 that lie side by side and are cut each by itself, such as queries, keys and
    values of a fused matrix; () is one.
    """

    dims: tuple[Axes, ...] = ()
    sections: tuple[int, ...] = ()

    @property
    def axes(self) -> Axes:
        return tuple(axis for axes in self.dims for axis in axes)

    def parts(self, mesh: Mesh, dim: int) -> int:
        """In how many parts dimension `dim` is cut."""
        return num_parts(mesh, self.dims[dim]) if dim < len(self.dims) else 1


def num_parts(mesh: Mesh, axes: Axes) -> int:
    """In how many parts `axes` cut a dimension."""
    parts = 1
    for axis in axes:
        parts *= mesh.size(axis)
    return parts


def part_index(mesh: Mesh, axes: Axes, rank: int) -> int:
    """Which of the `num_parts` parts is the rank's."""
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + mesh.index(axis, rank)
    return index
