"""NCCL's trees and chains step by step: data that streams over all hops at once.

The first chunk goes hop by hop, up a tree and down again, and waits at each rank until that has come. When it is
through everywhere, all hops carry the stream: none is more than a part ahead of the hop that feeds it.
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
        self.over = {rank: env.event() for rank in group}
        self.flowing: dict[Hop, int] = {}  # how many lanes' hops that begin and end there are not through
        for lane in lanes:
            for hop in lane.feeders():
                self.flowing[hop] = self.flowing.get(hop, 0) + 1
        self.left = dict.fromkeys(group, 0)  # hops of each rank that are not through
        for (source, target), count in self.flowing.items():
            self.left[source] += count
            self.left[target] += count

    def end(self, hop: Hop) -> None:
        self.flowing[hop] -= 1
        for rank in hop:
            self.left[rank] -= 1
            if not self.left[rank]:
                self.over[rank].succeed()


class Streams:
    """Of one machine."""

    def __init__(self, machine: Machine, nccl: Nccl) -> None:
        self._machine = machine
        self._nccl = nccl
        self._channels = machine.costs.cluster.nccl.channels
        self._open: dict[tuple[Tag, int], _Stream] = {}

    def run(self, rank: int, group: tuple[int, ...], transfer: Transfer, way: Way, tag: Tag) -> Steps:
        """Take part as `rank`, until all that it sends and receives is through."""
        env = self._machine.env
        key = (tag, group[0])
        stream = self._open.get(key)
        if stream is None:
            stream = self._open[key] = _Stream(env, group, self._lanes(group, transfer))
            for lane in stream.lanes:
                # a tree's data goes up and down: so a fourth of what the way counts is on each hop of each tree
                share = 1 / (len(stream.lanes) * (lane.up + lane.down))
                env.process(self._carry(stream, lane, way, way.nbytes * share, self._channels * share))
        if way.base_ns:
            yield env.timeout(way.base_ns)
        stream.come[rank].succeed()
        yield stream.over[rank]
        if not any(stream.left.values()):
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
                found += [(target, source) for (source, target), left in stream.flowing.items() if left]
        return found

    def _lanes(self, group: tuple[int, ...], transfer: Transfer) -> list[_Lane]:
        if transfer.op == "all_reduce":
            per_node = self._machine.costs.cluster.devices_per_node
            nodes = np.array(group) // per_node
            trees = tree_parents(np.zeros_like(nodes), nodes)
            return [_lane(group, above.tolist(), up=True, down=True) for above in trees]
        size, root, down = len(group), transfer.root, transfer.op == "broadcast"
        above = [(place + (-1 if down else 1)) % size for place in range(size)]
        above[root] = -1
        return [_lane(group, above, up=not down, down=down)]

    def _carry(self, stream: _Stream, lane: _Lane, way: Way, nbytes: float, channels: float) -> Steps:
        """All of one lane, from the first rank's coming on."""
        env = self._machine.env
        turn = self._first_up(stream, lane, lane.root, way) if lane.up else stream.come[lane.root]
        yield turn
        if lane.down:
            yield self._first_down(stream, lane, lane.root, way)
        feeders = lane.feeders()
        # the end of each part on each hop
        through = {hop: [env.event() for _ in range(PARTS)] for hop in feeders}
        for hop, before in feeders.items():
            feeding = [through[other] for other in before]
            env.process(self._flow(stream, hop, through[hop], feeding, nbytes / PARTS, channels))

    def _first_up(self, stream: _Stream, lane: _Lane, rank: int, way: Way) -> Any:
        """Fires when the first chunk of all below has come to `rank`, and itself."""
        env = self._machine.env

        def climb() -> Steps:
            for below in lane.below[rank]:
                yield arrivals[below]
            yield stream.come[rank]
            if rank != lane.root:
                yield env.timeout(self._nccl.hop_ns(way, rank, lane.above[rank]))

        arrivals = {below: self._first_up(stream, lane, below, way) for below in lane.below[rank]}
        return env.process(climb())

    def _first_down(self, stream: _Stream, lane: _Lane, rank: int, way: Way) -> Any:
        """Fires when the first chunk has gone from `rank` to all below."""
        env = self._machine.env

        def fall(below: int) -> Steps:
            yield env.timeout(self._nccl.hop_ns(way, rank, below))
            yield stream.come[below]
            yield self._first_down(stream, lane, below, way)

        return env.all_of([env.process(fall(below)) for below in lane.below[rank]])

    def _flow(
        self, stream: _Stream, hop: Hop, own: list[Any], feeding: list[list[Any]], nbytes: float, channels: float
    ) -> Steps:
        for k, over in enumerate(own):
            for other in feeding:
                if k:
                    yield other[k - 1]
            yield self._machine.send(*hop, nbytes, in_order=False, pooled=True, channels=channels)
            over.succeed()
        for other in feeding:
            yield other[-1]
        stream.end(hop)


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
