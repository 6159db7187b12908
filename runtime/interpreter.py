"""Carries plans out on tensors: the runtime's one interpreter of the vocabulary. It never asks which policy
it runs.

A step works on what the last step it waits for has left. Collectives on another stream than the plan's own are
started, and waited for where their result is needed: while a chunk is on its way between nodes, the one behind it is
on its way within the node, and the kernels of a third run. Collectives are reported to the ledger, one row each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import slice_order
from ..policies.mesh import Mesh
from ..policies.partition import copy_slice, cut_segments
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
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    Reorder,
    Step,
    StoreCopy,
)
from .collectives import Collectives, Pending
from .groups import Group, Groups
from .ledger import QUANTIZE_STREAM, Collecting, Ledger
from .ring import Codec
from .values import Coded, Plain, Sum, Value, add_up, decode, quantize


class CopyStore(Protocol):
    """Where a unit's secondary shard is kept."""

    def load(self, axis: str) -> Tensor:
        """The shard, flat."""
        ...

    def store(self, axis: str, shard: Tensor) -> None:
        """Keep a copy of it."""
        ...


class Interpreter:
    """Runs plans for one rank.

    Args:
        groups: Of this rank, on all axes.
        ledger: Told of every collective.
        collectives: Of the backend.
    """

    def __init__(self, groups: Groups, ledger: Ledger, collectives: Collectives) -> None:
        self.groups = groups
        self.ledger = ledger
        self.collectives = collectives

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh

    def gather(
        self,
        plan: Plan,
        *,
        unit: str,
        shard: Tensor,
        out: Tensor,
        segments: Sequence[int],
        copies: CopyStore | None = None,
    ) -> None:
        """From this rank's shard to the whole unit.

        Args:
            shard: [n]; may be a part of `out`.
            out: [world * n], contiguous, of the same dtype.
            segments: Lengths of the ranges in a shard, one a parameter.
            copies: Serves StoreCopy and LoadCopy.

        Raises:
            ValueError: If the plan does not end with one slice a rank.
        """
        out_Wn = out.view(self.mesh.num_ranks, -1)
        self._run(plan, unit, shard.view(1, -1), out_Wn, segments, copies, mean=False)
        for step in plan.steps:
            if isinstance(step, StoreCopy):
                group = self.groups[step.axis]
                start, end = copy_slice(out.numel(), group.size, group.index)
                _needed(copies, plan).store(step.axis, out[start:end])

    def reduce(
        self,
        plan: Plan,
        *,
        unit: str,
        slices: Tensor,
        out: Tensor,
        segments: Sequence[int],
        mean: bool,
    ) -> None:
        """From one slice for each rank to this rank's slice of the sum.

        Args:
            slices: [world * n], contiguous; its dtype is the wire's. Left as it is.
            out: [n].
            segments: Lengths of the ranges in a slice, one a parameter.
            mean: Divide by the world size if the plan says mean; False where the caller divides by itself.
        """
        slices_Wn = slices.view(self.mesh.num_ranks, -1)
        self._run(plan, unit, slices_Wn, out.view(1, -1), segments, None, mean=mean)

    def whole(
        self, plan: Plan, *, unit: str, flat: Tensor, segments: Sequence[int], mean: bool = False
    ) -> None:
        """All-reduce, reduce to or broadcast a whole unit, in place."""
        flat_1n = flat.view(1, -1)
        self._run(plan, unit, flat_1n, flat_1n, segments, None, mean=mean)

    # ---- one plan

    def _run(
        self,
        plan: Plan,
        unit: str,
        x_Sn: Tensor,
        out_Tn: Tensor,
        segments: Sequence[int],
        copies: CopyStore | None,
        *,
        mean: bool,
    ) -> None:
        if copies is None and any(isinstance(step, StoreCopy | LoadCopy) for step in plan.steps):
            _needed(copies, plan)
        if sum(segments) != x_Sn.shape[1]:
            raise ValueError(f"segments of {unit} hold {sum(segments)} elements, its slice {x_Sn.shape[1]}")
        pieces = [
            _Piece(self, plan, unit, cut_segments(segments, start, end), x_Sn, out_Tn, (start, end), copies)
            for start, end in plan.cuts(segments)
        ]
        for chunk, i in plan.order(len(pieces)):
            pieces[chunk].take(i)
        if not plan.steps:
            for piece in pieces:
                piece.finish()
        if mean and any(getattr(step, "op", None) is ReduceOp.mean for step in plan.steps):
            out_Tn.div_(self.mesh.num_ranks)


