"""Who is wired to whom: ranks, hosts, switches, NICs, leaves and sites, and the paths between two ranks.

The wiring is a tree, up from each rank to the network's core, with a link in each direction of an edge; gloo's ranks
of a node have connections of their own beside it.
"""

from dataclasses import dataclass

from ..conf.schema import Backend, ClusterConf, InterNodeConf, IntraNodeConf, NodeKind

# What a message costs on loopback TCP before its first byte arrives, on top of the link's own latency.
# Measured: with delay + 60 us a fluid model follows real gloo within 6% at 4-16 MiB and 100-500 Mbit/s.
TCP_LATENCY_NS = 60_000


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a wire, or the cores of a host. `capacity` in bytes (cores: core-ns) a nanosecond."""

    name: str
    capacity: float


@dataclass(frozen=True, slots=True)
class Path:
    """The links that a message takes and how often, and its latency. `node`: it never leaves the node."""

    links: tuple[tuple[Link, float], ...]
    latency_ns: int
    node: bool


class Topology:
    """Of one cluster; links are made when a path first takes them.

    gloo: two ranks of a node share one loopback connection in each direction. NCCL: each GPU has its own way
    to the node's switch, or to the host's memory where there is no switch. Either way a node's NIC is shared by
    its ranks, up and down apart; with rails each GPU has the NIC of its local index.
    """

    def __init__(self, cluster: ClusterConf) -> None:
        self._cluster = cluster
        self._places = cluster.placement
        self._per_node = cluster.devices_per_node
        self._gloo = cluster.backend is Backend.gloo
        self._links: dict[str, Link] = {}
        self._paths: dict[tuple[int, int, bool], Path] = {}
        outer = cluster.inter_node
        self._per_leaf = outer.nodes_per_leaf if 0 < outer.nodes_per_leaf < cluster.nodes else 0
        self._per_site = cluster.nodes // cluster.sites
        # one traversal of the network, node to node; it includes the way to the NIC. In a mixed cluster the slowest
        self.outside_ns = max(map(self._traversal_ns, cluster.outsides))

    def path(self, source: int, target: int, *, pooled: bool = False) -> Path:
        """The way from one rank to another. `pooled`: on all rails together, as a ring's channels go."""
        key = (source, target, pooled)
        known = self._paths.get(key)
        if known is None:
            known = self._paths[key] = self._find(source, target, pooled)
        return known

    def latency_ns(self, source: int, target: int) -> int:
        """Of a message, from its last byte's leaving to its arrival; of two kinds of nodes the slower one's."""
        here, there = self._places.node(source), self._places.node(target)
        if here == there:
            return self._cluster.inside(here).latency_ns
        wan_ns = self._cluster.wan_latency_ns if here // self._per_site != there // self._per_site else 0
        return max(self._traversal_ns(self._cluster.outside(node)) for node in (here, there)) + wan_ns

    def nic(self, node: int) -> tuple[Link, Link]:
        """A node's links to the others, out and in."""
        return self._both(f"nic.{node}", self._cluster.outside(node).node_Bps)

    def own(self, rank: int) -> list[tuple[Link, Link]]:
        """A rank's ways to the others of its node and to the host, out and in."""
        inner = self._inner(rank)
        ways = [self._both(f"rank.{rank}", inner.bandwidth_Bps)]
        if inner.kind is NodeKind.nvlink_pairs and inner.pcie_Bps is not None:
            ways.append(self._both(f"pcie.{rank}", inner.pcie_Bps))
        return ways

    def _traversal_ns(self, outer: InterNodeConf) -> int:
        return outer.latency_ns + (TCP_LATENCY_NS if self._gloo else 0)

    def _inner(self, rank: int) -> IntraNodeConf:
        return self._cluster.inside(self._places.node(rank))

    def _find(self, source: int, target: int, pooled: bool) -> Path:
        here, there = self._places.node(source), self._places.node(target)
        links: list[tuple[Link, float]] = []
        if here == there:
            links = self._inside(source, target)
        else:
            leaves = source if pooled else self._leaves_from(source, target)
            if leaves != source:
                links = [(self._own(source, 0), 1.0), (self._own(leaves, 1), 1.0)]
            links += [
                *self._edge(leaves, 0, pooled),
                *self._between(here, there),
                *self._edge(target, 1, pooled),
            ]
        return Path(tuple(links), self.latency_ns(source, target), here == there)

    def _inside(self, source: int, target: int) -> list[tuple[Link, float]]:
        inner = self._inner(source)
        if self._gloo:
            return [(self._link(f"rank.{source}>rank.{target}", inner.bandwidth_Bps), 1.0)]
        direct = inner.kind is NodeKind.nvswitch
        if inner.kind is NodeKind.nvlink_pairs:
            direct = self._places.local(source) // 2 == self._places.local(target) // 2
        if direct:
            return [(self._own(source, 0), 1.0), (self._own(target, 1), 1.0)]
        # copied into the host's memory and out again
        return [(self._to_host(source, 0), 1.0), self._memory(source), (self._to_host(target, 1), 1.0)]

    def _leaves_from(self, source: int, target: int) -> int:
        """The GPU of the source's node on whose rail a message leaves: NVLink takes it to the target's rail first."""
        detours = not self._gloo and self._inner(source).kind is NodeKind.nvswitch
        if not (detours and self._cluster.inter_node.rails):
            return source
        places = self._places
        return places.rank_at(places.node(source) * self._per_node + places.local(target))

    def _edge(self, rank: int, way: int, pooled: bool) -> list[tuple[Link, float]]:
        """From a rank to its node's NIC, or back."""
        if self._gloo:
            return []
        links = []
        if self._inner(rank).kind is NodeKind.nvswitch:
            links.append((self._own(rank, way), 1.0))
        else:  # without peer-to-peer a NIC reads and writes the host's memory
            links += [(self._to_host(rank, way), 1.0), self._memory(rank)]
        if self._cluster.inter_node.rails and not pooled:
            node = self._places.node(rank)
            outer = self._cluster.outside(node)
            sharing = max(1, -(-self._per_node // outer.links))
            place = self._places.local(rank) // sharing
            rail_Bps = outer.node_Bps * sharing / self._per_node
            links.append((self._both(f"rail.{node}.{place}", rail_Bps)[way], 1.0))
        return links

    def _between(self, here: int, there: int) -> list[tuple[Link, float]]:
        up, down = [self.nic(here)[0]], [self.nic(there)[1]]
        if self._per_leaf and here // self._per_leaf != there // self._per_leaf:
            up.append(self._leaf(here // self._per_leaf)[0])
            down.append(self._leaf(there // self._per_leaf)[1])
        wan_Bps = self._cluster.wan_Bps
        if here // self._per_site != there // self._per_site and wan_Bps is not None:
            up.append(self._both(f"site.{here // self._per_site}", wan_Bps)[0])
            down.append(self._both(f"site.{there // self._per_site}", wan_Bps)[1])
        return [(link, 1.0) for link in (*up, *reversed(down))]

    def _leaf(self, leaf: int) -> tuple[Link, Link]:
        """A leaf switch's way to the spine: what its nodes' links carry, over the oversubscription."""
        nodes = range(leaf * self._per_leaf, (leaf + 1) * self._per_leaf)
        down_Bps = sum(self._cluster.outside(node).node_Bps for node in nodes)
        return self._both(f"leaf.{leaf}", down_Bps / self._cluster.inter_node.oversubscription)

    def _own(self, rank: int, way: int) -> Link:
        return self._both(f"rank.{rank}", self._inner(rank).bandwidth_Bps)[way]

    def _to_host(self, rank: int, way: int) -> Link:
        inner = self._inner(rank)
        if inner.kind is NodeKind.nvlink_pairs and inner.pcie_Bps is not None:
            return self._both(f"pcie.{rank}", inner.pcie_Bps)[way]
        return self._own(rank, way)

    def _memory(self, rank: int) -> tuple[Link, float]:
        host_Bps = self._inner(rank).host_Bps
        assert host_Bps is not None, "the schema lets no such node without it"
        return self._link(f"host.{self._places.node(rank)}", host_Bps), 2.0

    def _both(self, name: str, bandwidth_Bps: float) -> tuple[Link, Link]:
        return self._link(f"{name}.out", bandwidth_Bps), self._link(f"{name}.in", bandwidth_Bps)

    def _link(self, name: str, bandwidth_Bps: float) -> Link:
        known = self._links.get(name)
        if known is None:
            known = self._links[name] = Link(name, bandwidth_Bps / 1e9)
        return known
