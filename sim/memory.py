"""Bytes that one rank holds, by tensor class and over a step, and whether they fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

from ..conf.model_spec import ModelSpec, num_parameters
from ..conf.schema import Backend, Engine, ExperimentConf, Precision, Recompute
from ..policies.comm import CommPolicy, Placement
from ..policies.comm.memory import state_bytes
from .device import Device
from .layers import BlockWork, block_work, kernels_of
from .optimizer import buffer_bytes, moment_bytes
from .root_layers import head_bytes

CLASSES = ("parameters", "gradients", "optimizer", "secondary_shard", "activations", "buffers")


class Convention(Enum):
    """What a parameter's states are taken to be, in mixed precision with Adam."""

    half_gradients = (
        "2+14"  # 16-bit weight 2; 16-bit gradient 2, fp32 master copy 4 and moments 8 (ZeRO, section 3)
    )
    float_gradients = "2+16"  # the same with fp32 gradients: Megatron in bf16, DeepSpeed's estimator
    float_copies = "2+18"  # 16-bit gradients, and fp32 copies of them for the optimizer: Megatron in fp16
    float_shards = "4+12"  # FSDP2: fp32 weight (also the master copy) 4; fp32 gradient 4 and moments 8

    @property
    def bytes_per_parameter(self) -> int:
        return sum(map(int, self.value.split("+")))


def optimizer_bytes(experiment: ExperimentConf) -> int:
    """Optimizer states a parameter: fp32 master copy (none if weights are fp32) and fp32 moments."""
    master = 0 if experiment.precision is Precision.fp32 else 4
    return master + moment_bytes(experiment.optimizer)


def activations(spec: ModelSpec, experiment: ExperimentConf) -> tuple[list[BlockWork], float]:
    """Of each block what a micro-batch keeps and what its backward needs beside, and the head's bytes.

    Without recomputation, with dropout and unfused attention a GPT's block keeps s b h (34 + 5 a s / h) bytes in
    16 bits (Korthikanti et al. 2022, section 4); `layers.block_modules` has the parts.
    """
    batch, kernels = experiment.batch, kernels_of(experiment)
    sequence = batch.sequence or spec.sequence
    device = Device(experiment.cluster.device, element_bytes=experiment.precision.element_bytes)
    kinds = [
        block_work(
            spec,
            device,
            sequence=sequence,
            micro=batch.micro,
            recompute=experiment.recompute.value,
            kernels=kernels,
            layer=layer,
        )
        for layer in ((0, 1) if experiment.recompute is Recompute.selective_layer else (0,))
    ]
    blocks = [kinds[layer % len(kinds)] for layer in range(spec.layers)]
    return blocks, head_bytes(spec, device, sequence=sequence, micro=batch.micro)


def activation_bytes(spec: ModelSpec, experiment: ExperimentConf) -> int:
    """The most that activations come to: at the head, or in the backward of a block."""
    blocks, head = activations(spec, experiment)
    kept, most = sum(block.saved_bytes for block in blocks), 0.0
    most = kept + head
    for block in reversed(blocks):
        most = max(most, kept + block.working_bytes)
        kept -= block.saved_bytes
    return round(most)


def convention(experiment: ExperimentConf, policy: CommPolicy) -> Convention:
    """How this engine keeps its states."""
    if experiment.engine.value == "megatron":
        fp16 = experiment.precision is Precision.fp16
        return Convention.float_copies if fp16 else Convention.float_gradients
    shards = policy.placement is Placement.sharded and policy.reshard_after_forward
    # ZeRO-Offload: 16-bit weights and gradients cross, the fp32 copy stays with the moments
    halved = experiment.offload.name == "cpu" and not experiment.offload.fp32
    return (
        Convention.float_shards
        if shards and experiment.engine.value == "fsdp2" and not halved
        else Convention.half_gradients
    )


