"""What a plan comes to for one unit of a model: local work and collectives, with their sizes.

This is the simulator's interpreter of the plan vocabulary: shapes only. It follows the value along the steps
and refuses a plan that does not end with what was asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from ..policies.mesh import LOCAL, NODE, WORLD, Mesh
from ..policies.partition import cut_segments
from ..policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Dequantize,
    LoadCopy,
    Plan,
    Quantize,
    Reduce,
    ReduceScatter,
    ReduceTo,
    Reorder,
    Step,
    StoreCopy,
)
from ..policies.wire import encoded_bytes

FP32_BYTES = 4
SUM, REQUANTIZE = "sum", "requantize"  # what a fused kernel makes of parts that it decodes
PASSES = ("reorder", "own", "sum")  # local work that is a pass over memory of its own


class Work(NamedTuple):
    """Something that takes time on one rank and moves nothing. `costs.Costs` says how long.

    kind `encode` or `decode`: `amount` elements of `bits`, to or from the wire's elements; with `key` `fp32`
    those are in fp32. A kernel that does several steps in one pass is charged by its steps, of which none reads what
    the one before it has made: `key` is `sum` (decode, add up) or `requantize` (decode, add up, encode).
    `traffic`: `amount` bytes read and written, as `key` says; those of `PASSES` are what a fused kernel would spare.
    `compute`: `key` is such as "forward/block.0", or "forward/block.0#out" for a part of it, of a micro-batch of
    `amount` sequences (0: batch.micro). `step`: the optimizer's. `fixed`: `amount` nanoseconds.
    """

    kind: str
    key: str = ""
    bits: int = 0
    amount: int = 0


class Goal(Enum):
    """What a plan starts from and must end with."""

    gather = "gather"  # own shard -> one slice a rank
    reduce = "reduce"  # one slice a rank -> own slice, summed
    whole = "whole"  # a replicated unit: the tensor as it is


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A step on one rank; `name` is shown in the timeline."""

    name: str
    work: Work


