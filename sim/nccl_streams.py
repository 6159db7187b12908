"""NCCL's trees and chains step by step: data that streams over all hops at once.

When all ranks have come, the first chunk goes hop by hop, up a tree and down again. When it is through everywhere, all
hops carry the stream: none is more than a part ahead of the hop that feeds it. A rank goes on when the stream is
through everywhere. Left out is what a buffer between two ranks holds, and that a chunk may be on its way up before a
rank near the root has come: so it does not matter where in a tree a late rank sits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .interpreter import Transfer
from .machine import Machine, Steps, Tag
from .nccl import Nccl, Way
from .trees import tree_parents

PARTS = 4  # of a stream

Hop = tuple[int, int]  # source and target


@dataclass(frozen=True, slots=True)
class _Lane:
    """One tree or chain: the rank above each and those below it; data goes up, down, or up and then down."""

    above: dict[int, int]  # without the root
    below: dict[int, list[int]]
    root: int
    up: bool
    down: bool

    def feeders(self) -> dict[Hop, list[Hop]]:
        """Of each hop, those whose data it passes on."""
        found: dict[Hop, list[Hop]] = {}
        into_root = [(below, self.root) for below in self.below[self.root]] if self.up else []
        for rank, above in self.above.items():
            if self.up:
                found[rank, above] = [(below, rank) for below in self.below[rank]]
            if self.down:
                before = into_root if above == self.root else [(self.above[above], above)]
                found[above, rank] = before
        return found


class _Stream:
    """One collective of one group."""

    def __init__(self, env: Any, group: tuple[int, ...], lanes: list[_Lane]) -> None:
        self.group = group
        self.lanes = lanes
        self.come = {rank: env.event() for rank in group}
        self.over = env.event()
        self.flowing = {(lane, hop): None for lane, each in enumerate(lanes) for hop in each.feeders()}

    def end(self, lane: int, hop: Hop) -> None:
        del self.flowing[lane, hop]
        if not self.flowing:
            self.over.succeed()


class Streams:
    """Of one machine."""

    def __init__(self, machine: Machine, nccl: Nccl) -> None:
        self._machine = machine
        self._nccl = nccl
        self._channels = machine.costs.cluster.ring_channels
        self._open: dict[tuple[Tag, int], _Stream] = {}

    def run(self, rank: int, group: tuple[int, ...], transfer: Transfer, way: Way, tag: Tag) -> Steps:
        """Take part as `rank`."""
        env = self._machine.env
        key = (tag, group[0])
        stream = self._open.get(key)
        if stream is None:
            stream = self._open[key] = _Stream(env, group, self._lanes(group, transfer))
            for number, lane in enumerate(stream.lanes):
                # a tree's data goes up and down: so a fourth of what the way counts is on each hop of each tree
                share = 1 / (len(stream.lanes) * (lane.up + lane.down))
                env.process(self._carry(stream, number, way, way.nbytes * share, self._channels * share))
        if way.base_ns:
            yield env.timeout(way.base_ns)
        stream.come[rank].succeed()
        yield stream.over
        self._open.pop(key, None)

    def missing(self) -> list[tuple[int, int]]:
        """(A waiting rank, a rank that it waits for)."""
        found = []
        for stream in self._open.values():
            come = [rank for rank, event in stream.come.items() if event.triggered]
            absent = [rank for rank in stream.group if rank not in come]
            if absent:
                found += [(here, there) for here in come for there in absent]
            else:
                found += [(target, source) for _, (source, target) in stream.flowing]
        return found

    def _lanes(self, group: tuple[int, ...], transfer: Transfer) -> list[_Lane]:
        if transfer.op == "all_reduce":
            nodes = np.array([self._nccl.node_of(rank) for rank in group])
            trees = tree_parents(np.zeros_like(nodes), nodes)
            return [_lane(group, above.tolist(), up=True, down=True) for above in trees]
        ring, down = self._nccl.ring(group), transfer.op == "broadcast"
        size, root = len(group), ring.index(group[transfer.root])
        above = [(place + (-1 if down else 1)) % size for place in range(size)]
        above[root] = -1
        return [_lane(ring, above, up=not down, down=down)]

    def _carry(self, stream: _Stream, number: int, way: Way, nbytes: float, channels: float) -> Steps:
        """All of one lane, from the first rank's coming on."""
        env, lane = self._machine.env, stream.lanes[number]
        yield env.all_of(list(stream.come.values()))
        if lane.up:
            yield self._first_up(lane, lane.root, way)
        if lane.down:
            yield self._first_down(lane, lane.root, way)
        feeders = lane.feeders()
        # the end of each part on each hop
        through = {hop: [env.event() for _ in range(PARTS)] for hop in feeders}
        for hop, before in feeders.items():
            feeding = [through[other] for other in before]
            env.process(self._flow(through[hop], feeding, hop, nbytes / PARTS, channels)).callbacks.append(
                lambda _, hop=hop: stream.end(number, hop)
            )

    def _first_up(self, lane: _Lane, rank: int, way: Way) -> Any:
        """Fires when the first chunk of all below `rank` has been passed on by it."""
        env = self._machine.env

        def climb() -> Steps:
            for below in lane.below[rank]:
                yield arrivals[below]
            if rank != lane.root:
                yield env.timeout(self._nccl.hop_ns(way, rank, lane.above[rank]))

        arrivals = {below: self._first_up(lane, below, way) for below in lane.below[rank]}
        return env.process(climb())

    def _first_down(self, lane: _Lane, rank: int, way: Way) -> Any:
        """Fires when the first chunk has gone from `rank` to all below."""
        env = self._machine.env

        def fall(below: int) -> Steps:
            yield env.timeout(self._nccl.hop_ns(way, rank, below))
            yield self._first_down(lane, below, way)

        return env.all_of([env.process(fall(below)) for below in lane.below[rank]])

    def _flow(
        self, own: list[Any], feeding: list[list[Any]], hop: Hop, nbytes: float, channels: float
    ) -> Steps:
        for k, over in enumerate(own):
            for other in feeding:
                if k:
                    yield other[k - 1]
            yield self._machine.send(*hop, nbytes, in_order=False, pooled=True, channels=channels)
            over.succeed()
        for other in feeding:
            yield other[-1]


def _lane(group: tuple[int, ...], above: list[int], *, up: bool, down: bool) -> _Lane:
    below: dict[int, list[int]] = {rank: [] for rank in group}
    for place, at in enumerate(above):
        if at >= 0:
            below[group[at]].append(group[place])
    return _Lane(
        above={group[place]: group[at] for place, at in enumerate(above) if at >= 0},
        below=below,
        root=group[above.index(-1)],
        up=up,
        down=down,
    )