class _Piece:
    """One chunk's way through a plan.

    Args:
        x_Sn: The whole value at the plan's begin; its dtype is the wire's.
        out_Tn: Where the whole result goes.
        cut: Where this chunk lies in a slice.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        plan: Plan,
        unit: str,
        segments: tuple[int, ...],
        x_Sn: Tensor,
        out_Tn: Tensor,
        cut: tuple[int, int],
        copies: CopyStore | None,
    ) -> None:
        self.groups = interpreter.groups
        self.ledger = interpreter.ledger
        self.collectives = interpreter.collectives
        self.plan = plan
        self.unit = unit
        self.segments = segments
        self.numel = sum(segments)
        self.dtype = x_Sn.dtype
        self.copies = copies
        self.cut = cut
        self._start: Value = Plain(x_Sn[None, :, cut[0] : cut[1]])
        self._out_Tn = out_Tn[:, cut[0] : cut[1]]
        # The last step may write where its result is wanted.
        self._target = self._out_Tn if self._out_Tn.is_contiguous() else None
        steps = plan.steps
        self._last = max((i for i, step in enumerate(steps) if not isinstance(step, StoreCopy)), default=-1)
        self._values: dict[int, Value] = {}
        self._under_way: dict[
            int, tuple[Collecting, Pending | None]
        ] = {}  # collectives beside, by their step
        self._at = -1  # the step that is being carried out

    def take(self, i: int) -> None:
        """Carry out step `i`, which comes after those that it waits for; after the last one the result is there."""
        dependencies = self.plan.dependencies(i)
        for dependency in dependencies:
            self._arrive(dependency)
        value = self._values[dependencies[-1]] if dependencies else self._start
        self._at = i
        self._values[i] = self._step(i, self.plan.steps[i], value, self._target if i == self._last else None)
        if len(self._values) == len(self.plan.steps):
            self.finish()

    def finish(self) -> None:
        """Wait for what is under way, and put the result where it is wanted."""
        for i in list(self._under_way):
            self._arrive(i)
        value = self._values[len(self.plan.steps) - 1] if self.plan.steps else self._start
        if isinstance(value, Coded) and not value.decoded:
            raise ValueError(f"plan '{self.plan.describe()}' ends with quantized data")
        out_Tn = self._out_Tn
        x = self._plain(value, self._target)
        if x.parts != 1 or x.slices != out_Tn.shape[0]:
            raise ValueError(
                f"plan '{self.plan.describe()}' ends with {x.parts} part(s) of {x.slices} slice(s); "
                f"{self.unit} must end with 1 part of {len(out_Tn)}"
            )
        result = x.in_order()
        if result.data_ptr() != out_Tn.data_ptr() or result.dtype != out_Tn.dtype:
            out_Tn.copy_(result)
        self._values.clear()

    def _arrive(self, i: int) -> None:
        """Wait for step `i`, if it is a collective under way."""
        if i in self._under_way:
            row, pending = self._under_way.pop(i)
            if pending is not None:
                pending.wait()
            row.over()

    def _step(self, i: int, step: Step, value: Value, out: Tensor | None) -> Value:
        match step:
            case Collective():
                return self._collective(step, self.plan.stream_of(i), value, out)
            case Quantize():
                return self._quantize(step, value)
            case Dequantize():
                if not isinstance(value, Coded) or value.decoded:
                    raise ValueError(f"plan '{self.plan.describe()}': Dequantize without Quantize")
                decoded = replace(value, decoded=True)
                if step.fused:
                    return decoded
                with self.ledger.span(QUANTIZE_STREAM, f"decode{value.codec.bits} {self.unit}"):
                    return decode(decoded, torch.float32, None)
            case Reduce():
                if isinstance(value, Coded) and value.decoded and value.parts > 1:
                    return Sum(value)
                x = self._plain(value, None)
                if x.parts == 1:
                    return x
                with self.ledger.span(QUANTIZE_STREAM, f"reduce {self.unit}"):
                    return Plain(x.x_PSn.sum(0, dtype=torch.float32)[None])
            case Reorder():
                x = self._plain(value, None)
                mesh = self.groups.mesh
                order = slice_order(mesh.num_nodes, mesh.ranks_per_node)
                if x.parts != 1 or len(order) != x.slices:
                    raise ValueError(
                        f"plan '{self.plan.describe()}': Reorder takes one slice a rank, got {x.slices}"
                    )
                before = x.order
                x = replace(x, order=order if before is None else tuple(before[j] for j in order))
                if step.fused:
                    return x
                with self.ledger.span(QUANTIZE_STREAM, f"reorder {self.unit}"):
                    return Plain(x.in_order()[None])
            case StoreCopy():
                return value  # the interpreter keeps it once all chunks are there
            case LoadCopy():
                slices = self.groups.mesh.num_ranks // self.groups[step.axis].size
                copy_Sn = _needed(self.copies, self.plan).load(step.axis).view(slices, -1)
                return Plain(copy_Sn[None, :, self.cut[0] : self.cut[1]])
        raise TypeError(f"the runtime does not know the plan step {type(step).__name__}")

    # ---- local work

    def _quantize(self, step: Quantize, value: Value) -> Coded:
        if isinstance(value, Coded):
            value = self._plain(value, None)
        if isinstance(value, Plain) and value.parts != 1:
            raise ValueError(f"plan '{self.plan.describe()}': Quantize of parts that no Reduce has added up")
        group = self.groups[step.exact_own] if step.exact_own is not None else None
        size, index = (group.size, group.index) if group is not None else (1, 0)
        if value.slices % size:
            raise ValueError(
                f"plan '{self.plan.describe()}': {value.slices} slices cannot be shared out over {size} "
                "ranks of "
                f"{step.exact_own!r}"
            )
        segments = self.segments if step.per_parameter else (self.numel,)
        with self.ledger.span(QUANTIZE_STREAM, f"encode{step.bits} {self.unit}"):
            return quantize(value, step, Codec(segments, step.bits, step.block), size=size, index=index)

    def _plain(self, value: Value, out: Tensor | None) -> Plain:
        """Elements, whatever they are now; decoded into `out` if they have to be."""
        if isinstance(value, Plain):
            return value
        terms = value.terms if isinstance(value, Sum) else value
        if not terms.decoded:
            raise ValueError(f"plan '{self.plan.describe()}': a step that takes no quantized data got some")
        with self.ledger.span(QUANTIZE_STREAM, f"decode{terms.codec.bits} {self.unit}"):
            if out is not None and len(out) != terms.slices * (1 if isinstance(value, Sum) else terms.parts):
                out = None  # the plan ends with a wrong shape, which is said elsewhere
            return add_up(value, out) if isinstance(value, Sum) else decode(value, self.dtype, out)

    # ---- collectives

    def _collective(self, step: Collective, stream: str, value: Value, out: Tensor | None) -> Value:
        group = self.groups[step.axis]
        if not isinstance(value, Coded) or value.decoded:
            value = self._plain(value, None)
        if value.parts != 1:
            raise ValueError(
                f"plan '{self.plan.describe()}': {type(step).__name__} of parts that no Reduce has added up"
            )
        if isinstance(step, AllToAll | ReduceScatter) and value.slices % group.size:
            raise ValueError(
                f"plan '{self.plan.describe()}': {type(step).__name__} over {group.size} ranks of "
                f"{step.axis!r} "
                f"cannot share out {value.slices} slices evenly"
            )
        root = step.root if isinstance(step, Broadcast | ReduceTo) else 0
        if not 0 <= root < group.size:
            raise ValueError(
                f"plan '{self.plan.describe()}': root={root} is not in the group of {step.axis!r}; use one of "
                f"[0, {group.size - 1}]"
            )
        exact = value.step.exact_own if isinstance(value, Coded) else None
        if exact is not None and not (isinstance(step, AllToAll) and step.axis == exact):
            raise ValueError(
                f"plan '{self.plan.describe()}': Quantize(exact_own={exact!r}) must be followed by "
                f"AllToAll(axis={exact!r})"
            )
        match step:
            case AllGather():
                return self._all_gather(group, stream, value, out)
            case AllToAll():
                return self._all_to_all(group, stream, value)
            case ReduceScatter():
                return self._reduce_scatter(step, group, stream, self._sent(value), out)
            case AllReduce():
                x = self._sent(value)
                if group.size > 1:
                    row = self._row("all_reduce", group, stream, 1, x.slices)
                    self._carry(row, partial(self.collectives.all_reduce, group, x.x_PSn.view(-1)))
                return x
            case ReduceTo():
                x = self._sent(value)
                if group.size > 1:
                    row = self._row("reduce", group, stream, 1, x.slices)
                    self._carry(row, partial(self.collectives.reduce, group, x.x_PSn.view(-1), step.root))
                return x
            case Broadcast():
                sent = value if isinstance(value, Coded) else self._sent(value)
                data = sent.messages if isinstance(sent, Coded) else sent.x_PSn
                if group.size > 1:
                    row = self._row("broadcast", group, stream, 1, sent.slices)
                    self._carry(row, partial(self.collectives.broadcast, group, data.view(-1), step.root))
                return sent
        raise TypeError(f"the runtime does not know the collective {type(step).__name__}")

    def _all_gather(
        self, group: Group, stream: str, value: Plain | Coded, out: Tensor | None
    ) -> Plain | Coded:
        if group.size == 1:
            return value
        if isinstance(value, Coded):
            gathered = value.messages.new_empty(group.size * value.slices, value.messages.shape[1])
            row = self._row("all_gather", group, stream, group.size, value.slices)
            x, out = value.messages.view(-1), gathered.view(-1)
            self._carry(row, partial(self.collectives.all_gather, group, x, out))
            return replace(value, messages=gathered, slices=len(gathered))
        x_Sn = self._sent(value).x_PSn[0]
        num_slices = x_Sn.shape[0]
        rows = group.size * num_slices
        if out is None or out.shape[0] != rows or out.dtype != x_Sn.dtype:
            out = x_Sn.new_empty(rows, self.numel)
        row = self._row("all_gather", group, stream, group.size, num_slices)
        self._carry(row, partial(self.collectives.all_gather, group, x_Sn.view(-1), out.view(-1)))
        return Plain(out[None])

    def _all_to_all(self, group: Group, stream: str, value: Plain | Coded) -> Plain | Coded:
        run = value.slices // group.size
        if isinstance(value, Plain):
            x_GRn = self._sent(value).x_PSn.view(group.size, run, self.numel)
            if group.size == 1:
                return Plain(x_GRn)
            parts = torch.empty_like(x_GRn)
            self._exchange(group, stream, list(x_GRn), list(parts), value.slices)
            parts[group.index].copy_(x_GRn[group.index])
            return Plain(parts)
        own = value.own
        width = run * value.codec.wire_bytes
        messages = value.messages.view(
            -1, width
        )  # a row for each peer; this rank's too unless it stayed exact
        parts = torch.empty_like(messages)
        sends, receives = list(messages), list(parts)
        if own is not None:  # places of the group again, with nothing for this rank
            sends.insert(group.index, messages.new_empty(0))
            receives.insert(group.index, messages.new_empty(0))
        elif self.numel:
            parts[group.index].copy_(messages[group.index])
        if group.size > 1:
            self._exchange(group, stream, sends, receives, value.slices)
        return replace(value, messages=parts, slices=run, parts=group.size)

    def _exchange(
        self, group: Group, stream: str, sends: list[Tensor], receives: list[Tensor], slices: int
    ) -> None:
        del sends[group.index], receives[group.index]
        row = self._row("all_to_all", group, stream, 1, slices)
        self._carry(row, partial(self.collectives.all_to_all, group, sends, receives))

    def _carry(self, row: Collecting, call: Callable[..., Pending | None]) -> None:
        """Do the collective of the present step, or start it if it runs beside."""
        if not self._beside:
            with row:
                call()
            return
        with row:
            pending = call(later=True)
        self._under_way[self._at] = (row, pending)
        if pending is None:
            self._arrive(self._at)

    @property
    def _beside(self) -> bool:
        return self.plan.is_beside(self._at)

    def _reduce_scatter(
        self, step: ReduceScatter, group: Group, stream: str, value: Plain, out: Tensor | None
    ) -> Plain:
        if group.size == 1:
            return value
        share = value.slices // group.size
        x_gn = value.x_PSn.view(group.size, -1)
        codec = Codec(self.segments, step.hop_bits, step.hop_block).times(share) if step.hop_bits else None
        dtype = torch.float32 if codec is not None else self.dtype
        if out is None or out.shape[0] != share or out.dtype != dtype:
            out = torch.empty(share, self.numel, dtype=dtype, device=x_gn.device)
        with self._row("reduce_scatter", group, stream, 1, value.slices):
            self.collectives.reduce_scatter(group, x_gn, out.view(-1), codec)
        return Plain(out[None])

    def _sent(self, value: Value) -> Plain:
        """As it goes on the wire: contiguous, in order and in the wire's dtype."""
        x = self._plain(value, None)
        if x.order is None and x.x_PSn.dtype == self.dtype and x.x_PSn.is_contiguous() and x.parts == 1:
            return x
        return Plain(x.in_order().to(self.dtype)[None])

    def _row(self, op: str, group: Group, stream: str, times: int, slices: int) -> Collecting:
        payload_bytes = times * slices * self.numel * self.dtype.itemsize
        return self.ledger.collective(
            op=op,
            axis=group.axis,
            group=group.ranks,
            payload_bytes=payload_bytes,
            stream=stream,
            layer=self.unit,
            later=self._beside,
        )


def _needed(copies: CopyStore | None, plan: Plan) -> CopyStore:
    if copies is None:
        raise ValueError(f"plan '{plan.describe()}' keeps a copy, but only a gather can")
    return copies
