"""What a collective puts on each kind of link: counted for every rank, whatever the groups look like."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..conf.schema import Backend, ClusterConf, IntraNodeConf, NodeKind
from ..policies.mesh import Mesh
from .reach import groups_of, peers_of, ring_peers, slots_of

Loads = NDArray[np.float64]  # [num_ranks]
RING, PAIRWISE, MESSAGE = "ring", "pairwise", "message"

OWN, PCIE, HOST, RAIL, NIC, LEAF, SITE = "own", "pcie", "host", "rail", "nic", "leaf", "site"


@dataclass(frozen=True, slots=True)
class Use:
    """A pattern of traffic over the groups of an axis. `shift`: of a message."""

    axis: str
    pattern: str
    shift: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Links of one kind, each shared by `block` consecutive slots. `capacities` in bytes a nanosecond, [num_blocks]."""

    name: str
    block: int
    capacities: Loads


def levels(cluster: ClusterConf) -> tuple[Level, ...]:
    """From a rank outwards."""
    nodes, per_node, outer = cluster.nodes, cluster.devices_per_node, cluster.inter_node
    inside = _of_nodes(cluster, [inner.bandwidth_Bps for inner in cluster.insides])
    node = _of_nodes(cluster, [each.node_Bps for each in cluster.outsides])
    found = [Level(OWN, 1, np.repeat(inside, per_node))]
    if cluster.backend is Backend.nccl:
        kinds = {inner.kind for inner in cluster.insides}
        if NodeKind.nvlink_pairs in kinds:
            pcie = _of_nodes(cluster, [_pcie_Bps(inner) for inner in cluster.insides])
            found.append(Level(PCIE, 1, np.repeat(pcie, per_node)))
        if kinds != {NodeKind.nvswitch}:
            found.append(Level(HOST, per_node, _of_nodes(cluster, list(map(_host_Bps, cluster.insides)))))
        if outer.rails:
            sharing = max(1, -(-per_node // outer.links))
            slots = np.arange(0, cluster.num_ranks, sharing)
            found.append(Level(RAIL, sharing, node[slots // per_node] * sharing / per_node))
    found.append(Level(NIC, per_node, node))
    per_leaf = outer.nodes_per_leaf
    if per_leaf and per_leaf < nodes:
        leaves = node.reshape(-1, per_leaf).sum(axis=1) / outer.oversubscription
        found.append(Level(LEAF, per_node * per_leaf, leaves))
    if cluster.sites > 1 and cluster.wan_Bps is not None:
        wan = np.full(cluster.sites, cluster.wan_Bps / 1e9)
        found.append(Level(SITE, cluster.num_ranks // cluster.sites, wan))
    return tuple(found)


def _of_nodes(cluster: ClusterConf, by_part_Bps: list[float]) -> Loads:
    """A capacity for each node, from one for each part, in bytes a nanosecond."""
    counts = [part.nodes for part in cluster.parts] or [cluster.nodes]
    capacities: Loads = np.repeat(np.array(by_part_Bps), counts) / 1e9
    return capacities


def _pcie_Bps(inner: IntraNodeConf) -> float:
    """Without bound where no load comes: elsewhere a GPU's way to the host is its own link."""
    given = inner.pcie_Bps if inner.kind is NodeKind.nvlink_pairs else None
    return given if given is not None else np.inf


def _host_Bps(inner: IntraNodeConf) -> float:
    given = inner.host_Bps if inner.kind is not NodeKind.nvswitch else None
    return given if given is not None else np.inf


class Traffic:
    """How often each rank's part in a use loads the link of each level.

    A ring: the edge to the next rank, for what passes along the ring. Pairwise: for all that a rank sends, the same
    to each peer. A message: for its bytes, at the sender.
    """

    def __init__(self, cluster: ClusterConf, mesh: Mesh) -> None:
        self.mesh = mesh
        self.slots = slots_of(mesh)
        self.levels = levels(cluster)
        self._gloo = cluster.backend is Backend.gloo
        self._rails = cluster.inter_node.rails and not self._gloo
        per_node = mesh.ranks_per_node
        self._nodes = self.slots // per_node
        self._pairs = self._nodes * per_node + self.slots % per_node // 2
        self._switched = self._ranks_of(cluster, NodeKind.nvswitch)
        self._paired = self._ranks_of(cluster, NodeKind.nvlink_pairs)
        self.loads = lru_cache(maxsize=None)(self._loads)
        self.bottleneck = lru_cache(maxsize=None)(self._bottleneck)

    def _ranks_of(self, cluster: ClusterConf, kind: NodeKind) -> NDArray[np.bool_]:
        """Which ranks lie on nodes of a kind; gloo's all lie as if on a switch."""
        kinds = [(NodeKind.nvswitch if self._gloo else inner.kind) is kind for inner in cluster.insides]
        counts = [part.nodes for part in cluster.parts] or [cluster.nodes]
        chosen: NDArray[np.bool_] = np.repeat(np.array(kinds), counts)[self._nodes]
        return chosen

    def _bottleneck(self, use: Use) -> float:
        """Nanoseconds that a byte takes at the fullest link, while all groups of the axis do the same."""
        slowest = 0.0
        for level in self.levels:
            on_blocks = np.bincount(self.slots // level.block, weights=self.loads(use, level))
            slowest = max(slowest, float((on_blocks / level.capacities).max()))
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
                return self._leaving(use, self.slots // level.block)

    def to(self, use: Use) -> NDArray[np.int64]:
        """Where each rank's ring edge or message goes."""
        if use.pattern == MESSAGE:
            return peers_of(self.mesh, use.axis, use.shift)
        return ring_peers(self.mesh, use.axis)

    def _leaving(self, use: Use, blocks: NDArray[np.int64]) -> Loads:
        """What leaves the rank's block."""
        if use.pattern == PAIRWISE:
            size = self.mesh.size(use.axis)
            return (size - self._beside(use.axis, blocks)) / (size - 1)
        leaves: Loads = np.not_equal(blocks[self.to(use)], blocks).astype(np.float64)
        return leaves

    def _beside(self, axis: str, blocks: NDArray[np.int64]) -> Loads:
        """Ranks of the own group in the own block, itself among them."""
        key = groups_of(self.mesh, axis) * (int(blocks.max()) + 1) + blocks
        _, at, count = np.unique(key, return_inverse=True, return_counts=True)
        beside: Loads = count[at].astype(np.float64)
        return beside

    def _near(self, use: Use, name: str) -> Loads:
        """The rank's own way, and with pairs of GPUs its other one, to the host."""
        if self._paired.any():
            in_pair = 1.0 - self._leaving(use, self._pairs)
            own: Loads = np.where(self._paired, in_pair, 1.0)
            if name == PCIE:
                return 1.0 - own
        elif self._gloo and use.pattern != PAIRWISE:
            return 1.0 - self._leaving(use, self._nodes)  # a connection of two ranks of one node
        else:
            own = np.ones(len(self.slots))
        if self._rails and use.pattern == PAIRWISE:
            # what goes to another local index elsewhere takes NVLink to the GPU of that rail first
            size = self.mesh.size(use.axis)
            outside = size - self._beside(use.axis, self._nodes)
            same_rail = self._beside(use.axis, self.slots % self.mesh.ranks_per_node) - 1.0
            own = own + np.where(self._switched, (outside - same_rail) / (size - 1), 0.0)
        return own

    def _host(self, use: Use) -> Loads:
        """Copies through the host's memory are written there and read again."""
        through = np.where(self._paired, self._near(use, PCIE), 1.0) if self._paired.any() else 1.0
        outside = arriving = self._leaving(use, self._nodes)  # pairwise as much comes as leaves
        if use.pattern != PAIRWISE:
            arriving = np.zeros(len(self.slots))
            arriving[self.to(use)] = outside
        loads: Loads = np.where(self._switched, 0.0, 2.0 * through + 2.0 * arriving)
        return loads

    def _rail(self, use: Use) -> Loads:
        """Rings leave a node on all NICs of its ranks alike (NCCL's channels); else each rank has its own."""
        leaving = self._leaving(use, self._nodes)
        if use.pattern != RING:
            return leaving
        key = groups_of(self.mesh, use.axis) * (self.mesh.num_nodes + 1) + self._nodes
        _, at, count = np.unique(key, return_inverse=True, return_counts=True)
        shared: Loads = (np.bincount(at, weights=leaving) / count)[at]
        return shared
