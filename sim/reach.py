"""How the groups of an axis lie on the nodes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..policies.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Reach:
    """Of one axis; the worst group, if they differ."""

    size: int
    nodes: int  # that one group spans
    ring_crossings: int  # edges of all groups' rings that leave one node
    peers_outside: int  # of one rank, on other nodes
    per_node: int  # ranks of one node that take part, in whatever group


def reach(mesh: Mesh, axis: str, block: int | None = None) -> Reach:
    """Of the groups of `axis`; ranks lie in block order. `block`: ranks of one leaf or site, not of a node."""
    size, step = mesh.lattice(axis)
    local = block or mesh.ranks_per_node
    ranks: NDArray[np.int64] = np.arange(mesh.num_ranks)
    place, here = ranks // step % size, ranks // local
    following = ranks + ((place + 1) % size - place) * step
    leaves = np.not_equal(following // local, here)
    group = ranks // (step * size) * step + ranks % step
    key = group * (int(here[-1]) + 1) + here
    parts, counts = np.unique(key, return_counts=True)
    spans = np.bincount(parts // (int(here[-1]) + 1))
    return Reach(
        size=size,
        nodes=int(spans.max()),
        ring_crossings=int(np.bincount(here, weights=leaves).max()),
        peers_outside=size - int(counts.min()),
        per_node=local,
    )
