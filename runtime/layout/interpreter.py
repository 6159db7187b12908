"""Carries layers' plans out on tensors: steps that read and write operands, in the order of the list.

Local work and blocking collectives follow one another. A collective beside (`Plan.is_beside`) is started where it
stands, and waited for by the steps that wait for it in the plan. Every collective of more than one rank is a row of the
ledger, at the place of its start.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...policies.balance import Half
from ...policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Apply,
    Broadcast,
    Collective,
    Fill,
    Gather,
    Join,
    Keep,
    Multiply,
    Part,
    Place,
    Plan,
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    Scatter,
    SendRecv,
    Slice,
    Step,
)
from ..balance.columns import PrunedColumns
from ..collectives import Collectives, Pending
from ..groups import Group, Groups
from ..ledger import Collecting, Ledger
from .functions import Context, apply_function
from .pace import Rate, step_flop


class LayerInterpreter:
    """Runs layers' plans for one rank. It never asks which layout it runs.

    Args:
        groups: Of this rank, on all axes of the mesh.
        ledger: Told of every collective.
        collectives: Of the backend.
        rate: Of products and attention; None: they take the time that they take.
        beside: Whether collectives run beside computation where plans say so; False: all block.
    """

    def __init__(
        self,
        groups: Groups,
        ledger: Ledger,
        collectives: Collectives,
        *,
        rate: Rate | None = None,
        beside: bool = True,
    ) -> None:
        self.groups = groups
        self.ledger = ledger
        self.collectives = collectives
        self.rate = rate
        self.beside = beside

    def run(
        self,
        plan: Plan,
        operands: Mapping[str, Tensor],
        *,
        label: str,
        context: Context,
        keep: Collection[str],
        half: Half | None = None,
    ) -> dict[str, Tensor]:
        """The operands that the plan ends with.

        Args:
            operands: What the plan begins with; left as they are.
            label: Of rows: the unit and the layer, such as "block.0.fc1".
            context: What functions know beside their operands.
            keep: Operands that are wanted; others are let go after the last step that reads them. One that the plan
                does not write on this rank, such as a sum whose root is another rank, is not in the result.
            half: Of a balanced block, to whose products the plan's belong.

        Raises:
            ValueError: If a step reads what no step has written, or a size does not divide.
        """
        return _Run(self, plan, operands, label, context, keep, half).all()


@dataclass(slots=True)
class _UnderWay:
    row: Collecting
    pending: Pending | None
    writes: Callable[[], Mapping[str, Tensor]]  # once it has ended


@dataclass(slots=True)
class _Run:
    interpreter: LayerInterpreter
    plan: Plan
    given: Mapping[str, Tensor]
    label: str
    context: Context
    keep: Collection[str]
    half: Half | None
    values: dict[str, Tensor] = field(init=False)
    under_way: dict[int, _UnderWay] = field(default_factory=dict, init=False)
    last_read: dict[str, int] = field(default_factory=dict, init=False)

    def all(self) -> dict[str, Tensor]:
        self.values = dict(self.given)
        for i, step in enumerate(self.plan.steps):
            self.last_read |= dict.fromkeys(step.reads, i)
        for i, step in enumerate(self.plan.steps):
            for dependency in self.plan.dependencies(i):
                self._arrive(dependency)
            if isinstance(step, Collective):
                self._collective(i, step)
            else:
                self.values.update(self._paced(step))
            for name in (*step.reads, *step.writes):
                if name not in self.keep and self.last_read.get(name, i) <= i:
                    self.values.pop(name, None)
        for i in tuple(self.under_way):
            self._arrive(i)
        return {name: self.values[name] for name in self.keep if name in self.values}

    def _arrive(self, i: int) -> None:
        """Wait for step `i`, if it is a collective under way."""
        if i in self.under_way:
            this = self.under_way.pop(i)
            if this.pending is not None:
                this.pending.wait()
            this.row.over()
            self.values.update(this.writes())

    def _read(self, name: str) -> Tensor:
        if name not in self.values:
            raise ValueError(
                f"plan '{self.plan.describe()}' of {self.label} reads {name!r}, which nothing has written on this "
                f"rank; there are {sorted(self.values)}"
            )
        return self.values[name]

    # ---- local work

    def _paced(self, step: Step) -> Mapping[str, Tensor]:
        rate = self.interpreter.rate
        if rate is None:
            return self._local(step)
        half = self.half if isinstance(step, Multiply | Keep | Fill) else None
        began_ns = time.monotonic_ns()
        mark = rate.stopwatch.mark() if rate.stopwatch is not None and half is not None else None
        flop = step_flop(step, self.context, [self._read(name) for name in step.reads])
        made = self._local(step)
        if half is not None and isinstance(step, Multiply):
            self._repeat(step, rate)
        rate.end(began_ns, rate.work(flop, half))
        if rate.stopwatch is not None and half is not None and mark is not None:
            rate.stopwatch.add(half, mark)
        return made

    def _repeat(self, step: Multiply, rate: Rate) -> None:
        """A rank that is slow by doing its products over and over throws the results away."""
        left, right = (self._read(name) for name in step.reads)
        left, right = left.flatten(0, -2), right.flatten(0, -2)
        repeats = 0.0 if rate.straggler is None else rate.straggler.repeats
        while repeats > 0:
            rows = math.ceil(min(1.0, repeats) * len(left))
            again = left[:rows], right[:rows] if step.transpose_left else right
            _multiply(replace(step, add=False), *again, None)
            repeats -= 1

    def _local(self, step: Step) -> Mapping[str, Tensor]:
        match step:
            case Multiply():
                left, right = (self._read(name) for name in step.reads)
                (name,) = step.writes
                return {name: _multiply(step, left, right, self._read(name) if step.add else None)}
            case Apply():
                made = apply_function(step, self.context, [self._read(name) for name in step.reads])
                return dict(zip(step.writes, made, strict=True))
            case Slice():
                group = self.interpreter.groups[step.axis]
                (x,) = (self._read(name) for name in step.reads)
                return {step.writes[0]: self._parts(x, group, step.dim)[group.index]}
            case Part():
                (x,) = (self._read(name) for name in step.reads)
                # a copy, also of rows: a parameter's memory may be let go until backward
                return {step.writes[0]: x.narrow(step.dim, step.first, step.size).contiguous()}
            case Place():
                return {step.writes[0]: self._place(step)}
            case Keep():
                (x,) = (self._read(name) for name in step.reads)
                return {step.writes[0]: self._pruned(step).keep(x, step.size, step.of)}
            case Fill():
                (x,) = (self._read(name) for name in step.reads)
                return {step.writes[0]: self._pruned(step).fill(x, step.of, of_input=step.of_input)}
            case Join():
                return {step.writes[0]: torch.cat([self._read(name) for name in step.reads], step.dim)}
        raise TypeError(f"a layer's plan has no step {type(step).__name__} that the runtime knows")

    def _pruned(self, step: Keep | Fill) -> PrunedColumns:
        if self.context.pruned is None:
            raise ValueError(f"{self.label}: {type(step).__name__} in a plan of a layer that is not pruned")
        return self.context.pruned

    def _place(self, step: Place) -> Tensor:
        (x,) = (self._read(name) for name in step.reads)
        if step.add:
            total = self._read(step.writes[0])
            total.narrow(step.dim, step.first, x.shape[step.dim]).add_(x)
            return total
        shape = list(x.shape)
        shape[step.dim] = step.total
        total = x.new_zeros(shape)
        total.narrow(step.dim, step.first, x.shape[step.dim]).copy_(x)
        return total

    def _parts(self, x: Tensor, group: Group, dim: int) -> Sequence[Tensor]:
        if x.shape[dim] % group.size:
            raise ValueError(
                f"{self.label}: dimension {dim} of {list(x.shape)} is shared out over {group.size} ranks of "
                f"{group.axis!r}, which do not divide it"
            )
        return x.chunk(group.size, dim)

    # ---- collectives

    def _collective(self, i: int, step: Collective) -> None:
        group = self.interpreter.groups[step.axis]
        xs = [self._read(name) for name in step.reads]
        match step:
            case SendRecv():
                self._shift(i, step, group, xs)
                return
            case AllGather():
                self._all_gather(i, step, group, xs[0])
            case ReduceScatter():
                self._reduce_scatter(i, step, group, xs[0])
            case AllReduce():
                self._all_reduce(i, step, group, xs[0])
            case AllToAll():
                self._all_to_all(i, step, group, xs[0])
            case Broadcast():
                self._broadcast(i, step, group, xs[0])
            case ReduceTo():
                self._reduce_to(i, step, group, xs[0])
            case Scatter():
                self._scatter(i, step, group, xs[0])
            case Gather():
                self._gather(i, step, group, xs[0])
            case _:
                raise TypeError(
                    f"a layer's plan has no collective {type(step).__name__} that the runtime knows"
                )

    def _all_gather(self, i: int, step: AllGather, group: Group, x: Tensor) -> None:
        x = x.contiguous()
        if not self._moves(group, x):
            self._write(i, (x,))
            return
        out = x.new_empty(group.size, *x.shape)
        self._carry(
            i,
            self._row(i, "all_gather", group, out),
            lambda later: self.interpreter.collectives.all_gather(
                group, x.view(-1), out.view(-1), later=later
            ),
            lambda: (_side_by_side(out, step.dim),),
        )

    def _reduce_scatter(self, i: int, step: ReduceScatter, group: Group, x: Tensor) -> None:
        self._only_sums(step)
        parts = self._parts(x, group, step.dim)
        if not self._moves(group, x):
            self._write(i, (parts[group.index],))
            return
        shape = parts[0].shape
        x_gn = x.contiguous() if step.dim == 0 else torch.stack(list(parts))
        out = x.new_empty(shape)
        with self._row(i, "reduce_scatter", group, x, later=False):
            self.interpreter.collectives.reduce_scatter(group, x_gn.view(group.size, -1), out.view(-1), None)
        self._write(i, (out,))

    def _all_reduce(self, i: int, step: AllReduce, group: Group, x: Tensor) -> None:
        if step.op not in (ReduceOp.sum, ReduceOp.max):
            raise ValueError(f"AllReduce(op={step.op.value}) of an operand: must be 'sum' or 'max'")
        if not self._moves(group, x):
            self._write(i, (x,))
            return
        x = self._own(i, step, x)
        self._carry(
            i,
            self._row(i, "all_reduce", group, x),
            lambda later: self.interpreter.collectives.all_reduce(
                group, x.view(-1), largest=step.op is ReduceOp.max, later=later
            ),
            lambda: (x,),
        )

    def _all_to_all(self, i: int, step: AllToAll, group: Group, x: Tensor) -> None:
        parts = self._parts(x, group, step.dim)
        if not self._moves(group, x):
            self._write(i, (x,))
            return
        sends = [part.contiguous().view(-1) for j, part in enumerate(parts) if j != group.index]
        shape = parts[0].shape
        receives = [x.new_empty(shape) for _ in sends]
        own = parts[group.index]
        self._carry(
            i,
            self._row(i, "all_to_all", group, x),
            lambda later: self.interpreter.collectives.all_to_all(
                group, sends, [buffer.view(-1) for buffer in receives], later=later
            ),
            lambda: (torch.cat([*receives[: group.index], own, *receives[group.index :]], step.into_dim),),
        )

    def _broadcast(self, i: int, step: Broadcast, group: Group, x: Tensor) -> None:
        """All ranks have an operand of the same shape; the root's is what all get."""
        root = self._root(step.root, group)
        x = x.contiguous()
        if not self._moves(group, x):
            self._write(i, (x,))
            return
        sent = x if group.index == root else torch.empty_like(x)
        self._carry(
            i,
            self._row(i, "broadcast", group, sent),
            lambda later: self.interpreter.collectives.broadcast(group, sent.view(-1), root, later=later),
            lambda: (sent,),
        )

    def _reduce_to(self, i: int, step: ReduceTo, group: Group, x: Tensor) -> None:
        """Written at the root alone."""
        self._only_sums(step)
        root = self._root(step.root, group)
        if not self._moves(group, x):
            if group.index == root:
                self._write(i, (x,))
            return
        x = self._own(i, step, x)
        is_root = group.index == root
        if step.tree:
            with self._row(i, "reduce_tree", group, x, later=False):
                self.interpreter.collectives.reduce_tree(group, x.view(-1), root)
            if is_root:
                self._write(i, (x,))
            return
        self._carry(
            i,
            self._row(i, "reduce", group, x),
            lambda later: self.interpreter.collectives.reduce(group, x.view(-1), root, later=later),
            (lambda: (x,)) if is_root else (lambda: ()),
        )

    def _scatter(self, i: int, step: Scatter, group: Group, x: Tensor) -> None:
        """Written where a part arrives: not at the root, nor where nothing does."""
        if not step.takes_part(group.index):
            return
        front = x.movedim(step.dim, 0)
        numel = front[:1].numel()
        here = group.index == step.root
        rows = front.reshape(len(front), numel).contiguous() if here else None
        out = None if here else x.new_empty(step.parts[group.index], numel)
        shape = front.shape[1:]
        self._carry(
            i,
            self._row_of_parts(i, "scatter", group, step, numel * x.element_size()),
            lambda later: self.interpreter.collectives.scatter(
                group, rows, out, step.root, step.parts, later=later
            ),
            lambda: () if out is None else (out.view(-1, *shape).movedim(0, step.dim),),
        )

    def _gather(self, i: int, step: Gather, group: Group, x: Tensor) -> None:
        """Written at the root alone."""
        if not step.takes_part(group.index):
            return
        front = x.movedim(step.dim, 0)
        numel = front[:1].numel()
        here = group.index == step.root
        rows = None if here else front.reshape(len(front), numel).contiguous()
        out = x.new_empty(sum(step.parts), numel) if here else None
        shape = front.shape[1:]
        self._carry(
            i,
            self._row_of_parts(i, "gather", group, step, numel * x.element_size()),
            lambda later: self.interpreter.collectives.gather(
                group, rows, out, step.root, step.parts, later=later
            ),
            lambda: () if out is None else (out.view(-1, *shape).movedim(0, step.dim),),
        )

    def _row_of_parts(
        self, i: int, op: str, group: Group, step: Scatter | Gather, row_bytes: int
    ) -> Collecting:
        return self.interpreter.ledger.collective(
            op=op,
            axis=group.axis,
            group=group.ranks,
            payload_bytes=sum(step.parts) * row_bytes,
            stream=self.plan.stream_of(i),
            layer=self.label,
            later=self._is_beside(i),
        )

    def _shift(self, i: int, step: SendRecv, group: Group, xs: Sequence[Tensor]) -> None:
        """Several operands are several messages of one row."""
        xs = [x.contiguous() for x in xs]
        by = step.shift % group.size
        if not by or not any(x.numel() for x in xs):
            self._write(i, xs)
            return
        arrived = [torch.empty_like(x) for x in xs]
        self._carry(
            i,
            self._row(i, "send", group, *xs),
            lambda later: self.interpreter.collectives.shift(
                group, [x.view(-1) for x in xs], [x.view(-1) for x in arrived], by, later=later
            ),
            lambda: arrived,
        )

    # ---- what they share

    def _carry(
        self,
        i: int,
        row: Collecting,
        call: Callable[[bool], Pending | None],
        results: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Do the collective of step `i`, or start it if it runs beside."""
        writes = self.plan.steps[i].writes
        beside = self._is_beside(i)
        with row:
            pending = call(beside)
        if not beside:
            self.values.update(zip(writes, results(), strict=False))
            return
        self.under_way[i] = _UnderWay(row, pending, lambda: dict(zip(writes, results(), strict=False)))
        for name in writes:  # not there until it has arrived
            self.values.pop(name, None)
        if pending is None:
            self._arrive(i)

    def _write(self, i: int, made: Sequence[Tensor]) -> None:
        self.values.update(zip(self.plan.steps[i].writes, made, strict=True))

    def _row(self, i: int, op: str, group: Group, *xs: Tensor, later: bool | None = None) -> Collecting:
        return self.interpreter.ledger.collective(
            op=op,
            axis=group.axis,
            group=group.ranks,
            payload_bytes=sum(x.numel() * x.element_size() for x in xs),
            stream=self.plan.stream_of(i),
            layer=self.label,
            later=self._is_beside(i) if later is None else later,
        )

    def _is_beside(self, i: int) -> bool:
        return self.interpreter.beside and self.plan.is_beside(i)

    def _own(self, i: int, step: Step, x: Tensor) -> Tensor:
        """Contiguous, and free to be written over: a copy if it is given, is read later on or shares such memory."""
        (name,) = step.reads
        kept = name not in step.writes and (self.last_read[name] > i or name in self.keep)
        others = [*self.given.values(), *(value for key, value in self.values.items() if key != name)]
        memory = x.untyped_storage().data_ptr()
        shared = kept or any(other.untyped_storage().data_ptr() == memory for other in others)
        return x.clone(memory_format=torch.contiguous_format) if shared else x.contiguous()

    def _moves(self, group: Group, x: Tensor) -> bool:
        return group.size > 1 and x.numel() > 0

    def _root(self, root: int, group: Group) -> int:
        if not 0 <= root < group.size:
            raise ValueError(
                f"plan '{self.plan.describe()}': root={root} is not in the group of {group.axis!r}; use one of "
                f"[0, {group.size - 1}]"
            )
        return root

    def _only_sums(self, step: ReduceScatter | ReduceTo) -> None:
        hops = isinstance(step, ReduceScatter) and step.hop_bits
        if step.op is not ReduceOp.sum or hops:
            raise ValueError(
                f"plan '{self.plan.describe()}': {type(step).__name__} of an operand must be a plain sum"
            )


def _multiply(step: Multiply, left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
    """Matrices over their last dimension; the others of `left` come back in the product, unless it is transposed."""
    a, b = left.flatten(0, -2), right.flatten(0, -2)
    leading = left.shape[:-1]
    if step.transpose_left:
        a, leading = a.t(), left.shape[-1:]
    if step.transpose_right:
        b = b.t()
    if total is None:
        return (a @ b).view(*leading, b.shape[1])
    total.flatten(0, -2).addmm_(a, b)
    return total


def _side_by_side(parts: Tensor, dim: int) -> Tensor:
    """[g, ...] joined along `dim` of the rest."""
    dim %= parts.ndim - 1
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)
