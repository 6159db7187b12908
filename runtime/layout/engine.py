"""Training a model that is laid out over ranks: each rank has some of its parts, and replicas of these average."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...policies.comm import Placement
from ...policies.layout.border import num_parts
from ...policies.layout.parallel import ROOT, ParallelLayout
from ...policies.layout.policy import StepGradientsReady
from ...policies.layout.schedule import Pass
from ...policies.mesh import DATA, PIPELINE, SEQUENCE, Mesh
from ..gradients import clip_factor
from ..groups import STAGE, Groups
from ..laps import PIPELINE_LAP, Clock
from ..ledger import LIBRARY_STREAM, Ledger
from ..micro_batches import (
    MicroBatches,
    NoClock,
    evaluate_in_turn,
    nothing_begins,
    num_right,
    train_in_turn,
)
from ..optim.norms import Holders, square_sums
from ..stack import Stack
from ..wrap import PassEngine
from .layout import LaidOut, tell_places
from .operands import parameters_of
from .stages import tied_name
from .tied import exchange

if TYPE_CHECKING:
    from .pipeline import Pipeline

_EVAL_TAG = 2_001  # apart from torch's 0 and that of `tied`


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A chunk of this rank's stage, and what trains it."""

    chunk: int
    model: Stack
    engine: PassEngine
    laid: LaidOut


