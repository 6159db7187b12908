"""One experiment as its layout has it: what a rank computes and sends for each part of the model, and what it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...conf.model_spec import ModelSpec, Unit
from ...conf.schema import ExperimentConf, Recompute
from ...policies.balance import Half, balanced_work
from ...policies.comm import describe_action
from ...policies.layout import (
    Direction,
    Kind,
    Layer,
    ParallelLayout,
    describe_layer_event,
    layout_of,
)
from ...policies.mesh import Mesh
from ...policies.plan import Plan
from ..balance.columns import ColumnShare
from ..balance.share import Share, products_of
from ..device import Device, Tally
from ..engine import Stretch
from ..interpreter import FP32_BYTES, Transfer
from ..layers import Kernels
from .operands import PRUNING, Followed, LocalStep, Operand, beside_bytes, follow
from .pruned import pruned
from .saved import SavedOnCpu, keeps_as_on_cpu
from .shapes import BEFORE, BEHIND, BLOCK, Shapes
from .work import Works

PARAMETERS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class LaidStep:
    """One step of a rank's computation of a part of the model.

    Args:
        path: Of its layer, within the unit.
        after: Positions, among the steps of the part, that must end first; () only at its beginning.
        pair: As of `operands.OperandStep`.
        by_place: Work that differs by the rank's place on the sequence axis, of which `what` is the mean; () else.
        product: Whether it is a product, or attention.
        half: Of a block, to whose products it belongs; None: something else.
    """

    path: str
    name: str
    what: Tally | Transfer
    stream: str = ""
    after: tuple[int, ...] = ()
    beside: bool = False
    pair: int = -1
    by_place: tuple[Tally, ...] = ()
    product: bool = False
    half: Half | None = None


class LaidModel:
    """Layout, mesh and sizes of one experiment.

    Raises:
        ValueError: If the layout does not fit the cluster or the model, naming the keys.
    """

    def __init__(self, experiment: ExperimentConf, spec: ModelSpec, device: Device, kernels: Kernels) -> None:
        cluster, batch = experiment.cluster, experiment.batch
        self.spec = spec
        sequence = batch.sequence or spec.sequence
        layout = layout_of(experiment, spec)
        assert layout is not None, "asked for where ranks share a replica's work"
        self.layout: ParallelLayout = layout
        self.mesh = Mesh.of(cluster, 1, self.layout.dims)
        self.shapes = Shapes(
            self.layout,
            spec,
            self.mesh,
            micro=batch.micro,
            sequence=sequence,
            element_bytes=experiment.precision.element_bytes,
        )
        self._device, self._kernels = device, kernels
        self._parts: dict[tuple[str, Share | ColumnShare | None], _Part] = {}
        self._work = balanced_work(experiment, spec, layout)
        self._roots: dict[tuple[str, ...], Unit] = {}
        self._recomputes = experiment.recompute is Recompute.full
        # What a CPU keeps is known to the byte, of a GPU's kernels it is estimated
        self.saved: SavedOnCpu | None = None
        if keeps_as_on_cpu(experiment, spec):
            self.saved = SavedOnCpu(self.shapes, experiment.train.dropout, recompute=self._recomputes)

    @cached_property
    def decided(self) -> tuple[tuple[str, str], ...]:
        """(event, action) of every distinct layer, which both targets ask at the begin of each step and validation."""
        asked = [(event, self.layout.decide(event)) for event in self.layout.questions()]
        return tuple((describe_layer_event(event), describe_action(plan)) for event, plan in asked)

    def steps(
        self, part: str, direction: Direction, share: Share | ColumnShare | None = None
    ) -> tuple[LaidStep, ...]:
        """What a rank does for one unit, or for the root before or behind the blocks (`shapes.BEFORE`, ...).

        Args:
            share: What of a block it computes; None: as much as every other rank.
        """
        found = self._part(part, share)
        if direction is not Direction.backward:
            return found.forward
        return _chained([found.again, found.backward]) if self._repeats(part) else tuple(found.backward)

    def _repeats(self, part: str) -> bool:
        return self._recomputes and part == BLOCK

    @cached_property
    def num_places(self) -> int:
        """Places on the sequence axis whose ranks do not do the same; 1: all do."""
        directions = (Direction.forward, Direction.backward)
        steps = [step for direction in directions for step in self.steps(BLOCK, direction)]
        return self.layout.sequence if any(len(set(step.by_place)) > 1 for step in steps) else 1

    def saved_bytes(self, part: str) -> float:
        """What a micro-batch keeps of a part of the model from its forward to its backward: of CPUs to the byte."""
        return self.input_bytes() if self._repeats(part) else self._all_saved_bytes(part)

    def _all_saved_bytes(self, part: str) -> float:
        return float(self.saved.nbytes(part)) if self.saved is not None else self._part(part).saved_bytes

    def working_bytes(self, part: str) -> float:
        """What is there beside while that backward runs: what it repeats, and what one of its layers has made."""
        again = self._all_saved_bytes(part) if self._repeats(part) else 0.0
        return again + self._part(part).beside_bytes

    def logits_bytes(self) -> int:
        """Of one rank's part of the logits, in fp32 and in the precision of activations."""
        before, loss = self.shapes.parts[BEHIND][-2:]
        logits = self.shapes.forward(loss, before)["logits"]
        return logits.nbytes + FP32_BYTES * logits.numel

    def input_bytes(self) -> int:
        """Of one rank's part of what enters a block."""
        first = self.shapes.parts[BLOCK][0]
        return self.shapes.activation(first.input, self.spec.hidden, self.shapes.tokens).nbytes

    def flop(self, part: str, direction: Direction) -> int:
        """Of one rank."""
        return sum(step.what.flop for step in self.steps(part, direction) if isinstance(step.what, Tally))

    # ---- parameters of one rank

    def stretch(self, stage: int, chunk: int) -> Stretch:
        """What a chunk of a stage holds, with local shapes."""
        layout, root = self.layout, None
        first, last = layout.is_first(stage, chunk), layout.is_last(stage, chunk)
        ends = [part for part, there in ((BEFORE, first), (BEHIND, last)) if there]
        if ends:
            root = self._roots.setdefault(tuple(ends), self.shapes.root(*ends))
        blocks = tuple(self.shapes.blocks[i] for i in layout.layers(stage, chunk))
        return Stretch(root, blocks, first, last)

    def units(self, stage: int = 0) -> tuple[Unit, ...]:
        """Of all chunks of a stage, in order."""
        chunks = range(self.layout.chunks)
        return tuple(unit for chunk in chunks for unit in self.stretch(stage, chunk).units)

    def num_parameters(self, stage: int = 0) -> int:
        """Elements that the ranks that hold the same part of the model hold, each or together."""
        return sum(unit.numel for unit in self.units(stage))

    # ---- what a part comes to

    def share_named(self, text: str) -> Share | ColumnShare | None:
        """What `str` wrote; None of ""."""
        if not text:
            return None
        if "/" not in text:
            return Share.parse(text)
        assert self._work is not None, "columns migrate between balanced ranks"
        return ColumnShare.parse(text, self._work)

    def _part(self, part: str, share: Share | ColumnShare | None = None) -> "_Part":
        known = self._parts.get((part, share))
        if known is None:
            shapes = self.shapes.of_share(share) if isinstance(share, Share) else self.shapes
            works = Works(shapes, self._device, self._kernels)
            known = self._parts[part, share] = _Part(self, part, shapes, works, share)
        return known


