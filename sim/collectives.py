"""Collectives step by step: every rank a process, every message a flow. The algorithms are gloo's, and the
runtime's own where it builds on sends and receives; NCCL's are in `nccl_steps`.

Sources: pytorch/gloo (allgather_ring, allreduce ring, broadcast, reduce); checked against real gloo on a
shaped network, where a fluid model of these steps is within 6%.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..conf.schema import Backend
from ..policies.mesh import Mesh
from ..policies.wire import binomial_children, binomial_parent
from .interpreter import Transfer, Work, peer_of
from .machine import Machine, Steps, Tag
from .nccl import Nccl
from .nccl_steps import NcclSteps
from .pairs import Pairs, ends_of

MAX_SEGMENT_BYTES = 1 << 20  # gloo's ring all-reduce and reduce cut a chunk into segments of at most this


class Collectives(Protocol):
    """How a rank takes part in a collective."""

    def run(self, rank: int, transfer: Transfer, tag: Tag, wait_ns: int = 0) -> Steps:
        """Take part as `rank`, `wait_ns` from now. `tag` is the same on all ranks, and used once."""
        ...

    def missing(self) -> list[tuple[int, int]]: ...


@dataclass(slots=True)
class _Message:
    """A message that at least one end has posted. The events fire when it is over for that end."""

    nbytes: int
    sent: Any = None
    received: Any = None
    noticed: bool = False  # the sender knows that the receiver is ready


class Letters:
    """Messages between two ranks that leave as soon as they are sent.

    Args:
        move: Puts `nbytes` on the way from source to target, as its last argument says; gives the event of its end.
    """

    def __init__(self, env: Any, move: Callable[[int, int, int, Any], Any]) -> None:
        self._env = env
        self._move = move
        self._arriving: dict[tuple[Tag, int, int], Any] = {}  # the event of a message that one end knows
        self._awaited: dict[tuple[Tag, int, int], None] = {}

    def send(self, tag: Tag, source: int, target: int, nbytes: int, how: Any = None) -> Any:
        """The event fires when the last byte is there."""
        key = (tag, source, target)
        moved = self._move(source, target, nbytes, how)
        if key in self._awaited:
            del self._awaited[key]
            arrival = self._arriving.pop(key)
            moved.callbacks.append(lambda _: arrival.succeed())
        else:
            assert key not in self._arriving, f"message {tag} from {source} to {target} is sent twice"
            self._arriving[key] = moved
        return moved

    def receive(self, tag: Tag, source: int, target: int) -> Any:
        """The event fires when all of the message is there."""
        key = (tag, source, target)
        if key in self._arriving and key not in self._awaited:
            return self._arriving.pop(key)
        assert key not in self._awaited, f"message {tag} from {source} to {target} is received twice"
        self._awaited[key] = None
        arrival = self._arriving[key] = self._env.event()
        return arrival

    def missing(self) -> list[tuple[int, int]]:
        """Receipts without a message, as (waiting rank, rank that it waits for)."""
        return [(target, source) for _, source, target in self._awaited]


class PerStep:
    """Every rank and message apart.

    gloo: the receiver's notice that it has posted a message goes to the sender, which then writes the message to
    the connection and is done; its last byte arrives a latency later. What goes one way on a connection keeps its
    order, notices too: with two messages in flight latencies hide behind long messages and show with short ones,
    and two ranks that send to each other can hold each other's notices up.
    """

    def __init__(self, machine: Machine, mesh: Mesh) -> None:
        self._machine = machine
        self._mesh = mesh
        self._posted: dict[tuple[Tag, int, int, int], _Message] = {}
        cluster = machine.costs.cluster
        self._nccl: NcclSteps | None = None
        if cluster.backend is Backend.nccl:
            self._nccl = NcclSteps(machine, Nccl(cluster, mesh, machine.costs.ns))
        self._launch_ns = cluster.device.launch_ns if self._nccl is not None else 0
        self.letters = Letters(machine.env, self._send_letter)
        self._pairs = Pairs(machine.env, self._send_letter)

    def run(self, rank: int, transfer: Transfer, tag: Tag, wait_ns: int = 0) -> Steps:
        if wait_ns:
            yield self._machine.env.timeout(wait_ns)
        group = self._mesh.group(transfer.axis, rank)
        if transfer.op in ("send", "recv"):
            yield from self._message(rank, peer_of(group, rank, transfer), transfer, tag)
            return
        fixed_ns = (
            self._machine.costs.op_ns(transfer.op, transfer.axis, transfer.message_bytes) + self._launch_ns
        )
        if fixed_ns:
            yield self._machine.env.timeout(fixed_ns)
        if transfer.parts:
            yield from self._uneven(rank, group, transfer, tag)
            return
        if self._nccl is not None:
            yield from self._nccl.run(rank, group, transfer, tag)
            return
        at = _Place(self, rank, group, tag)
        match transfer.op:
            case "all_gather":
                yield from self._ring(
                    at, transfer.message_bytes, rounds=len(group) - 1, shift=1, segments=2, send_first=True
                )
            case "reduce_scatter":
                yield from self._reduce_scatter(at, transfer)
            case "all_to_all":
                yield from _all_to_all(at, transfer.message_bytes)
            case "all_reduce":
                yield from self._ring_reduce(at, transfer, rounds=2 * (len(group) - 1))
            case "broadcast":
                yield from _broadcast(at, transfer)
            case "reduce_tree":
                yield from self._reduce_tree(at, transfer)
            case _:
                yield from self._ring_reduce(at, transfer, rounds=len(group) - 1)
                yield from self._collect(at, transfer)

    def _message(self, rank: int, peer: int, transfer: Transfer, tag: Tag) -> Steps:
        """One end of a message. On NCCL the bytes leave at once, into the other end's open receipt."""
        sends = transfer.op == "send"
        source, target = (rank, peer) if sends else (peer, rank)
        if sends:
            fixed_ns = (
                self._machine.costs.op_ns(transfer.op, transfer.axis, transfer.message_bytes)
                + self._launch_ns
            )
            if fixed_ns:
                yield self._machine.env.timeout(fixed_ns)
        if self._nccl is None:
            yield self.post(tag, source, target, -2, transfer.message_bytes, sends=sends)
        elif sends:
            yield self.letters.send(tag, source, target, transfer.message_bytes)
        else:
            yield self.letters.receive(tag, source, target)

    def _uneven(self, rank: int, group: tuple[int, ...], transfer: Transfer, tag: Tag) -> Steps:
        """The root's messages to or from all others at once: on gloo by notice, on NCCL when both ends have come."""
        scatters = transfer.op == "scatter"
        ends = ends_of(rank, group, transfer.parts, root=transfer.root, scatters=scatters)
        if self._nccl is None:
            yield from [self.post(tag, *end[:2], 0, end[2], sends=end[0] == rank) for end in ends]
        else:
            yield from [self._pairs.post(tag, *end, sends=end[0] == rank) for end in ends]

    def _send_letter(self, source: int, target: int, nbytes: int, _how: Any = None) -> Any:
        latency_ns = self._machine.latency_ns(source, target)
        return self._machine.send(source, target, nbytes, after_ns=latency_ns, in_order=False)

    def missing(self) -> list[tuple[int, int]]:
        """Messages that one end waits for, as (waiting rank, rank that it waits for)."""
        found = self.letters.missing() + self._pairs.missing()
        found += self._nccl.missing() if self._nccl is not None else []
        return found + [
            (source, target) if message.received is None else (target, source)
            for (_, source, target, _), message in self._posted.items()
        ]

    def post(self, tag: Tag, source: int, target: int, k: int, nbytes: int, *, sends: bool) -> Any:
        """One end of a message; the event fires when it is over for this end."""
        key = (tag, source, target, k)
        message = self._posted.get(key)
        if message is None:
            message = self._posted[key] = _Message(nbytes)
        assert message.nbytes == nbytes, f"message {key}: {message.nbytes} bytes meet {nbytes}"
        over = self._machine.env.event()
        if sends:
            assert message.sent is None, f"message {key} posted twice by its sender"
            message.sent = over
        else:
            assert message.received is None, f"message {key} posted twice by its receiver"
            message.received = over
        both = message.sent is not None and message.received is not None
        if both:
            del self._posted[key]
        if not sends:
            self._notify(message, source, target)
        elif message.noticed:
            self._move(message, source, target)
        return over

    def _notify(self, message: _Message, source: int, target: int) -> None:
        """The receiver says that it is ready, behind whatever it is sending to that rank."""
        machine = self._machine
        latency_ns = machine.latency_ns(source, target)

        def arrive(_: Any) -> None:
            message.noticed = True
            if message.sent is not None:
                self._move(message, source, target)

        def depart(_: Any) -> None:
            machine.env.timeout(latency_ns).callbacks.append(arrive)

        sending = machine.sending(target, source)
        if sending is None:
            depart(None)
        else:
            sending.callbacks.append(depart)

    def _move(self, message: _Message, source: int, target: int) -> None:
        machine = self._machine

        def left(_: Any) -> None:
            message.sent.succeed()
            latency_ns = machine.latency_ns(source, target)
            machine.env.timeout(latency_ns).callbacks.append(lambda _: message.received.succeed())

        machine.send(source, target, message.nbytes).callbacks.append(left)

    def _ring(
        self,
        at: "_Place",
        chunk_bytes: int,
        *,
        rounds: int,
        shift: int,
        segments: int,
        send_first: bool = False,
        work_of: Callable[[int], Sequence[Work]] | None = None,
    ) -> Steps:
        """`rounds` chunks to the neighbour, in segments of which two are in flight.

        `send_first`: gloo's all-gather posts a send before the receive beside it. Between two ranks the notice of
        that receive waits behind the send.
        """
        segments = min(segments, max(1, chunk_bytes))
        sizes = [chunk_bytes * (i + 1) // segments - chunk_bytes * i // segments for i in range(segments)]
        to, source = at.neighbour(shift), at.neighbour(-shift)
        sent: list[Any] = []
        received: list[Any] = []

        def settle(k: int) -> Steps:
            yield sent[k]
            yield received[k]
            if work_of is not None:
                yield from self._machine.work(at.rank, work_of(k // segments))

        in_flight = 2 if segments > 1 else 1
        for k in range(rounds * segments):
            if k >= in_flight:
                yield from settle(k - in_flight)
            size = sizes[k % segments]
            if send_first:
                sent.append(at.send(to, k, size))
            received.append(at.receive(source, k, size))
            if not send_first:
                sent.append(at.send(to, k, size))
        for k in range(max(0, rounds * segments - in_flight), rounds * segments):
            yield from settle(k)

    def _reduce_scatter(self, at: "_Place", transfer: Transfer) -> Steps:
        """The runtime's ring on sends and receives: each receive is posted before the send beside it."""
        to, source, rounds = at.neighbour(1), at.neighbour(-1), len(at.group) - 1
        before, after = transfer.hop
        yield from self._machine.work(at.rank, before)
        coming = at.receive(source, 0, transfer.message_bytes)
        for k in range(rounds):
            current = coming
            if k + 1 < rounds:
                coming = at.receive(source, k + 1, transfer.message_bytes)
            going = at.send(to, k, transfer.message_bytes)
            yield current
            works = after if k + 1 < rounds else after[: len(after) - len(before)]  # the last is not sent on
            yield from self._machine.work(at.rank, works)
            yield going

    def _ring_reduce(self, at: "_Place", transfer: Transfer, *, rounds: int) -> Steps:
        """gloo's ring, r to r - 1: a reduce-scatter and, with twice the rounds, an all-gather."""
        chunk_bytes, segments, add = reduce_chunks(transfer)
        reducing = len(at.group) - 1

        def work_of(k: int) -> Sequence[Work]:
            return (add,) if k < reducing else ()

        yield from self._ring(at, chunk_bytes, rounds=rounds, shift=-1, segments=segments, work_of=work_of)

    def _reduce_tree(self, at: "_Place", transfer: Transfer) -> Steps:
        """The broadcast's binomial tree from its leaves on: what the children have is added, last child first."""
        root, nbytes = at.group[transfer.root], transfer.message_bytes
        children = binomial_children(at.group, root, at.rank)
        coming = [at.receive(child, 0, nbytes) for child in children]
        for arrival in reversed(coming):
            yield arrival
            yield from self._machine.work(at.rank, (whole_addition(transfer),))
        if at.rank != root:
            yield at.send(binomial_parent(at.group, root, at.rank), 0, nbytes)

    def _collect(self, at: "_Place", transfer: Transfer) -> Steps:
        """Every rank's chunk of the sum goes to the root."""
        chunk_bytes, _, _ = reduce_chunks(transfer)
        root = at.group[transfer.root]
        if at.rank != root:
            yield at.send(root, -1, chunk_bytes)
            return
        yield from [at.receive(peer, -1, chunk_bytes) for peer in at.group if peer != root]


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place in one collective."""

    steps: PerStep
    rank: int
    group: tuple[int, ...]
    tag: Tag

    def neighbour(self, shift: int) -> int:
        return self.group[(self.group.index(self.rank) + shift) % len(self.group)]

    def send(self, to: int, k: int, nbytes: int) -> Any:
        return self.steps.post(self.tag, self.rank, to, k, nbytes, sends=True)

    def receive(self, source: int, k: int, nbytes: int) -> Any:
        return self.steps.post(self.tag, source, self.rank, k, nbytes, sends=False)


def _all_to_all(at: _Place, message_bytes: int) -> Steps:
    """Receives first, then all sends at once."""
    peers = [peer for peer in at.group if peer != at.rank]
    events = [at.receive(peer, 0, message_bytes) for peer in peers]
    events += [at.send(peer, 0, message_bytes) for peer in peers]
    yield from events


def _broadcast(at: _Place, transfer: Transfer) -> Steps:
    """Binomial tree: the whole buffer comes, then goes to all children at once."""
    root = at.group[transfer.root]
    if at.rank != root:
        yield at.receive(binomial_parent(at.group, root, at.rank), 0, transfer.message_bytes)
    children = binomial_children(at.group, root, at.rank)
    yield from [at.send(child, 0, transfer.message_bytes) for child in children]


def whole_addition(transfer: Transfer) -> Work:
    """One more operand added to a sum."""
    return Work("traffic", "add", 0, 3 * transfer.message_bytes)


def reduce_chunks(transfer: Transfer) -> tuple[int, int, Work]:
    """(bytes of a chunk, segments, the addition of one segment) of gloo's ring over the whole tensor."""
    numel = -(-transfer.numel // transfer.group_size)
    chunk_bytes = numel * transfer.element_bytes
    segments = max(2, -(-chunk_bytes // MAX_SEGMENT_BYTES)) if numel > 1 else 1
    return chunk_bytes, segments, Work("traffic", "add", 0, 3 * chunk_bytes // segments)
