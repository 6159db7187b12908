"""Bytes that one rank holds, by tensor class and over a step, and whether they fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

from ..conf.model_spec import ModelSpec, Unit, num_parameters, parameters
from ..conf.schema import Backend, Engine, ExperimentConf, Precision, Recompute
from ..policies.comm import CommPolicy, Placement
from ..policies.comm.memory import state_bytes
from ..policies.partition import shard_segments
from .device import Device
from .layers import BlockWork, block_work, kernels_of
from .layout.saved import saved_on_cpu
from .layout.shapes import BEFORE, BEHIND, BLOCK
from .optimizer import buffer_bytes, moment_bytes
from .root_layers import head_bytes

EMBED, ROOT = "embed", "root"  # what the root computes before the blocks, and behind them
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
    held: Mapping[str, int]  # by class; one object where points are equal
    micro_batch: int = 0
    rank: int = 0

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
    distinct = list({id(point.held): point.held for point in points}.values())
    held = {name: max(each[name] for each in distinct) for name in CLASSES}
    return held | {"peak": max(sum(each.values()) for each in distinct)}


def peak(points: Sequence[MemoryPoint]) -> MemoryPoint:
    """The fullest one; of equals the first."""
    distinct = {id(point.held): point for point in reversed(points)}
    return max(reversed(distinct.values()), key=lambda point: point.total)


def memory_over_time(
    experiment: ExperimentConf,
    spec: ModelSpec,
    policy: CommPolicy,
    unit_bytes: Sequence[int],
    near: Mapping[str, int] | None = None,
) -> list[MemoryPoint]:
    """A training step, micro-batch by micro-batch and unit by unit in the order of computation.

    Activations grow block by block in forward and shrink in backward, where a recomputed block stands whole
    beside them. Gradients of a sharded unit come with its reduction, those of earlier micro-batches are there.
    `memory_clock` says when.

    Args:
        near: Of these classes, what offloading leaves in this memory; None: nothing is offloaded.
    """
    if experiment.engine is Engine.megatron:
        from .megatron.memory import stage_memory  # other engines do not import it

        return stage_memory(experiment, spec)
    if experiment.engine is Engine.fsdp2 and experiment.parallel.ranks_a_replica > 1:
        from .layout.memory import layout_memory  # plain data parallelism does not import it

        return layout_memory(experiment, spec, policy)
    held, ranks = num_parameters(spec), experiment.cluster.num_ranks
    states = model_states(experiment, policy, held, ranks, parameters(spec)) | dict(near or {})
    if experiment.engine in (Engine.deepspeed, Engine.deepspeed_2023):
        from .deepspeed.memory import buffer_bytes  # other engines do not import it

        gathered, reducing = buffer_bytes(experiment, spec)
    else:
        gathered, reducing = unit_buffers(experiment, policy, unit_bytes)
    walk = _Walk(states, gathered, reducing, _activations(experiment, spec), unit_bytes)
    grows = walk.micro_batch(all_there=policy.placement is not Placement.sharded)
    count = experiment.batch.accumulation
    again = walk.micro_batch(all_there=True) if count > 1 else []
    points = [
        MemoryPoint(phase, unit, held, number)
        for number in range(count)
        for phase, unit, held in (again if number else grows)
    ]
    return [
        *points,
        MemoryPoint(
            "step", "all", walk.held(0.0, step_buffers(experiment, policy, held, ranks), None), count - 1
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes that a micro-batch keeps, and of each block what stands beside them while it is computed.

    `exact`: what is kept is known to the byte (the runtime's `activations`), and what stands beside is a buffer.
    """

    blocks: Sequence[tuple[float, float]]
    head: float
    embedding: float = 0.0
    exact: bool = False


def _activations(experiment: ExperimentConf, spec: ModelSpec) -> _Activations:
    blocks, head = activations(spec, experiment)
    known = saved_on_cpu(experiment, spec)
    if known is None:
        return _Activations([(block.saved_bytes, block.working_bytes) for block in blocks], head)
    again = float(known.nbytes(BLOCK)) if known.recompute else 0.0
    each = (float(known.until_backward(BLOCK)), again)
    return _Activations([each] * spec.layers, known.nbytes(BEHIND), known.nbytes(BEFORE), exact=True)


def saved_bytes(experiment: ExperimentConf, spec: ModelSpec) -> dict[str, int] | None:
    """What a micro-batch keeps for backward, by unit, where it is known to the byte; else None."""
    known = saved_on_cpu(experiment, spec)
    return known.unit_bytes() if known is not None else None


