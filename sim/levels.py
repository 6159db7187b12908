"""What a collective puts on each kind of link: counted for every rank, whatever the groups look like."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..conf.schema import Backend, ClusterConf, IntraNodeConf, NodeKind
from ..policies.mesh import Mesh
from .reach import groups_of, peers_of, ring_peers, slots_of
from .trees import tree_parents

Loads = NDArray[np.float64]  # [num_ranks]
RING, PAIRWISE, MESSAGE, TREE, CHAIN = "ring", "pairwise", "message", "tree", "chain"

OWN, PCIE, HOST, RAIL, NIC, LEAF, SITE = "own", "pcie", "host", "rail", "nic", "leaf", "site"

# In place of a number of consecutive slots
_PAIR = -1  # two GPUs with NVLink between them
_PLACE = -2  # the GPUs of one local index


@dataclass(frozen=True, slots=True)
class Use:
    """A pattern of traffic over the groups of an axis.

    `shift`: of a message; of a chain the place in the group of the rank that does not send on, or -1 - the place of the
    one that nobody sends to.
    """

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
        self.slots = slots_of(mesh)
        self.levels = levels(cluster)
        self._gloo = cluster.backend is Backend.gloo
        self._rails = cluster.inter_node.rails and not self._gloo
        self._per_node = mesh.ranks_per_node
        self._switched = self._ranks_of(cluster, NodeKind.nvswitch)
        self._paired = self._ranks_of(cluster, NodeKind.nvlink_pairs)
        self.loads = lru_cache(maxsize=None)(self._loads)
        self.bottleneck = lru_cache(maxsize=None)(self._bottleneck)
        self.parents = lru_cache(maxsize=None)(self._parents)
        self._stretches = lru_cache(maxsize=None)(self._find_stretches)

    def to(self, use: Use) -> NDArray[np.int64]:
        """Where each rank's ring edge or message goes."""
        if use.pattern == MESSAGE:
            return peers_of(self.mesh, use.axis, use.shift)
        return ring_peers(self.mesh, use.axis)

    def sending(self, use: Use) -> Loads:
        """1 for each rank that sends along a ring or chain. [num_ranks]"""
        if use.pattern != CHAIN:
            return np.ones(len(self.slots))
        size, step = self.mesh.lattice(use.axis)
        place = np.arange(len(self.slots)) // step % size
        last = place == use.shift if use.shift >= 0 else place[self.to(use)] == -1 - use.shift
        return np.where(last, 0.0, 1.0)

    def part(self, use: Use, level: Level, part: Part) -> Loads:
        """Loads of a part of a pairwise use, as fractions of all that one rank sends in the whole of it."""
        return self._loads(use, level, part)

    def _ranks_of(self, cluster: ClusterConf, kind: NodeKind) -> NDArray[np.bool_]:
        """Which ranks lie on nodes of a kind; gloo's all lie as if on a switch."""
        kinds = [(NodeKind.nvswitch if self._gloo else inner.kind) is kind for inner in cluster.insides]
        counts = [part.nodes for part in cluster.parts] or [cluster.nodes]
        chosen: NDArray[np.bool_] = np.repeat(np.array(kinds), counts)[self._blocks(self._per_node)]
        return chosen

    def _parents(self, axis: str) -> NDArray[np.int64]:
        """The ranks above each in the two trees of its group of `axis`. [2, num_ranks]"""
        return tree_parents(groups_of(self.mesh, axis), self._blocks(self._per_node))

    def _bottleneck(self, use: Use) -> float:
        """Nanoseconds that a byte takes at the fullest link, while all groups of the axis do the same."""
        slowest = 0.0
        for level in self.levels:
            on_blocks = np.bincount(self.slots // level.block, weights=self.loads(use, level))
            slowest = max(slowest, float((on_blocks / level.capacities).max()))
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
        if block == _PAIR:
            return self.slots // self._per_node * self._per_node + self.slots % self._per_node // 2
        if block == _PLACE:
            return self.slots % self._per_node
        return self.slots // block

    def _leaving(self, use: Use, block: int, part: Part | None = None) -> Loads:
        """What leaves the rank's block; of blocks of one rank, all that it sends."""
        if use.pattern == PAIRWISE:
            return self._pairwise(use.axis, block, part)
        blocks = self._blocks(block)
        if use.pattern == TREE:
            total: Loads = np.zeros(len(self.slots))
            for above in self.parents(use.axis):
                low: NDArray[np.int64] = np.flatnonzero(above >= 0)
                low = low[blocks[low] != blocks[above[low]]]
                for senders in (low, above[low]):  # a fourth goes up each tree, and down again
                    total += 0.25 * np.bincount(senders, minlength=len(total))
            return total
        return np.not_equal(blocks[self.to(use)], blocks) * self.sending(use)

    def _pairwise(self, axis: str, block: int, part: Part | None) -> Loads:
        others = self.mesh.size(axis) - 1
        if part is None:
            return (others + 1 - self._beside(axis, block)) / others
        # who has just come sends to all that are there, and those to them
        groups, (at, num) = groups_of(self.mesh, axis), self._stretches(axis, block)
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
            return np.arange(len(self.slots)), len(self.slots)
        blocks = self._blocks(block)
        key = groups_of(self.mesh, axis) * (int(blocks.max()) + 1) + blocks
        found, at = np.unique(key, return_inverse=True)
        return at, len(found)

    def _near(self, use: Use, name: str, part: Part | None = None) -> Loads:
        """The rank's own way, and with pairs of GPUs its other one, to the host."""
        own = self._leaving(use, 1, part)
        if self._gloo:  # its ways are connections of two ranks of one node
            return own if use.pattern == PAIRWISE else own - self._leaving(use, self._per_node)
        if self._paired.any():
            to_host = np.where(self._paired, self._leaving(use, _PAIR, part), 0.0)
            if name == PCIE:
                return to_host
            own = own - to_host
        if self._rails and use.pattern == PAIRWISE:
            # what goes to another local index elsewhere takes NVLink to the GPU of that rail first
            same_rail = own - self._leaving(use, _PLACE, part)
            own = own + np.where(self._switched, self._leaving(use, self._per_node, part) - same_rail, 0.0)
        return own

    def _host(self, use: Use, part: Part | None = None) -> Loads:
        """Copies through the host's memory are written there and read again."""
        through = self._leaving(use, 1, part)
        if self._paired.any():
            through = np.where(self._paired, self._near(use, PCIE, part), through)
        outside = arriving = self._leaving(use, self._per_node, part)  # of most as much comes as leaves
        if use.pattern not in (PAIRWISE, TREE):
            arriving = np.zeros(len(self.slots))
            arriving[self.to(use)] = outside
        return np.where(self._switched, 0.0, 2.0 * through + 2.0 * arriving)

    def _rail(self, use: Use, part: Part | None = None) -> Loads:
        """Rings leave a node on all NICs of its ranks alike (NCCL's channels); else each rank has its own."""
        leaving = self._leaving(use, self._per_node, part)
        if use.pattern in (PAIRWISE, MESSAGE):
            return leaving
        at, num = self._stretches(use.axis, self._per_node)
        count = np.bincount(at, minlength=num)
        shared: Loads = (np.bincount(at, weights=leaving, minlength=num) / count)[at]
        return shared
