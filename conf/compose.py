"""From Hydra's config to typed, checked specs. Every error comes here, before any process starts."""

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .balance_check import check_balance
from .data_check import check_data_fits, resolve_epochs
from .deepspeed import read_deepspeed_config
from .hf import read_hf_config
from .hints import hint
from .model_spec import ModelSpec, spec_from_keys
from .offload_check import check_offload
from .schema import (
    Engine,
    ExperimentConf,
    Launch,
    Recompute,
    Target,
)
from .without_effect import without_effect

CONFIG_PATH = "pkg://twinbed.conf"
CONFIG_NAME = "config"
SCHEMA_NAME = "experiment_schema"

# What a training of ours can run; the simulator takes any family that is counted.
RUNTIME_FAMILIES = ("gpt", "llama", "qwen2", "bert", "vit")

# What a file may say of a model that is trained here, and that is not read (runtime/llama.py, bert.py, vit.py)
_UNREAD = {
    **dict.fromkeys(("llama", "qwen2"), "SiLU, norms with 1e-5 and unscaled rotary positions of base 10,000"),
    "bert": "exact GELU and norms with 1e-12",
    "vit": "exact GELU and norms with 1e-5",
}

# Keys of `model` that change a model which a file describes
_BESIDE_A_FILE = ("layers", "vocab", "sequence")


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
        cause = f": {str(err.__cause__).splitlines()[0]}" if err.__cause__ is not None else ""
        told = hint(err)
        raise ValueError(f"{err}{cause}{f'; {told}' if told else ''}") from err
    return from_hydra(config)


def from_hydra(config: DictConfig) -> Composed:
    """Type, resolve and check a composed config.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    warnings: list[str] = []
    _check_keys(config, ExperimentConf, "")
    _check_finite(OmegaConf.to_container(config, resolve=True), "")
    config = _import_deepspeed(config, warnings)
    experiment = _typed(config)
    spec = model_spec(experiment)
    _resolve_batch(experiment, spec)
    check_data_fits(experiment, spec)
    resolve_epochs(experiment, num_replicas=_replicas(experiment))
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
        spec = _with_keys(read_hf_config(Path(model.config_json)), experiment)
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


def _check_keys(config: DictConfig, schema: type, prefix: str) -> None:
    """Refuse keys that were added with `+`: nothing would read them."""
    types = get_type_hints(schema)
    for key in config:
        name = str(key)
        if name not in types:
            raise ValueError(f"{prefix}{name}: there is no such key; use one of {sorted(types)}")
        inner = None if OmegaConf.is_missing(config, name) else config[name]
        if isinstance(inner, DictConfig) and is_dataclass(types[name]):
            _check_keys(inner, types[name], f"{prefix}{name}.")


def _check_finite(value: object, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}={value!r}: must be a finite number")
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, inner in items:
        _check_finite(inner, f"{key}.{name}" if key else str(name))


def _with_keys(spec: ModelSpec, experiment: ExperimentConf) -> ModelSpec:
    """A file's model with the keys that may be given beside it: a part of the same model is still that model."""
    model = experiment.model
    given = {key: getattr(model, key) for key in _BESIDE_A_FILE if getattr(model, key) is not None}
    for key in ("hidden", "heads", "kv_heads", "ffn"):
        if getattr(model, key) is not None:
            raise ValueError(
                f"model.{key}={getattr(model, key)} with model.config_json={model.config_json!r}, which gives it: "
                f"beside a file (model=hf) only {', '.join(f'model.{k}' for k in _BESIDE_A_FILE)} may be given; "
                "change the file, or use model=gpt"
            )
    try:
        return replace(spec, **given)
    except ValueError as err:
        told = ", ".join(f"model.{key}={item}" for key, item in given.items())
        raise ValueError(f"{told} with model.config_json={model.config_json!r}: {err}") from err


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
            key = "optimizer.name"
        before = OmegaConf.select(config, key)
        before = before.value if isinstance(before, Enum) else before
        if key in imported.unsaid and before != value:
            warnings.append(f"{path}: {key}={value} in place of {before}: {imported.unsaid[key]}")
        OmegaConf.update(config, key, value)
    if imported.auto:
        warnings.append(f"{path}: twinbed's own values stand for {', '.join(imported.auto)} ('auto')")
    if imported.offload:
        warnings.append(f"{path}: it offloads, which is not followed by itself: add {imported.offload}")
    if imported.ignored:
        warnings.append(f"{path}: no effect here: {', '.join(imported.ignored)}")
    return config


