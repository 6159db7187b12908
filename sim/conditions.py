"""How fast each rank and each node's links are at any time, and when one of them fails."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..conf.conditions import Mtbf, Slowdown, failures, link_slowdowns, rank_slowdowns
from ..conf.schema import ClusterConf, SlowdownBy
from ..policies.mesh import Mesh

Vector = NDArray[np.int64]

# instants, or optimizer steps, and the factor from each of them on
Speeds = tuple[tuple[int, ...], tuple[float, ...]]


class Conditions:
    """Of one run.

    Attributes:
        ranks: Speeds of the ranks that have a slowdown: factors by which local work takes longer.
        steps: The same of slowdowns that are told by optimizer steps.
        by: Which local work they make slow.
        nodes: The same of the links of nodes.
        own_links: The same of the ranks' own links to their nodes.
        dies_ns: When a rank stops.
        cuts: When a node's links stop, and when they go on (None: never).
        varies: Whether anything depends on the time.
    """

    def __init__(self, cluster: ClusterConf, *, seed: int = 0) -> None:
        self._cluster = cluster
        slow_ranks = rank_slowdowns(cluster.slowdown, cluster.num_ranks)
        self.ranks = _speeds(tuple(slow for slow in slow_ranks if slow.from_step is None))
        self.steps = _speeds_by_step(tuple(slow for slow in slow_ranks if slow.from_step is not None))
        self.by = cluster.slowdown_by
        links = link_slowdowns(cluster.link_slowdown, nodes=cluster.nodes, num_ranks=cluster.num_ranks)
        self.nodes = _speeds(tuple(slow for slow in links if not slow.own))
        self.own_links = _speeds(tuple(slow for slow in links if slow.own))
        self.dies_ns: dict[int, int] = {}
        self.cuts: dict[int, tuple[tuple[int, int | None], ...]] = {}
        given = failures(cluster.failures, num_ranks=cluster.num_ranks, nodes=cluster.nodes)
        if isinstance(given, Mtbf):
            random = np.random.default_rng(seed)
            # the first of independent exponential times; the run ends with it
            if given.mtbf_s is not None:
                rank, at_ns = _first(random, given.mtbf_s, cluster.num_ranks)
                self.dies_ns[rank] = at_ns
            if given.link_mtbf_s is not None:
                node, at_ns = _first(random, given.link_mtbf_s, cluster.nodes)
                self.cuts[node] = ((at_ns, None),)
        else:
            for failure in given:  # in the order of times: the earliest of a rank counts
                if failure.rank is not None:
                    self.dies_ns.setdefault(failure.rank, failure.at_ns)
                elif failure.node is not None:
                    before = self.cuts.get(failure.node, ())
                    self.cuts[failure.node] = (*before, (failure.at_ns, failure.until_ns))
        moving = any(
            len(times) > 1
            for times, _ in (
                *self.ranks.values(),
                *self.steps.values(),
                *self.nodes.values(),
                *self.own_links.values(),
            )
        )
        self.varies = moving or bool(self.dies_ns) or bool(self.cuts)

    def colours(self) -> Vector:
        """A number for each rank: equal where the rank itself, its device and its node's links are alike."""
        cluster, placement = self._cluster, self._cluster.placement
        colours: Vector = np.zeros(cluster.num_ranks, dtype=np.int64)
        if cluster.parts:
            of_node = np.repeat(np.arange(len(cluster.parts)), [part.nodes for part in cluster.parts])
            colours = of_node[placement.node(np.arange(cluster.num_ranks))]
        seen: dict[object, int] = {}
        odd = set(self.ranks) | set(self.steps) | set(self.dies_ns) | set(self.own_links)
        for node in set(self.nodes) | set(self.cuts):
            odd |= set(placement.ranks_on(node))
        for rank in sorted(odd):
            node = placement.node(rank)
            own = (self.ranks.get(rank), self.dies_ns.get(rank), self.own_links.get(rank))
            traits = (
                int(colours[rank]),
                self.steps.get(rank),
                *own,
                self.nodes.get(node),
                self.cuts.get(node),
            )
            colours[rank] = len(cluster.parts) + seen.setdefault(traits, len(seen) + 1)
        return colours

    def spread(self, mesh: Mesh, axes: Iterable[str]) -> None:
        """Let all ranks of a group be as slow as its slowest, where a program counts their collectives as its own."""
        for axis in axes:
            for speeds in (self.ranks, self.steps):
                for rank, own in sorted(speeds.items()):
                    for peer in mesh.group(axis, rank):
                        speeds[peer] = _slower(speeds.get(peer, ((0,), (1.0,))), own)
            for rank, at_ns in sorted(self.dies_ns.items()):
                for peer in mesh.group(axis, rank):
                    self.dies_ns[peer] = min(at_ns, self.dies_ns.get(peer, at_ns))

    def is_slow(self, rank: int) -> bool:
        """Whether it ever has a slowdown."""
        return rank in self.ranks or rank in self.steps

    def slows(self, *, product: bool, of_block: bool) -> bool:
        """Whether slowdowns are of such local work.

        Args:
            product: It is a product, or attention.
            of_block: It belongs to the products of a block that a layout shares out.
        """
        if self.by is SlowdownBy.sleep:
            return product
        return self.by is not SlowdownBy.repeat or (product and of_block)

    def step_factor(self, rank: int, step: int) -> float:
        """By slowdowns that are told by steps."""
        speeds = self.steps.get(rank)
        return speeds[1][bisect_right(speeds[0], step) - 1] if speeds is not None else 1.0

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
        return 0.0 if self.is_cut(node, now_ns) else _share(self.nodes.get(node), now_ns)

    def own_share(self, rank: int, now_ns: int) -> float:
        """What a rank's own link delivers of its nominal bandwidth."""
        return _share(self.own_links.get(rank), now_ns)

    @property
    def changing_nodes(self) -> list[int]:
        """Nodes whose links are not, or not always, at their nominal bandwidth."""
        return sorted(set(self.nodes) | set(self.cuts))

    def is_cut(self, node: int, now_ns: int) -> bool:
        """Whether a node's links carry nothing."""
        return any(
            at_ns <= now_ns and (until_ns is None or now_ns < until_ns)
            for at_ns, until_ns in self.cuts.get(node, ())
        )

    def link_changes_ns(self) -> list[int]:
        """Instants after the start at which some link changes."""
        times = {t for times, _ in (*self.nodes.values(), *self.own_links.values()) for t in times}
        times |= {t for cuts in self.cuts.values() for cut in cuts for t in cut if t is not None}
        return sorted(t for t in times if t > 0)

    def failed(self, now_ns: int) -> list[str]:
        """What has failed by now, in words."""
        ranks = [f"rank {r} failed at {t / 1e9:g} s" for r, t in sorted(self.dies_ns.items()) if t <= now_ns]
        nodes = [
            f"the links of node {n} failed at {max(t for t, _ in cuts if t <= now_ns) / 1e9:g} s"
            for n, cuts in sorted(self.cuts.items())
            if self.is_cut(n, now_ns)
        ]
        return ranks + nodes


def _first(random: np.random.Generator, mean_s: float, num_places: int) -> tuple[int, int]:
    """The place that fails first, and when in ns; each by itself does so after `mean_s` on average."""
    at_ns = round(random.exponential(mean_s / num_places) * 1e9)
    return int(random.integers(num_places)), at_ns


def _share(speeds: Speeds | None, now_ns: int) -> float:
    return 1.0 / speeds[1][bisect_right(speeds[0], now_ns) - 1] if speeds is not None else 1.0


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


def _speeds_by_step(slowdowns: tuple[Slowdown, ...]) -> dict[int, Speeds]:
    """The same by optimizer steps."""
    timed = [replace(s, from_ns=s.from_step or 0, until_ns=s.until_step) for s in slowdowns]
    return _speeds(tuple(timed))
