"""From Hydra's config to typed, checked specs. Every error comes here, before any process starts."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .deepspeed import read_deepspeed_config
from .hf import read_hf_config
from .model_spec import ModelSpec, spec_from_keys
from .schema import (
    Backend,
    ExperimentConf,
    GradientPath,
    HpzLifetime,
    Launch,
    Precision,
    Target,
)

CONFIG_PATH = "pkg://twinbed.conf"
CONFIG_NAME = "config"
SCHEMA_NAME = "experiment_schema"

# What a training of ours can run; the simulator takes any family that is counted.
RUNTIME_FAMILIES = ("gpt",)


@dataclass(frozen=True, slots=True)
class Composed:
    """One experiment, ready to run."""

    experiment: ExperimentConf
    spec: ModelSpec
    resolved: dict[str, Any]  # plain values, as the record keeps them
    warnings: tuple[str, ...]


def register_schema() -> None:
    """Tell Hydra the types of the keys, so that an unknown key or a wrong type is refused."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=SCHEMA_NAME, node=ExperimentConf)


def compose(overrides: Sequence[str] = ()) -> Composed:
    """Compose an experiment as the command line would.

    Raises:
        ValueError: If a key, a value or a combination is not legal.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    register_schema()
    if GlobalHydra.instance().is_initialized():
        GlobalHydra.instance().clear()
    try:
        with initialize_config_module(config_module="twinbed.conf", version_base="1.3"):
            config = hydra_compose(CONFIG_NAME, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as err:
        cause = f": {err.__cause__}" if err.__cause__ is not None else ""
        raise ValueError(f"{err}{cause}") from err
    return from_hydra(config)


def from_hydra(config: DictConfig) -> Composed:
    """Type, resolve and check a composed config.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    warnings: list[str] = []
    config = _import_deepspeed(config, warnings)
    experiment = _typed(config)
    spec = model_spec(experiment)
    _resolve_batch(experiment, spec)
    _check(experiment, spec, warnings)
    _absolute(experiment)
    return Composed(experiment, spec, to_dict(experiment), tuple(warnings))