def _resolve_batch(experiment: ExperimentConf, spec: ModelSpec) -> None:
    batch, ranks = experiment.batch, _replicas(experiment)
    if batch.sequence is None:
        batch.sequence = spec.sequence
    if batch.sequence > spec.sequence:
        raise ValueError(
            f"batch.sequence={batch.sequence} must be <= model.sequence={spec.sequence}, the positions that "
            "the model has"
        )
    if spec.family == "vit" and batch.sequence != spec.sequence:
        raise ValueError(
            f"batch.sequence={batch.sequence} must be the patches + 1 of model={spec.name}: {spec.sequence}, or null"
        )
    if batch.global_sequences is not None:
        a_micro_batch = batch.micro * ranks
        if batch.global_sequences % a_micro_batch:
            raise ValueError(
                f"batch.global_sequences={batch.global_sequences} must be a multiple of batch.micro times "
                f"the {'ranks' if ranks == experiment.cluster.num_ranks else 'replicas of the model'}: "
                f"{batch.micro} * {ranks} = {a_micro_batch}"
            )
        accumulation = batch.global_sequences // a_micro_batch
        if batch.accumulation not in (1, accumulation):
            raise ValueError(
                f"batch.accumulation={batch.accumulation} contradicts batch.global_sequences="
                f"{batch.global_sequences}, which gives {accumulation}; leave one of them out"
            )
        batch.accumulation = accumulation


def _replicas(experiment: ExperimentConf) -> int:
    """Replicas of the model: what tensor and pipeline parallelism leave of the ranks."""
    parallel, cluster = experiment.parallel, experiment.cluster
    model, ranks = parallel.ranks_a_replica, cluster.num_ranks
    where = f"(cluster.nodes={cluster.nodes} x cluster.devices_per_node={cluster.devices_per_node})"
    said = f"parallel.tensor={parallel.tensor} times parallel.pipeline={parallel.pipeline}"
    if model > parallel.tensor * parallel.pipeline:
        said += f" times parallel.sequence={parallel.sequence}"
    if ranks % model:
        legal = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"{said} must divide the number of ranks, {ranks} {where}: the product is {model}, and can be "
            f"one of {legal}"
        )
    replicas = ranks // model
    if parallel.data not in (-1, replicas):
        if model == 1:
            raise ValueError(
                f"parallel.data={parallel.data} must be -1 or the number of ranks, {ranks} {where}"
            )
        raise ValueError(
            f"parallel.data={parallel.data} times {said} is {parallel.data * model}, and must be the number of ranks, "
            f"{ranks} {where}: parallel.data can be -1 or {replicas}"
        )
    return replicas


def _check(experiment: ExperimentConf, spec: ModelSpec, warnings: list[str]) -> None:
    parallel = experiment.parallel
    if experiment.engine not in (Engine.megatron, Engine.fsdp2):
        for key in ("tensor", "pipeline", "virtual_stages", "sequence"):
            if getattr(parallel, key) > 1:
                raise ValueError(
                    f"parallel.{key}={getattr(parallel, key)} needs engine=fsdp2 or megatron, got engine="
                    f"{experiment.engine.value}"
                )
    if experiment.engine is not Engine.fsdp2 and experiment.target is not Target.sim:
        raise ValueError(
            f"engine={experiment.engine.value} needs target=sim, got target={experiment.target.value}"
        )
    if experiment.engine is not Engine.fsdp2 and experiment.optimizer.name in ("lamb", "lars"):
        raise ValueError(
            f"optimizer={experiment.optimizer.name} needs engine=fsdp2, got engine={experiment.engine.value}: how that "
            "takes norms of what it cuts into flat parts is not modelled; use optimizer=adamw or sgd"
        )
    if parallel.sequence_mode == "megatron" and parallel.sequence not in (1, parallel.tensor):
        raise ValueError(
            f"parallel.sequence={parallel.sequence} must be 1 or parallel.tensor={parallel.tensor}: with "
            "parallel.sequence_mode=megatron the ranks of a tensor group share the tokens; or use ring or ulysses"
        )
    if experiment.steps <= experiment.warmup_steps:
        warnings.append(
            f"steps={experiment.steps} is not more than warmup_steps={experiment.warmup_steps}: "
            "iteration_s has no figures"
        )
    if experiment.data.path is not None and experiment.data.name == "synthetic":
        raise ValueError(f"data.path={experiment.data.path!r} has no effect with data={experiment.data.name}")
    warnings += without_effect(experiment)
    warnings += check_offload(experiment)
    warnings += check_balance(experiment, spec)
    if experiment.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("train.tensorboard=true needs the package tensorboard: pip install tensorboard")
    if experiment.target is not Target.sim:
        _check_runtime(experiment, spec)
        if experiment.model.config_json is not None:
            warnings.append(
                f"model.config_json={experiment.model.config_json!r}: its sizes and biases are read; trained here are "
                f"{_UNREAD[spec.family]}, whatever the file says"
            )


