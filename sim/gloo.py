"""gloo's collectives of ranks that arrive together, as single flows: the closed form of `collectives`.

L is the latency of the slowest hop, s the time of a message on its way alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..policies.mesh import Mesh
from .collectives import reduce_chunks, whole_addition
from .interpreter import Transfer
from .machine import Machine
from .network import Route, Stage, alone_ns
from .reach import Reach, reach
from .wires import Wires


class Gloo:
    """Stages of one cluster's collectives."""

    def __init__(self, machine: Machine, mesh: Mesh, wires: Wires) -> None:
        self._machine = machine
        self._mesh = mesh
        self._wires = wires
        self._reach: dict[str, Reach] = {}

    def stages(self, transfer: Transfer, of_class: int) -> tuple[Stage, ...]:
        """What `transfer` comes to in the groups of one class of ranks."""
        axis = transfer.axis
        if axis not in self._reach:
            self._reach[axis] = reach(self._mesh, axis)
        return _Group(self._machine, self._wires, self._reach[axis], axis, of_class).stages(transfer)


class _Group:
    """The groups of one axis in which one class of ranks takes part."""

    def __init__(self, machine: Machine, wires: Wires, at: Reach, axis: str, of_class: int) -> None:
        cluster = machine.costs.cluster
        self._ns = machine.costs.ns
        self._at = at
        self._own: Route = wires.own(axis, of_class)
        self._nics: Callable[[float], Route] = partial(wires.nics, axis, of_class)
        self._along: Route = wires.ring(axis, of_class)
        self._inner_ns = max(inner.latency_ns for inner in cluster.insides)
        self._outer_ns = machine.topology.outside_ns
        self._inner_Bpns = min(inner.bandwidth_Bps for inner in cluster.insides) / 1e9

    def stages(self, transfer: Transfer) -> tuple[Stage, ...]:
        """One behind the other."""
        rounds = self._at.size - 1
        match transfer.op:
            case "all_gather":
                return (self._ring(transfer.message_bytes, rounds, 2),)
            case "reduce_scatter":
                return (self._reduce_scatter(transfer),)
            case "all_reduce":
                return (self._ring_reduce(transfer, 2 * rounds),)
            case "all_to_all":
                return self._pairwise(transfer.message_bytes)
            case "broadcast":
                return self._broadcast(transfer)
            case "reduce_tree":
                return self._reduce_tree(transfer)
            case _:
                chunk_bytes, _, _ = reduce_chunks(transfer)
                into_root = self._at.peers_outside * chunk_bytes or chunk_bytes
                roots = float(self._at.per_node * self._at.nodes // self._at.size)  # on the node of one
                into: Route = self._nics(roots) if self._at.peers_outside else self._own
                # a root whose own sums come from within its node is ready early: its notice is back in time
                early = self._at.ring_crossings and self._at.size > self._at.ring_edges_outside
                latency_ns = self._hop_ns() * (1 if early else 2)
                collect = Stage(latency_ns, ((into_root, into),))
                return (self._ring_reduce(transfer, rounds), collect)

    def _flow(self, nbytes: float) -> Stage:
        return Stage(0, ((nbytes, self._along),))

    def _hop_ns(self) -> int:
        return self._outer_ns if self._at.ring_crossings else self._inner_ns

    def _ring(
        self, chunk_bytes: int, rounds: int, segments: int, *, add_ns: int = 0, num_added: int = 0
    ) -> Stage:
        """Chunks in segments, of which two are in flight; the first `num_added` segments are added, each `add_ns`.

        The first segment leaves after a notice, L, and the last arrives L after it left. Between, segment k + 2
        leaves when k + 1 has left, and when k has arrived (L), was added (a) and the notice of that is back
        (L). So two segments take 2 s or s + 2 L + a, or 2 a where adding is slowest.
        """
        segments = min(segments, max(1, chunk_bytes))
        in_flight = 2 if segments > 1 else 1
        stage = self._flow(rounds * chunk_bytes)
        whole_ns, num = alone_ns(stage), rounds * segments
        took_ns = _ring_ns(
            num, in_flight, self._hop_ns(), whole_ns / num, add_ns, num_added, both_ways=self._at.size == 2
        )
        return replace(stage, latency_ns=round(took_ns - whole_ns))

    def _ring_reduce(self, transfer: Transfer, rounds: int) -> Stage:
        chunk_bytes, segments, add = reduce_chunks(transfer)
        add_ns, num_added = self._ns(add), (self._at.size - 1) * segments
        return self._ring(chunk_bytes, rounds, segments, add_ns=add_ns, num_added=num_added)

    def _reduce_scatter(self, transfer: Transfer) -> Stage:
        """Whole messages, one in flight, each receive posted a round ahead.

        As in `_ring` L before and L behind, and the work w of the last round. Until then three paths race: the
        messages of a slow hop one behind the other; a sum on its way around the ring, with work at each stop;
        and notices, for message k + 2 leaves a slow hop at the earliest when its receiver has done its work on
        k (L, w) and told so (L).
        """
        rounds = self._at.size - 1
        stage = self._flow(rounds * transfer.message_bytes)
        hop_ns, message_ns = self._hop_ns(), alone_ns(stage) / rounds
        # the encoding before the first send is the one that the last round leaves out
        work_ns = sum(map(self._ns, transfer.hop[1]))
        # hops of a sum after its first
        slow = min(self._at.ring_edges_outside, rounds) - 1 if self._at.ring_crossings else rounds - 1
        inner_ns = transfer.message_bytes / self._inner_Bpns + self._inner_ns
        around_ns = slow * hop_ns + (rounds - 1 - slow) * (inner_ns - message_ns) + (rounds - 1) * work_ns
        notices_ns = (rounds - 1) // 2 * (2 * hop_ns + work_ns - message_ns)
        return replace(stage, latency_ns=round(2 * hop_ns + max(0.0, around_ns, notices_ns) + work_ns))

    def _pairwise(self, message_bytes: int) -> tuple[Stage, ...]:
        """A notice to all peers, then their messages."""
        if not self._at.peers_outside:
            return (Stage(2 * self._inner_ns, ((message_bytes, self._own),)),)
        outside = (message_bytes * self._at.peers_outside, self._nics(float(self._at.per_node)))
        return (Stage(2 * self._outer_ns, (outside,)),)

    def _broadcast(self, transfer: Transfer) -> tuple[Stage, ...]:
        """Binomial tree: first within the root's node, then each level of nodes sends to those below it.

        All have given notice at the start: it shows before the first send, on either kind of link.
        """
        nbytes = float(transfer.message_bytes)
        inside = math.ceil(math.log2(-(-self._at.size // self._at.nodes)))
        levels = math.ceil(math.log2(self._at.nodes)) if self._at.nodes > 1 else 0
        senders = -(-self._at.size // self._at.nodes) * (self._at.per_node * self._at.nodes // self._at.size)
        stages: list[Stage] = []
        past_ns = 0
        for _ in range(inside):
            notice_ns = max(0, self._inner_ns - past_ns)
            stages.append(Stage(notice_ns + self._inner_ns, ((nbytes, self._own),)))
            past_ns += round(alone_ns(stages[-1]))
        for depth in range(levels):
            load = float(senders * (levels - depth))
            notice_ns = max(0, self._outer_ns - past_ns)
            stages.append(Stage(notice_ns + self._outer_ns, ((nbytes, self._nics(load)),)))
            past_ns += round(alone_ns(stages[-1]))
        return tuple(stages)

    def _reduce_tree(self, transfer: Transfer) -> tuple[Stage, ...]:
        """The same tree from its leaves on: each level of nodes sends to those above it, one message to each, then the
        ranks of the root's node do; every arrival is added. Only the first notice shows. Nodes of a power of two of the
        group's ranks: of others the tree's levels lie askew, and it is up to a fifth faster than this.
        """
        nbytes, add_ns = float(transfer.message_bytes), self._ns(whole_addition(transfer))
        inside = math.ceil(math.log2(-(-self._at.size // self._at.nodes)))
        levels = math.ceil(math.log2(self._at.nodes)) if self._at.nodes > 1 else 0
        senders = -(-self._at.size // self._at.nodes) * (self._at.per_node * self._at.nodes // self._at.size)
        ways = [(self._outer_ns, self._nics(float(senders)))] * levels + [
            (self._inner_ns, self._own)
        ] * inside
        stages: list[Stage] = []
        past_ns = 0
        for latency_ns, route in ways:
            notice_ns = max(0, latency_ns - past_ns)
            stages.append(Stage(notice_ns + latency_ns + add_ns, ((nbytes, route),)))
            past_ns += round(alone_ns(stages[-1]))
        return tuple(stages)


def _ring_ns(
    num: int,
    in_flight: int,
    hop_ns: float,
    segment_ns: float,
    add_ns: float,
    num_added: int,
    *,
    both_ways: bool,
) -> float:
    """`num` segments one behind the other, when all ranks do the same at the same time.

    Receipt k is asked for when the rank has done with k - `in_flight`. `both_ways`: each rank sends to the one that it
    receives from, and a notice waits behind what is on its way there.
    """
    done_ns, free_ns = [0.0] * in_flight, 0.0  # with the last segments; when the connection is free
    moved: list[tuple[float, float]] = [(0.0, 0.0)] * in_flight  # when they were sent, and when they had left
    for k in range(num):
        asks_ns = done_ns[-in_flight]
        if both_ways:
            asks_ns = max([asks_ns, *(left for sent, left in moved if sent <= asks_ns)])
        notice_ns = asks_ns + hop_ns
        free_ns = max(free_ns, notice_ns) + segment_ns
        moved = [*moved[1:], (notice_ns, free_ns)]
        done_ns = [*done_ns[1:], max(done_ns[-1], free_ns + hop_ns) + (add_ns if k < num_added else 0.0)]
    return done_ns[-1]
