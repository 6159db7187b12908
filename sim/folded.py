"""Collectives of classes of ranks: one process stands for each class, and a collective is one or two flows.

The volumes are the algorithm's; a flow loads each kind of link as often as the ranks that it stands for do
together. So concurrent collectives share links as they would step by step, and the cost does not grow with the
number of ranks. Where several classes meet, a collective begins when the last of them has come.
"""

from collections.abc import Iterable
from typing import Any

from ..conf.schema import Backend
from ..policies.mesh import HPZ, LOCAL, NODE, WORLD, Mesh
from .classes import Fold
from .collectives import Letters
from .conditions import Conditions
from .gloo import Gloo
from .interpreter import Transfer, peer_of
from .levels import PAIRWISE, RING, Traffic
from .machine import Machine, Steps, Tag
from .nccl import Nccl, Way
from .network import NEVER_NS, Route, Stage
from .wires import Wires, uses_of

IN_ROUNDS = ("all_gather", "reduce_scatter", "all_reduce")
MAX_STEPWISE_RANKS = 64  # up to which every message can be simulated apart (`collectives.PerStep`)
NEGLIGIBLE = 0.01  # of a collective's time


class _Meeting:
    """The classes of one circle at one collective. `over` fires when it has ended."""

    __slots__ = ("classes", "come", "over")

    def __init__(self, classes: tuple[int, ...], over: Any) -> None:
        self.classes = classes
        self.over = over
        self.come: list[int] = []


