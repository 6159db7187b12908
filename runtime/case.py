"""What one launch of ranks has to do: a list of cases in `launch.json`. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..analysis.record import write_text

LAUNCH = "launch.json"
TRAIN, CALIBRATE = "train", "calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One experiment of a launch. Starting ranks takes seconds, so one launch runs many.

    Attributes:
        name: Shown in messages; unique within a launch.
        folder: Where its files go, below the launch's folder, or absolute.
        experiment: The resolved config, as `conf.compose.Composed.resolved`.
        kind: "train"; "calibrate"; or "module:function" or "file.py:function", called on every rank with the
            case and a `runtime.worker.WorkerContext`.
        tensorboard: Write TensorBoard's files too.
        warnings: Kept in the record.
        options: For a function of your own.
    """

    name: str
    folder: str
    experiment: dict[str, Any]
    kind: str = TRAIN
    tensorboard: bool = False
    warnings: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in (TRAIN, CALIBRATE) and ":" not in self.kind:
            legal = f"one of {[TRAIN, CALIBRATE]}, or 'module:function'"
            raise ValueError(f"case {self.name}: kind={self.kind!r} must be {legal}")


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """`launch.json`."""

    cases: tuple[Case, ...]
    git_commit: str = ""


def write_launch(folder: Path, cases: Sequence[Case], *, git_commit: str = "") -> None:
    """Write FOLDER/launch.json.

    Raises:
        ValueError: There is no case, or two have one name or folder.
        OSError: The folder cannot be written.
    """
    if not cases:
        raise ValueError("a launch needs at least one case")
    for key in ("name", "folder"):
        values = [getattr(case, key) for case in cases]
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"cases of a launch must differ in {key}, got {twice[0]!r} twice")
    folder.mkdir(parents=True, exist_ok=True)
    content = {"cases": [asdict(case) for case in cases], "git_commit": git_commit}
    write_text(folder / LAUNCH, json.dumps(content, indent=1) + "\n")


def read_launch(folder: Path) -> LaunchFile:
    """Read it back.

    Raises:
        ValueError: There is none, or it is broken.
    """
    path = folder / LAUNCH
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cases = tuple(
            Case(**{**case, "warnings": tuple(case.get("warnings", ()))}) for case in content["cases"]
        )
    except OSError as err:
        raise ValueError(f"{path} cannot be read: {err.strerror}") from err
    except (json.JSONDecodeError, KeyError, TypeError) as err:
        raise ValueError(f"{path} is no launch file: {err}") from err
    return LaunchFile(cases, str(content.get("git_commit", "")))


def finished_marker(folder: Path, index: int) -> Path:
    """The file that says that case `index` has been completed."""
    return folder / f".finished.{index}"
