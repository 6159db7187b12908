"""Bytes that one rank holds, by tensor class, and whether they fit."""

from collections.abc import Mapping, Sequence

from ..conf.model_spec import ModelSpec, num_parameters
from ..conf.schema import Backend, ExperimentConf, Precision, Recompute
from ..policies.comm import CommPolicy, Placement
from ..policies.comm.memory import state_bytes


def optimizer_bytes(experiment: ExperimentConf) -> int:
    """Optimizer states a parameter: fp32 master copy (none if weights are fp32) and fp32 moments."""
    master = 0 if experiment.precision is Precision.fp32 else 4
    if experiment.optimizer.name == "adamw":
        return master + 8
    return master + (4 if experiment.optimizer.momentum else 0)


def activation_bytes(spec: ModelSpec, experiment: ExperimentConf) -> int:
    """What a micro-batch keeps for its backward (Korthikanti et al. 2022, section 4, without parallelism).

    A block: s b (18 h + 4 ffn) + 5 a s^2 b bytes in 16 bits, which is s b h (34 + 5 a s / h) for ffn = 4h; a
    gated MLP keeps half as much again of its width. recompute=full keeps each block's input, and one block
    whole. The head keeps its input, logits, and their fp32 copy for the loss.
    """
    batch, element = experiment.batch, experiment.precision.element_bytes
    sequence = batch.sequence or spec.sequence
    tokens = batch.micro * sequence
    mlp = (6 if spec.is_gated else 4) * spec.ffn
    block = tokens * (18 * spec.hidden + mlp) + 5 * spec.heads * sequence * tokens
    block = block * element // 2
    kept = tokens * spec.hidden * element
    blocks = spec.layers * kept + block if experiment.recompute is Recompute.full else spec.layers * block
    classes = spec.vocab or spec.classes
    return blocks + kept + tokens * classes * (element + 4)


def buffer_bytes(experiment: ExperimentConf, policy: CommPolicy, unit_bytes: Sequence[int]) -> int:
    """The largest gathered units in flight, and the gradients that wait for their reduction.

    The root stays gathered through a whole pass; beside it a block computes and another is gathered (NCCL:
    its output and the copy-out before it). Gradients: one unit's, on NCCL two.
    """
    if policy.placement is not Placement.sharded:
        return 0
    overlaps = experiment.cluster.backend is Backend.nccl or experiment.comm.overlap
    root, *blocks = unit_bytes
    largest = max(blocks, default=0)
    gathered = root + (3 if overlaps else 2) * largest if policy.reshard_after_forward else 0
    return gathered + (2 if overlaps else 1) * max(unit_bytes)


def memory_bytes(
    experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy, unit_bytes: Sequence[int]
) -> dict[str, int]:
    """All classes of a record's `memory_bytes`, of the rank that holds most.

    Args:
        unit_bytes: Of each gathered unit on the wire's precision, root first.
    """
    states = state_bytes(
        policy,
        num_parameters=num_parameters(spec),
        num_ranks=experiment.cluster.num_ranks,
        element_bytes=experiment.precision.element_bytes,
        optimizer_bytes=optimizer_bytes(experiment),
    )
    parameters, gradients, optimizer = states.parameters, states.gradients, states.optimizer
    if policy.placement is Placement.sharded and policy.reshard_after_forward:
        # FSDP2 shards the fp32 weights themselves, and their gradients, and casts what it gathers: the master copy
        # is the parameter
        shard = -(-num_parameters(spec) // experiment.cluster.num_ranks)
        parameters = gradients = 4 * shard
        optimizer = shard * (
            optimizer_bytes(experiment) - (0 if experiment.precision is Precision.fp32 else 4)
        )
    held = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "secondary_shard": states.secondary_shard,
        "activations": activation_bytes(spec, experiment),
        "buffers": buffer_bytes(experiment, policy, unit_bytes),
    }
    return held | {"peak": sum(held.values())}


def out_of_memory(held: Mapping[str, int], capacity_bytes: float) -> str | None:
    """The reason why it does not fit, None if it does."""
    if held["peak"] <= capacity_bytes:
        return None
    largest = sorted(((n, name) for name, n in held.items() if name != "peak"), reverse=True)[:2]
    shown = ", ".join(f"{name} {n / 1e9:.2f} GB" for n, name in largest)
    return (
        f"out of memory: a rank needs {held['peak'] / 1e9:.2f} GB, cluster.device.memory_bytes is "
        f"{capacity_bytes / 1e9:.2f} GB; most of it: {shown}"
    )