class LayoutEngine:
    """A `wrap.CommEngine` over the parts of a model that this rank holds.

    Args:
        parts: Chunk 0 first; each trained over this rank's replicas.
        micro: Sequences of a micro-batch.
        tokens: Of a sequence.
        dtype: Of activations.
        placement: Of the policy of all parts.
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        *,
        layout: ParallelLayout,
        groups: Groups,
        ledger: Ledger,
        placement: Placement,
        micro: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parts, self._layout = parts, layout
        self._groups, self._mesh, self._ledger = groups, groups.mesh, ledger
        self._device, self._dtype = device, dtype
        self._stage = self._mesh.index(PIPELINE, groups.rank)
        self._is_last = any(part.model.is_last for part in parts)
        self._tokens = tokens
        self._eval_shape = self._shape = self._shape_of(micro)
        self._pipeline: Pipeline | None = None
        replicas = self._mesh.num_replicas
        # whether a rank lacks some of the gradients
        self._shared = layout.tensor * layout.stages > 1 or (placement is Placement.sharded and replicas > 1)
        self._copies = replicas if placement is Placement.replicated else 1
        self._weights = self._find_weights()
        # Of the step that is being run
        self._clock: Clock = NoClock()
        self._factor = 1.0
        self._begins: Callable[[int], None] = nothing_begins
        self._losses: list[Tensor] = []
        self._ran: list[Pass] = []
        self._idle_ns = 0  # since when no pass has run

    def take_sequences(self, count: int) -> None:
        """Messages between stages have another size then, of which torch's schedule must be told anew."""
        for part in self._parts:
            tell_places(
                part.model, self._layout, self._mesh, self._groups.rank, micro=count, sequence=self._tokens
            )
        self._shape, self._pipeline = self._shape_of(count), None

    def _shape_of(self, sequences: int) -> tuple[int, int, int]:
        hidden = self._parts[0].model.spec.hidden
        return activation_shape(self._layout, self._mesh, micro=sequences, tokens=self._tokens, hidden=hidden)

    # ---- a step

    def run_step(self, batches: MicroBatches) -> Tensor:
        self._ask_layout()
        if self._layout.stages == 1:
            losses = train_in_turn(self._parts[0].engine, self._ledger, batches)
        else:
            losses = self._run_pipeline(batches)
        self._add_up_tied()
        return losses

    def _ask_layout(self) -> None:
        """Of every layer, so that the log holds what each step is made of."""
        for event in self._layout.questions():
            self._ledger.decided_layer(event, self._layout.decide(event))

    def _run_pipeline(self, batches: MicroBatches) -> Tensor:
        read = [batches.read(index) for index in range(batches.count)]
        inputs, targets = (torch.cat(parts) for parts in zip(*read, strict=True))
        if self._pipeline is None:
            with self._ledger.set_up():
                self._pipeline = self._new_pipeline(*read[0])
        self._clock, self._factor, self._begins = batches.clock, batches.factor, batches.begins
        self._losses.clear()
        self._ran.clear()
        self._ledger.at(phase="forward", layer="")
        self._clock.lap("step")
        self._idle_ns = time.monotonic_ns()
        self._pipeline.run(inputs, targets)
        self._waited("the end")
        self._pipeline.check_order(self._stage, self._ran)
        for part in self._parts:
            part.engine.finish_gradients()
        self._clock.lap("step")  # of all micro-batches together
        self._ledger.at(phase="backward", layer="")
        losses = (
            torch.stack(self._losses) if self._is_last else torch.empty(batches.count, device=self._device)
        )
        pipeline, began_ns = self._groups[PIPELINE], time.monotonic_ns()
        with self._ledger.set_up():  # a rank's own figures, not the training
            dist.broadcast(losses, pipeline.ranks[-1], group=pipeline.handle)
        self._ledger.moved(LIBRARY_STREAM, "losses of the last stage", began_ns, time.monotonic_ns(), 0)
        return losses

    def _new_pipeline(self, inputs: Tensor, targets: Tensor) -> "Pipeline":
        from .pipeline import Pipeline, WatchedStage  # torch's takes long to import

        pipeline = self._groups[PIPELINE]
        stages = []
        for part in self._parts:
            activations = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
            stages.append(
                WatchedStage(
                    part.engine.model,
                    part=part.chunk * self._layout.stages + self._stage,
                    chunk=part.chunk,
                    parts=self._layout.stages * self._layout.chunks,
                    device=self._device,
                    group=pipeline.handle,
                    inputs=inputs.to("meta") if part.model.is_first else activations,
                    outputs=torch.empty((), device="meta") if part.model.is_last else activations,
                    watch=self,
                )
            )
        made = Pipeline(stages, layout=self._layout, loss=self._loss_of)
        made.set_up(inputs, targets)
        return made

    def _loss_of(self, output: Tensor, _: object) -> Tensor:
        self._losses.append(output.detach())
        return output * self._factor

    # ---- what the pipeline tells (`pipeline.Watches`)

    def pass_begins(self, which: Pass) -> None:
        self._waited(f"{which}")
        self._ran.append(which)
        self._begins(which.micro_batch)
        self._ledger.at(phase="backward" if which.backward else "forward", layer=self._name(which))
        if which.backward:
            self._parts[which.chunk].engine.begin_micro_batch(which.micro_batch, self._layout.micro_batches)

    def pass_ends(self, which: Pass) -> None:
        """What is sent before the next pass begins is what this one made."""
        last = (
            "root"
            if which.backward or self._parts[which.chunk].model.is_last
            else self._last_unit(which.chunk)
        )
        if which.backward:
            self._parts[which.chunk].engine.end_micro_batch()
        self._clock.lap(f"{'backward' if which.backward else 'forward'}/{last}")
        self._ledger.at(phase="backward" if which.backward else "forward", layer=self._name(which))
        self._idle_ns = time.monotonic_ns()

    def _waited(self, why: str) -> None:
        """Between two passes a rank does nothing but send and receive."""
        self._ledger.moved(LIBRARY_STREAM, f"messages before {why}", self._idle_ns, time.monotonic_ns(), 0)
        self._clock.lap(PIPELINE_LAP)

    def _name(self, which: Pass) -> str:
        return f"stage.{which.chunk * self._layout.stages + self._stage}"

    def _last_unit(self, chunk: int) -> str:
        return f"block.{self._layout.layers(self._stage, chunk)[-1]}"

    # ---- after the backward passes

    @torch.no_grad()
    def _add_up_tied(self) -> None:
        """The two gradients of a matrix that the first and the last stage both hold."""
        plan = self._layout.decide(StepGradientsReady(self._stage, "embedding"))
        name = tied_name(self._layout)
        if plan is None or not name:
            return
        path = name.rpartition(".")[0]
        for part in self._parts:
            gradient = part.engine.gradients().get(name)
            if gradient is not None and (part.model.is_first or part.model.is_last):
                exchange(
                    plan,
                    gradient,
                    group=self._groups[PIPELINE],
                    ledger=self._ledger,
                    layer=f"{ROOT}.{path}",
                )

    # ---- the rest of a step

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for part in self._parts for parameter in part.engine.parameters()]

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """`parameters` by name, in their order."""
        return {name: p for part in self._parts for name, p in part.engine.named_parameters().items()}

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> float | None:
        """Each element counts once, however many ranks hold it; one all-reduce of one number over the world, unless a
        rank that has gradients has all of them.
        """
        found = self._gradients()
        if not self._shared and not found:
            return None
        square = torch.zeros((), device=self._device)
        if found:
            weights = torch.tensor([self._weights[name] for name in found], device=self._device)
            square = (square_sums(list(found.values()), torch.float32) * weights).sum()
        if self._shared:
            with self._ledger.span(LIBRARY_STREAM, "all_reduce"):
                dist.all_reduce(square)
        else:
            square *= self._copies
        norm = float(square.sqrt())
        factor = clip_factor(norm, max_norm)
        if factor < 1 and found:
            torch._foreach_mul_(list(found.values()), factor)
        return norm

    def check_finite(self) -> None:
        for part in self._parts:
            part.engine.check_finite()

    def after_optimizer_step(self) -> None:
        for part in self._parts:
            part.engine.after_optimizer_step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.engine.zero_grad()

    def holders(self) -> Holders | None:
        """A tensor mode's parts are tensors of their own; without one, what FSDP2 shards says who holds the rest."""
        group = self._groups[STAGE].handle
        if self._layout.tensor == 1 or group is None:
            return None
        tied = tied_name(self._layout)
        shares = {
            id(parameter): self._weights[name]
            * (2 if name == tied else 1)  # each of the two stages adds up its own
            for part in self._parts
            for name, parameter in part.engine.named_parameters().items()
        }
        return Holders(group, shares)

    def sum_norms(self, norms: Tensor, group: dist.ProcessGroup) -> None:
        """Over the ranks of this stage that hold parts of the same parameters."""
        ranks = tuple(dist.get_process_group_ranks(group))
        row = self._ledger.collective(
            op="all_reduce",
            axis=STAGE,
            group=ranks,
            payload_bytes=norms.numel() * norms.element_size(),
            stream=LIBRARY_STREAM,
            layer="",
        )
        with row:
            dist.all_reduce(norms, group=group)

    # ---- validation

    @torch.no_grad()
    def evaluate(self, batches: MicroBatches) -> Tensor:
        self._ask_layout()
        if self._layout.stages == 1:
            model = self._parts[0].model
            total = evaluate_in_turn(model, batches, lambda: num_right(model))
        else:
            total = self._through_stages(batches)
        total[0] /= self._same_loss  # answers are counted once
        return total

    def _through_stages(self, batches: MicroBatches) -> Tensor:
        """Each batch through all parts; a stage goes on with the next one as soon as it has sent."""
        total = torch.zeros(2, device=self._device)
        for part in self._parts:
            part.engine.model.eval()
        pipeline = self._groups[PIPELINE]
        before, after = (pipeline.ranks[(pipeline.index + by) % pipeline.size] for by in (-1, 1))
        sends: list[tuple[Tensor, dist.Work | None]] = []
        for index in range(batches.count):
            inputs, targets = batches.read(index)
            for part in self._parts:
                self._ledger.at(phase="eval", layer=self._name(Pass(index, part.chunk, backward=False)))
                if not part.model.is_first:
                    inputs = torch.empty(self._eval_shape, dtype=self._dtype, device=self._device)
                    dist.recv(inputs, before, group=pipeline.handle, tag=_EVAL_TAG)
                output: Tensor = part.engine.model(inputs, targets=targets)
                if part.model.is_last:
                    total += torch.stack([output.float(), num_right(part.model).to(output.device).float()])
                    continue
                output = output.contiguous()
                sends.append((output, dist.isend(output, after, group=pipeline.handle, tag=_EVAL_TAG)))
        for _, work in sends:
            if work is not None:
                work.wait()
        for part in self._parts:
            part.engine.model.train()
        return total

    @property
    def _same_loss(self) -> int:
        """Ranks that work out the same loss: those of a tensor group, and of `sequence`."""
        same = 1
        for axis, size in self._mesh.dims:
            if axis not in (DATA, PIPELINE):
                same *= size
        return same

    # ---- state

    @property
    def place(self) -> str:
        """Where this rank stands on the axes that cut the model, such as "pipeline1"; "" if none does."""
        axes = [axis for axis, size in self._mesh.dims if size > 1 and axis not in (DATA, SEQUENCE)]
        return ".".join(f"{axis}{self._mesh.index(axis, self._groups.rank)}" for axis in reversed(axes))

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of what lies like the parameter of that name, before replicas shard it."""
        for part in self._parts:
            if name in part.laid.placed:
                return part.laid.placed[name].local_part(whole, self._mesh, self._groups.rank)
        return whole

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{self.place}/{name}": value
            for part in self._parts
            for name, value in part.engine.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self._parts:
            names = part.engine.state_dict()
            part.engine.load_state_dict({name: state[f"{self.place}/{name}"] for name in names})

    def full_parameters(self) -> dict[str, Tensor]:
        """Of this rank's parts of the model."""
        return self._wholes([part.engine.full_parameters() for part in self._parts])

    def full_gradients(self) -> dict[str, Tensor]:
        """Of this rank's parts of the model."""
        return self._wholes([part.engine.full_gradients() for part in self._parts])

    def _wholes(self, locals_: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of what lies in parts over the tensor group."""
        with self._ledger.set_up():
            return {
                name: whole
                for part, tensors in zip(self._parts, locals_, strict=True)
                for name, whole in part.laid.wholes(tensors).items()
            }

    def secondary_bytes(self) -> int:
        return sum(part.engine.secondary_bytes() for part in self._parts)

    def close(self) -> None:
        for part in self._parts:
            part.engine.close()

    # ---- who holds what

    def _gradients(self) -> dict[str, Tensor]:
        return {n: x for part in self._parts for n, x in part.engine.gradients().items()}

    def _find_weights(self) -> Mapping[str, float]:
        """One over the ranks that hold the same elements of a parameter's gradient, by its name."""
        tied = tied_name(self._layout)
        found = {}
        for part in self._parts:
            for name, copies in parameter_copies(
                self._layout, self._mesh, part.model, self._stage, part.chunk
            ).items():
                found[name] = 1 / (copies * self._copies * (2 if name == tied else 1))
        return found


def parameter_copies(
    layout: ParallelLayout, mesh: Mesh, model: Stack, stage: int, chunk: int
) -> dict[str, int]:
    """In how many ranks of a tensor group each element of a parameter lies, by the parameter's name."""
    units = model.units()
    names = {
        (id(module), name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._parameters
    }
    parts: dict[str, int] = {}
    for unit, layers in layout.units(stage, chunk):
        for layer in layers:
            cuts = layout.parameter_cuts(layer)
            for each in (layer, *layer.others):
                for operand, owned in parameters_of(units[unit], each).items():
                    name = names[id(owned.owner), owned.name]
                    parts[name] = num_parts(mesh, cuts[operand].axes)
    return {name: layout.tensor // parts.get(name, 1) for name, _ in model.named_parameters()}


def activation_shape(
    layout: ParallelLayout, mesh: Mesh, *, micro: int, tokens: int, hidden: int
) -> tuple[int, int, int]:
    """[B, T, D] of what lies here of an activation between two blocks."""
    border = layout.outline.block[0].input
    return (
        micro // num_parts(mesh, border.batch),
        tokens // layout.sequence // num_parts(mesh, border.tokens),
        hidden // num_parts(mesh, border.features),
    )
