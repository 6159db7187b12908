"""Concurrent flows share links by max-min fairness, re-evaluated only when one of them starts or ends.

A flow may load a link several times (`weight`): a folded flow stands for many equal ones. The cores of a host
are a link too: a computation is a flow of core-nanoseconds that takes at most one core.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from .topology import Link

Route = tuple[tuple[Link, float], ...]  # links and how often the flow loads each

NEVER_NS = 1 << 62

_ROUNDING = 1e-6  # ns: below this a finish is the same instant


@dataclass(frozen=True, slots=True)
class Stage:
    """After `latency_ns`, flows of (amount, route) side by side."""

    latency_ns: int
    flows: tuple[tuple[float, Route], ...] = ()


def alone_ns(stage: Stage) -> float:
    """How long a stage takes on an empty network."""
    return stage.latency_ns + max(
        amount * max(weight / link.capacity for link, weight in route) for amount, route in stage.flows
    )


class Flow:
    """Work under way. `rate` and `limit` in units a nanosecond, `left` in units as of `since_ns`."""

    __slots__ = ("done", "finish_ns", "left", "limit", "rate", "route", "since_ns", "stamp")

    def __init__(self, amount: float, route: Route, limit: float, done: Any, now_ns: int) -> None:
        self.left = amount
        self.route = route
        self.limit = limit
        self.done = done
        self.rate = 0.0
        self.since_ns = now_ns
        self.finish_ns = -1
        self.stamp = 0


class Network:
    """The fluid solver. It keeps one simpy event ahead: the earliest end of a flow.

    simpy cannot cancel a timeout, so an event that was overtaken still fires; it then finds nothing due.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.history: list[int] | None = None  # times of starts and ends, kept only when a list is put here
        self._flows: dict[Link, dict[Flow, float]] = {}
        self._changed: dict[Link, None] = {}
        self._settling = False
        self._due: list[tuple[int, int, int, Flow]] = []
        self._order = 0
        self._wake_ns: int | None = None

    def flow(self, amount: float, route: Route, *, limit: float = math.inf, after_ns: int = 0) -> Any:
        """Start a flow `after_ns` from now; the event fires at its end.

        Args:
            amount: Bytes, or core-nanoseconds.
            route: Links that it loads, each once in here, with weights.
            limit: Highest rate of this flow, in units a nanosecond.
        """
        done = self.env.event()
        if after_ns:
            self.env.timeout(after_ns).callbacks.append(lambda _: self._start(amount, route, limit, done))
        else:
            self._start(amount, route, limit, done)
        return done

    def change(self, link: Link, capacity: float) -> None:
        """From now on `link` has another capacity; with 0 what is on it stands still."""
        link.capacity = capacity
        self._changed[link] = None
        self._settle_soon()

    def _start(self, amount: float, route: Route, limit: float, done: Any) -> None:
        if self.history is not None:
            self.history.append(self.env.now)
        if amount <= 0:
            done.succeed()
            return
        if not route and math.isinf(limit):
            raise ValueError("a flow needs a link or a limit")
        flow = Flow(amount, route, limit, done, self.env.now)
        if not route:  # shares nothing, so nothing can change its rate
            self._set_rate(flow, limit)
            self._wake_at_next()
            return
        alone, rate, flows, changed = True, limit, self._flows, self._changed
        for link, weight in route:
            on_link = flows.get(link)
            if on_link is None:
                on_link = flows[link] = {}
            elif on_link:
                alone = False
            on_link[flow] = weight
            rate = min(rate, link.capacity / weight)
        if alone and changed:
            alone = not any(link in changed for link, _ in route)
        if alone:  # nobody else's rate can change
            self._set_rate(flow, rate)
            self._wake_at_next()
            return
        for link, _ in route:
            self._changed[link] = None
        self._settle_soon()

    def _settle_soon(self) -> None:
        # at this instant, but after what else happens now: flows that start or end together settle once
        if not self._settling:
            self._settling = True
            self.env.timeout(0).callbacks.append(self._settle)

    def _settle(self, _event: Any) -> None:
        """New rates for all flows that are tied, link by link, to one that has started or ended."""
        self._settling = False
        links, self._changed = self._changed, {}
        flows: dict[Flow, None] = {}
        queue = list(links)
        for link in queue:  # grows while we walk
            for flow in self._flows.get(link, ()):
                if flow not in flows:
                    flows[flow] = None
                    for other, _ in flow.route:
                        if other not in links:
                            links[other] = None
                            queue.append(other)
        if flows:
            for flow, rate in self._fair_rates(flows, queue).items():
                if rate != flow.rate:
                    self._set_rate(flow, rate)
        self._wake_at_next()

    def _fair_rates(self, flows: dict[Flow, None], links: Sequence[Link]) -> dict[Flow, float]:
        """Raise all rates together; a flow stops at its limit, or when a link of its is full."""
        if len(flows) == 1:
            (flow,) = flows
            return {flow: min(flow.limit, *(link.capacity / weight for link, weight in flow.route))}
        rates: dict[Flow, float] = {}
        active = dict(flows)
        used = dict.fromkeys(links, 0.0)
        weights = {link: sum(self._flows[link].values()) for link in links if self._flows.get(link)}
        while active:
            level = min(flow.limit for flow in active)
            full: list[Link] = []
            for link, weight in weights.items():
                at = (link.capacity - used[link]) / weight
                if at < level:
                    level, full = at, [link]
                elif at == level:
                    full.append(link)
            stopping = {flow: None for flow in active if flow.limit <= level}
            for link in full:
                stopping.update((flow, None) for flow in self._flows[link] if flow in active)
            for flow in stopping:
                rates[flow] = level
                del active[flow]
                for link, weight in flow.route:
                    used[link] += weight * level
                    weights[link] -= weight
            weights = {link: weight for link, weight in weights.items() if weight > 1e-9}
        return rates

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now: int = self.env.now
        flow.left -= flow.rate * (now - flow.since_ns)
        flow.since_ns, flow.rate = now, rate
        flow.stamp += 1
        if rate <= 0:
            flow.finish_ns = NEVER_NS
            return
        flow.finish_ns = now + max(0, math.ceil(flow.left / rate * (1 - 1e-12) - _ROUNDING))
        self._order += 1
        heapq.heappush(self._due, (flow.finish_ns, self._order, flow.stamp, flow))

    def _wake_at_next(self) -> None:
        due = self._due
        while due and due[0][2] != due[0][3].stamp:
            heapq.heappop(due)
        if due and (self._wake_ns is None or due[0][0] < self._wake_ns):
            self._wake_ns = due[0][0]
            self.env.timeout(self._wake_ns - self.env.now).callbacks.append(self._wake)

    def _wake(self, _event: Any) -> None:
        now = self.env.now
        if self._wake_ns is None or now < self._wake_ns:
            return  # overtaken by an earlier one, and a later one is on its way
        self._wake_ns = None
        while self._due and self._due[0][0] <= now:
            _, _, stamp, flow = heapq.heappop(self._due)
            if stamp == flow.stamp:
                self._end(flow)
        if self._changed:
            self._settle_soon()
        self._wake_at_next()

    def _end(self, flow: Flow) -> None:
        flow.stamp += 1
        for link, _ in flow.route:
            on_link = self._flows[link]
            del on_link[flow]
            if on_link:
                self._changed[link] = None
        if self.history is not None:
            self.history.append(self.env.now)
        flow.done.succeed()
