"""Who is wired to whom: a directed graph of ranks, switches, NICs and the core, and the paths through it."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import networkx as nx

from ..conf.schema import Backend, ClusterConf

# What a message costs on loopback TCP before its first byte arrives, on top of the link's own latency.
# Measured: with delay + 60 us a fluid model follows real gloo within 6% at 4-16 MiB and 100-500 Mbit/s.
TCP_LATENCY_NS = 60_000

CORE = "core"


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a wire, or the cores of a host. `capacity` in bytes (cores: core-ns) a nanosecond."""

    name: str
    capacity: float


@dataclass(frozen=True, slots=True)
class Path:
    """The links that a message takes and the sum of their latencies. `node`: it never leaves the node."""

    links: tuple[Link, ...]
    latency_ns: int
    node: bool


class Topology:
    """The graph of a cluster, or (`ranks` given) of the part that these ranks see.

    gloo: two ranks of a node share one loopback connection in each direction. NCCL: each GPU has its own way
    to the node's switch. Either way a node's NIC is shared by its ranks, up and down apart.
    """

    def __init__(self, cluster: ClusterConf, ranks: Iterable[int] | None = None) -> None:
        self.graph: Any = nx.DiGraph()
        self._per_node = cluster.devices_per_node
        self._paths: dict[tuple[int, int], Path] = {}
        by_node: dict[int, list[int]] = {}
        for rank in range(cluster.num_ranks) if ranks is None else ranks:
            by_node.setdefault(rank // self._per_node, []).append(rank)
        for node, members in by_node.items():
            self._add_node(cluster, node, members)

    def _add_node(self, cluster: ClusterConf, node: int, members: list[int]) -> None:
        inner, outer = cluster.intra_node, cluster.inter_node
        gloo = cluster.backend is Backend.gloo
        nic, switch = nic_name(node), f"switch.{node}"
        extra_ns = TCP_LATENCY_NS if gloo else 0
        self._edge(
            nic, CORE, outer.node_Bps, outer.latency_ns + extra_ns
        )  # one latency a traversal: at the way up
        self._edge(CORE, nic, outer.node_Bps, 0)
        if not gloo:
            self._edge(switch, nic, None, 0)
            self._edge(nic, switch, None, 0)
        for rank in members:
            if gloo:
                self._edge(rank_name(rank), nic, None, 0)
                self._edge(nic, rank_name(rank), None, 0)
                for peer in members:
                    if peer != rank:
                        self._edge(rank_name(rank), rank_name(peer), inner.bandwidth_Bps, inner.latency_ns)
            else:
                self._edge(rank_name(rank), switch, inner.bandwidth_Bps, inner.latency_ns)
                self._edge(switch, rank_name(rank), inner.bandwidth_Bps, 0)

    def _edge(self, source: str, target: str, bandwidth_Bps: float | None, latency_ns: int) -> None:
        link = Link(f"{source}>{target}", bandwidth_Bps / 1e9) if bandwidth_Bps is not None else None
        self.graph.add_edge(source, target, link=link, latency_ns=latency_ns)

    def link(self, source: str, target: str) -> Link:
        """The link of one edge."""
        link = self.graph.edges[source, target]["link"]
        assert isinstance(link, Link), f"{source} > {target} has no limit of its own"
        return link

    def path(self, source: int, target: int) -> Path:
        """The shortest way from one rank to another."""
        known = self._paths.get((source, target))
        if known is None:
            known = self._paths[source, target] = self._find(source, target)
        return known

    def _find(self, source: int, target: int) -> Path:
        stops = nx.shortest_path(self.graph, rank_name(source), rank_name(target))
        edges = [self.graph.edges[a, b] for a, b in itertools.pairwise(stops)]
        node = source // self._per_node == target // self._per_node
        latency_ns = sum(edge["latency_ns"] for edge in edges)
        if not node and CORE in stops:
            # the way over the network has its own figure, which includes the way to the NIC
            latency_ns = self.graph.edges[nic_name(source // self._per_node), CORE]["latency_ns"]
        return Path(tuple(e["link"] for e in edges if e["link"] is not None), latency_ns, node)


def rank_name(rank: int) -> str:
    return f"rank.{rank}"


def nic_name(node: int) -> str:
    return f"nic.{node}"
