"""What torch's autograd keeps of a forward pass on CPUs, to the byte: the memory behind what the runtime's own models
save, each piece of it once.

`layers` and `work` estimate what a GPU's kernels keep. Here are the modules as the runtime runs them (torch 2.13,
eager, CPU kernels): views keep what they are views of, so that a fused matrix' output stays whole for as long as one of
its parts does. Parameters and data are left out. A layer with a plan keeps what backward's plan reads of forward's;
what lies between layers follows from the family.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from ...conf.model_spec import ModelSpec
from ...conf.schema import Backend, Engine, ExperimentConf, ParallelConf, Recompute
from ...policies.layout import (
    Direction,
    Kind,
    Layer,
    ParallelLayout,
    build_parallel,
    layout_of,
    num_parts,
)
from ...policies.layout.layers import Role
from ...policies.mesh import Mesh
from ...policies.plan import Apply, Collective, Plan, Slice, Step
from ..interpreter import FP32_BYTES
from .operands import Operand, follow
from .shapes import BEFORE, BEHIND, BLOCK, ID_BYTES, Shapes

FAMILIES = ("gpt", "llama", "qwen2", "bert", "vit")  # those that the runtime trains
_ROTARY = ("llama", "qwen2")
_PARAMETERS = ("weight", "bias")
_DATA = ("ids", "images", "targets")


@dataclass(frozen=True, slots=True)
class Kept:
    """A piece of memory that is kept: the layer that kept it first, what it is, and its bytes."""

    path: str
    what: str
    nbytes: int


@dataclass(eq=False, slots=True)
class _Memory:
    """A piece of memory; two tensors that share one have the same object."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor that goes from layer to layer, and the memory that it lies in."""

    shape: tuple[int, ...]
    memory: _Memory

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(slots=True)
class SavedOnCpu:
    """Of one rank and one micro-batch.

    Args:
        shapes: Local shapes; the family must be one of FAMILIES.
        dropout: Chance; 0 keeps no masks.
        recompute: Blocks keep what goes into them, and make the rest anew in backward.
    """

    shapes: Shapes
    dropout: float = 0.0
    recompute: bool = False
    _known: dict[str, tuple[Kept, ...]] = field(default_factory=dict, init=False)

    def part(self, part: str) -> tuple[Kept, ...]:
        """Of BEFORE, BLOCK or BEHIND, in the order of forward."""
        if part not in self._known:
            self._known[part] = tuple(_Walk(self.shapes, self.dropout).through(part))
        return self._known[part]

    def nbytes(self, part: str) -> int:
        """Of all that `part` lists."""
        return sum(kept.nbytes for kept in self.part(part))

    def until_backward(self, part: str) -> int:
        """Bytes from the forward of a part to its backward."""
        return self.input_bytes if self.recompute and part == BLOCK else self.nbytes(part)

    @property
    def input_bytes(self) -> int:
        """Of what goes into a block."""
        shapes = self.shapes
        first = shapes.parts[BLOCK][0]
        return shapes.activation(first.input, shapes.spec.hidden, shapes.tokens).nbytes

    def unit_bytes(self) -> dict[str, int]:
        """By unit, as the runtime measures it: "before", "block.0", ..., "behind"; what keeps nothing is left out."""
        blocks = {f"block.{i}": BLOCK for i in range(self.shapes.spec.layers)}
        parts = {BEFORE: BEFORE, **blocks, BEHIND: BEHIND}
        found = {unit: self.until_backward(part) for unit, part in parts.items()}
        return {unit: nbytes for unit, nbytes in found.items() if nbytes}