class _Part:
    """The layers of a part, forward and backward."""

    def __init__(
        self, model: LaidModel, part: str, shapes: Shapes, works: Works, share: Share | ColumnShare | None
    ) -> None:
        self._model, self._shapes, self._works, self._share = model, shapes, works, share
        self._layers = shapes.parts[part]
        self._products = products_of(self._layers) if part == BLOCK else {}
        self.saved_bytes = 0.0
        self.beside_bytes = 0  # the most of any layer
        forward: list[list[LaidStep]] = []
        backward: list[list[LaidStep]] = []
        between = works.between(self._layers) if part == BLOCK else {}
        for i, layer in enumerate(self._layers):
            before = self._layers[i - 1] if i else None
            ahead, behind = self._layer(i, layer, before)
            forward.append(ahead)
            backward.append(behind)
            for module in between.get(i, ()):
                forward.append([LaidStep(layer.path, module.name, module.forward)])
                backward.append([LaidStep(layer.path, module.name, module.backward)])
                self.saved_bytes += module.saved_bytes
        # a checkpoint stops with the last tensor that backward needs: a product without a plan keeps its input only
        last = len(self._layers) - 1
        planned = model.layout.decide(self._layers[last].runs(Direction.forward)) is not None
        self.again = list(_chained(forward[: len(forward) - len(between.get(last, ())) - (not planned)]))
        self.forward = _chained(forward)
        self.backward = list(_chained(backward[::-1]))

    def _layer(self, at: int, layer: Layer, before: Layer | None) -> tuple[list[LaidStep], list[LaidStep]]:
        model = self._model
        ahead = model.layout.decide(layer.runs(Direction.forward))
        behind = model.layout.decide(layer.runs(Direction.backward))
        place, plans = 0, None
        if isinstance(self._share, ColumnShare) and at in self._products:
            plans = self._share.plans(self._products[at], bias=layer.bias)
            ahead, behind = plans or (ahead, behind)
            place = self._share.place
        whole = plans is None  # its products are of all columns, and pruned here
        if ahead is None or behind is None:
            if (ahead is None) != (behind is None):
                raise ValueError(f"layer {layer.path!r}: the layout has a plan of one direction only")
            forward, backward, saved = self._works.layer(layer, before)
            self.saved_bytes += 0.0 if self._is_kept_before(at) else saved
            name, half = layer.kind.value, self._half(at)
            return (
                [LaidStep(layer.path, name, forward, product=forward.flop > 0, half=half)],
                [LaidStep(layer.path, name, backward, product=backward.flop > 0, half=half)],
            )
        began = self._shapes.forward(layer, before)
        try:
            through = follow(ahead, began, model.mesh, place=place)
            name, output = self._shapes.output(layer, before)
            made = through.operands.get(name)
            if made is None or made.shape != output.shape:
                raise ValueError(f"plan '{ahead.describe()}' ends with {name} = {made}, not {output}")
            back = follow(behind, {**through.operands, f"d{name}": output}, model.mesh, place=place)
            self._check_gradients(behind, began, back)
        except ValueError as err:
            raise ValueError(f"layer {layer.path!r} of kind {layer.kind.value}: {err}") from err
        kept = self._kept(at, behind, through.operands)
        self.saved_bytes += float(sum(through.operands[each].nbytes for each in kept))
        local = [step.what for step in through.steps if isinstance(step.what, LocalStep)]
        self.saved_bytes += sum(self._works.scores_bytes(step) for step in local)
        self.beside_bytes = max(
            self.beside_bytes,
            beside_bytes(ahead, through.operands, (name, *kept)),
            beside_bytes(behind, back.operands, [f"d{each}" for each in began]),
        )
        return (
            self._steps(at, through, whole=whole),
            self._steps(at, back, backward=True, whole=whole),
        )

    def _half(self, at: int) -> Half | None:
        product = self._products.get(at)
        return product.half if product is not None else None

    def _check_gradients(self, plan: Plan, began: Mapping[str, Operand], back: Followed) -> None:
        for name, operand in began.items():
            gradient = back.operands.get(f"d{name}")
            if name in ("ids", "images", "targets"):
                continue
            if gradient is None or prod(gradient.shape) != operand.numel:
                raise ValueError(
                    f"plan '{plan.describe()}' makes d{name} = {gradient}, not of {operand.shape}"
                )

    def _kept(self, at: int, behind: Plan, operands: Mapping[str, Operand]) -> list[str]:
        """What backward reads of forward, parameters and what is kept elsewhere left out."""
        kept = [name for name in behind.operands if name in operands and name not in PARAMETERS]
        if self._is_kept_before(at):
            kept = [name for name in kept if name != "x"]
        return kept

    def _is_kept_before(self, at: int) -> bool:
        """Whether the module before a product keeps its own output, which is the product's input."""
        linears = [i for i, layer in enumerate(self._layers) if layer.kind is Kind.linear]
        if len(linears) != 4 or at not in linears[1::2]:
            return False
        before = self._layers[at - 1]
        behind = self._model.layout.decide(before.runs(Direction.backward))
        return before.kind is not Kind.attention or behind is None or "y" in behind.operands

    def _steps(self, at: int, followed: Followed, *, whole: bool, backward: bool = False) -> list[LaidStep]:
        layer, found = self._layers[at], list[LaidStep]()
        for step in followed.steps:
            if isinstance(step.what, LocalStep):
                found.append(
                    self._local(at, step.what, step.stream, step.after, backward=backward, whole=whole)
                )
            else:
                found.append(
                    LaidStep(
                        layer.path, step.what.op, step.what, step.stream, step.after, step.beside, step.pair
                    )
                )
        return found

    def _local(
        self, at: int, what: LocalStep, stream: str, after: tuple[int, ...], *, backward: bool, whole: bool
    ) -> LaidStep:
        works, product = self._works, self._products.get(at)
        extra = Tally()
        if whole and product is not None and self._share is not None and what.product is not None:
            what, moved, kernels = pruned(what, self._share, product, backward=backward)
            extra = works.passes(moved, kernels)
        work = works.step(what)
        return LaidStep(
            self._layers[at].path,
            what.name,
            work + extra,
            stream,
            after,
            by_place=works.by_place(what),
            product=work.flop > 0,
            half=product.half if product is not None and (what.product or what.name in PRUNING) else None,
        )


def _chained(groups: list[list[LaidStep]]) -> tuple[LaidStep, ...]:
    """Steps of layers one behind the other: what a layer begins with waits for all of the one before."""
    found: list[LaidStep] = []
    ends: tuple[int, ...] = ()
    for steps in groups:
        first = len(found)
        for step in steps:
            after = tuple(first + at for at in step.after) or ends
            pair = first + step.pair if step.pair >= 0 else -1
            found.append(replace(step, after=after, pair=pair))
        waited = {at for step in found[first:] for at in step.after}
        if steps:
            ends = tuple(at for at in range(first, len(found)) if at not in waited)
    return tuple(found)
