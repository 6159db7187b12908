"""The simulated machine: who waits for what when a rank computes or sends."""

from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

import simpy

from ..conf.schema import Backend, ClusterConf, SlowdownBy
from .conditions import Conditions
from .costs import Costs
from .far import FarMemory
from .interpreter import Work
from .network import Network, Route
from .topology import Link, Path, Topology

# Real ranks never come to a collective at one instant, and simulated ones that behave alike always would. A little
# more than an idle connection's latency decides who waits for whose notice.
ARRIVAL_SKEW_NS = 100_000

Tag = tuple[Hashable, ...]  # names a collective: the same on all its ranks, and used once

Steps = Generator[Any, Any, None]  # of a simpy process


class Machine:
    """Ranks, cores and links in simulated time.

    Args:
        folded: Each rank that is simulated stands for others.
        shares: Of each simulated rank, the share of all ranks that it stands for; empty: one stands for all.
        part_costs: Of the parts of a mixed cluster, by their first node.
    """

    def __init__(
        self,
        env: simpy.Environment,
        costs: Costs,
        topology: Topology,
        *,
        folded: bool,
        conditions: Conditions | None = None,
        shares: Mapping[int, float] | None = None,
        part_costs: Mapping[int, Costs] | None = None,
    ) -> None:
        self.env = env
        self.costs = costs
        self.network = Network(env)
        self.topology = topology
        cluster = costs.cluster
        self.conditions = conditions if conditions is not None else Conditions(cluster)
        self._part_costs = dict(part_costs or {})
        # how much later than the others every other rank comes to a collective
        self.skew_ns = ARRIVAL_SKEW_NS if cluster.backend is Backend.gloo and not folded else 0
        self._per_host = cluster.num_ranks if cluster.host.all_nodes else cluster.devices_per_node
        self._folded = folded
        self._shares = dict(shares or {})
        self.far = FarMemory(
            cluster,
            costs.offload,
            self.network,
            per_host=self._per_host,
            shares=self._shares if folded else None,
        )
        self._cores = _cores(cluster, self._per_host)
        # a probe times a rank while all ranks do the same: what it saw is this share of a core
        self.core_share = min(1.0, cluster.host.cores / self._per_host) if cluster.host.cores else 1.0
        # computation is timed in its place, where not all ranks of a pipeline compute at once
        self._compute_share = min(1.0, self.core_share / costs.computing)
        self._routes: dict[tuple[int, int, bool], tuple[Path, Route, bool]] = {}
        self._last_sent: dict[tuple[int, int], Any] = {}  # of each connection
        self._step_factors: dict[int, float] = {}  # of ranks, in the step that each is in
        self._rests = self.conditions.by in (SlowdownBy.sleep, SlowdownBy.quota)

        if not folded:
            self._set_changes()

    def costs_of(self, rank: int) -> Costs:
        """Of the part of the cluster that `rank` lies in."""
        own = self.costs
        if self._part_costs:
            node = self.costs.cluster.placement.node(rank)
            for first, costs in self._part_costs.items():
                if node >= first:
                    own = costs
        return own

    def _set_changes(self) -> None:
        """Let links change when their conditions do."""
        conditions, topology = self.conditions, self.topology
        links = [
            *((topology.nic(node), conditions.link_share, node) for node in conditions.changing_nodes),
            *(
                (pair, conditions.own_share, rank)
                for rank in conditions.own_links
                for pair in topology.own(rank)
            ),
        ]
        nominal = [pair[0].capacity for pair, _, _ in links]

        def change(now_ns: int) -> None:
            for (pair, share, place), whole in zip(links, nominal, strict=True):
                capacity = whole * share(place, now_ns)
                for link in pair:
                    if link.capacity != capacity:
                        self.network.change(link, capacity)

        change(0)
        for at_ns in self.conditions.link_changes_ns():
            self.env.timeout(at_ns).callbacks.append(lambda _, at_ns=at_ns: change(at_ns))

    @property
    def shares_cores(self) -> bool:
        return bool(self._cores)

    def begin(self, rank: int, step: int) -> None:
        """From now on `rank` is in optimizer step `step`."""
        if rank in self.conditions.steps:
            self._step_factors[rank] = self.conditions.step_factor(rank, step)

    def end_ns(self, rank: int, start_ns: int, ns: int) -> int:
        """When a rank with a slowdown is done with `ns` of work at its full speed that it begins at `start_ns`."""
        return self.conditions.end_ns(rank, start_ns, round(ns * self._step_factors.get(rank, 1.0)))

    def work(
        self, rank: int, works: Sequence[Work], *, product: bool = False, of_block: bool = False
    ) -> Steps:
        """Do `works` one after the other.

        Args:
            product, of_block: As of `Conditions.slows`.
        """
        costs, slowed = self.costs_of(rank), self.conditions.is_slow(rank)
        slowed = slowed and self.conditions.slows(product=product, of_block=of_block)
        for work in works:
            ns = costs.ns(work)
            if not ns:
                continue
            slept_ns = costs.slept_ns(work) if self._cores else ns
            if slowed:
                slow_ns = self.end_ns(rank, self.env.now, ns) - self.env.now
                # who is put to sleep uses no core for it
                slept_ns = slow_ns - (ns - slept_ns) if self._rests else round(slept_ns * (slow_ns / ns))
                ns = slow_ns
            if slept_ns:
                yield self.env.timeout(slept_ns)
            if ns > slept_ns:
                share = self._compute_share if work.kind == "compute" else self.core_share
                amount = (ns - slept_ns) * share
                yield self.network.flow(amount, self._core_route(rank), limit=1.0)

    def sending(self, source: int, target: int) -> Any:
        """The end of what `source` is sending to `target` in order; None if that connection is free."""
        last = self._last_sent.get((source, target))
        return None if last is None or last.triggered else last

    def latency_ns(self, source: int, target: int) -> int:
        """Of a message, from its last byte's leaving to its arrival."""
        return self._way(source, target)[0].latency_ns

    def send(
        self,
        source: int,
        target: int,
        nbytes: float,
        *,
        after_ns: int = 0,
        in_order: bool = True,
        pooled: bool = False,
        channels: float = 1,
    ) -> Any:
        """Put a message on the way, at the earliest `after_ns` from now; the event fires when all of it has left.

        `in_order`: it follows the one before it from `source` to `target`; else they share the way. `pooled`: on all
        rails together. `channels`: it counts as so many flows where it shares the way.
        A message that stays in its node is a copy by a core: where cores are shared it takes its share of them, and
        never runs faster than the connection.
        """
        path, route, copied = self._way(source, target, pooled)
        amount = nbytes
        if copied:
            amount = nbytes / min(link.capacity for link, _ in path.links) * self.core_share
        if channels != 1:
            amount, route = amount / channels, tuple((link, channels * load) for link, load in route)
        if not in_order:
            return self.network.flow(amount, route, after_ns=after_ns)
        before = self._last_sent.get((source, target))
        if before is None or before.triggered:
            sent = self.network.flow(amount, route, after_ns=after_ns)
        else:
            sent = self.env.event()
            ready_ns = self.env.now + after_ns

            def start(_: Any) -> None:
                flow = self.network.flow(amount, route, after_ns=max(0, ready_ns - self.env.now))
                flow.callbacks.append(lambda _: sent.succeed())

            before.callbacks.append(start)
        self._last_sent[source, target] = sent
        return sent

    def _way(self, source: int, target: int, pooled: bool = False) -> tuple[Path, Route, bool]:
        known = self._routes.get((source, target, pooled))
        if known is None:
            path = self.topology.path(source, target, pooled=pooled)
            copied = path.node and bool(self._cores)
            route: Route = path.links
            if copied:
                # in core-ns: the connection's capacity is the share of a core with which the probe measured it
                connection = Link(f"copy.{source}>{target}", self.core_share)
                route = ((connection, 1.0), *self._core_route(source))
            known = self._routes[source, target, pooled] = (path, route, copied)
        return known

    def _core_route(self, rank: int) -> Route:
        if self._folded:
            return ((self._cores[0], self._per_host * self._shares.get(rank, 1.0)),)
        slot = self.costs.cluster.placement.slot(rank)
        return ((self._cores[slot // self._per_host], 1.0),)


def _cores(cluster: ClusterConf, per_host: int) -> list[Link]:
    if not cluster.host.cores:
        return []
    hosts = -(-cluster.num_ranks // per_host)
    return [Link(f"cores.{host}", float(cluster.host.cores)) for host in range(hosts)]
