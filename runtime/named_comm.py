"""Communication policies by the names that a loop of one's own calls them."""

import os
from importlib.resources import files
from typing import cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..conf.schema import CommConf


def comm_names() -> list[str]:
    """Those of the config group `comm` whose keys do not come from a file."""
    folder = files("twinbed.conf") / "comm"
    names = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir())
    names.remove("deepspeed")  # its keys come from a file: compose it, and pass the CommConf
    return names


def named_comm_node(name: str) -> DictConfig | ListConfig:
    """The keys of `comm=name`, typed, to be merged with others.

    Raises:
        ValueError: If there is no such name.
    """
    known = comm_names()
    if name not in known:
        raise ValueError(f"comm={name!r} is unknown; use one of {known}")
    text = (files("twinbed.conf") / "comm" / f"{name}.yaml").read_text(encoding="utf-8")
    return OmegaConf.merge(OmegaConf.structured(CommConf), OmegaConf.create(text))


def named_comm(name: str) -> CommConf:
    """The policy's keys.

    Raises:
        ValueError: If there is no such name.
    """
    return cast(CommConf, OmegaConf.to_object(named_comm_node(name)))


def local_world_size() -> int | None:
    """Ranks of a node, as torchrun says; None: nobody does."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value is not None else None
