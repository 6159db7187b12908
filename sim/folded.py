"""Collectives of ranks that behave alike: one process stands for all, and a collective is one or two flows.

The volumes are the algorithm's, the links are this rank's own and its node's NIC, which the flow loads as
often as the node's ranks do together; so concurrent collectives share a NIC as they would step by step. The
cost does not grow with the number of ranks.
"""

import math
from dataclasses import dataclass

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

    @property
    def peers_inside(self) -> int:
        return self.size - 1 - self.peers_outside


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
    `collectives`, for ranks that arrive together.
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

    # ---- gloo

    def _gloo_stages(self, transfer: Transfer, at: Reach) -> tuple[Stage, ...]:
        rounds = at.size - 1
        hop_ns = self._outer_ns if at.ring_crossings else self._inner_ns
        match transfer.op:
            case "all_gather":
                return (self._ring(rounds * hop_ns, rounds * transfer.message_bytes, at),)
            case "reduce_scatter":
                # a rank that sends over the NIC adds while it sends, if its data came from within the node
                exposed = 1 if at.ring_crossings and at.size > at.nodes else rounds
                latency_ns = rounds * hop_ns + self._hops_ns(transfer, exposed)
                return (self._ring(latency_ns, rounds * transfer.message_bytes, at),)
            case "all_reduce":
                return (self._ring_reduce(transfer, at, 2 * rounds),)
            case "all_to_all":
                return self._gloo_pairwise(transfer.message_bytes, at)
            case "broadcast":
                return self._gloo_broadcast(transfer, at)
            case _:
                chunk_bytes, _, _ = reduce_chunks(transfer)
                into_root = at.peers_outside * chunk_bytes or chunk_bytes
                link = self._up if at.peers_outside else self._own
                collect = Stage(hop_ns, ((into_root, ((link, 1.0),)),))
                return (self._ring_reduce(transfer, at, rounds), collect)

    def _ring_reduce(self, transfer: Transfer, at: Reach, rounds: int) -> Stage:
        chunk_bytes, segments, add = reduce_chunks(transfer)
        hop_ns = self._outer_ns if at.ring_crossings else self._inner_ns
        turns = rounds * -(-segments // 2)  # two segments are in flight, and begin together
        hidden = at.ring_crossings and at.size > at.nodes
        adds = 1 if hidden else (at.size - 1) * segments
        latency_ns = turns * hop_ns + adds * self._machine.costs.ns(add)
        return self._ring(latency_ns, rounds * chunk_bytes, at)

    def _hops_ns(self, transfer: Transfer, exposed: int) -> int:
        before, after = transfer.hop
        ns = self._machine.costs.ns
        return sum(map(ns, before)) + exposed * sum(map(ns, after)) - sum(map(ns, before))

    def _gloo_pairwise(self, message_bytes: int, at: Reach) -> tuple[Stage, ...]:
        if not at.peers_outside:
            return (Stage(self._inner_ns, ((message_bytes, ((self._own, 1.0),)),)),)
        outside = (message_bytes * at.peers_outside, ((self._up, float(at.per_node)),))
        return (Stage(self._outer_ns, (outside,)),)

    def _gloo_broadcast(self, transfer: Transfer, at: Reach) -> tuple[Stage, ...]:
        """Binomial tree: first within the root's node, then each level of nodes sends to those below it."""
        nbytes = float(transfer.message_bytes)
        inside = math.ceil(math.log2(-(-at.size // at.nodes)))
        levels = math.ceil(math.log2(at.nodes)) if at.nodes > 1 else 0
        senders = -(-at.size // at.nodes) * (at.per_node * at.nodes // at.size)
        stages = [Stage(self._inner_ns, ((nbytes, ((self._own, 1.0),)),)) for _ in range(inside)]
        for depth in range(levels):
            load = float(senders * (levels - depth))
            stages.append(Stage(self._outer_ns, ((nbytes, ((self._up, load),)),)))
        return tuple(stages)