class Folded:
    """Each collective as stages, worked out once for each circle of classes.

    Args:
        fold: The classes; None: all ranks behave alike.
        transfers: All that will run; None: any over the axes of data parallelism.
    """

    def __init__(
        self,
        machine: Machine,
        mesh: Mesh,
        fold: Fold | None = None,
        transfers: Iterable[Transfer] | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self._machine = machine
        self._mesh = mesh
        self._fold = fold if fold is not None else Fold.alike(mesh)
        cluster = machine.costs.cluster
        conditions = conditions if conditions is not None else Conditions(cluster)
        self._nccl = Nccl(cluster, mesh, machine.costs.ns) if cluster.backend is Backend.nccl else None
        traffic = self._nccl.traffic if self._nccl is not None else Traffic(cluster, mesh)
        kinds = [("all_gather", axis, 0) for axis in (WORLD, LOCAL, NODE, HPZ)]
        if transfers is not None:
            kinds = [(t.op, t.axis, t.peer) for t in transfers]
        self._wires = Wires(cluster, self._fold, traffic, conditions, uses_of(mesh, kinds))
        self._wires.set_changes(machine.network)
        self._gloo = Gloo(machine, mesh, self._wires)
        self._launch_ns = cluster.device.launch_ns if self._nccl is not None else 0
        self._stages: dict[tuple[int, int], tuple[Transfer, tuple[Stage, ...]]] = {}
        self._open: dict[tuple[Tag, str, int], _Meeting] = {}
        self._letters = Letters(machine.env, self._send)
        self._class_of = {rank: number for number, rank in enumerate(self._fold.ranks)}
        self._ends: dict[tuple[int, str, str, int], tuple[int, int, Route]] = {}
        self._conditions = conditions
        self._dies_ns = {
            self._class_of[rank]: at for rank, at in conditions.dies_ns.items() if rank in self._class_of
        }

    def run(self, rank: int, transfer: Transfer, tag: Tag, wait_ns: int = 0) -> Steps:
        """Take part as the class of `rank`, `wait_ns` from now."""
        of_class = self._class_of[rank]
        if transfer.peer:
            yield from self._message(rank, transfer, tag, wait_ns)
            return
        circle = self._fold.circle(transfer.axis, of_class)
        classes = circle.classes
        if len(classes) == 1:
            yield from self._flows(self._of(transfer, of_class, circle.number), wait_ns)
            return
        if wait_ns:
            yield self._machine.env.timeout(wait_ns)
        key = (tag, transfer.axis, circle.number)
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = _Meeting(classes, self._machine.env.event())
        meeting.come.append(of_class)
        if len(meeting.come) < len(classes):
            yield meeting.over
            return
        yield from self._flows(self._of(transfer, of_class, circle.number))
        if self._dies_ns and any(self._dies_ns.get(c, NEVER_NS) <= self._machine.env.now for c in classes):
            meeting.come = [c for c in classes if c not in self._dies_ns]
            yield self._machine.env.event()  # what a dead rank should have passed on never comes
        del self._open[key]
        meeting.over.succeed()

    def missing(self) -> list[tuple[int, int]]:
        """(A waiting rank, a rank that it waits for) of all open collectives and receipts."""
        ranks = self._fold.ranks
        found = self._letters.missing()
        for meeting in self._open.values():
            absent = [c for c in meeting.classes if c not in meeting.come] or self._cut_off(meeting)
            found += [
                (ranks[here], ranks[there]) for there in absent for here in meeting.come if here != there
            ]
        return found

    def _cut_off(self, meeting: "_Meeting") -> list[int]:
        """Classes that came, and whose node no byte leaves any more."""
        node_of, now_ns = self._mesh.node_of, self._machine.env.now
        return [c for c in meeting.classes if self._conditions.is_cut(node_of(self._fold.ranks[c]), now_ns)]

    def stages(self, transfer: Transfer, of_class: int = 0) -> tuple[Stage, ...]:
        """What `transfer` comes to in the groups of one class."""
        costs = self._machine.costs
        fixed_ns = costs.op_ns(transfer.op, transfer.axis, transfer.message_bytes) + self._launch_ns
        if self._nccl is None:
            first, *others = self._gloo.stages(transfer, of_class)
            return (Stage(first.latency_ns + fixed_ns, first.flows), *others)
        way = self._nccl.way(transfer)
        choose = self._wires.pairwise if way.pattern == PAIRWISE else self._wires.ring
        route = choose(transfer.axis, of_class)
        channels = self._machine.costs.cluster.nccl.channels if way.pattern == RING else 1
        if channels > 1:  # each a flow with its part of the bytes, and all alike
            route = tuple((link, channels * load) for link, load in route)
        rounds = self._rounds(transfer, way)
        flows = ((way.nbytes / channels / rounds, route),)
        each_ns = way.latency_ns // rounds
        first_ns = way.latency_ns - each_ns * (rounds - 1)
        return (Stage(first_ns + fixed_ns, flows), *[Stage(each_ns, flows)] * (rounds - 1))

    def _rounds(self, transfer: Transfer, way: Way) -> int:
        """In how many pieces a collective goes: those of its ring, where that shows and the steps could be followed.

        Between the rounds of a ring its links are free. Whether another one beside it uses these pauses or comes in
        step with it makes up to the smaller of all pauses and all transfers.
        """
        followed = self._mesh.num_ranks <= MAX_STEPWISE_RANKS
        if way.algorithm != "ring" or transfer.op not in IN_ROUNDS or not followed:
            return 1
        assert self._nccl is not None, "gloo has no ways"
        total_ns = self._nccl.alone_ns(transfer, way)
        if min(way.latency_ns, total_ns - way.latency_ns) < NEGLIGIBLE * total_ns:
            return 1
        return (transfer.group_size - 1) * (2 if transfer.op == "all_reduce" else 1)

    def _of(self, transfer: Transfer, of_class: int, circle: int) -> tuple[Stage, ...]:
        # the transfer is kept with its stages, so that its id stays its own
        key = (id(transfer), circle)
        known = self._stages.get(key)
        if known is None:
            known = self._stages[key] = (transfer, self.stages(transfer, of_class))
        return known[1]

    def _flows(self, stages: tuple[Stage, ...], wait_ns: int = 0) -> Steps:
        network = self._machine.network
        for stage in stages:
            after_ns, wait_ns = stage.latency_ns + wait_ns, 0
            yield from [network.flow(amount, route, after_ns=after_ns) for amount, route in stage.flows]

    def _message(self, rank: int, transfer: Transfer, tag: Tag, wait_ns: int) -> Steps:
        peer, fixed_ns, route = self._end(rank, transfer)
        if transfer.op == "recv":
            if wait_ns:
                yield self._machine.env.timeout(wait_ns)
            yield self._letters.receive(tag, peer, rank)
        else:
            yield self._letters.send(tag, rank, peer, transfer.message_bytes, (route, wait_ns + fixed_ns))

    def _send(self, source: int, target: int, nbytes: int, how: Any) -> Any:
        route, after_ns = how
        return self._machine.network.flow(nbytes, route, after_ns=after_ns)

    def _end(self, rank: int, transfer: Transfer) -> tuple[int, int, Route]:
        """The rank that stands for the other end of a message, and time and links of the way to it."""
        key = (rank, transfer.op, transfer.axis, transfer.peer)
        known = self._ends.get(key)
        if known is None:
            peer = peer_of(self._mesh.group(transfer.axis, rank), rank, transfer)
            fixed_ns = self._launch_ns + self._machine.costs.op_ns(
                transfer.op, transfer.axis, transfer.message_bytes
            )
            fixed_ns += self._machine.topology.latency_ns(rank, peer)
            route: Route = ()
            if transfer.op == "send":
                route = self._wires.message(transfer.axis, transfer.peer, self._class_of[rank])
            known = self._ends[key] = (self._fold.representative(peer), fixed_ns, route)
        return known