def memory_bytes(
    experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy, unit_bytes: Sequence[int]
) -> dict[str, int]:
    """All classes of a record's `memory_bytes`: each at its largest, and `peak`, the largest sum at one time.

    Args:
        unit_bytes: Of each gathered unit on the wire's precision, root first.
    """
    return at_most(memory_over_time(experiment, spec, policy, unit_bytes))


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """What a rank holds at its fullest while it computes one unit."""

    phase: str  # forward, backward or step
    unit: str
    held: Mapping[str, int]  # by class

    @property
    def total(self) -> int:
        return sum(self.held.values())

    def reason(self) -> str:
        """Where this is and the two classes that take most."""
        largest = sorted(((n, name) for name, n in self.held.items()), reverse=True)[:2]
        shown = ", ".join(f"{name} {n / 1e9:.2f} GB" for n, name in largest)
        return f"in {self.phase} of {self.unit}: {shown}"


def at_most(points: Sequence[MemoryPoint]) -> dict[str, int]:
    """Each class at its largest, and `peak`, the largest sum at one time."""
    held = {name: max(point.held[name] for point in points) for name in CLASSES}
    return held | {"peak": max(point.total for point in points)}


def peak(points: Sequence[MemoryPoint]) -> MemoryPoint:
    """The fullest one; of equals the first."""
    return max(points, key=lambda point: point.total)


def memory_over_time(
    experiment: ExperimentConf,
    spec: ModelSpec,
    policy: CommPolicy,
    unit_bytes: Sequence[int],
    near: Mapping[str, int] | None = None,
) -> list[MemoryPoint]:
    """A training step's last micro-batch, unit by unit in the order of computation.

    Activations grow block by block in forward and shrink in backward, where a recomputed block stands whole
    beside them. Gradients of a sharded unit come with its reduction, those of earlier micro-batches are there.

    Args:
        near: Of these classes, what offloading leaves in this memory; None: nothing is offloaded.
    """
    if experiment.engine is Engine.megatron:
        from .megatron.memory import stage_memory  # other engines do not import it

        return stage_memory(experiment, spec)
    states = _states(experiment, spec, policy) | dict(near or {})
    if experiment.engine in (Engine.deepspeed, Engine.deepspeed_2023):
        from .deepspeed.memory import buffer_bytes  # other engines do not import it

        gathered, reducing = buffer_bytes(experiment, spec)
    else:
        gathered, reducing = _buffers(experiment, policy, unit_bytes)
    blocks, head = activations(spec, experiment)
    sharded = policy.placement is Placement.sharded
    root_bytes, *blocks_bytes = unit_bytes
    whole = max(1, sum(unit_bytes))
    before = experiment.batch.accumulation > 1 or not sharded

    def point(phase: str, unit: str, activation: float, buffers: int, reduced: int) -> MemoryPoint:
        gradients = states["gradients"]
        if not before:
            gradients = min(gradients, ceil(gradients * reduced / whole))
        held = states | {"activations": round(activation), "buffers": buffers, "gradients": gradients}
        return MemoryPoint(phase, unit, held)

    kept, points = 0.0, []
    for layer, block in enumerate(blocks):
        points.append(
            point("forward", f"block.{layer}", kept + block.saved_bytes + block.working_bytes, gathered, 0)
        )
        kept += block.saved_bytes
    points.append(point("forward", "root", kept + head, gathered, 0))
    # the logits' gradient, in fp32 and in the precision of the logits, beside them
    points.append(point("backward", "root", kept + 2 * head, gathered, 0))
    reduced = 0
    for layer in reversed(range(len(blocks))):
        block = blocks[layer]
        points.append(
            point("backward", f"block.{layer}", kept + block.working_bytes, gathered + reducing, reduced)
        )
        kept -= block.saved_bytes
        reduced += blocks_bytes[layer] if layer < len(blocks_bytes) else 0
    points.append(point("backward", "embed", 0.0, gathered + reducing, reduced + root_bytes))
    points.append(point("step", "all", 0.0, _step_buffers(experiment, spec, policy), whole))
    return points


