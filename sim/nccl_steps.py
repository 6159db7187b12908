"""NCCL's collectives step by step: every rank a process, every message a flow.

A ring goes in rounds, one chunk a round to the next rank and one from the rank before. NCCL's tuner knows only the
latency of a whole ring; each round takes its share of that. Pairwise messages go to all peers at once. Trees and
chains are pipelined: their flows run side by side from the arrival of the last rank on, with the tree's volume on
each rank's way to the next.
"""

from dataclasses import dataclass, field
from typing import Any

from .interpreter import Transfer
from .machine import Machine, Steps, Tag
from .nccl import Nccl, Way


@dataclass(slots=True)
class _Pipeline:
    """A pipelined collective: who has come, and the event of its start."""

    group: tuple[int, ...]
    start: Any
    come: list[int] = field(default_factory=list)


class NcclSteps:
    """Of one machine."""

    def __init__(self, machine: Machine, nccl: Nccl) -> None:
        self._machine = machine
        self._nccl = nccl
        self._posted: dict[tuple[Tag, int, int, int], tuple[Any, bool]] = {}
        self._pipelines: dict[tuple[Tag, int], _Pipeline] = {}

    def run(self, rank: int, group: tuple[int, ...], transfer: Transfer, tag: Tag) -> Steps:
        """Take part as `rank`."""
        group = self._nccl.ring(group)
        way = self._nccl.way(transfer)
        if way.algorithm == "direct":
            yield from self._pairwise(rank, group, way, tag, phases=1 if transfer.op == "all_to_all" else 2)
        elif way.algorithm == "ring" and transfer.op in ("all_gather", "reduce_scatter", "all_reduce"):
            rounds = (len(group) - 1) * (2 if transfer.op == "all_reduce" else 1)
            yield from self._ring(rank, group, way, tag, rounds)
        else:
            yield from self._pipelined(rank, group, way, tag)

    def missing(self) -> list[tuple[int, int]]:
        """(A waiting rank, a rank that it waits for)."""
        messages = [
            (source, target) if sends else (target, source)
            for (_, source, target, _), (_, sends) in self._posted.items()
        ]
        return messages + [
            (here, there)
            for pipeline in self._pipelines.values()
            for here in pipeline.come
            for there in pipeline.group
            if there not in pipeline.come
        ]

    def _ring(self, rank: int, group: tuple[int, ...], way: Way, tag: Tag, rounds: int) -> Steps:
        place = group.index(rank)
        to, source = group[(place + 1) % len(group)], group[place - 1]
        nbytes, each_ns = way.nbytes / rounds, way.latency_ns // rounds
        first_ns = way.latency_ns - each_ns * (rounds - 1)
        for k in range(rounds):
            after_ns = each_ns if k else first_ns
            going = self._post(tag, rank, to, k, nbytes, after_ns, sends=True, pooled=True)
            yield self._post(tag, source, rank, k, nbytes, after_ns, sends=False, pooled=True)
            yield going

    def _pairwise(self, rank: int, group: tuple[int, ...], way: Way, tag: Tag, *, phases: int) -> Steps:
        nbytes = way.nbytes / phases / (len(group) - 1)
        for phase in range(phases):
            after_ns = way.latency_ns * (phase + 1) // phases - way.latency_ns * phase // phases
            peers = [peer for peer in group if peer != rank]
            events = [
                self._post(tag, peer, rank, phase, nbytes, after_ns, sends=False, pooled=False)
                for peer in peers
            ]
            events += [
                self._post(tag, rank, peer, phase, nbytes, after_ns, sends=True, pooled=False)
                for peer in peers
            ]
            yield from events

    def _pipelined(self, rank: int, group: tuple[int, ...], way: Way, tag: Tag) -> Steps:
        env = self._machine.env
        key = (tag, group[0])
        pipeline = self._pipelines.setdefault(key, _Pipeline(group, env.event()))
        pipeline.come.append(rank)
        if len(pipeline.come) == len(group):
            del self._pipelines[key]
            place = group.index
            flows = [
                self._send(
                    source, group[(place(source) + 1) % len(group)], way.nbytes, way.latency_ns, pooled=True
                )
                for source in group
            ]
            env.all_of(flows).callbacks.append(lambda _: pipeline.start.succeed())
        yield pipeline.start

    def _post(
        self,
        tag: Tag,
        source: int,
        target: int,
        k: int,
        nbytes: float,
        after_ns: int,
        *,
        sends: bool,
        pooled: bool,
    ) -> Any:
        """One end of a message, which is over for both when its bytes are there."""
        key = (tag, source, target, k)
        other = self._posted.pop(key, None)
        if other is None:
            over = self._machine.env.event()
            self._posted[key] = (over, sends)
            return over
        over, _ = other
        self._send(source, target, nbytes, after_ns, pooled=pooled).callbacks.append(lambda _: over.succeed())
        return over

    def _send(self, source: int, target: int, nbytes: float, after_ns: int, *, pooled: bool) -> Any:
        channels = self._machine.costs.cluster.nccl.channels if pooled else 1
        return self._machine.send(
            source, target, nbytes, after_ns=after_ns, in_order=False, pooled=pooled, channels=channels
        )
