"""What a collective puts on each kind of link: counted for every rank, whatever the groups look like."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..conf.schema import Backend, ClusterConf, NodeKind
from ..policies.mesh import Mesh
from .trees import tree_parents

Loads = NDArray[np.float64]  # [num_ranks]
RING, PAIRWISE, MESSAGE, TREE, CHAIN = "ring", "pairwise", "message", "tree", "chain"

OWN, PCIE, HOST, RAIL, NIC, LEAF, SITE = "own", "pcie", "host", "rail", "nic", "leaf", "site"
_PAIR = -1  # in place of a number of consecutive ranks: two GPUs with NVLink between them


@dataclass(frozen=True, slots=True)
class Use:
    """A pattern of traffic over the groups of an axis. `shift`: of a message; the last rank's place in a chain."""

    axis: str
    pattern: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """Links of one kind, each shared by `block` consecutive ranks. `capacity` in bytes a nanosecond."""

    name: str
    block: int
    capacity: float


def levels(cluster: ClusterConf) -> tuple[Level, ...]:
    """From a rank outwards."""
    inner, outer = cluster.intra_node, cluster.inter_node
    per_node, node = cluster.devices_per_node, outer.node_Bps / 1e9
    found = [Level(OWN, 1, inner.bandwidth_Bps / 1e9)]
    nccl = cluster.backend is Backend.nccl
    if nccl and inner.pcie_Bps is not None and inner.kind is NodeKind.nvlink_pairs:
        found.append(Level(PCIE, 1, inner.pcie_Bps / 1e9))
    if nccl and inner.host_Bps is not None and inner.kind is not NodeKind.nvswitch:
        found.append(Level(HOST, per_node, inner.host_Bps / 1e9))
    if nccl and outer.rails:
        sharing = max(1, -(-per_node // outer.links))
        found.append(Level(RAIL, sharing, node * sharing / per_node))
    found.append(Level(NIC, per_node, node))
    per_leaf = outer.nodes_per_leaf
    if per_leaf and per_leaf < cluster.nodes:
        found.append(Level(LEAF, per_node * per_leaf, per_leaf * node / outer.oversubscription))
    if cluster.sites > 1 and cluster.wan_Bps is not None:
        found.append(Level(SITE, cluster.num_ranks // cluster.sites, cluster.wan_Bps / 1e9))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The messages of an exchange between ranks that have just come, and with those that came before."""

    come: NDArray[np.bool_]  # [num_ranks]
    here: NDArray[np.bool_]  # [num_ranks], others


class Traffic:
    """How often each rank's part in a use loads the link of each level.

    A ring: the edge to the next rank, for what passes along the ring; a chain: the same without one edge. Pairwise: for
    all that a rank sends, the same to each peer. A message: for its bytes, at the sender. A tree: for the data, twice
    (up and down); half of it takes each of two trees.
    """

    def __init__(self, cluster: ClusterConf, mesh: Mesh) -> None:
        self.mesh = mesh
        self.levels = levels(cluster)
        self._kind = cluster.intra_node.kind if cluster.backend is Backend.nccl else NodeKind.nvswitch
        self._rails = cluster.inter_node.rails and cluster.backend is Backend.nccl
        self._ranks: NDArray[np.int64] = np.arange(mesh.num_ranks)
        self.loads = lru_cache(maxsize=None)(self._loads)
        self.bottleneck = lru_cache(maxsize=None)(self._bottleneck)
        self.parents = lru_cache(maxsize=None)(self._parents)
        self._stretches = lru_cache(maxsize=None)(self._find_stretches)

    def peers(self, axis: str, shift: int) -> NDArray[np.int64]:
        """The rank `shift` places further, of each rank. [num_ranks]"""
        size, step = self.mesh.lattice(axis)
        place = self._ranks // step % size
        moved: NDArray[np.int64] = self._ranks + ((place + shift) % size - place) * step
        return moved

    def groups(self, axis: str) -> NDArray[np.int64]:
        """A number for each rank, equal within a group of `axis`. [num_ranks]"""
        size, step = self.mesh.lattice(axis)
        found: NDArray[np.int64] = self._ranks // (step * size) * step + self._ranks % step
        return found

    def sending(self, use: Use) -> Loads:
        """1 for each rank that sends along a ring or chain. [num_ranks]"""
        size, step = self.mesh.lattice(use.axis)
        if use.pattern == CHAIN:
            return np.not_equal(self._ranks // step % size, use.shift).astype(np.float64)
        return np.ones(len(self._ranks))

    def part(self, use: Use, level: Level, part: Part) -> Loads:
        """Loads of a part of a pairwise use, as fractions of all that one rank sends in the whole of it."""
        return self._loads(use, level, part)

    def _parents(self, axis: str) -> NDArray[np.int64]:
        """The ranks above each in the two trees of its group of `axis`. [2, num_ranks]"""
        return tree_parents(self.groups(axis), self._blocks(self.mesh.ranks_per_node))

    def _bottleneck(self, use: Use) -> float:
        """Nanoseconds that a byte takes at the fullest link, while all groups of the axis do the same."""
        slowest = 0.0
        for level in self.levels:
            on_blocks = np.bincount(self._ranks // level.block, weights=self.loads(use, level))
            slowest = max(slowest, float(on_blocks.max()) / level.capacity)
        return slowest

    def _loads(self, use: Use, level: Level, part: Part | None = None) -> Loads:
        match level.name:
            case "own" | "pcie":
                return self._near(use, level.name, part)
            case "host":
                return self._host(use, part)
            case "rail":
                return self._rail(use, part)
            case _:
                return self._leaving(use, level.block, part)

    def _blocks(self, block: int) -> NDArray[np.int64]:
        per_node = self.mesh.ranks_per_node
        if block == _PAIR:
            return self._ranks // per_node * per_node + self._ranks % per_node // 2
        return self._ranks // block

    def _leaving(self, use: Use, block: int, part: Part | None = None) -> Loads:
        """What leaves the rank's block; of blocks of one rank, all that it sends."""
        if use.pattern == PAIRWISE:
            return self._pairwise(use.axis, block, part)
        blocks = self._blocks(block)
        if use.pattern == TREE:
            total: Loads = np.zeros(len(self._ranks))
            for above in self.parents(use.axis):
                low: NDArray[np.int64] = np.flatnonzero(above >= 0)
                low = low[blocks[low] != blocks[above[low]]]
                for senders in (low, above[low]):  # a fourth goes up each tree, and down again
                    total += 0.25 * np.bincount(senders, minlength=len(total))
            return total
        to = self.peers(use.axis, use.shift if use.pattern == MESSAGE else 1)
        return np.not_equal(blocks[to], blocks) * self.sending(use)

    def _pairwise(self, axis: str, block: int, part: Part | None) -> Loads:
        others = self.mesh.size(axis) - 1
        if part is None:
            return (others + 1 - self._beside(axis, block)) / others
        # who has just come sends to all that are there, and those to them
        groups, (at, num) = self.groups(axis), self._stretches(axis, block)
        leaving = []
        for mask in (part.come, part.here):
            in_group, beside = np.bincount(groups, mask), np.bincount(at, mask, minlength=num)
            leaving.append(in_group[groups] - beside[at])
        to_come, to_here = leaving
        return (part.come * (to_come + to_here) + part.here * to_come) / others

    def _beside(self, axis: str, block: int) -> Loads:
        """Ranks of the own group in the own block, itself among them."""
        at, num = self._stretches(axis, block)
        return np.bincount(at, minlength=num)[at].astype(np.float64)

    def _find_stretches(self, axis: str, block: int) -> tuple[NDArray[np.int64], int]:
        """Ranks of one group in one block have equal numbers: these, and how many there are."""
        if block == 1:
            return self._ranks, len(self._ranks)
        blocks = self._blocks(block)
        key = self.groups(axis) * (int(blocks[-1]) + 1) + blocks
        found, at = np.unique(key, return_inverse=True)
        return at, len(found)

    def _near(self, use: Use, name: str, part: Part | None = None) -> Loads:
        """The rank's own way, and with pairs of GPUs its other one, to the host."""
        own = self._leaving(use, 1, part)
        if self._kind is NodeKind.nvlink_pairs:
            out_of_pair = self._leaving(use, _PAIR, part)
            return own - out_of_pair if name == OWN else out_of_pair
        if self._rails and self._kind is NodeKind.nvswitch and use.pattern == PAIRWISE:
            # what goes to another local index elsewhere takes NVLink to the GPU of that rail first
            beside = self._beside(use.axis, self.mesh.ranks_per_node)
            outside = self._leaving(use, self.mesh.ranks_per_node, part)
            own = own + outside - outside / beside
        return own

    def _host(self, use: Use, part: Part | None = None) -> Loads:
        """Copies through the host's memory are written there and read again."""
        through = self._near(use, PCIE, part)
        outside = self._leaving(use, self.mesh.ranks_per_node, part)
        if use.pattern in (PAIRWISE, TREE):
            return 2.0 * through + 2.0 * outside  # and as much comes from outside
        arriving: Loads = np.zeros(len(self._ranks))
        arriving[self.peers(use.axis, use.shift if use.pattern == MESSAGE else 1)] = outside
        return 2.0 * through + 2.0 * arriving

    def _rail(self, use: Use, part: Part | None = None) -> Loads:
        """Rings leave a node on all NICs of its ranks alike (NCCL's channels); else each rank has its own."""
        per_node = self.mesh.ranks_per_node
        leaving = self._leaving(use, per_node, part)
        if use.pattern in (PAIRWISE, MESSAGE):
            return leaving
        at, num = self._stretches(use.axis, per_node)
        count = np.bincount(at, minlength=num)
        shared: Loads = (np.bincount(at, weights=leaving, minlength=num) / count)[at]
        return shared
