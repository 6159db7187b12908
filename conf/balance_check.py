"""Whether ranks can be balanced in an experiment, and which keys of it then have no effect."""

from dataclasses import fields
from enum import Enum
from math import gcd
from typing import Any

from .model_spec import ModelSpec
from .schema import Backend, BalanceConf, Engine, ExperimentConf, Recompute, Target, Way


def check_balance(experiment: ExperimentConf, spec: ModelSpec) -> list[str]:
    """Warnings about keys of `balance` that nothing reads, and about what cannot move.

    Raises:
        ValueError: If this experiment cannot be balanced so, naming the key, its value and what would be legal.
    """
    conf = experiment.balance
    warnings = _without_effect(experiment)
    if not conf.active:
        return warnings
    which = f"balance={conf.name}"
    if experiment.engine is not Engine.fsdp2:
        raise ValueError(f"{which} needs engine=fsdp2, got engine={experiment.engine.value}")
    if conf.of_tensor_ranks:
        _refuse_tensor(experiment, which)
        warnings += _heads(experiment, spec) + _columns(experiment, spec)
    elif conf.name == "batch":
        _refuse_batch(experiment, which)
    elif conf.name == "layers":
        _refuse_layers(experiment, which)
        warnings.append(
            f"{which}: stages are timed before the first step, and the split stays for the whole run; for another one "
            "start anew from a checkpoint (train.resume_from)"
        )
    return warnings


def guessed_by_balance(experiment: ExperimentConf) -> list[dict[str, Any]]:
    """For a record's `guessed_inputs`: what a budget of accuracy is held to rests on another training than this."""
    conf = experiment.balance
    if not conf.guesses_points:
        return []
    points = conf.points(experiment.parallel.tensor)
    return [{"key": "balance.loss_points", "value": str([[ratio, round(cost, 3)] for ratio, cost in points])}]


def _refuse_tensor(experiment: ExperimentConf, which: str) -> None:
    parallel, conf = experiment.parallel, experiment.balance
    if parallel.tensor == 1:
        raise ValueError(
            f"parallel.tensor=1 with {which}: must be > 1, for it is of ranks that share matrices; use balance=batch "
            "for replicas, or balance=layers for stages"
        )
    if parallel.tensor_mode != "1d":
        raise ValueError(
            f"parallel.tensor_mode={parallel.tensor_mode} with {which}: must be 1d, whose products end in one "
            "all-reduce each"
        )
    if parallel.sequence > 1 and parallel.sequence_mode == "megatron":
        raise ValueError(
            f"parallel.sequence={parallel.sequence} with parallel.sequence_mode=megatron and {which}: must be 1"
        )
    if conf.moves and parallel.sequence > 1:
        raise ValueError(
            f"parallel.sequence={parallel.sequence} with {which}: must be 1; ranks that share a sequence exchange keys "
            "and values of the same heads, and each tensor group moves its own"
        )
    if parallel.stage_layers:
        raise ValueError(
            f"parallel.stage_layers={list(parallel.stage_layers)} with {which}: must be left out, stages hold "
            "equal numbers"
        )
    if conf.moves and experiment.recompute is not Recompute.none:
        raise ValueError(
            f"recompute={experiment.recompute.value} with {which}: must be none; what was lent would have to be lent "
            "again within backward"
        )
    replicas = experiment.cluster.num_ranks // parallel.ranks_a_replica
    if conf.prunes and conf.pruned_state.value == "frozen" and replicas > 1:
        raise ValueError(
            f"balance.pruned_state=frozen with {replicas} replicas of the model: must be moving, for other replicas "
            "have gradients of the columns that one leaves out"
        )


