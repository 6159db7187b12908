"""NCCL's collectives step by step: every rank a process, every message a flow.

A part of the data goes in many chunks, of which the first takes the latency of each hop and the others follow in a
stream. So on rings a token goes the whole way first, hop by hop and as the ranks come, then bytes follow: one part a
round to the next rank and one from the rank before. Really NCCL goes round many times, with a chunk of each part; so
the ranks of a ring end together, however their parts lie. Pairwise messages go to all peers at once. Trees and chains
are in `nccl_streams`.
"""

from dataclasses import dataclass
from typing import Any

from .interpreter import Transfer
from .machine import Machine, Steps, Tag
from .nccl import Nccl, Way
from .nccl_streams import Streams


@dataclass(frozen=True, slots=True)
class _Message:
    """`pooled`: parts of a ring take all rails together, other messages the one of their rank."""

    nbytes: float
    after_ns: int
    channels: float
    pooled: bool


class NcclSteps:
    """Of one machine."""

    def __init__(self, machine: Machine, nccl: Nccl) -> None:
        self._machine = machine
        self._nccl = nccl
        self._channels = machine.costs.cluster.ring_channels
        self._posted: dict[tuple[Tag, int, int, int], tuple[Any, bool]] = {}
        # the end of each ring, and who has done its part
        self._rings: dict[tuple[Tag, int], tuple[Any, list[int]]] = {}
        self._streams = Streams(machine, nccl)

    def run(self, rank: int, group: tuple[int, ...], transfer: Transfer, tag: Tag) -> Steps:
        """Take part as `rank`."""
        way = self._nccl.way(transfer)
        if way.algorithm == "direct":
            yield from self._pairwise(rank, group, way, tag, phases=1 if transfer.op == "all_to_all" else 2)
        elif way.algorithm == "ring":
            rounds = (len(group) - 1) * (2 if transfer.op == "all_reduce" else 1)
            yield from self._ring(rank, group, way, tag, rounds)
        else:
            yield from self._streams.run(rank, group, transfer, way, tag)

    def missing(self) -> list[tuple[int, int]]:
        """(A waiting rank, a rank that it waits for)."""
        messages = [
            (source, target) if sends else (target, source)
            for (_, source, target, _), (_, sends) in self._posted.items()
        ]
        return messages + self._streams.missing()

    def _ring(self, rank: int, group: tuple[int, ...], way: Way, tag: Tag, rounds: int) -> Steps:
        group = self._nccl.ring(group)
        place = group.index(rank)
        to, source = group[(place + 1) % len(group)], group[place - 1]
        # the tuner knows the latency of a whole ring only; a hop takes its share of that
        each_ns = way.latency_ns // rounds
        first_ns = way.latency_ns - each_ns * (rounds - 1)
        hops = [(0.0, each_ns if k else first_ns) for k in range(rounds)]
        hops += [(way.nbytes / rounds, 0)] * rounds
        for k, (nbytes, after_ns) in enumerate(hops):
            ring = _Message(nbytes, after_ns, self._channels, pooled=True)
            going = self._post(tag, rank, to, k, ring, sends=True)
            yield self._post(tag, source, rank, k, ring, sends=False)
            yield going
        key = (tag, group[0])
        over, done = self._rings.setdefault(key, (self._machine.env.event(), []))
        done.append(rank)
        if len(done) == len(group):
            del self._rings[key]
            over.succeed()
        yield over

    def _pairwise(self, rank: int, group: tuple[int, ...], way: Way, tag: Tag, *, phases: int) -> Steps:
        peers = [peer for peer in group if peer != rank]
        nbytes, channels = way.nbytes / phases / len(peers), 1 / len(peers)  # they take turns on one
        for phase in range(phases):
            after_ns = way.latency_ns * (phase + 1) // phases - way.latency_ns * phase // phases
            each = _Message(nbytes, after_ns, channels, pooled=False)
            events = [self._post(tag, peer, rank, phase, each, sends=False) for peer in peers]
            events += [self._post(tag, rank, peer, phase, each, sends=True) for peer in peers]
            yield from events

    def _post(self, tag: Tag, source: int, target: int, k: int, message: "_Message", *, sends: bool) -> Any:
        """One end of a message, which is over for both when its bytes are there."""
        key = (tag, source, target, k)
        other = self._posted.pop(key, None)
        if other is None:
            over = self._machine.env.event()
            self._posted[key] = (over, sends)
            return over
        over, _ = other
        sent = self._machine.send(
            source,
            target,
            message.nbytes,
            after_ns=message.after_ns,
            in_order=False,
            pooled=message.pooled,
            channels=message.channels,
        )
        sent.callbacks.append(lambda _: over.succeed())
        return over
