"""How the groups of an axis lie on the nodes."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..policies.mesh import Mesh

Vector = NDArray[np.int64]  # [num_ranks]


@dataclass(frozen=True, slots=True)
class Reach:
    """Of one axis; the worst group, if they differ."""

    size: int
    nodes: int  # that one group spans
    ring_crossings: int  # edges of all groups' rings that leave one node
    ring_edges_outside: int  # edges of one group's ring that go from node to node
    peers_outside: int  # of one rank, on other nodes
    per_node: int  # ranks of one node that take part, in whatever group


def reach(mesh: Mesh, axis: str, block: int | None = None) -> Reach:
    """Of the groups of `axis`. `block`: slots of one leaf or site, not of a node."""
    size, _ = mesh.lattice(axis)
    local = block or mesh.ranks_per_node
    here = slots_of(mesh) // local
    leaves = np.not_equal(here[ring_peers(mesh, axis)], here)
    group = groups_of(mesh, axis)
    num_blocks = int(here.max()) + 1
    parts, counts = np.unique(group * num_blocks + here, return_counts=True)
    spans = np.bincount(parts // num_blocks)
    return Reach(
        size=size,
        nodes=int(spans.max()),
        ring_crossings=int(np.bincount(here, weights=leaves).max()),
        ring_edges_outside=int(np.bincount(group, weights=leaves).max()),
        peers_outside=size - int(counts.min()),
        per_node=local,
    )


@lru_cache(maxsize=16)
def slots_of(mesh: Mesh) -> Vector:
    """Where each rank lies: its node times the ranks of a node, plus its place on it."""
    slots: Vector = mesh.placement.slot(np.arange(mesh.num_ranks))
    return slots


def groups_of(mesh: Mesh, axis: str) -> Vector:
    """A number for each rank's group."""
    size, step = mesh.lattice(axis)
    ranks: Vector = np.arange(mesh.num_ranks)
    return ranks // (step * size) * step + ranks % step


def peers_of(mesh: Mesh, axis: str, shift: int) -> Vector:
    """The rank `shift` places further in the group, of each rank."""
    size, step = mesh.lattice(axis)
    ranks: Vector = np.arange(mesh.num_ranks)
    place = ranks // step % size
    moved: Vector = ranks + ((place + shift) % size - place) * step
    return moved


@lru_cache(maxsize=64)
def ring_peers(mesh: Mesh, axis: str, shift: int = 1) -> Vector:
    """The rank `shift` places further on the library's ring (`Mesh.ring`), of each rank."""
    if not (mesh.cyclic and mesh.rings_by_node):
        return peers_of(mesh, axis, shift)
    size, _ = mesh.lattice(axis)
    order = np.lexsort((slots_of(mesh), groups_of(mesh, axis))).reshape(-1, size)
    following: Vector = np.empty(mesh.num_ranks, dtype=np.int64)
    following[order] = np.roll(order, -shift, axis=1)
    return following