def _states(experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy) -> dict[str, int]:
    ranks, element = experiment.cluster.num_ranks, experiment.precision.element_bytes
    states = state_bytes(
        policy,
        num_parameters=num_parameters(spec),
        num_ranks=ranks,
        element_bytes=element,
        optimizer_bytes=optimizer_bytes(experiment),
    )
    parameters, gradients, optimizer = states.parameters, states.gradients, states.optimizer
    match convention(experiment, policy):
        case Convention.float_shards:
            # FSDP2 shards the fp32 weights themselves, and their gradients, and casts what it gathers
            shard = -(-num_parameters(spec) // ranks)
            master = 0 if experiment.precision is Precision.fp32 else 4
            parameters = gradients = 4 * shard
            optimizer = shard * (optimizer_bytes(experiment) - master)
        case Convention.float_gradients:
            gradients = gradients // element * 4
        case Convention.float_copies:
            optimizer += 4 * (optimizer // optimizer_bytes(experiment))
        case Convention.half_gradients:
            pass
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "secondary_shard": states.secondary_shard,
    }


def _step_buffers(experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy) -> int:
    """What the optimizer holds only while it steps."""
    ranks = experiment.cluster.num_ranks
    one = buffer_bytes(experiment.optimizer)
    return state_bytes(
        policy, num_parameters=num_parameters(spec), num_ranks=ranks, optimizer_bytes=one
    ).optimizer


def _buffers(experiment: ExperimentConf, policy: CommPolicy, unit_bytes: Sequence[int]) -> tuple[int, int]:
    """Gathered units in flight, and gradients that wait for their reduction.

    The root stays gathered through a whole pass; beside it a block computes and another is gathered (NCCL:
    its output and the copy-out before it). Gradients: one unit's, on NCCL two; summed in fp32 they are twice
    as large once copied in.
    """
    if policy.placement is not Placement.sharded:
        return 0, 0
    overlaps = experiment.cluster.backend is Backend.nccl or experiment.comm.overlap
    root, *blocks = unit_bytes
    gathered = root + (3 if overlaps else 2) * max(blocks, default=0) if policy.reshard_after_forward else 0
    wide = 2 if experiment.kernels.reduce_fp32 and experiment.precision is not Precision.fp32 else 1
    return gathered, (1 + wide if overlaps else wide) * max(unit_bytes)


def estimate_zero3(
    num_parameters: int,
    largest_layer: int,
    *,
    ranks: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> int:
    """Bytes of model states a GPU as DeepSpeed's `estimate_zero3_model_states_mem_needs` counts them.

    18 bytes a parameter sharded (`Convention.float_gradients`); the weights alone if the optimizer is in host
    memory; nothing but a gathered layer if the weights are there too. The largest layer counts twice in 16 bits.

    Raises:
        ValueError: If parameters are offloaded and the optimizer is not: DeepSpeed has no such mode.
    """
    if offload_parameters and not offload_optimizer:
        raise ValueError("offload_parameters=True needs offload_optimizer=True")
    layer = 4 * largest_layer
    if offload_parameters:
        return layer
    per_parameter = 2 if offload_optimizer else Convention.float_gradients.bytes_per_parameter
    return layer + per_parameter * num_parameters // ranks


def out_of_far_memory(experiment: ExperimentConf, nbytes: int) -> str | None:
    """The reason why what lies outside a node's near memory does not fit there; None: it fits, or nobody knows."""
    cluster = experiment.cluster
    disk = experiment.offload.name == "disk"
    key, what = ("disk.capacity_bytes", "disk") if disk else ("host.memory_bytes", "host memory")
    capacity = cluster.disk.capacity_bytes if disk else cluster.host.memory_bytes
    if capacity is None or nbytes <= capacity:
        return None
    return f"out of {what}: the ranks of a node offload {nbytes / 1e9:.2f} GB, cluster.{key} is {capacity / 1e9:.2f} GB"


def out_of_memory(
    held: Mapping[str, int],
    capacity_bytes: float,
    points: Sequence[MemoryPoint] = (),
    *,
    key: str = "cluster.device.memory_bytes",
) -> str | None:
    """The reason why it does not fit, None if it does. `points` tell when it is fullest, `key` gives the capacity."""
    if held["peak"] <= capacity_bytes:
        return None
    if points:
        where = peak(points).reason()
    else:
        largest = sorted(((n, name) for name, n in held.items() if name != "peak"), reverse=True)[:2]
        where = "most of it: " + ", ".join(f"{name} {n / 1e9:.2f} GB" for n, name in largest)
    return (
        f"out of memory: a rank needs {held['peak'] / 1e9:.2f} GB, {key} is "
        f"{capacity_bytes / 1e9:.2f} GB; {where}"
    )
