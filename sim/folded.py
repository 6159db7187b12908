"""Collectives of ranks that behave alike: one process stands for all, and a collective is one or two flows.

The volumes are the algorithm's, the links are this rank's own and its node's NIC, which the flow loads as
often as the node's ranks do together; so concurrent collectives share a NIC as they would step by step. The
cost does not grow with the number of ranks.
"""

import math
from dataclasses import dataclass, replace

from ..conf.schema import Backend
from ..policies.mesh import HPZ, LOCAL, NODE, WORLD, Mesh
from .collectives import Tag, reduce_chunks
from .interpreter import Transfer
from .machine import Machine, Steps
from .network import Route
from .topology import CORE, Link, nic_name, rank_name


@dataclass(frozen=True, slots=True)
class Reach:
    """How a group of one axis lies on the nodes; the worst group, if they differ."""

    size: int
    nodes: int  # that one group spans
    ring_crossings: int  # edges of all groups' rings that leave one node
    peers_outside: int  # of one rank, on other nodes
    per_node: int  # ranks of one node that take part, in whatever group


@dataclass(frozen=True, slots=True)
class Stage:
    """After `latency_ns`, flows of (amount, route) side by side."""

    latency_ns: int
    flows: tuple[tuple[float, Route], ...] = ()


def reach(mesh: Mesh, axis: str) -> Reach:
    """Of the groups of `axis`; ranks lie in block order."""
    local, nodes, world = mesh.ranks_per_node, mesh.num_nodes, mesh.num_ranks
    if axis == WORLD:
        return Reach(world, nodes, 1 if nodes > 1 else 0, world - local, local)
    if axis == LOCAL:
        return Reach(local, 1, 0, 0, local)
    if axis == NODE:
        return Reach(nodes, nodes, local if nodes > 1 else 0, nodes - 1, local)
    if axis != HPZ:
        raise ValueError(f"axis={axis!r} is not on the mesh; use one of {[WORLD, LOCAL, NODE, HPZ]}")
    size = mesh.hpz_size
    if local % size == 0:
        return Reach(size, 1, 0, 0, local)
    if size % local == 0:
        return Reach(size, size // local, 1, size - local, local)
    # groups that lie askew on the nodes: the pattern repeats, and its worst part counts
    period = math.lcm(size, local)
    crossings = [0] * (period // local)
    spans = outside = 0
    for rank in range(min(period, world)):
        group = mesh.group(HPZ, rank)
        here = mesh.node_of(rank)
        if mesh.node_of(group[(group.index(rank) + 1) % size]) != here:
            crossings[here] += 1
        spans = max(spans, len({mesh.node_of(peer) for peer in group}))
        outside = max(outside, sum(mesh.node_of(peer) != here for peer in group))
    return Reach(size, spans, max(crossings), outside, local)


class Folded:
    """Each collective as stages, worked out once.

    NCCL: rings with one latency a hop, all-reduce by ring or tree, whichever ends first alone (as NCCL's
    tuner does); broadcast and reduce are pipelined rings; all-to-all sends to all peers at once. gloo: as in
    `collectives`, for ranks that arrive together (in a ring of two, notices that wait behind data are left out).
    """

    def __init__(self, machine: Machine, mesh: Mesh) -> None:
        self._machine = machine
        self._mesh = mesh
        self._cluster = machine.costs.cluster
        self._gloo = self._cluster.backend is Backend.gloo
        self._stages: dict[int, tuple[Transfer, tuple[Stage, ...]]] = {}
        self._reach: dict[str, Reach] = {}
        graph = machine.topology
        self._up = graph.link(nic_name(0), CORE)
        self._outer_ns = int(graph.graph.edges[nic_name(0), CORE]["latency_ns"])
        self._inner_ns = self._cluster.intra_node.latency_ns
        self._own = self._own_link(machine)

    def _own_link(self, machine: Machine) -> Link:
        if not self._gloo:
            return machine.topology.link(rank_name(0), "switch.0")
        return Link("connection", self._cluster.intra_node.bandwidth_Bps / 1e9)

    def run(self, rank: int, transfer: Transfer, tag: Tag) -> Steps:
        """Take part; all ranks are taken to arrive now."""
        known = self._stages.get(id(transfer))
        if known is None:  # the transfer is kept with its stages, so that its id stays its own
            known = self._stages[id(transfer)] = (transfer, self.stages(transfer))
        machine = self._machine
        for stage in known[1]:
            if len(stage.flows) == 1:
                amount, route = stage.flows[0]
                yield machine.network.flow(amount, route, after_ns=stage.latency_ns)
                continue
            if stage.latency_ns:
                yield machine.env.timeout(stage.latency_ns)
            yield from [machine.network.flow(amount, route) for amount, route in stage.flows]

    def missing(self) -> list[tuple[int, int]]:
        return []

    def stages(self, transfer: Transfer) -> tuple[Stage, ...]:
        """What `transfer` comes to."""
        axis = transfer.axis
        if axis not in self._reach:
            self._reach[axis] = reach(self._mesh, axis)
        at = self._reach[axis]
        fixed_ns = self._machine.costs.op_ns(transfer.op, axis) + self._cluster.device.launch_ns * (
            not self._gloo
        )
        stages = self._gloo_stages(transfer, at) if self._gloo else self._nccl_stages(transfer, at)
        return (Stage(stages[0].latency_ns + fixed_ns, stages[0].flows), *stages[1:])

    # ---- NCCL

    def _nccl_stages(self, transfer: Transfer, at: Reach) -> tuple[Stage, ...]:
        ring_ns = (at.size - at.nodes) * self._inner_ns + (at.nodes - 1) * self._outer_ns
        rounds = at.size - 1
        match transfer.op:
            case "all_gather":
                return (self._ring(ring_ns, rounds * transfer.message_bytes, at),)
            case "reduce_scatter":
                hops_ns = (
                    self._hops_ns(transfer, rounds) if transfer.hop[0] else 0
                )  # NCCL adds while it moves
                return (self._ring(ring_ns + hops_ns, rounds * transfer.message_bytes, at),)
            case "all_reduce":
                chunk_bytes, _, _ = reduce_chunks(transfer)
                ring = self._ring(2 * ring_ns, 2 * rounds * chunk_bytes, at)
                return (min(ring, self._tree(transfer, at), key=self._alone_ns),)
            case "all_to_all":
                return (self._pairwise(transfer.message_bytes, at),)
            case _:
                return (self._ring(ring_ns, transfer.message_bytes, at),)

    def _ring(self, latency_ns: int, nbytes: float, at: Reach) -> Stage:
        return Stage(latency_ns, ((nbytes, self._ring_route(at)),))

    def _ring_route(self, at: Reach) -> Route:
        own: Route = ((self._own, 1.0),)
        if not at.ring_crossings:
            return own
        nic: Route = ((self._up, float(at.ring_crossings)),)
        return nic if self._gloo and at.size == at.nodes else (*own, *nic)

    def _tree(self, transfer: Transfer, at: Reach) -> Stage:
        """Double binary tree over the nodes, a chain within each: up, then down, pipelined."""
        depth = math.ceil(math.log2(at.nodes)) if at.nodes > 1 else 0
        inside = -(-at.size // at.nodes) - 1
        latency_ns = 2 * (depth * self._outer_ns + inside * self._inner_ns)
        return self._ring(latency_ns, 2.0 * transfer.payload_bytes, at)

    def _alone_ns(self, stage: Stage) -> float:
        return stage.latency_ns + max(
            amount * max(weight / link.capacity for link, weight in route) for amount, route in stage.flows
        )

    def _pairwise(self, message_bytes: int, at: Reach) -> Stage:
        latency_ns = self._outer_ns if at.peers_outside else self._inner_ns
        total = message_bytes * (at.size - 1)
        route: Route = ((self._own, 1.0),)
        if at.peers_outside:
            route = (*route, (self._up, at.per_node * at.peers_outside / (at.size - 1)))
        return Stage(latency_ns, ((total, route),))

    def _hops_ns(self, transfer: Transfer, exposed: int) -> int:
        before, after = transfer.hop
        ns = self._machine.costs.ns
        return sum(map(ns, before)) + exposed * sum(map(ns, after)) - sum(map(ns, before))

    # ---- gloo: L is the latency of the slowest hop, s the time of a message on its way alone

    def _gloo_stages(self, transfer: Transfer, at: Reach) -> tuple[Stage, ...]:
        rounds = at.size - 1
        match transfer.op:
            case "all_gather":
                return (self._gloo_ring(transfer.message_bytes, rounds, 2, at),)
            case "reduce_scatter":
                return (self._gloo_reduce_scatter(transfer, at),)
            case "all_reduce":
                return (self._gloo_ring_reduce(transfer, 2 * rounds, at),)
            case "all_to_all":
                return self._gloo_pairwise(transfer.message_bytes, at)
            case "broadcast":
                return self._gloo_broadcast(transfer, at)
            case _:
                chunk_bytes, _, _ = reduce_chunks(transfer)
                into_root = at.peers_outside * chunk_bytes or chunk_bytes
                roots = float(at.per_node * at.nodes // at.size)  # on the node of one
                into: Route = ((self._up, roots),) if at.peers_outside else ((self._own, 1.0),)
                # a root whose own sums come from within its node is ready early: its notice is back in time
                early = at.ring_crossings and at.size > at.nodes
                latency_ns = self._hop_ns(at) * (1 if early else 2)
                collect = Stage(latency_ns, ((into_root, into),))
                return (self._gloo_ring_reduce(transfer, rounds, at), collect)

    def _hop_ns(self, at: Reach) -> int:
        return self._outer_ns if at.ring_crossings else self._inner_ns

    def _gloo_ring(
        self, chunk_bytes: int, rounds: int, segments: int, at: Reach, *, add_ns: int = 0, num_added: int = 0
    ) -> Stage:
        """Chunks in segments, of which two are in flight; the first `num_added` segments are added, each `add_ns`.

        The first segment leaves after a notice, L, and the last arrives L after it left. Between, segment k + 2
        leaves when k + 1 has left, and when k has arrived (L), was added (a) and the notice of that is back
        (L). So two segments take 2 s or s + 2 L + a, or 2 a where adding is slowest.
        """
        segments = min(segments, max(1, chunk_bytes))
        in_flight = 2 if segments > 1 else 1
        stage = self._ring(0, rounds * chunk_bytes, at)
        hop_ns, segment_ns = self._hop_ns(at), self._alone_ns(stage) / (rounds * segments)

        def gap_ns(add_ns: int) -> float:
            arrival_ns = 2 * hop_ns + add_ns - (in_flight - 1) * segment_ns
            return max(0.0, arrival_ns, in_flight * (add_ns - segment_ns))

        turns = (rounds * segments - 1) // in_flight
        adding = min(turns, -(-num_added // in_flight))
        latency_ns = 2 * hop_ns + adding * gap_ns(add_ns) + (turns - adding) * gap_ns(0)
        # one rank adds one segment at a time: the second of the last two waits for the first where a > s
        waits_ns = (in_flight - 1) * max(0.0, add_ns - segment_ns)
        if num_added == rounds * segments:
            latency_ns += waits_ns + add_ns
        else:
            latency_ns += min(waits_ns, 2 * hop_ns)  # CPU-bound or not, the gather behind sees no more of it
        return replace(stage, latency_ns=round(latency_ns))

    def _gloo_ring_reduce(self, transfer: Transfer, rounds: int, at: Reach) -> Stage:
        chunk_bytes, segments, add = reduce_chunks(transfer)
        add_ns, num_added = self._machine.costs.ns(add), (at.size - 1) * segments
        return self._gloo_ring(chunk_bytes, rounds, segments, at, add_ns=add_ns, num_added=num_added)

    def _gloo_reduce_scatter(self, transfer: Transfer, at: Reach) -> Stage:
        """Whole messages, one in flight, each receive posted a round ahead.

        As in `_gloo_ring` L before and L behind, and the work w of the last round. Until then three paths race: the
        messages of a slow hop one behind the other; a sum on its way around the ring, with work at each stop;
        and notices, for message k + 2 leaves a slow hop at the earliest when its receiver has done its work on
        k (L, w) and told so (L).
        """
        rounds = at.size - 1
        stage = self._ring(0, rounds * transfer.message_bytes, at)
        hop_ns, message_ns = self._hop_ns(at), self._alone_ns(stage) / rounds
        # the encoding before the first send is the one that the last round leaves out
        work_ns = sum(map(self._machine.costs.ns, transfer.hop[1]))
        slow = min(at.nodes, rounds) - 1 if at.ring_crossings else rounds - 1  # hops of a sum after its first
        inner_ns = transfer.message_bytes / self._own.capacity + self._inner_ns
        around_ns = slow * hop_ns + (rounds - 1 - slow) * (inner_ns - message_ns) + (rounds - 1) * work_ns
        notices_ns = (rounds - 1) // 2 * (2 * hop_ns + work_ns - message_ns)
        return replace(stage, latency_ns=round(2 * hop_ns + max(0.0, around_ns, notices_ns) + work_ns))

    def _gloo_pairwise(self, message_bytes: int, at: Reach) -> tuple[Stage, ...]:
        """A notice to all peers, then their messages."""
        if not at.peers_outside:
            return (Stage(2 * self._inner_ns, ((message_bytes, ((self._own, 1.0),)),)),)
        outside = (message_bytes * at.peers_outside, ((self._up, float(at.per_node)),))
        return (Stage(2 * self._outer_ns, (outside,)),)

    def _gloo_broadcast(self, transfer: Transfer, at: Reach) -> tuple[Stage, ...]:
        """Binomial tree: first within the root's node, then each level of nodes sends to those below it.

        All have given notice at the start: it shows before the first send, on either kind of link.
        """
        nbytes = float(transfer.message_bytes)
        inside = math.ceil(math.log2(-(-at.size // at.nodes)))
        levels = math.ceil(math.log2(at.nodes)) if at.nodes > 1 else 0
        senders = -(-at.size // at.nodes) * (at.per_node * at.nodes // at.size)
        stages: list[Stage] = []
        past_ns = 0
        for _ in range(inside):
            notice_ns = max(0, self._inner_ns - past_ns)
            stages.append(Stage(notice_ns + self._inner_ns, ((nbytes, ((self._own, 1.0),)),)))
            past_ns += round(self._alone_ns(stages[-1]))
        for depth in range(levels):
            load = float(senders * (levels - depth))
            notice_ns = max(0, self._outer_ns - past_ns)
            stages.append(Stage(notice_ns + self._outer_ns, ((nbytes, ((self._up, load),)),)))
            past_ns += round(self._alone_ns(stages[-1]))
        return tuple(stages)
