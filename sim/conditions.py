"""How fast each rank and each node's links are at any time, and when one of them fails."""

import math
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..conf.conditions import Mtbf, Slowdown, failures, link_slowdowns, rank_slowdowns
from ..conf.schema import ClusterConf
from ..policies.mesh import Mesh

Vector = NDArray[np.int64]

Speeds = tuple[tuple[int, ...], tuple[float, ...]]  # instants, and the factor from each of them on


class Conditions:
    """Of one run.

    Attributes:
        ranks: Speeds of the ranks that have a slowdown: factors by which local work takes longer.
        nodes: The same of the links of nodes.
        dies_ns: When a rank stops.
        cut_ns: When a node's links stop.
        varies: Whether anything depends on the time.
    """

    def __init__(self, cluster: ClusterConf, *, seed: int = 0) -> None:
        self._cluster = cluster
        self.ranks = _speeds(rank_slowdowns(cluster.slowdown, cluster.num_ranks))
        self.nodes = _speeds(link_slowdowns(cluster.link_slowdown, cluster.nodes))
        self.dies_ns: dict[int, int] = {}
        self.cut_ns: dict[int, int] = {}
        given = failures(cluster.failures, num_ranks=cluster.num_ranks, nodes=cluster.nodes)
        if isinstance(given, Mtbf):
            random = np.random.default_rng(seed)
            # the first of independent exponential times; the run ends with it
            for mean_s, num_places, times_ns in (
                (given.mtbf_s, cluster.num_ranks, self.dies_ns),
                (given.link_mtbf_s, cluster.nodes, self.cut_ns),
            ):
                if mean_s is not None:
                    at_s = random.exponential(mean_s / num_places)
                    times_ns[int(random.integers(num_places))] = round(at_s * 1e9)
        else:
            for failure in reversed(given):  # the earliest of one place counts
                if failure.rank is not None:
                    self.dies_ns[failure.rank] = failure.at_ns
                elif failure.node is not None:
                    self.cut_ns[failure.node] = failure.at_ns
        moving = any(len(times) > 1 for times, _ in (*self.ranks.values(), *self.nodes.values()))
        self.varies = moving or bool(self.dies_ns) or bool(self.cut_ns)

    def colours(self) -> Vector:
        """A number for each rank: equal where the rank itself, its device and its node's links are alike."""
        cluster, per_node = self._cluster, self._cluster.devices_per_node
        colours: Vector = np.zeros(cluster.num_ranks, dtype=np.int64)
        first = 0
        for number, part in enumerate(cluster.parts):
            last = first + part.nodes * per_node
            colours[first:last] = number
            first = last
        seen: dict[object, int] = {}
        odd = set(self.ranks) | set(self.dies_ns)
        for node in set(self.nodes) | set(self.cut_ns):
            odd |= set(range(node * per_node, (node + 1) * per_node))
        for rank in sorted(odd):
            node = rank // per_node
            own = (self.ranks.get(rank), self.dies_ns.get(rank))
            traits = (int(colours[rank]), *own, self.nodes.get(node), self.cut_ns.get(node))
            colours[rank] = len(cluster.parts) + seen.setdefault(traits, len(seen) + 1)
        return colours

    def spread(self, mesh: Mesh, axes: Iterable[str]) -> None:
        """Let all ranks of a group be as slow as its slowest, where a program counts their collectives as its own."""
        for axis in axes:
            for rank, own in sorted(self.ranks.items()):
                for peer in mesh.group(axis, rank):
                    self.ranks[peer] = _slower(self.ranks.get(peer, ((0,), (1.0,))), own)
            for rank, at_ns in sorted(self.dies_ns.items()):
                for peer in mesh.group(axis, rank):
                    self.dies_ns[peer] = min(at_ns, self.dies_ns.get(peer, at_ns))

    def end_ns(self, rank: int, start_ns: int, ns: int) -> int:
        """When `rank` is done with `ns` of work at its full speed that it begins at `start_ns`."""
        speeds = self.ranks.get(rank)
        if speeds is None or not ns:
            return start_ns + ns
        times, factors = speeds
        at, left, now = bisect_right(times, start_ns) - 1, float(ns), start_ns
        while at + 1 < len(times) and now + left * factors[at] > times[at + 1]:
            left -= (times[at + 1] - now) / factors[at]
            now = times[at + 1]
            at += 1
        return now + round(left * factors[at])

    def link_share(self, node: int, now_ns: int) -> float:
        """What a node's links deliver of their nominal bandwidth."""
        if self.cut_ns.get(node, now_ns + 1) <= now_ns:
            return 0.0
        speeds = self.nodes.get(node)
        return 1.0 / speeds[1][bisect_right(speeds[0], now_ns) - 1] if speeds is not None else 1.0

    def link_changes_ns(self) -> list[int]:
        """Instants after the start at which some link changes."""
        times = {t for times, _ in self.nodes.values() for t in times} | set(self.cut_ns.values())
        return sorted(t for t in times if t > 0)

    def failed(self, now_ns: int) -> list[str]:
        """What has failed by now, in words."""
        ranks = [f"rank {r} failed at {t / 1e9:g} s" for r, t in sorted(self.dies_ns.items()) if t <= now_ns]
        nodes = [
            f"the links of node {n} failed at {t / 1e9:g} s"
            for n, t in sorted(self.cut_ns.items())
            if t <= now_ns
        ]
        return ranks + nodes


def _slower(one: Speeds, other: Speeds) -> Speeds:
    """At each time the slower of two."""
    times = sorted({*one[0], *other[0]})
    factors = [max(s[1][bisect_right(s[0], t) - 1] for s in (one, other)) for t in times]
    return tuple(times), tuple(factors)


def _speeds(slowdowns: tuple[Slowdown, ...]) -> dict[int, Speeds]:
    """Factors by place and time; slowdowns of one place at one time multiply."""
    by_place: dict[int, list[Slowdown]] = {}
    for slowdown in slowdowns:
        by_place.setdefault(slowdown.where, []).append(slowdown)
    speeds = {}
    for place, own in by_place.items():
        times = sorted({0, *(s.from_ns for s in own), *(s.until_ns for s in own if s.until_ns is not None)})
        factors = [
            math.prod(s.factor for s in own if s.from_ns <= t and (s.until_ns is None or t < s.until_ns))
            for t in times
        ]
        speeds[place] = (tuple(times), tuple(factors))
    return speeds
