"""What an importer found out: keys of a cluster, each with where it comes from, and what had to be guessed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Value = int | float | str | bool | None | list[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One key of `cluster`, such as "intra_node.bandwidth_Bps".

    `reason`: where the value comes from, for a remark behind it. `spread`: (worst, best) where it is a guess.
    """

    key: str
    value: Value
    reason: str
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Likeness:
    """The cluster of ours that has a file's GPUs, and how that is known."""

    cluster: str
    how: str
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Imported:
    """What one file says about a cluster.

    `summary`: what the file holds, in a line. `notes`: guesses that are no key's value. `gpu`: what stands in where
    the user names no base.
    """

    source: str
    format: str
    summary: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    gpu: Likeness | None = None


@dataclass(slots=True)
class Base:
    """The cluster that findings are put onto: plain values of a `conf/cluster` file, its own defaults resolved.

    `guessed`: nobody says that its GPUs are those of the files.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    guessed: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value
