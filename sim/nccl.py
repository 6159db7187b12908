"""NCCL's choice of algorithm and protocol, and what a collective then costs.

Constants: NVIDIA/nccl, src/graph/tuning.cc (base and hop latencies, shares of bandwidth, the trees' correction by
size). Rings: 2.20.3 (since 2.21.5 LL takes half the bandwidth). Trees: 2.25.1 (2.20.3 has hops of 28 us for simple
and no base). Left out: ceilings per channel and GPU, a tree pattern's 0.85, and the plateau of rings (their latency
1.4 to 1.9 times). Every rank passes a chunk on as it comes: the first one takes the latency of each hop on its way,
and the others follow in a stream, so that latencies and the bytes of the fullest link add up, as for the tuner.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..conf.schema import Algorithm, ClusterConf
from ..policies.mesh import Mesh
from .interpreter import Transfer, Work
from .levels import CHAIN, PAIRWISE, RING, TREE, Traffic, Use
from .reach import Reach, reach
from .trees import climb

# microseconds: (tree, ring)
BASE_US = {"ll": (6.8, 6.6), "ll128": (14.0, 14.0), "simple": (8.4, 8.4)}
# microseconds of a hop, (tree, ring): within a node by NVLink, and between nodes. The configured latencies are those
# of a ring with the simple protocol; the others keep NCCL's proportion to it.
HOP_INSIDE_US = {"ll": (0.6, 0.6), "ll128": (1.25, 1.9), "simple": (4.0, 3.4)}
HOP_OUTSIDE_US = {"ll": (5.0, 2.7), "ll128": (8.5, 4.0), "simple": (14.0, 14.0)}

CHAINS = (
    "broadcast",
    "reduce",
    "reduce_tree",
)  # along the ring from the root, or to it; it has no other trees for them

TREE_SHARE = 0.92  # of the ring's bandwidth
# By powers of two from 64 bytes on; above them, 1.
TREE_SIZE_SHARE = {
    "ll": (
        *(1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    ),
    "ll128": (
        *(1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    ),
    "simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}


@dataclass(frozen=True, slots=True)
class Way:
    """How a collective is carried out: after `latency_ns`, `nbytes` with the loads of `use`."""

    algorithm: str  # ring, chain, tree, direct
    use: Use
    latency_ns: int
    nbytes: float
    base_ns: int = 0  # of the latency, what comes before the first hop
    hops_ns: tuple[int, int] = (0, 0)  # of one hop: within a node, and between nodes


class Nccl:
    """Of one cluster and mesh.

    Args:
        ns: How long local work takes: what a ring does between its hops. NCCL's own sums cost nothing extra.
    """

    def __init__(self, cluster: ClusterConf, mesh: Mesh, ns: Callable[[Work], int]) -> None:
        self.traffic = Traffic(cluster, mesh)
        self._mesh = mesh
        self._conf = cluster.nccl
        # in a mixed cluster the slowest nodes' hops count for all
        self._inside_ns = max(inner.latency_ns for inner in cluster.insides)
        self._outside_ns = max(outer.latency_ns for outer in cluster.outsides)
        self._wan_ns = cluster.wan_latency_ns if cluster.sites > 1 else 0
        self._per_site = cluster.nodes // cluster.sites
        self._ns = ns
        self._reach: dict[tuple[str, int | None], Reach] = {}
        self._known: dict[Transfer, Way] = {}
        self._longest: dict[tuple[Use, tuple[int, int]], int] = {}

    def way(self, transfer: Transfer) -> Way:
        """The one that ends first on an empty network, as NCCL's tuner takes it."""
        known = self._known.get(transfer)
        if known is None:
            ways = self._ways(transfer)
            known = self._known[transfer] = min(ways, key=self._expected_ns) if len(ways) > 1 else ways[0]
        return known

    def alone_ns(self, way: Way) -> float:
        """On an empty network, all groups of the axis at once."""
        return way.latency_ns + way.nbytes * self.traffic.bottleneck(way.use)

    def hop_ns(self, way: Way, source: int, target: int) -> int:
        """What a chunk takes from one rank to the next before its bytes count."""
        inside_ns, outside_ns = way.hops_ns
        here, there = self._mesh.node_of(source), self._mesh.node_of(target)
        if here == there:
            return inside_ns
        return outside_ns + (self._wan_ns if here // self._per_site != there // self._per_site else 0)

    def _expected_ns(self, way: Way) -> float:
        """As the tuner has it: to it a node's links carry of a tree what they carry of a ring."""
        if way.use.pattern != TREE:
            return self.alone_ns(way)
        return way.latency_ns + way.nbytes * self.traffic.bottleneck(Use(way.use.axis, RING))

    def node_of(self, rank: int) -> int:
        return self._mesh.node_of(rank)

    def ring(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """A group in the order of its ring."""
        return tuple(self._mesh.ring(group))

    def reach(self, axis: str, block: int | None = None) -> Reach:
        key = (axis, block)
        if key not in self._reach:
            self._reach[key] = reach(self._mesh, axis, block)
        return self._reach[key]

    def _ways(self, transfer: Transfer) -> list[Way]:
        at, sites = self.reach(transfer.axis), self._sites(transfer.axis)
        rounds, chosen = at.size - 1, self._conf.algorithm
        if transfer.op == "all_to_all":
            wan_ns = self._wan_ns if sites > 1 else 0
            hop_ns = (self._outside_ns if at.peers_outside else self._inside_ns) + wan_ns
            base_ns = self._base_ns("simple", 1)
            use = Use(transfer.axis, PAIRWISE)
            return [Way("direct", use, base_ns + hop_ns, float(transfer.message_bytes * rounds))]
        ways = []
        for protocol in self._conf.protocols:
            if transfer.op in CHAINS:
                ways.append(self._chain(transfer, protocol, at))
                continue
            if transfer.op != "all_reduce":
                ways.append(self._ring(transfer, protocol, at, sites))
                continue
            if chosen in (Algorithm.auto, Algorithm.ring):
                ways.append(self._ring(transfer, protocol, at, sites))
            if chosen in (Algorithm.auto, Algorithm.tree):
                ways.append(self._tree(transfer, protocol, at))
            if chosen is Algorithm.direct:
                ways.append(self._direct(transfer, protocol, at, sites))
        return ways

    def _ring(self, transfer: Transfer, protocol: str, at: Reach, sites: int) -> Way:
        inside_ns, outside_ns = self._hop_ns(protocol, 1)
        latency_ns = (
            (at.size - at.nodes) * inside_ns + (at.nodes - 1) * outside_ns + (sites - 1) * self._wan_ns
        )
        rounds = at.size - 1
        nbytes = float(transfer.message_bytes)
        if transfer.op in ("all_gather", "reduce_scatter"):
            nbytes *= rounds
        elif transfer.op == "all_reduce":
            nbytes = 2.0 * rounds * _chunk_bytes(transfer)
            latency_ns *= 2
        if transfer.op == "reduce_scatter" and transfer.hop[0]:
            latency_ns += rounds * sum(map(self._ns, transfer.hop[1]))
        latency_ns += self._base_ns(protocol, 1)
        nbytes *= self._overhead(transfer.op, protocol, at)
        return Way("ring", Use(transfer.axis, RING), latency_ns, nbytes)

    def _chain(self, transfer: Transfer, protocol: str, at: Reach) -> Way:
        """Along the ring from the root, or to it."""
        hops_ns, base_ns = self._hop_ns(protocol, 1), self._base_ns(protocol, 1)
        end = -1 - transfer.root if transfer.op == "broadcast" else transfer.root
        nbytes = transfer.message_bytes * self._overhead(transfer.op, protocol, at)
        return self._streamed("chain", Use(transfer.axis, CHAIN, end), nbytes, base_ns, hops_ns)

    def _tree(self, transfer: Transfer, protocol: str, at: Reach) -> Way:
        """Two binary trees over the nodes, a chain within each node: up, then down, pipelined."""
        hops_ns, base_ns = self._hop_ns(protocol, 0), self._base_ns(protocol, 0)
        steps = TREE_SIZE_SHARE[protocol]
        power = max(0, transfer.payload_bytes // 64).bit_length() - 1
        share = TREE_SHARE * (steps[max(0, power)] if power < len(steps) else 1.0)
        if protocol == "ll":
            share /= 3.8
        elif protocol == "ll128":
            share *= 7 / 9 if at.nodes == 1 else 120 / 128
        nbytes = 2.0 * transfer.payload_bytes / share
        return self._streamed("tree", Use(transfer.axis, TREE), nbytes, base_ns, hops_ns)

    def _streamed(
        self, algorithm: str, use: Use, nbytes: float, base_ns: int, hops_ns: tuple[int, int]
    ) -> Way:
        return Way(algorithm, use, base_ns + self._longest_ns(use, hops_ns), nbytes, base_ns, hops_ns)

    def _longest_ns(self, use: Use, hops_ns: tuple[int, int]) -> int:
        """What a first chunk takes along the longest way: up a tree and down again, or along a chain."""
        key = (use, hops_ns)
        if key not in self._longest:
            if use.pattern == TREE:
                following, times = self.traffic.parents(use.axis), 2
            else:
                along = self.traffic.to(use)
                following, times = np.where(self.traffic.sending(use) > 0, along, -1)[None], 1
            ways = [float(climb(to, self._latencies(to, hops_ns)).max()) for to in following]
            self._longest[key] = round(times * max(ways))
        return self._longest[key]

    def _direct(self, transfer: Transfer, protocol: str, at: Reach, sites: int) -> Way:
        """Each rank sums its part from all others, and gives it to all others."""
        inside_ns, outside_ns = self._hop_ns(protocol, 1)
        hop_ns = (outside_ns if at.nodes > 1 else inside_ns) + (self._wan_ns if sites > 1 else 0)
        nbytes = 2.0 * (at.size - 1) * _chunk_bytes(transfer) * self._overhead("all_reduce", protocol, at)
        use = Use(transfer.axis, PAIRWISE)
        return Way("direct", use, 2 * hop_ns + self._base_ns(protocol, 1), nbytes)

    def _latencies(self, to: NDArray[np.int64], hops_ns: tuple[int, int]) -> NDArray[np.float64]:
        """`hop_ns` from each rank to its `to`."""
        nodes = self.traffic.slots // self._mesh.ranks_per_node
        sites = nodes // self._per_site
        found = np.where(nodes[to] == nodes, *(float(ns) for ns in hops_ns))
        return found + np.where(sites[to] == sites, 0.0, float(self._wan_ns))

    def _sites(self, axis: str) -> int:
        return self.reach(axis, self._per_site * self._mesh.ranks_per_node).nodes if self._wan_ns else 1

    def _hop_ns(self, protocol: str, ring: int) -> tuple[int, int]:
        if protocol == "simple" and ring:
            return self._inside_ns, self._outside_ns
        inside = HOP_INSIDE_US[protocol][ring] / HOP_INSIDE_US["simple"][1]
        outside = HOP_OUTSIDE_US[protocol][ring] / HOP_OUTSIDE_US["simple"][1]
        return round(self._inside_ns * inside), round(self._outside_ns * outside)

    def _base_ns(self, protocol: str, ring: int) -> int:
        return round(BASE_US[protocol][ring] * 1e3) if self._conf.base_latency else 0

    def _overhead(self, op: str, protocol: str, at: Reach) -> float:
        """Bytes on the wire of a ring for each byte of data: flags beside it, or what its rate loses."""
        if protocol == "ll":
            return 4.0 if at.nodes > 1 or op in ("all_reduce", "reduce", "reduce_tree") else 3.0
        if protocol == "ll128":
            return 1 / (0.7 if at.size < 2 * at.nodes else 0.92)
        return 1.0


def _chunk_bytes(transfer: Transfer) -> int:
    return -(-transfer.numel // transfer.group_size) * transfer.element_bytes
