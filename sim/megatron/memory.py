"""Bytes that one rank of a pipeline stage holds over a step."""

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf, Precision
from ..device import Device
from ..layers import kernels_of
from ..memory import CLASSES, MemoryPoint, optimizer_bytes
from ..root_layers import head_bytes
from .model import LayoutModel
from .parts import FLOAT_BYTES


def stage_memory(experiment: ExperimentConf, spec: ModelSpec) -> list[MemoryPoint]:
    """Where the first and the last stage are fullest: in a forward pass, in a backward pass, in the step.

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
    most = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    for each in model.layout.passes(stage):
        kind = model.kind(stage, each.chunk, each.backward)
        saved = kind.blocks * block.saved_bytes + (head if kind.head else 0.0)
        if each.backward:
            # a block that is repeated stands whole beside the others; so does the gradient of the logits
            beside = max(block.working_bytes, head if kind.head else 0.0)
            most["backward"] = max(most["backward"], kept + beside)
            kept -= saved
        else:
            kept += saved
            most["forward"] = max(most["forward"], kept + block.working_bytes)
    return [
        MemoryPoint(phase, f"stage.{stage}", states | {"activations": round(nbytes)})
        for phase, nbytes in most.items()
    ]