class _Walk:
    """The units of one micro-batch, in the order of computation."""

    def __init__(
        self,
        states: Mapping[str, int],
        gathered: int,
        reducing: int,
        kept: _Activations,
        unit_bytes: Sequence[int],
    ) -> None:
        self._states = states
        self._gathered = gathered
        self._reducing = reducing
        self._kept = kept
        self._root_bytes, *self._blocks_bytes = unit_bytes
        self._whole = max(1, sum(unit_bytes))

    def held(
        self, activation: float, buffers: int, reduced: int | None, beside: float = 0.0
    ) -> Mapping[str, int]:
        """`reduced`: bytes of the units whose gradients are there; None: all of them. `beside`: what stands beside
        activations."""
        if self._kept.exact:
            buffers += round(beside)
        else:
            activation += beside
        gradients = self._states["gradients"]
        if reduced is not None:
            gradients = min(gradients, ceil(gradients * reduced / self._whole))
        own = {"activations": round(activation), "buffers": buffers, "gradients": gradients}
        return {**self._states, **own}

    def micro_batch(self, *, all_there: bool) -> list[tuple[str, str, Mapping[str, int]]]:
        """`all_there`: gradients are, from the beginning. (phase, unit, held) of each computation."""
        gathered, both = self._gathered, self._gathered + self._reducing
        reduced = None if all_there else 0
        blocks, head = self._kept.blocks, self._kept.head
        kept = self._kept.embedding
        found = [("forward", EMBED, self.held(kept, gathered, reduced))]
        for layer, (saved, beside) in enumerate(blocks):
            kept += saved
            found.append(("forward", f"block.{layer}", self.held(kept, gathered, reduced, beside)))
        found.append(("forward", ROOT, self.held(kept + head, gathered, reduced)))
        # the logits' gradient, in fp32 and in the precision of the logits, beside them
        found.append(("backward", ROOT, self.held(kept + head, gathered, reduced, head)))
        for layer, (saved, beside) in reversed(list(enumerate(blocks))):
            found.append(("backward", f"block.{layer}", self.held(kept, both, reduced, beside)))
            kept -= saved
            if reduced is not None:
                reduced += self._blocks_bytes[layer] if layer < len(self._blocks_bytes) else 0
        if reduced is not None:
            reduced += self._root_bytes
        found.append(("backward", EMBED, self.held(kept, both, reduced)))
        return found


def model_states(
    experiment: ExperimentConf, policy: CommPolicy, held: int, ranks: int, units: Sequence[Unit] = ()
) -> dict[str, int]:
    """Args:
    held: Parameters that `ranks` ranks hold, whole or shared out, as the policy places them.
    units: What they are of. FSDP2 cuts each tensor by itself, so that the first rank has more than its share; (): all
        have as much.
    """
    element = experiment.precision.element_bytes
    states = state_bytes(
        policy,
        num_parameters=held,
        num_ranks=ranks,
        element_bytes=element,
        optimizer_bytes=optimizer_bytes(experiment),
    )
    parameters, gradients, optimizer = states.parameters, states.gradients, states.optimizer
    match convention(experiment, policy):
        case Convention.float_shards:
            # FSDP2 shards the fp32 weights themselves, and their gradients, and casts what it gathers
            shapes = [tensor.shape for unit in units for tensor in unit.tensors]
            shard = sum(shard_segments(shapes, ranks)) if shapes else -(-held // ranks)
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


def step_buffers(experiment: ExperimentConf, policy: CommPolicy, held: int, ranks: int) -> int:
    """What the optimizer holds only while it steps; `held` and `ranks` as of `model_states`."""
    one = buffer_bytes(experiment.optimizer)
    return state_bytes(policy, num_parameters=held, num_ranks=ranks, optimizer_bytes=one).optimizer


def unit_buffers(
    experiment: ExperimentConf, policy: CommPolicy, unit_bytes: Sequence[int]
) -> tuple[int, int]:
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


def out_of_far_memory(experiment: ExperimentConf, nbytes: int) -> str | None:
    """The reason why what lies outside a node's near memory does not fit there; None: it fits, or nobody knows."""
    cluster = experiment.cluster
    disk = experiment.offload.name == "disk"
    key, what = ("disk.capacity_bytes", "disk") if disk else ("host.memory_bytes", "host memory")
    capacity = cluster.disk.capacity_bytes if disk else cluster.host.memory_bytes
    needed, how = (2 * nbytes, ", two generations of it") if disk else (nbytes, "")
    if capacity is None or needed <= capacity:
        return None
    held = f"{nbytes / 1e9:.4g} GB{how}"
    return f"out of {what}: the ranks of a node offload {held}; cluster.{key} is {capacity / 1e9:.4g} GB"


def over_budget(experiment: ExperimentConf, held: Mapping[str, int]) -> list[str]:
    """A warning where a rank needs more than offload.memory_bytes, which chunks are held to and the rest is not."""
    budget = experiment.offload.memory_bytes
    if not experiment.offload.active or budget is None or held["peak"] <= budget:
        return []
    rest = {key: held[key] for key in ("activations", "buffers", "secondary_shard") if held.get(key)}
    listed = ", ".join(f"{key} {nbytes / 1e9:.3g} GB" for key, nbytes in rest.items())
    return [
        f"offload.memory_bytes={budget:g}: chunks keep to it, and with all else ({listed}) the peak is "
        f"{held['peak'] / 1e9:.3g} GB; cluster.device.memory_bytes is what the peak is held to"
    ]


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
