"""What one rank of each end of a layout's pipeline holds over a step; without a pipeline, what any rank holds.

Parameters, their gradients and optimizer states are those of the rank's own part of the model, over its replicas as the
communication policy has them. A layer with a plan keeps what its backward reads of its forward, gathered factors too
(3D). What lies between is cut as the activation is.
"""

from collections.abc import Iterable, Iterator, Mapping

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf
from ...policies.comm import CommPolicy, Placement
from ...policies.layout import Pass
from ...policies.mesh import PIPELINE
from ...policies.partition import shard_segments
from ..device import Device
from ..layers import kernels_of
from ..memory import EMBED, ROOT, MemoryPoint, model_states, step_buffers, unit_buffers
from .model import LaidModel
from .shapes import BEFORE, BEHIND, BLOCK


def layout_memory(experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy) -> list[MemoryPoint]:
    """Of the first rank of the first stage, which has the most micro-batches in flight, and of the last, which has the
    logits (of all stages, where they hold different numbers of blocks): pass by pass, and unit by unit in the order of
    computation.
    """
    device = Device(experiment.cluster.device, element_bytes=experiment.precision.element_bytes)
    model = LaidModel(experiment, spec, device, kernels_of(experiment))
    layout = model.layout
    shown = range(layout.stages) if layout.stage_layers else dict.fromkeys((0, layout.stages - 1))
    return [point for stage in shown for point in _Stage(experiment, model, policy, stage).points()]


class _Stage:
    def __init__(self, experiment: ExperimentConf, model: LaidModel, policy: CommPolicy, stage: int) -> None:
        self._experiment = experiment
        self._model = model
        self._policy = policy
        self._stage = stage
        mesh = model.mesh
        self._rank = next(r for r in range(mesh.num_ranks) if mesh.index(PIPELINE, r) == stage)
        self._replicas, self._held = mesh.num_replicas, model.num_parameters(stage)
        self._states = model_states(experiment, policy, self._held, self._replicas, model.units(stage))
        self._gathered, self._reducing = unit_buffers(experiment, policy, self._unit_bytes())
        self._known: dict[tuple[int, int, bool], Mapping[str, int]] = {}

    def points(self) -> Iterator[MemoryPoint]:
        model, kept = self._model, 0.0
        embed, head = model.saved_bytes(BEFORE), model.saved_bytes(BEHIND)
        block, beside = model.saved_bytes(BLOCK), model.working_bytes(BLOCK)
        sharded = self._policy.placement is Placement.sharded
        there = not sharded  # gradients, from the beginning; sharded ones come with the first backward
        both = self._gathered + self._reducing
        for this in self._passes():
            of = model.stretch(self._stage, this.chunk)
            saved = block * len(of.blocks)
            if not this.backward:
                if of.first:
                    kept += embed
                    yield self._point("forward", EMBED, kept, 0.0, self._gathered, there, this)
                for i, unit in enumerate(of.blocks):
                    here = kept + block * (i + 1)
                    yield self._point("forward", unit.name, here, beside, self._gathered, there, this)
                kept += saved
                if of.last:
                    kept += head
                    yield self._point("forward", ROOT, kept, 0.0, self._gathered, there, this)
                continue
            if of.last:  # the logits' gradient beside them
                yield self._point("backward", ROOT, kept, head, both, there, this)
                kept -= head
            for i, unit in reversed(list(enumerate(of.blocks))):
                here = kept - block * (len(of.blocks) - 1 - i)
                yield self._point("backward", unit.name, here, beside, both, there, this)
            kept -= saved
            there = True
            if of.first:
                yield self._point("backward", EMBED, kept, 0.0, both, there, this)
                kept -= embed
        buffers = step_buffers(self._experiment, self._policy, self._held, self._replicas)
        held = self._holding(0, buffers, there=True)
        yield MemoryPoint("step", "all", held, self._experiment.batch.accumulation - 1, self._rank)

    def _passes(self) -> Iterable[Pass]:
        """Without a pipeline a micro-batch's backward follows its forward, whatever the schedule."""
        if self._model.layout.stages > 1:
            return self._model.layout.passes(self._stage)
        count = self._experiment.batch.accumulation
        return [Pass(i, 0, backward) for i in range(count) for backward in (False, True)]

    def _point(
        self, phase: str, unit: str, kept: float, beside: float, buffers: int, there: bool, this: Pass
    ) -> MemoryPoint:
        """What is kept for backward is the runtime's `activations`, where that is known to the byte; what stands beside
        it for a moment is then a buffer."""
        if self._model.saved is not None:
            held = self._holding(round(kept), buffers + round(beside), there=there)
        else:
            held = self._holding(round(kept + beside), buffers, there=there)
        return MemoryPoint(phase, unit, held, this.micro_batch, self._rank)

    def _holding(self, activation: int, buffers: int, *, there: bool) -> Mapping[str, int]:
        key = (activation, buffers, there)
        if key not in self._known:
            gradients = self._states["gradients"] if there else 0
            own = {"activations": activation, "buffers": buffers, "gradients": gradients}
            self._known[key] = {**self._states, **own}
        return self._known[key]

    def _unit_bytes(self) -> list[int]:
        """Root first; 0 where the stage has nothing of it."""
        element, sizes = self._experiment.precision.element_bytes, {ROOT: 0}
        for unit in self._model.units(self._stage):
            shapes = [tensor.shape for tensor in unit.tensors]
            sizes[unit.name] = self._replicas * sum(shard_segments(shapes, self._replicas)) * element
        return list(sizes.values())
