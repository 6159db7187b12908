"""Sizes that must divide, and what to type instead."""

from collections.abc import Mapping, Sequence
from math import isqrt

from ...mesh import divisors
from .mode import Sizes


def check_divides(
    sizes: Sizes, parts: Mapping[str, int], *, mode: str, ranks: int, legal: Sequence[int]
) -> None:
    """Raises ValueError for the first key whose size `parts` does not divide.

    Args:
        legal: Values of parallel.tensor that the model allows.
    """
    found = sizes.keys()
    for key, into in parts.items():
        if found[key] % into:
            instead = f"parallel.tensor can be one of {list(legal)}"
            if key.startswith("batch."):
                instead = f"{key} can be a multiple of {into}"
            raise ValueError(
                f"parallel.tensor={ranks} with parallel.tensor_mode={mode} cuts {key}={found[key]} in {into} parts, "
                f"which does not divide; {instead}"
            )


def legal_1d(sizes: Sizes) -> list[int]:
    """The tensor degrees that heads, key heads and MLP allow."""
    return [t for t in divisors(sizes.kv_heads) if sizes.heads % t == 0 and sizes.ffn % t == 0]


def legal_sides(sizes: Sizes, *, power: int) -> list[int]:
    """Values of q for which hidden and ffn can be cut in q ** power parts, and heads in q."""
    return [
        q
        for q in divisors(sizes.kv_heads)
        if sizes.heads % q == 0 and sizes.hidden % q**power == 0 and sizes.ffn % q**power == 0
    ]


def square_side(ranks: int, *, depth: int = 1) -> int | None:
    """q of a q x q x depth mesh; None: there is none."""
    if ranks % depth:
        return None
    side = isqrt(ranks // depth)
    return side if side * side * depth == ranks else None


def cube_side(ranks: int) -> int | None:
    """q of a q x q x q mesh; None: there is none."""
    side = round(ranks ** (1 / 3))
    return side if side**3 == ranks else None
