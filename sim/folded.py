"""Collectives of classes of ranks: one process stands for each class, and a collective is one or two flows.

The volumes are the algorithm's; a flow loads each kind of link as often as the ranks that it stands for do
together. So concurrent collectives share links as they would step by step, and the cost does not grow with the
number of ranks. Where several classes meet, a collective begins when the last of them has come. But ranks that send to
each other directly begin with those that are there: whoever comes later adds a flow of what it exchanges with them.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..conf.schema import Algorithm, Backend
from ..policies.mesh import HPZ, LOCAL, NODE, WORLD, Mesh
from .classes import Fold
from .collectives import Letters
from .conditions import Conditions
from .gloo import Gloo
from .interpreter import Transfer, peer_of
from .levels import PAIRWISE, Traffic, Use
from .machine import Machine, Steps, Tag
from .nccl import Nccl, Way
from .network import NEVER_NS, Route, Stage
from .pairs import Pairs, ends_of
from .wires import Wires, uses_of

MAX_EXCHANGING = (
    64  # classes; of more, an exchange begins when the last has come, for each would be a flow of its own
)


class _Meeting:
    """The classes of one circle at one collective. `over` fires when it has ended."""

    __slots__ = ("classes", "come", "over")

    def __init__(self, classes: tuple[int, ...], over: Any) -> None:
        self.classes = classes
        self.over = over
        self.come: list[int] = []


class _Exchange(_Meeting):
    """The same where each sends to each. `over` fires when all have come; `flows`: of those that came together."""

    __slots__ = ("flows", "fresh", "left")

    def __init__(self, classes: tuple[int, ...], over: Any) -> None:
        super().__init__(classes, over)
        self.fresh: list[int] = []  # have come at this instant
        self.flows: list[Any] = []
        self.left = len(classes)  # that have not ended


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
        exchanges: set[str] = set()
        if transfers is not None:
            kinds = [(t.op, t.axis, t.peer) for t in transfers]
            if self._nccl is not None and 1 < len(self._fold) <= MAX_EXCHANGING:
                direct = cluster.nccl.algorithm is Algorithm.direct
                ops = ("all_to_all", "all_reduce") if direct else ("all_to_all",)
                exchanges = {axis for op, axis, _ in kinds if op in ops}
        self._wires = Wires(cluster, self._fold, traffic, conditions, uses_of(mesh, kinds), exchanges)
        self._exchanges = frozenset(exchanges)
        self._wires.set_changes(machine.network)
        self._gloo = Gloo(machine, mesh, self._wires)
        self._launch_ns = cluster.device.launch_ns if self._nccl is not None else 0
        self._channels = cluster.ring_channels
        self._stages: dict[tuple[int, int], tuple[Transfer, tuple[Stage, ...]]] = {}
        self._open: dict[tuple[Tag, str, int], _Meeting] = {}
        self._letters = Letters(machine.env, self._send)
        self._pairs: dict[str, Pairs] = {}  # by axis
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
        if transfer.parts:
            yield from self._uneven(rank, transfer, tag, wait_ns)
            return
        circle = self._fold.circle(transfer.axis, of_class)
        classes = circle.classes
        if len(classes) == 1:
            yield from self._flows(self._of(transfer, of_class, circle.number), wait_ns)
            return
        if wait_ns:
            yield self._machine.env.timeout(wait_ns)
        key = (tag, transfer.axis, circle.number)
        if self._nccl is not None and transfer.axis in self._exchanges:
            way = self._nccl.way(transfer)
            if way.use.pattern == PAIRWISE:
                yield from self._exchange(key, of_class, transfer, way)
                return
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = _Meeting(classes, self._machine.env.event())
        meeting.come.append(of_class)
        if len(meeting.come) < len(classes):
            yield meeting.over
            return
        yield from self._flows(self._of(transfer, of_class, circle.number))
        yield from self._unless_dead(meeting)
        del self._open[key]
        meeting.over.succeed()

    def _exchange(self, key: tuple[Tag, str, int], of_class: int, transfer: Transfer, way: Way) -> Steps:
        """Send to each, and go on when all messages to and from this class are through."""
        env = self._machine.env
        phases = 1 if transfer.op == "all_to_all" else 2
        fixed_ns = self._fixed_ns(transfer)
        for phase in range(phases):
            after_ns = fixed_ns + way.latency_ns * (phase + 1) // phases - way.latency_ns * phase // phases
            at = ((*key[0], phase), *key[1:])
            found = self._open.get(at)
            if found is None:
                classes = self._fold.circle(transfer.axis, of_class).classes
                found = self._open[at] = _Exchange(classes, env.event())
            assert isinstance(found, _Exchange)
            exchange, own = found, len(found.flows)
            exchange.come.append(of_class)
            exchange.fresh.append(of_class)
            if len(exchange.fresh) == 1:  # when all have come that come at this instant
                begin = partial(self._begin, exchange, transfer.axis, way.nbytes / phases, after_ns)
                env.timeout(0).callbacks.append(lambda _, begin=begin: begin())
            yield exchange.over
            yield from exchange.flows[own:]
            yield from self._unless_dead(exchange)
            exchange.left -= 1
            if not exchange.left:
                del self._open[at]
            fixed_ns = 0

    def _begin(self, exchange: _Exchange, axis: str, amount: float, after_ns: int) -> None:
        """The messages among those that have just come, and between them and the others that are there."""
        come, exchange.fresh = tuple(sorted(exchange.fresh)), []
        here = tuple(sorted(set(exchange.come).difference(come)))
        if len(come) == len(exchange.classes):
            route = self._wires.route(Use(axis, PAIRWISE), come[0])
        else:
            route = self._wires.part(axis, come, here)
        if route:  # a class of one rank that comes first has nobody to send to
            exchange.flows.append(self._machine.network.flow(amount, route, after_ns=after_ns))
        if len(exchange.come) == len(exchange.classes):
            exchange.over.succeed()

    def _unless_dead(self, meeting: _Meeting) -> Steps:
        """What a dead rank should have passed on never comes."""
        now_ns = self._machine.env.now
        if self._dies_ns and any(self._dies_ns.get(c, NEVER_NS) <= now_ns for c in meeting.classes):
            meeting.come = [c for c in meeting.classes if c not in self._dies_ns]
            yield self._machine.env.event()

    def missing(self) -> list[tuple[int, int]]:
        """(A waiting rank, a rank that it waits for) of all open collectives and receipts."""
        ranks = self._fold.ranks
        found = self._letters.missing()
        found += [pair for pairs in self._pairs.values() for pair in pairs.missing()]
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
        fixed_ns = self._fixed_ns(transfer)
        if self._nccl is None:
            first, *others = self._gloo.stages(transfer, of_class)
            return (Stage(first.latency_ns + fixed_ns, first.flows), *others)
        way = self._nccl.way(transfer)
        route = self._wires.route(way.use, of_class)
        channels = self._channels if way.use.pattern != PAIRWISE else 1
        if channels > 1:  # each a flow with its part of the bytes, and all alike
            route = tuple((link, channels * load) for link, load in route)
        return (Stage(way.latency_ns + fixed_ns, ((way.nbytes / channels, route),)),)

    def _fixed_ns(self, transfer: Transfer) -> int:
        """Before anything is sent."""
        return self._machine.costs.op_ns(transfer.op, transfer.axis, transfer.message_bytes) + self._launch_ns

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

    def _uneven(self, rank: int, transfer: Transfer, tag: Tag, wait_ns: int) -> Steps:
        """The root's messages to or from all others at once, each when both ends have come; of ranks that are simulated
        apart.
        """
        assert len(self._fold) == self._mesh.num_ranks, "parts differ from rank to rank"
        wait_ns += self._fixed_ns(transfer)
        if wait_ns:
            yield self._machine.env.timeout(wait_ns)
        axis = transfer.axis
        if axis not in self._pairs:
            self._pairs[axis] = Pairs(self._machine.env, partial(self._move_along, axis))
        group = self._mesh.group(axis, rank)
        scatters = transfer.op == "scatter"
        ends = ends_of(rank, group, transfer.parts, root=transfer.root, scatters=scatters)
        yield from [self._pairs[axis].post(tag, *end, sends=end[0] == rank) for end in ends]

    def _move_along(self, axis: str, source: int, target: int, nbytes: int) -> Any:
        """A message of an axis. On gloo its receiver's notice comes before it."""
        size, index = self._mesh.size(axis), self._mesh.index
        shift = (index(axis, target) - index(axis, source)) % size
        latency_ns = self._machine.topology.latency_ns(source, target) * (1 if self._nccl is not None else 2)
        route = self._wires.message(axis, shift, self._class_of[source])
        return self._machine.network.flow(nbytes, route, after_ns=latency_ns)

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