def to_dict(experiment: ExperimentConf) -> dict[str, Any]:
    """Plain values of a typed experiment; enums by name."""
    plain = OmegaConf.to_container(OmegaConf.structured(experiment), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def load_experiment(resolved: Mapping[str, Any]) -> ExperimentConf:
    """The typed experiment of a record's or a launch file's `experiment`.

    Raises:
        ValueError: If it does not fit the schema.
    """
    try:
        return _typed(OmegaConf.merge(OmegaConf.structured(ExperimentConf), dict(resolved)))
    except OmegaConfBaseException as err:
        raise ValueError(str(err)) from err


def model_spec(experiment: ExperimentConf) -> ModelSpec:
    """The shapes of `model`, from its keys or from a Hugging Face config.json.

    Raises:
        ValueError: If sizes do not fit, the file cannot be read, or the model is a mixture of experts.
    """
    model = experiment.model
    if model.name == "hf" and model.config_json is None:
        raise ValueError("model.config_json must be given with model=hf: the path of a config.json")
    if model.config_json is not None:
        spec = read_hf_config(Path(model.config_json))
    else:
        keys = to_dict(experiment)["model"]
        keys.pop("config_json")
        spec = spec_from_keys(keys)
    if spec.is_moe:
        from .model_spec import num_active_parameters, num_parameters

        raise ValueError(
            f"model={spec.name}: a mixture of experts with {num_parameters(spec):,} parameters, "
            f"{num_active_parameters(spec):,} active: expert parallelism is out of scope; use a dense model"
        )
    return spec


def _typed(config: DictConfig | Any) -> ExperimentConf:
    try:
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as err:
        cause = err.__cause__ or err.__context__
        raise ValueError(str(cause if isinstance(cause, ValueError) else err).split("\n")[0]) from err
    assert isinstance(made, ExperimentConf)
    return made


def _import_deepspeed(config: DictConfig, warnings: list[str]) -> DictConfig:
    path = config.comm.config_json
    if path is None and config.comm.name == "deepspeed":
        raise ValueError("comm.config_json must be given with comm=deepspeed: the path of a DeepSpeed JSON")
    if path is None:
        return config
    imported = read_deepspeed_config(Path(path))
    for key, value in imported.overrides.items():
        if key == "optimizer":
            if value not in ("adamw", "sgd"):
                raise ValueError(f"{path}: optimizer {value!r}: must be one of ['adamw', 'sgd']")
            key = "optimizer.name"
        OmegaConf.update(config, key, value)
    if imported.auto:
        warnings.append(f"{path}: twinbed's own values stand for {', '.join(imported.auto)} ('auto')")
    if imported.ignored:
        warnings.append(f"{path}: no effect here: {', '.join(imported.ignored)}")
    return config


def _resolve_batch(experiment: ExperimentConf, spec: ModelSpec) -> None:
    batch, ranks = experiment.batch, experiment.cluster.num_ranks
    if batch.sequence is None:
        batch.sequence = spec.sequence
    if batch.sequence > spec.sequence:
        raise ValueError(
            f"batch.sequence={batch.sequence} must be <= model.sequence={spec.sequence}, the positions that "
            "the model has"
        )
    if batch.global_sequences is not None:
        a_micro_batch = batch.micro * ranks
        if batch.global_sequences % a_micro_batch:
            raise ValueError(
                f"batch.global_sequences={batch.global_sequences} must be a multiple of batch.micro times "
                f"the ranks: {batch.micro} * {ranks} = {a_micro_batch}"
            )
        accumulation = batch.global_sequences // a_micro_batch
        if batch.accumulation not in (1, accumulation):
            raise ValueError(
                f"batch.accumulation={batch.accumulation} contradicts batch.global_sequences="
                f"{batch.global_sequences}, which gives {accumulation}; leave one of them out"
            )
        batch.accumulation = accumulation


def _check(experiment: ExperimentConf, spec: ModelSpec, warnings: list[str]) -> None:
    ranks = experiment.cluster.num_ranks
    if experiment.parallel.data not in (-1, ranks):
        raise ValueError(
            f"parallel.data={experiment.parallel.data} must be -1 or the number of ranks, {ranks} "
            f"(cluster.nodes={experiment.cluster.nodes} x cluster.devices_per_node="
            f"{experiment.cluster.devices_per_node})"
        )
    if experiment.steps <= experiment.warmup_steps:
        warnings.append(
            f"steps={experiment.steps} is not more than warmup_steps={experiment.warmup_steps}: "
            "iteration_s has no figures"
        )
    if experiment.data.path is not None and experiment.data.name != "text":
        raise ValueError(f"data.path={experiment.data.path!r} has no effect with data={experiment.data.name}")
    warnings += _without_effect(experiment)
    if experiment.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("train.tensorboard=true needs the package tensorboard: pip install tensorboard")
    if experiment.target is not Target.sim:
        _check_runtime(experiment, spec)


def _without_effect(experiment: ExperimentConf) -> list[str]:
    """Keys that were set, and that nothing reads in this experiment."""
    comm, train, optimizer = experiment.comm, experiment.train, experiment.optimizer
    family = comm.policy is None
    adamw = optimizer.name == "adamw"
    target = experiment.target
    qgz = "comm.zero_quantized_gradients=true"
    readers: list[tuple[str, object, object, bool, str]] = [
        (
            "comm.weight_bits",
            comm.weight_bits,
            8,
            comm.zero_quantized_weights,
            "comm.zero_quantized_weights=true",
        ),
        (
            "comm.weight_block",
            comm.weight_block,
            2048,
            comm.zero_quantized_weights,
            "comm.zero_quantized_weights=true",
        ),
        *(
            (f"comm.{key}", getattr(comm, key), default, comm.zero_quantized_gradients, qgz)
            for key, default in (
                ("gradient_path", GradientPath.two_hop),
                ("gradient_bits", [4, 4]),
                ("gradient_block", 256),
            )
        ),
        (
            "comm.hpz_lifetime",
            comm.hpz_lifetime,
            HpzLifetime.micro_batch,
            comm.zero_hpz_partition_size != 1,
            "hpZ",
        ),
        ("comm.zero_quantized_weights", comm.zero_quantized_weights, False, family, "comm.policy=null"),
        ("comm.zero_quantized_gradients", comm.zero_quantized_gradients, False, family, "comm.policy=null"),
        (
            "comm.overlap",
            comm.overlap,
            False,
            experiment.cluster.backend is Backend.gloo,
            "cluster.backend=gloo",
        ),
        ("optimizer.momentum", optimizer.momentum, 0.0, not adamw, "optimizer=sgd"),
        ("train.loss_scale", train.loss_scale, 0.0, experiment.precision is Precision.fp16, "precision=fp16"),
        (
            "train.lr_min_fraction",
            train.lr_min_fraction,
            0.1,
            train.lr_schedule != "constant",
            "train.lr_schedule",
        ),
        ("train.eval_batches", train.eval_batches, 4, train.eval_every > 0, "train.eval_every"),
        ("launch", experiment.launch, Launch.local, target is not Target.sim, "target=runtime or both"),
    ]
    return [
        f"{key}={value.value if isinstance(value, Enum) else value} has no effect without {needs}"
        for key, value, default, read, needs in readers
        if value != default and not read
    ]


def _absolute(experiment: ExperimentConf) -> None:
    """Paths are of the folder that the command was given in; ranks may run elsewhere."""
    for owner, key in (
        (experiment.data, "path"),
        (experiment.train, "resume_from"),
        (experiment.model, "config_json"),
        (experiment.comm, "config_json"),
    ):
        value = getattr(owner, key)
        if value is not None:
            setattr(owner, key, str(Path(value).absolute()))
    policy = experiment.comm.policy
    if policy is not None and ".py:" in policy:
        where, _, name = policy.rpartition(":")
        experiment.comm.policy = f"{Path(where).absolute()}:{name}"


def _check_runtime(experiment: ExperimentConf, spec: ModelSpec) -> None:
    target = experiment.target.value
    if spec.family not in RUNTIME_FAMILIES:
        raise ValueError(
            f"model={spec.name} of family {spec.family} cannot be trained here (target={target}): the "
            f"runtime has families {list(RUNTIME_FAMILIES)}; use target=sim, or attach(model, comm) in your "
            "own loop"
        )
    if experiment.data.name == "text" and spec.vocab < 256:
        raise ValueError(f"model.vocab={spec.vocab} must be >= 256 with data=text, whose tokens are bytes")
    if experiment.data.path is not None and not Path(experiment.data.path).is_file():
        raise ValueError(f"data.path={experiment.data.path!r}: no such file; give a text file, or null")
    if experiment.train.resume_from is not None and not Path(experiment.train.resume_from).is_dir():
        raise ValueError(f"train.resume_from={experiment.train.resume_from!r}: no such checkpoint folder")