def _refuse_batch(experiment: ExperimentConf, which: str) -> None:
    replicas = experiment.cluster.num_ranks // experiment.parallel.ranks_a_replica
    if replicas == 1:
        raise ValueError(
            f"{which} with one replica of the model: needs data parallelism, parallel.data > 1; use balance=resize, "
            "migrate or semi for tensor ranks, or balance=layers for stages"
        )
    if experiment.batch.micro == 1:
        raise ValueError(
            f"batch.micro=1 with {which}: must be > 1, for sequences of micro-batches move between replicas"
        )
    parallel = experiment.parallel
    if parallel.tensor > 1 and parallel.tensor_mode != "1d":
        raise ValueError(
            f"parallel.tensor_mode={parallel.tensor_mode} with {which}: must be 1d; the others cut micro-batches, "
            "whose sizes would have to be divisible"
        )
    if experiment.offload.active:
        raise ValueError(
            f"offload={experiment.offload.name} with {which}: must be none; what lies near would have to follow the "
            "sizes of micro-batches"
        )
    if experiment.cluster.backend is Backend.nccl and experiment.target is not Target.sim:
        raise ValueError(
            f"cluster.backend=nccl with {which} and target={experiment.target.value}: must be gloo, or target=sim; "
            "what a GPU computes between collectives is not measured"
        )


def _refuse_layers(experiment: ExperimentConf, which: str) -> None:
    parallel = experiment.parallel
    if parallel.pipeline == 1:
        raise ValueError(
            f"parallel.pipeline=1 with {which}: must be > 1, for blocks move between stages; use balance=resize, "
            "migrate or semi for tensor ranks, or balance=batch for replicas"
        )
    if parallel.virtual_stages > 1:
        raise ValueError(f"parallel.virtual_stages={parallel.virtual_stages} with {which}: must be 1")
    if parallel.stage_layers is not None:
        raise ValueError(
            f"parallel.stage_layers={list(parallel.stage_layers)} with {which}: must be null, for the policy answers it"
        )


def _heads(experiment: ExperimentConf, spec: ModelSpec) -> list[str]:
    """Key heads that several query heads share move with all of them."""
    own, sharing = spec.kv_heads // experiment.parallel.tensor, spec.heads // spec.kv_heads
    conf = experiment.balance
    if not conf.moves or conf.way is not Way.paired or own > 1 or sharing == 1:
        return []
    return [
        f"balance={conf.name}: each rank has one key head, which its {sharing} heads share: attention "
        "cannot be split further, and only hidden units of the FFN move"
    ]


def _columns(experiment: ExperimentConf, spec: ModelSpec) -> list[str]:
    """All four matrices of a block lend the same share of their columns."""
    conf, tensor = experiment.balance, experiment.parallel.tensor
    if not conf.moves or conf.way is Way.paired:
        return []
    columns = (spec.hidden, spec.heads * spec.head_dim // tensor, spec.ffn // tensor)
    if gcd(*columns) > 1:
        return []
    return [
        f"balance.way={conf.way.value}: a rank's matrices have {columns[0]}, {columns[1]} and {columns[2]} columns, "
        "which have no divisor in common: none can move; use balance.way=paired"
    ]


def _without_effect(experiment: ExperimentConf) -> list[str]:
    conf, usual = experiment.balance, BalanceConf()
    of_tensor = conf.of_tensor_ranks
    readers = {
        "policy": of_tensor,
        "period": of_tensor or conf.name == "batch",
        "slack": of_tensor or conf.name in ("batch", "layers"),
        "ratio": conf.name == "resize",
        "goal": conf.name == "resize" and conf.ratio is None,
        **dict.fromkeys(
            (
                "max_ratio",
                "selection",
                "refresh",
                "imputation",
                "pruned_state",
                "accuracy_budget",
            ),
            conf.prunes,
        ),
        "loss_points": conf.prunes and conf.accuracy_budget is not None,
        "way": conf.moves,
        "pretest": conf.of_tensor_ranks,
    }
    without = []
    for field in fields(conf):
        value = getattr(conf, field.name)
        if value != getattr(usual, field.name) and not readers.get(field.name, True):
            shown = value.value if isinstance(value, Enum) else value
            without.append(f"balance.{field.name}={shown} has no effect {_why(field.name, conf)}")
    if conf.name in ("resize", "migrate", "semi", "batch") and conf.period >= experiment.steps:
        without.append(
            f"balance.period={conf.period} with steps={experiment.steps}: nothing is decided that a step would follow"
        )
    return without


def _why(key: str, conf: BalanceConf) -> str:
    if key == "goal" and conf.name == "resize":
        return f"with balance.ratio={conf.ratio}"
    if key == "loss_points" and conf.prunes:
        return "without balance.accuracy_budget"
    return f"with balance={conf.name}"