def saved_on_cpu(experiment: ExperimentConf, spec: ModelSpec) -> SavedOnCpu | None:
    """Of the runtime's own models on CPUs under engine=fsdp2, laid out over ranks or not; None: of anything else, what
    is kept is estimated.
    """
    if not keeps_as_on_cpu(experiment, spec):
        return None
    cluster, batch = experiment.cluster, experiment.batch
    sequence = batch.sequence or spec.sequence
    layout = layout_of(experiment, spec)
    if layout is None:
        layout = build_parallel(
            ParallelConf(), spec, num_ranks=1, micro=batch.micro, micro_batches=1, sequence=sequence
        )
        mesh = Mesh(1, 1, dims=layout.dims)
    else:
        mesh = Mesh.of(cluster, 1, layout.dims)
    shapes = Shapes(
        layout,
        spec,
        mesh,
        micro=batch.micro,
        sequence=sequence,
        element_bytes=experiment.precision.element_bytes,
    )
    return SavedOnCpu(shapes, experiment.train.dropout, recompute=experiment.recompute is Recompute.full)


def keeps_as_on_cpu(experiment: ExperimentConf, spec: ModelSpec) -> bool:
    """Whether it is known to the byte; not of kernels that are asked for, which CPUs do not have."""
    asked = experiment.kernels
    if (asked.attention, asked.fusion, asked.dropout) != (None, None, None):
        return False
    return (
        experiment.engine is Engine.fsdp2
        and experiment.cluster.backend is Backend.gloo
        and experiment.recompute in (Recompute.none, Recompute.full)
        and spec.family in FAMILIES
        and (spec.family != "bert" or spec.head == "masked_lm")
    )


