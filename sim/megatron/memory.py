"""Bytes that one rank of a pipeline stage holds over a step."""

from collections.abc import Mapping

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf, Precision
from ..device import Device
from ..layers import kernels_of
from ..memory import CLASSES, MemoryPoint, optimizer_bytes
from ..program import Program
from ..root_layers import head_bytes
from .model import LayoutModel
from .parts import FLOAT_BYTES
from .stage import unit_name

STEP_TAG = 5  # parts of the tag of an item of a pass whose steps are items: stage, micro-batch, chunk, direction, place


def stage_memory(experiment: ExperimentConf, spec: ModelSpec) -> list[MemoryPoint]:
    """A step of the first rank of the first and of the last stage, pass by pass in the schedule's order.

    The first stage has the most micro-batches in flight, the last one the logits. States: 16-bit weights, fp32
    gradients, fp32 master copy and moments, of which ZeRO-1 shares out the last three over the replicas; in fp16
    the gradients have 16 bits, and fp32 copies that are shared out too (Megatron Core's guide to its distributed
    optimizer: 20 bytes in fp16, 18 in bf16, 16 in fp32).
    """
    device = Device(experiment.cluster.device, element_bytes=experiment.precision.element_bytes)
    model = LayoutModel(experiment, spec, device, kernels_of(experiment))
    stages = model.layout.stages
    return [point for stage in dict.fromkeys((0, stages - 1)) for point in _points(model, experiment, stage)]


def _points(model: LayoutModel, experiment: ExperimentConf, stage: int) -> list[MemoryPoint]:
    numel = model.num_parameters(stage)
    owned = -(-numel // model.mesh.data) if experiment.comm.zero_stage else numel
    copies = experiment.precision is Precision.fp16
    states = dict.fromkeys(CLASSES, 0) | {
        "parameters": numel * experiment.precision.element_bytes,
        "gradients": numel * (experiment.precision.element_bytes if copies else FLOAT_BYTES),
        "optimizer": owned * (optimizer_bytes(experiment) + (FLOAT_BYTES if copies else 0)),
    }
    block = model.parts.block()
    head = head_bytes(
        model.spec,
        Device(experiment.cluster.device, element_bytes=experiment.precision.element_bytes),
        sequence=model.parts.tokens // experiment.batch.micro,
        micro=experiment.batch.micro,
        tensor=model.layout.tensor,
    )
    kept = 0.0
    known: dict[tuple[str, int], Mapping[str, int]] = {}
    rank, unit = stage * model.mesh.tensor * model.mesh.data, unit_name(stage)

    def point(phase: str, activation: float, micro_batch: int) -> MemoryPoint:
        key = (phase, round(activation))
        if key not in known:
            known[key] = states | {"activations": key[1]}
        return MemoryPoint(phase, unit, known[key], micro_batch, rank)

    points = []
    for each in model.layout.passes(stage):
        kind = model.kind(stage, each.chunk, each.backward)
        saved = kind.blocks * block.saved_bytes + (head if kind.head else 0.0)
        if each.backward:
            # a block that is repeated stands whole beside the others; so does the gradient of the logits
            beside = max(block.working_bytes, head if kind.head else 0.0)
            points.append(point("backward", kept + beside, each.micro_batch))
            kept -= saved
        else:
            kept += saved
            points.append(point("forward", kept + block.working_bytes, each.micro_batch))
    return [*points, point("step", 0.0, experiment.batch.accumulation - 1)]


def pass_starts(program: Program) -> list[tuple[str, str, int]]:
    """(phase, stage, first item) of each pass, and of the optimizer step."""
    found: list[tuple[str, str, int]] = []
    last: object = None
    for item in program.items:
        kind = item.parts[0].work if item.parts else None
        if item.phase == "step":
            if kind is not None and kind.key.startswith("step/"):
                found.append((item.phase, item.unit, item.index))
            continue
        if program.compact:  # a pass is an item
            this: object = item.index if kind is not None and kind.key.startswith("pass/") else None
        else:  # its items share a tag up to their place in it
            this = item.tag[:4] if isinstance(item.tag, tuple) and len(item.tag) == STEP_TAG else None
        if this is not None and this != last:
            found.append((item.phase, item.unit, item.index))
            last = this
    return found