@dataclass(frozen=True, slots=True)
class Transfer:
    """One executed collective of more than one rank, or one end of a message between two.

    `message_bytes`: all_gather: one rank's part; reduce_scatter and all_to_all: the part for one peer; else
    the whole tensor. op `send` and `recv`: the other end is `peer` places further along `axis` (+1: the next
    stage; the last is followed by the first), and both ends have one tag. A send's data leaves at once, and a
    receipt ends when all of it is there. `numel` and `element_bytes` describe the whole input of an all_reduce
    or reduce. `hop` is the work between two hops of a ring that reduces: before the first send, and after each
    receipt. op `scatter` and `gather`: messages between the root and those whose part is not empty, `message_bytes` of
    the largest; nobody else takes part.
    """

    op: str
    axis: str
    group_size: int
    payload_bytes: int
    message_bytes: int
    numel: int = 0
    element_bytes: int = 0
    root: int = 0  # position in the group
    hop: tuple[tuple[Work, ...], tuple[Work, ...]] = ((), ())
    peer: int = 0  # signed distance along the axis
    parts: tuple[int, ...] = ()  # of a scatter or gather: bytes of each place's part, the root's own 0
    listed: bool = True  # in the ledger; else the other end's row stands for it


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of one chunk. `after`: positions of the pieces that must end first.

    `beside`: a collective which only those pieces wait for that name it; `chunk` tells it from those of its stream
    that may be under way at the same time.
    """

    what: LocalWork | Transfer
    stream: str
    after: tuple[int, ...]
    beside: bool = False
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Interpreted:
    """`pieces` in the order of issue. Local work is done where the plan is carried out, on `stream`."""

    pieces: tuple[Piece, ...]
    stream: str
    stores_copy: str  # over which axis; "": none
    loads_copy: str


@dataclass(frozen=True, slots=True)
class _Value:
    """The tensor between two steps: `parts` times `slices` slices of the same layout.

    `waits`: decoded in one pass with what follows (SUM or REQUANTIZE). `wide`: in memory, in fp32. `own_bytes`: of
    slices that were left exact.
    """

    slices: int
    parts: int = 1
    encoding: Quantize | None = None
    waits: str = ""
    wide: bool = False
    own_bytes: int = 0
    bits: int = 0  # of what waits


def interpret(
    plan: Plan, *, goal: Goal, segments: Sequence[int], mesh: Mesh, element_bytes: int
) -> Interpreted:
    """Sizes of all steps.

    Args:
        segments: Elements of each tensor's part in one slice (see `policies.partition`).
        element_bytes: Of an element on the wire that is not quantized.

    Raises:
        ValueError: If a step cannot follow the ones before it, or the plan does not reach its goal.
    """
    pieces: list[Piece] = []
    walks = [
        _Walk(plan, goal, chunk, cut_segments(segments, start, end), mesh, element_bytes, pieces)
        for chunk, (start, end) in enumerate(plan.cuts(segments))
    ]
    for chunk, step in plan.order(len(walks)):
        walks[chunk].take(step)
    for walk in walks:
        walk.check_end()
    stored = [step.axis for step in plan.steps if isinstance(step, StoreCopy)]
    loaded = [step.axis for step in plan.steps if isinstance(step, LoadCopy)]
    if goal is not Goal.gather and (stored or loaded):
        raise ValueError(f"plan '{plan.describe()}' keeps a copy, but only a gather can")
    return Interpreted(tuple(pieces), plan.stream, stored[-1] if stored else "", loaded[-1] if loaded else "")


class _Walk:
    """One chunk's way through the plan; its pieces go to `pieces`."""

    def __init__(
        self,
        plan: Plan,
        goal: Goal,
        chunk: int,
        segments: tuple[int, ...],
        mesh: Mesh,
        element_bytes: int,
        pieces: list[Piece],
    ) -> None:
        self.plan = plan
        self.goal = goal
        self.chunk = chunk
        self.pieces = pieces
        self.segments = segments
        self.numel = sum(segments)
        self.mesh = mesh
        self.element_bytes = element_bytes
        self._start = _Value(mesh.num_ranks if goal is Goal.reduce else 1)
        self._values: dict[int, _Value] = {}
        # the pieces that stand for a step; a step without work hands on those that it waits for
        self._ends: dict[int, tuple[int, ...]] = {}

    def take(self, i: int) -> None:
        """Step `i`. Those that it waits for have been taken."""
        plan, pieces = self.plan, self.pieces
        dependencies = plan.dependencies(i)
        self._values[i], whats = self._step(
            i, plan.steps[i], self._values[dependencies[-1]] if dependencies else self._start
        )
        after = tuple(dict.fromkeys(at for dep in dependencies for at in self._ends[dep]))
        for what in whats:
            beside = isinstance(what, Transfer) and plan.is_beside(i)
            pieces.append(Piece(what, plan.stream_of(i), after, beside, self.chunk))
            after = (len(pieces) - 1,)
        self._ends[i] = after

    def check_end(self) -> None:
        last = len(self.plan.steps) - 1
        value = self._values.get(last, self._start)
        value = _Value(value.slices, value.parts, value.encoding)
        slices = self.mesh.num_ranks if self.goal is Goal.gather else 1
        if value != _Value(slices):
            raise ValueError(
                f"plan '{self.plan.describe()}' ends with {_describe(value)}; a {self.goal.value} must end "
                f"with {_describe(_Value(slices))}"
            )

    def _pass(self, i: int) -> str:
        """What the kernel that begins with step `i`, a Dequantize of several parts, does in its pass."""
        for _ in range(2):  # Reduce, and what takes its sum
            following = [j for j in range(i + 1, len(self.plan.steps)) if i in self.plan.dependencies(j)]
            if len(following) != 1:
                return SUM
            i = following[0]
        return REQUANTIZE if isinstance(self.plan.steps[i], Quantize) else SUM

    def _step(self, i: int, step: Step, value: _Value) -> tuple[_Value, list[LocalWork | Transfer]]:
        elements = value.parts * value.slices * self.numel
        match step:
            case Quantize():
                self._need(value.encoding is None, step, "quantized data")
                self._need(value.parts == 1, step, "parts that no Reduce has added up")
                sharers = axis_size(self.mesh, step.exact_own) if step.exact_own is not None else 1
                if value.slices % sharers:
                    raise ValueError(
                        f"plan '{self.plan.describe()}': {value.slices} slices cannot be shared out over {sharers} "
                        f"ranks of {step.exact_own!r}"
                    )
                own = elements // sharers if step.exact_own is not None else 0
                key = "fp32" if value.wide else value.waits
                work = Work("encode", key, step.bits, elements - own)
                wide = bool(value.wide or value.waits)
                own_bytes = own * (FP32_BYTES if wide else self.element_bytes)
                after = replace(value, encoding=step, wide=False, waits="", own_bytes=own_bytes, bits=0)
                works: list[LocalWork | Transfer] = [LocalWork(f"encode{step.bits}", work)]
                if own and value.waits:  # sums that stay exact are written
                    works.append(LocalWork("own", Work("traffic", "fused", value.bits, own_bytes)))
                return after, works
            case Dequantize():
                encoding = value.encoding
                if encoding is None:
                    raise ValueError(f"plan '{self.plan.describe()}': Dequantize without Quantize")
                exact = encoding.exact_own
                own = elements // axis_size(self.mesh, exact) if exact is not None else 0
                fused = self._pass(i) if step.fused and value.parts > 1 else ""
                key = fused if step.fused else "fp32"
                work = Work("decode", key, encoding.bits, elements - own)
                works = [LocalWork(f"decode{encoding.bits}", work)]
                if own and not step.fused:
                    moved = own * (self.element_bytes + FP32_BYTES)
                    works.append(LocalWork("own", Work("traffic", "own", 0, moved)))
                own_bytes = value.own_bytes if fused else 0
                bits = encoding.bits if fused else 0
                wide = not step.fused
                after = replace(value, encoding=None, waits=fused, wide=wide, own_bytes=own_bytes, bits=bits)
                return after, works
            case Reduce():
                self._need(value.encoding is None, step, "quantized data")
                return self._sum(value)
            case Reorder():
                self._need(value.encoding is None, step, "quantized data")
                if value.parts != 1 or value.slices != self.mesh.num_ranks:
                    raise ValueError(
                        f"plan '{self.plan.describe()}': Reorder takes one slice a rank, got {value.slices}"
                    )
                if step.fused:  # into the quantization that follows, as in DeepSpeed's swizzled_quantize
                    return value, []
                moved = 2 * elements * self.element_bytes
                return value, [LocalWork("reorder", Work("traffic", "reorder", 0, moved))]
            case LoadCopy():
                slices = self._copy_slices(step.axis)
                return _Value(slices), []  # a view of what this rank holds
            case StoreCopy():
                moved = 2 * self._copy_slices(step.axis) * self.numel * self.element_bytes
                return value, [LocalWork("store_copy", Work("traffic", "copy", 0, moved))]
            case Collective():
                return self._collective(step, value)
        raise ValueError(f"the simulator does not know the plan step {type(step).__name__}")

    def _sum(self, value: _Value) -> tuple[_Value, list[LocalWork | Transfer]]:
        """Parts that were decoded in the same pass, or that lie in memory: of the wire's elements, or in fp32."""
        after = replace(value, parts=1, wide=False)
        if value.parts == 1:
            return after, []
        numel = value.slices * self.numel
        if value.waits:  # own parts are read, and a sum that nothing encodes in the same pass is written
            moved = value.own_bytes + (numel * FP32_BYTES if value.waits == SUM else 0)
            return replace(after, own_bytes=0), [
                LocalWork("reduce", Work("traffic", "fused", value.bits, moved))
            ]
        each = FP32_BYTES if value.wide else self.element_bytes
        moved = value.parts * numel * each + numel * FP32_BYTES
        return replace(after, wide=True), [LocalWork("reduce", Work("traffic", "sum", 0, moved))]

    def _collective(self, step: Collective, value: _Value) -> tuple[_Value, list[LocalWork | Transfer]]:
        size = axis_size(self.mesh, step.axis)
        value = replace(value, waits="", wide=False, bits=0)  # as it goes on the wire
        self._need(value.parts == 1, step, "parts that no Reduce has added up")
        exact = value.encoding.exact_own if value.encoding is not None else None
        if exact is not None and not (isinstance(step, AllToAll) and step.axis == exact):
            raise ValueError(
                f"plan '{self.plan.describe()}': Quantize(exact_own={exact!r}) must be followed by "
                f"AllToAll(axis={exact!r})"
            )
        root = step.root if isinstance(step, Broadcast | ReduceTo) else 0
        if not 0 <= root < size:
            raise ValueError(
                f"plan '{self.plan.describe()}': root={root} is not in the group of {step.axis!r}; use one of "
                f"[0, {size - 1}]"
            )
        payload = value.slices * self.numel * self.element_bytes
        whole = value.slices * self._slice_bytes(value.encoding)
        made: Transfer | None = None
        match step:
            case AllGather():
                after = replace(value, slices=value.slices * size)
                made = Transfer("all_gather", step.axis, size, size * payload, whole)
            case ReduceScatter():
                self._need(value.encoding is None, step, "quantized data")
                share = self._share(step, value, size)
                after = _Value(share)
                made = self._reduce_scatter(step, size, payload, share)
            case AllToAll():
                share = self._share(step, value, size)
                after = replace(value, parts=size, slices=share)
                message = share * self._slice_bytes(value.encoding)
                made = Transfer("all_to_all", step.axis, size, payload, message)
            case AllReduce() | ReduceTo():
                self._need(value.encoding is None, step, "quantized data")
                after = value
                op = "all_reduce" if isinstance(step, AllReduce) else "reduce"
                root = step.root if isinstance(step, ReduceTo) else 0
                numel = value.slices * self.numel
                made = Transfer(op, step.axis, size, payload, payload, numel, self.element_bytes, root)
            case Broadcast():
                after = value
                made = Transfer("broadcast", step.axis, size, payload, whole, root=step.root)
            case _:
                raise ValueError(f"the simulator does not know the collective {type(step).__name__}")
        return after, [made] if size > 1 and payload else []

    def _reduce_scatter(self, step: ReduceScatter, size: int, payload: int, share: int) -> Transfer:
        numel = share * self.numel
        add = Work("traffic", "add", 0, 3 * numel * self.element_bytes)
        message = numel * self.element_bytes
        hop: tuple[tuple[Work, ...], tuple[Work, ...]] = ((), (add,))
        if step.hop_bits:
            encode = Work("encode", "", step.hop_bits, numel)
            decode = Work("decode", "", step.hop_bits, numel)
            message = share * encoded_bytes(self.segments, step.hop_bits, step.hop_block)
            hop = ((encode,), (decode, add, encode))
        return Transfer("reduce_scatter", step.axis, size, payload, message, hop=hop)

    def _slice_bytes(self, encoding: Quantize | None) -> int:
        if encoding is None:
            return self.numel * self.element_bytes
        segments = self.segments if encoding.per_parameter else (self.numel,)
        return encoded_bytes(segments, encoding.bits, encoding.block)

    def _share(self, step: Collective, value: _Value, size: int) -> int:
        if value.slices % size:
            raise ValueError(
                f"plan '{self.plan.describe()}': {type(step).__name__} over {size} ranks of {step.axis!r} "
                f"cannot share out {value.slices} slices evenly"
            )
        return value.slices // size

    def _copy_slices(self, axis: str) -> int:
        return self.mesh.num_ranks // axis_size(self.mesh, axis)

    def _need(self, ok: bool, step: Step, found: str) -> None:
        if not ok:
            raise ValueError(f"plan '{self.plan.describe()}': {type(step).__name__} cannot take {found}")


def _describe(value: _Value) -> str:
    state = "quantized" if value.encoding is not None else "plain"
    return f"{value.parts} part(s) of {value.slices} {state} slice(s)"


def axis_size(mesh: Mesh, axis: str) -> int:
    """`mesh.size(axis)` without listing the group: a cluster may have many thousand ranks."""
    sizes = {WORLD: mesh.num_ranks, LOCAL: mesh.ranks_per_node, NODE: mesh.num_nodes}
    return sizes[axis] if axis in sizes else mesh.size(axis)


def peer_of(group: Sequence[int], rank: int, transfer: Transfer) -> int:
    """The rank at the other end of a `send` or `recv`."""
    return group[(group.index(rank) + transfer.peer) % len(group)]