class _Walk:
    """Through the layers of one part, with the tensors that flow between them."""

    def __init__(self, shapes: Shapes, dropout: float) -> None:
        self._shapes, self._spec, self._dropout = shapes, shapes.spec, dropout
        self._element = shapes.element_bytes
        self._found: list[Kept] = []
        self._seen: set[int] = set()
        self._pieces: list[_Memory] = []  # alive for as long as their addresses are told apart
        self._path = ""

    def through(self, part: str) -> Iterator[Kept]:
        layers = self._shapes.parts[part]
        first = layers[0]
        flow: list[_Value] = []  # data
        if part != BEFORE:
            came = self._shapes.activation(first.input, self._spec.hidden, self._shapes.tokens)
            flow = [self._new(came)]
        before: Layer | None = None
        for at, layer in enumerate(layers):
            self._path = layer.path
            flow = self._layer(layer, before, flow)
            flow = self._behind(part, layers, at, flow)
            before = layer
        yield from self._found

    # ---- layers

    def _layer(self, layer: Layer, before: Layer | None, flow: list[_Value]) -> list[_Value]:
        ahead = self._layout.decide(layer.runs(Direction.forward))
        behind = self._layout.decide(layer.runs(Direction.backward))
        _, made = self._shapes.output(layer, before)
        alone = self._layout.is_plain or self._library_computes(layer)
        if alone or ahead is None or behind is None:
            self._plain(layer, before, flow, made)
            whole = self._new(made)
            return self._apart(layer, made) if layer.others else [whole]
        y = self._planned(layer, before, flow, ahead, behind)
        if layer.kind is Kind.attention:
            return [self._heads_beside(y, ahead)]
        if layer.others:
            return self._shared_out(layer, made, y)
        return [_Value(made.shape, y)]

    def _planned(
        self, layer: Layer, before: Layer | None, flow: list[_Value], ahead: Plan, behind: Plan
    ) -> _Memory:
        """Keeps what backward reads; the memory of the output."""
        began = self._shapes.forward(layer, before)
        made = follow(ahead, began, self._mesh).operands
        names = ("q", "k", "v") if layer.kind is Kind.attention else ("x", "logits")
        given = [name for name in names if name in began]
        memory: dict[str, _Memory | None] = dict.fromkeys((*_PARAMETERS, *_DATA))
        memory |= dict(zip(given, (value.memory for value in flow), strict=True))
        for step in ahead.steps:
            for name in step.writes:
                memory[name] = (
                    memory[step.reads[0]] if self._is_view(step) else self._piece(made[name].nbytes)
                )
        for name in behind.operands:
            kept = memory.get(name)
            if kept is not None:
                self._keep(kept, name)
        output, _ = self._shapes.output(layer, before)
        last = memory[output]
        assert last is not None
        return last

    def _is_view(self, step: Step) -> bool:
        """Whether what a step writes lies where what it reads does."""
        if isinstance(step, Slice) or (isinstance(step, Apply) and step.function == "rows_apart"):
            return True
        return isinstance(step, Collective) and self._mesh.size(step.axis) == 1

    def _heads_beside(self, y: _Memory, ahead: Plan) -> _Value:
        """[B, T, H E] of attention's output: kernels and merges lay a token's heads side by side; what comes of an
        all-to-all is put together head by head, and copied.
        """
        last = ahead.steps[-1]
        copied = isinstance(last, Collective) and self._mesh.size(last.axis) > 1
        return _Value((), self._piece(y.nbytes) if copied else y)

    def _shared_out(self, layer: Layer, made: Operand, y: _Memory) -> list[_Value]:
        """The output of several matrices' one product, for each its features: views, or copies where they come in
        runs (`runtime.layout.autograd.Program`).
        """
        weight = self._layout.parameter_cuts(layer)["weight"]
        runs = weight.parts(self._mesh, 0) // num_parts(self._mesh, layer.output.features)
        apart = self._apart(layer, made)
        return apart if runs > 1 else [_Value(each.shape, y) for each in apart]

    def _apart(self, layer: Layer, made: Operand) -> list[_Value]:
        """The outputs of several matrices, each a tensor of its own."""
        widths = [layer.features_out, *(other.features_out for other in layer.others)]
        whole = sum(widths)
        return [
            self._new(Operand((*made.shape[:-1], made.shape[-1] * width // whole), made.element_bytes))
            for width in widths
        ]

    def _library_computes(self, layer: Layer) -> bool:
        """1D without sequence parallelism is DTensor's: `runtime.layout.dtensor.is_served`."""
        layout = self._layout
        if layout.tensor == 1 or layout.mode.name != "1d" or layout.mode.outer.axes:
            return False
        return layer.kind in (Kind.embedding, Kind.tied) or (
            layer.kind is Kind.linear and layer.role is not Role.whole
        )

    # ---- layers that torch computes

    def _plain(self, layer: Layer, before: Layer | None, flow: list[_Value], made: Operand) -> None:
        match layer.kind:
            case Kind.linear | Kind.tied:
                self._keep(flow[0].memory, "x")
            case Kind.layer_norm:
                rows = prod(flow[0].shape[:-1])
                self._keep(flow[0].memory, "x")
                self._keep_new(rows * self._element, "mean")
                self._keep_new(rows * self._element, "inverse deviation")
            case Kind.rms_norm:
                self._rms_norm(flow[0])
            case Kind.positions:
                self._keep_new(made.shape[1] * ID_BYTES, "rows")
            case Kind.attention:
                self._attention(layer, before, flow)
            case Kind.loss:
                logits = self._shapes.forward(layer, before)["logits"]
                self._keep_new(logits.numel * FP32_BYTES, "logarithms of probabilities")
                self._keep_new(FP32_BYTES, "weight of all targets")
            case _:  # looks up, or joins: what backward reads are numbers that were given
                pass

    def _rms_norm(self, x: _Value) -> None:
        """torch composes it in fp32: x, 1 / root mean square, and their product, which the weight's gradient reads."""
        if self._element == FP32_BYTES:
            self._keep(x.memory, "x")
        else:
            self._keep_new(x.numel * FP32_BYTES, "x, wide")
        self._keep_new(prod(x.shape[:-1]) * FP32_BYTES, "inverse root mean square")
        self._keep_new(x.numel * FP32_BYTES, "normed x, wide")

    def _attention(self, layer: Layer, before: Layer | None, flow: list[_Value]) -> None:
        """`scaled_dot_product_attention`'s flash kernel of CPUs; key heads are not written out."""
        q = self._shapes.forward(layer, before)["q"]
        for name, value in zip(("q", "k", "v"), flow, strict=True):
            self._keep(value.memory, name)
        self._keep_new(prod(q.shape[:-1]) * FP32_BYTES, "logarithms of sums")

    # ---- between layers

    def _behind(self, part: str, layers: Sequence[Layer], at: int, flow: list[_Value]) -> list[_Value]:
        layer = layers[at]
        if part == BLOCK:
            return self._within_block(layers, at, flow)
        if part == BEFORE and at == len(layers) - 1:
            return self._dropped(flow[0])
        if part == BEHIND and layer.kind is Kind.linear and layer.role is Role.whole:
            return self._gelu(flow[0])  # of BERT's head
        return flow

    def _within_block(self, layers: Sequence[Layer], at: int, flow: list[_Value]) -> list[_Value]:
        layer = layers[at]
        linears = [i for i, each in enumerate(layers) if each.kind is Kind.linear]
        if layer.kind is Kind.attention:  # its output is what the next product reads
            if self._layout.is_plain or self._layout.decide(layer.runs(Direction.forward)) is None:
                self._keep(flow[0].memory, "y")
            return flow
        match linears.index(at) if at in linears else -1:
            case 0:
                return self._queries_keys_values(layers[at + 1], layer, flow)
            case 2:
                return self._gelu(flow[0]) if len(flow) == 1 else self._swiglu(*flow)
            case 1 | 3:  # added to what came in
                _, made = self._shapes.output(layer, layers[at - 1])
                self._drop(made)
                return [self._new(made)]
            case _:
                return flow

    def _queries_keys_values(self, attention: Layer, layer: Layer, flow: list[_Value]) -> list[_Value]:
        if len(flow) == 1:  # views of one matrix' output
            flow = flow * 3
        if self._spec.family not in _ROTARY:
            return flow
        operands = self._shapes.forward(attention, layer)
        tokens, head = operands["q"].shape[2:]
        for what in ("cosines", "sines"):
            self._keep_new(tokens * head * self._element, what)
        return [self._new(operands["q"]), self._new(operands["k"]), flow[2]]

    def _gelu(self, x: _Value) -> list[_Value]:
        self._keep(x.memory, "input of gelu")
        return [_Value(x.shape, self._piece(x.numel * self._element))]

    def _swiglu(self, gate: _Value, up: _Value) -> list[_Value]:
        self._keep(gate.memory, "gate")
        self._keep_new(gate.numel * self._element, "silu of gate")
        self._keep(up.memory, "up")
        return [_Value(gate.shape, self._piece(gate.numel * self._element))]

    def _dropped(self, x: _Value) -> list[_Value]:
        operand = Operand(x.shape, self._element)
        return [self._new(operand)] if self._drop(operand) else [x]

    def _drop(self, x: Operand) -> bool:
        """A mask of one byte an element."""
        if self._dropout:
            self._keep_new(x.numel, "mask")
        return self._dropout > 0

    # ---- memory

    def _new(self, operand: Operand) -> _Value:
        return _Value(operand.shape, self._piece(operand.nbytes))

    def _piece(self, nbytes: int) -> _Memory:
        piece = _Memory(nbytes)
        self._pieces.append(piece)
        return piece

    def _keep(self, memory: _Memory, what: str) -> None:
        if memory.nbytes and id(memory) not in self._seen:
            self._seen.add(id(memory))
            self._found.append(Kept(self._path, what, memory.nbytes))

    def _keep_new(self, nbytes: int, what: str) -> None:
        self._keep(self._piece(nbytes), what)

    @property
    def _layout(self) -> ParallelLayout:
        return self._shapes.layout

    @property
    def _mesh(self) -> Mesh:
        return self._shapes.mesh