def _absolute(experiment: ExperimentConf) -> None:
    """Paths are of the folder that the command was given in; ranks may run elsewhere."""
    for owner, key in (
        (experiment.data, "path"),
        (experiment.train, "resume_from"),
        (experiment.model, "config_json"),
        (experiment.comm, "config_json"),
        (experiment.offload, "path"),
    ):
        value = getattr(owner, key)
        if value is not None:
            setattr(owner, key, str(Path(value).absolute()))
    for conf in (experiment.comm, experiment.balance):
        if conf.policy is not None and ".py:" in conf.policy:
            where, _, name = conf.policy.rpartition(":")
            conf.policy = f"{Path(where).absolute()}:{name}"


def _check_runtime(experiment: ExperimentConf, spec: ModelSpec) -> None:
    target = experiment.target.value
    _check_trainable(spec, target=target)
    if experiment.recompute not in (Recompute.none, Recompute.full):
        raise ValueError(
            f"recompute={experiment.recompute.value} is only simulated: with target={target} use one of "
            "['none', 'full']"
        )
    cluster = experiment.cluster
    if cluster.placement.cyclic and experiment.launch is Launch.torchrun:
        raise ValueError(
            "cluster.rank_order=cyclic with launch=torchrun, which numbers the ranks node by node: use launch=slurm, "
            "whose script says --distribution=cyclic, or cluster.rank_order=block"
        )
    if cluster.placement.cyclic and experiment.target is Target.both and experiment.launch is Launch.local:
        raise ValueError(
            "cluster.rank_order=cyclic with target=both: the probe tells a node's own links by groups of consecutive "
            "ranks, which now span nodes; use target=runtime and target=sim, or cluster.rank_order=block"
        )
    if experiment.kernels.reduce_fp32:
        raise ValueError(f"kernels.reduce_fp32=True is only simulated: leave it false with target={target}")
    if experiment.data.name == "text" and spec.family == "vit":
        raise ValueError(
            f"data=text with model={spec.name} of family vit: it takes pictures; use data=fashion_mnist or synthetic"
        )
    least, tokens = (256, "bytes") if experiment.data.name == "text" else (1, "random")
    mask = spec.family == "bert"
    if spec.family != "vit" and spec.vocab < least + mask:
        behind = ", and the mask's behind them" if mask else ""
        raise ValueError(
            f"model.vocab={spec.vocab} must be >= {least + mask} with data={experiment.data.name}, whose tokens are "
            f"{tokens}{behind}"
        )
    if (
        experiment.data.name == "text"
        and experiment.data.path is not None
        and not Path(experiment.data.path).is_file()
    ):
        raise ValueError(f"data.path={experiment.data.path!r}: no such file; give a text file, or null")
    if experiment.train.resume_from is not None and not Path(experiment.train.resume_from).is_dir():
        raise ValueError(f"train.resume_from={experiment.train.resume_from!r}: no such checkpoint folder")


def _check_trainable(spec: ModelSpec, *, target: str) -> None:
    """Refuse a model that `runtime.stack.build_model` does not build."""
    if spec.family not in RUNTIME_FAMILIES:
        raise ValueError(
            f"model={spec.name} of family {spec.family} cannot be trained here (target={target}): the "
            f"runtime has families {list(RUNTIME_FAMILIES)}; use target=sim, or attach(model, comm) in your own loop"
        )
    head = {"bert": "masked_lm", "vit": "classifier"}.get(spec.family, "lm")
    if spec.head != head:
        raise ValueError(
            f"model.extra.head={spec.head} of model={spec.name} of family {spec.family} cannot be trained here (target="
            f"{target}): must be {head}; or use target=sim"
        )
    if spec.family == "bert" and not spec.tied_embeddings:
        raise ValueError(
            f"model.tied_embeddings=false of model={spec.name} of family bert cannot be trained here (target="
            f"{target}): must be true (untied, the released code leaves one of the head's two biases unused); or use "
            "target=sim"
        )
    if spec.family in ("llama", "qwen2") and spec.head_dim % 2:
        raise ValueError(
            f"model.hidden={spec.hidden} over model.heads={spec.heads} gives heads of {spec.head_dim} with "
            f"target={target}: rotary positions of family {spec.family} turn pairs of features, so it must be even"
        )
