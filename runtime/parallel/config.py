"""What a script says of its parallelism: a few keys of an experiment, as a mapping, as overrides, or in a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...conf.hints import hint
from ...conf.schema import CommConf, ParallelConf
from ..named_comm import comm_names, named_comm, named_comm_node

_PARALLEL = tuple(f.name for f in fields(ParallelConf))
_COMM = tuple(f.name for f in fields(CommConf) if f.name not in ("name", "config_json"))
_ACCUMULATION = "batch.accumulation"
_SEED = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptConf:
    """Args:
    accumulation: Micro-batches in which `forward_backward` takes a batch.
    seed: Of the dropouts of a foreign model.
    comm_given: Whether the script says how replicas communicate; else they average whole gradients.
    """

    parallel: ParallelConf = field(default_factory=ParallelConf)
    comm: CommConf = field(default_factory=lambda: named_comm("ddp"))
    accumulation: int = 1
    seed: int = 0
    comm_given: bool = False


def read_config(config: Mapping[str, Any] | str | Path) -> ScriptConf:
    """The typed config.

    Keys are `parallel.*` of an experiment, which may stand without "parallel."; `comm`, a name such as zero3, and
    `comm.*`; `batch.accumulation`; `seed`. A mapping may be nested.

    Args:
        config: A mapping; a text of overrides such as "parallel.tensor=4 comm=zero3"; or the path of a YAML file.

    Raises:
        ValueError: If a key or a value is not legal, naming it and what would be.
    """
    parallel: dict[str, Any] = {}
    comm: dict[str, Any] = {}
    name: str | None = None
    others: dict[str, int] = {}
    for key, value in _flat(_mapping(config), ""):
        if key == "comm" or key == "comm.name":
            name = str(value)
        elif key.startswith("comm.") and key.removeprefix("comm.") in _COMM:
            comm[key.removeprefix("comm.")] = value
        elif key.removeprefix("parallel.") in _PARALLEL:
            parallel[key.removeprefix("parallel.")] = value
        elif key in (_ACCUMULATION, _SEED):
            others[key] = _whole(key, value)
        else:
            raise ValueError(
                f"{key}={value!r}: there is no key {key}; legal are {', '.join(f'parallel.{k}' for k in _PARALLEL)} "
                f"(also without 'parallel.'), comm (one of {comm_names()}), "
                f"{', '.join(f'comm.{k}' for k in _COMM)}, {_ACCUMULATION} and {_SEED}"
            )
    if others.get(_ACCUMULATION, 1) < 1:
        raise ValueError(f"{_ACCUMULATION}={others[_ACCUMULATION]} must be >= 1")
    return ScriptConf(
        parallel=cast(ParallelConf, _typed(OmegaConf.structured(ParallelConf), parallel, "parallel")),
        comm=cast(CommConf, _typed(named_comm_node(name or "ddp"), comm, "comm")),
        accumulation=others.get(_ACCUMULATION, 1),
        seed=others.get(_SEED, 0),
        comm_given=name is not None or bool(comm),
    )


def _mapping(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, Path) or str(config).endswith((".yaml", ".yml")):
        return _file(Path(config))
    if not isinstance(config, str):
        raise ValueError(
            f"config={config!r} must be a mapping, a text of overrides such as 'parallel.tensor=4 comm=zero3', or "
            "the path of a YAML file"
        )
    bare = [word for word in config.split() if "=" not in word]
    if bare:
        raise ValueError(
            f"{bare[0]!r} in {config!r} is no override KEY=VALUE, such as parallel.tensor=4, and no path of a YAML "
            "file, which ends in .yaml"
        )
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist(config.split()))
    except (OmegaConfBaseException, YAMLError) as err:
        raise ValueError(f"{config!r} cannot be read: {str(err).splitlines()[0]}") from err
    return cast(Mapping[str, Any], read)


def _file(path: Path) -> Mapping[str, Any]:
    try:
        read = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, OmegaConfBaseException, YAMLError) as err:
        raise ValueError(f"{path} cannot be read: {str(err).splitlines()[0]}") from err
    if not isinstance(read, dict):
        raise ValueError(f"{path} holds a list; it must hold keys such as 'tensor: 4' and 'comm: zero3'")
    return cast(Mapping[str, Any], read)


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys with dots, whether the mapping is nested or has them so."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed(schema: Any, given: Mapping[str, Any], group: str) -> object:
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema, dict(given)))
    except OmegaConfBaseException as err:
        cause = err.__cause__ or err.__context__
        if isinstance(cause, ValueError) and not isinstance(cause, OmegaConfBaseException):
            raise ValueError(str(cause)) from err
        told = hint(err)
        said = f"{group}.{err.full_key}: {str(err).splitlines()[0]}"
        raise ValueError(f"{said}; {told}" if told else said) from err


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value!r} must be a whole number")
    return value
