"""What a collective puts on each kind of link: counted for every rank, whatever the groups look like."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..conf.schema import Backend, ClusterConf, NodeKind
from ..policies.mesh import Mesh

Loads = NDArray[np.float64]  # [num_ranks]
RING, PAIRWISE, MESSAGE = "ring", "pairwise", "message"

OWN, PCIE, HOST, RAIL, NIC, LEAF, SITE = "own", "pcie", "host", "rail", "nic", "leaf", "site"


@dataclass(frozen=True, slots=True)
class Use:
    """A pattern of traffic over the groups of an axis. `shift`: of a message."""

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


class Traffic:
    """How often each rank's part in a use loads the link of each level.

    A ring: the edge to the next rank, for what passes along the ring. Pairwise: for all that a rank sends, the same
    to each peer. A message: for its bytes, at the sender.
    """

    def __init__(self, cluster: ClusterConf, mesh: Mesh) -> None:
        self.mesh = mesh
        self.levels = levels(cluster)
        self._kind = cluster.intra_node.kind if cluster.backend is Backend.nccl else NodeKind.nvswitch
        self._rails = cluster.inter_node.rails and cluster.backend is Backend.nccl
        self._ranks: NDArray[np.int64] = np.arange(mesh.num_ranks)
        per_node = mesh.ranks_per_node
        self._pairs: NDArray[np.int64] = self._ranks // per_node * per_node + self._ranks % per_node // 2
        self.loads = lru_cache(maxsize=None)(self._loads)
        self.bottleneck = lru_cache(maxsize=None)(self._bottleneck)

    def peers(self, axis: str, shift: int) -> NDArray[np.int64]:
        """The rank `shift` places further, of each rank. [num_ranks]"""
        size, step = self.mesh.lattice(axis)
        place = self._ranks // step % size
        moved: NDArray[np.int64] = self._ranks + ((place + shift) % size - place) * step
        return moved

    def _bottleneck(self, use: Use) -> float:
        """Nanoseconds that a byte takes at the fullest link, while all groups of the axis do the same."""
        slowest = 0.0
        for level in self.levels:
            on_blocks = np.bincount(self._ranks // level.block, weights=self.loads(use, level))
            slowest = max(slowest, float(on_blocks.max()) / level.capacity)
        return slowest

    def _loads(self, use: Use, level: Level) -> Loads:
        match level.name:
            case "own" | "pcie":
                return self._near(use, level.name)
            case "host":
                return self._host(use)
            case "rail":
                return self._rail(use)
            case _:
                return self._leaving(use, level.block)

    def _leaving(self, use: Use, block: int) -> Loads:
        """What leaves the rank's block."""
        blocks = self._ranks // block
        if use.pattern == PAIRWISE:
            size = self.mesh.size(use.axis)
            return (size - self._beside(use.axis, blocks)) / (size - 1)
        return self._edge(use, blocks)

    def _edge(self, use: Use, blocks: NDArray[np.int64]) -> Loads:
        to = self.peers(use.axis, use.shift if use.pattern == MESSAGE else 1)
        leaves: Loads = np.not_equal(blocks[to], blocks).astype(np.float64)
        return leaves

    def _beside(self, axis: str, blocks: NDArray[np.int64]) -> Loads:
        """Ranks of the own group in the own block, itself among them."""
        size, step = self.mesh.lattice(axis)
        group = self._ranks // (step * size) * step + self._ranks % step
        key = group * (int(blocks[-1]) + 1) + blocks
        _, at, count = np.unique(key, return_inverse=True, return_counts=True)
        beside: Loads = count[at].astype(np.float64)
        return beside

    def _near(self, use: Use, name: str) -> Loads:
        """The rank's own way, and with pairs of GPUs its other one, to the host."""
        if self._kind is NodeKind.nvlink_pairs:
            if use.pattern == PAIRWISE:
                size = self.mesh.size(use.axis)
                in_pair = (self._beside(use.axis, self._pairs) - 1) / (size - 1)
            else:
                in_pair = 1.0 - self._edge(use, self._pairs)
            return in_pair if name == OWN else 1.0 - in_pair
        own: Loads = np.ones(len(self._ranks))
        if self._rails and self._kind is NodeKind.nvswitch and use.pattern == PAIRWISE:
            # what goes to another local index elsewhere takes NVLink to the GPU of that rail first
            size, _ = self.mesh.lattice(use.axis)
            beside = self._beside(use.axis, self._ranks // self.mesh.ranks_per_node)
            outside = size - beside
            same_rail = outside / beside
            own = own + (outside - same_rail) / (size - 1)
        return own

    def _host(self, use: Use) -> Loads:
        """Copies through the host's memory are written there and read again."""
        per_node = self.mesh.ranks_per_node
        through = self._near(use, PCIE) if self._kind is NodeKind.nvlink_pairs else np.ones(len(self._ranks))
        outside = self._leaving(use, per_node)
        if use.pattern == PAIRWISE:
            return 2.0 * through + 2.0 * outside  # and as much comes from outside
        arriving: Loads = np.zeros(len(self._ranks))
        arriving[self.peers(use.axis, use.shift if use.pattern == MESSAGE else 1)] = outside
        return 2.0 * through + 2.0 * arriving

    def _rail(self, use: Use) -> Loads:
        """Rings leave a node on all NICs of its ranks alike (NCCL's channels); else each rank has its own."""
        per_node = self.mesh.ranks_per_node
        leaving = self._leaving(use, per_node)
        if use.pattern != RING:
            return leaving
        size, step = self.mesh.lattice(use.axis)
        group = self._ranks // (step * size) * step + self._ranks % step
        key = group * (self.mesh.num_nodes + 1) + self._ranks // per_node
        _, at, count = np.unique(key, return_inverse=True, return_counts=True)
        shared: Loads = (np.bincount(at, weights=leaving) / count)[at]
        return shared
