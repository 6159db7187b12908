"""Collectives of a layout as its layers run them, and messages between stages: how long each takes, small and large."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from ..policies.layout import Layer, ParallelLayout
from ..policies.mesh import LOCAL, NODE, PIPELINE, TENSOR, WORLD
from ..policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Plan,
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    SendRecv,
)
from .layout.dtensor import is_served
from .layout.functions import Context
from .layout.interpreter import LayerInterpreter
from .measured import OpRow
from .op_probe import Timed

SMALL_ELEMENTS, LARGE_ELEMENTS = 256, 65_536  # of the whole operand: some numbers, and an activation
LINK_FACTOR = 4  # exchanges that tell the rate of copies within a node are larger
_STREAM = "probe"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a layout's plans ask for, whatever its size. `call` takes the operand of one rank."""

    op: str
    axis: str
    shared: bool  # the operand is cut by the ranks of a group, or is so afterwards
    call: Callable[[Tensor], None]


class LayerProbe(Timed):
    """What a layout's plans ask for, each by itself and blocking; beside it what a run has on the world's axes.

    Where DTensor computes a layer (`layout.dtensor`), its functional all-reduce is measured: it costs more than ours.
    """

    def __init__(
        self, layout: ParallelLayout, interpreter: LayerInterpreter, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(device)
        mesh, groups = interpreter.groups.mesh, interpreter.groups
        context = Context(mesh=mesh, rank=groups.rank)
        library = any(is_served(layout, layer) for layer in _layers(layout))

        def planned(step: Collective) -> Callable[[Tensor], None]:
            """`step` alone, on an operand of one dimension."""
            alone = replace(step, reads=("x",), writes=("y",), stream="", after=None, dim=0)
            match alone:  # one stands for all roots, dimensions and distances
                case AllToAll():
                    alone = replace(alone, into_dim=0)
                case Broadcast() | ReduceTo():
                    alone = replace(alone, root=0)
                case SendRecv():
                    alone = replace(alone, shift=1)
            plan = Plan.of_operands([alone], _STREAM)

            def call(x: Tensor) -> None:
                interpreter.run(plan, {"x": x}, label=_STREAM, context=context, keep=("y",))

            return call

        def functional(x: Tensor) -> None:
            handle = groups[TENSOR].handle
            assert handle is not None, "there are several ranks"
            wait_tensor(all_reduce(x, "sum", handle))  # type: ignore[no-untyped-call]

        kinds: dict[tuple[str, str], _Kind] = {}
        for step in collectives_of(layout):
            op = op_of(step)
            call = functional if library and (op, step.axis) == ("all_reduce", TENSOR) else planned(step)
            shared = op in ("all_gather", "reduce_scatter", "all_to_all")
            kinds.setdefault((op, step.axis), _Kind(op, step.axis, shared, call))
        for numel in (SMALL_ELEMENTS, LARGE_ELEMENTS):
            for kind in kinds.values():
                size = mesh.size(kind.axis)
                part = numel * (LINK_FACTOR if kind.axis == LOCAL else 1) // size
                held = part if kind.op == "all_gather" else part * size
                x = torch.zeros(held, dtype=dtype, device=device)
                message = (part if kind.shared else held) * dtype.itemsize
                row = OpRow(kind.op, kind.axis, size, message, held, ())
                self.add(row, lambda call=kind.call, x=x: call(x))  # type: ignore[misc]
        self.begin()


def collectives_of(layout: ParallelLayout) -> Iterator[Collective]:
    """Every collective in the layout's plans, and of what a run has beside them: messages between its stages, sums over
    the world (clipping, figures), and the exchanges from which links are measured.
    """
    for event in layout.questions():
        plan = layout.decide(event)
        for step in plan.steps if plan is not None else ():
            if isinstance(step, Collective):
                yield step
    if layout.stages > 1:
        yield SendRecv(axis=PIPELINE, shift=1)
    yield AllReduce(axis=WORLD, op=ReduceOp.sum)
    for axis in (LOCAL, NODE, WORLD):
        yield AllToAll(axis=axis)


def op_of(step: Collective) -> str:
    """As rows of the ledger say."""
    match step:
        case AllGather():
            return "all_gather"
        case ReduceScatter():
            return "reduce_scatter"
        case AllReduce():
            return "all_reduce"
        case AllToAll():
            return "all_to_all"
        case Broadcast():
            return "broadcast"
        case ReduceTo():
            return "reduce_tree" if step.tree else "reduce"
        case SendRecv():
            return "send"
    raise TypeError(f"a layer's plan has no collective {type(step).__name__} that the runtime knows")


def _layers(layout: ParallelLayout) -> tuple[Layer, ...]:
    return (*layout.outline.before, *layout.outline.block, *layout.outline.behind)
