"""Folders of records: one run, a prediction beside its run, a Hydra multirun, or published rows validated."""

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .parity import PARITY, lacks_ledger, read_whole, void_reason
from .record import LEDGER, RESULT, SCHEMA_VERSION, STATUSES, Record, read_record

SIM, REAL = "sim", "runtime"
VALIDATION, VALIDATION_STATISTICS = "validate.csv", "validate.json"
_TEXTS = ("row_id", "table", "quantity", "unit", "source")
_FLAGS = {"yes": True, "no": False}
# Hydra's sweeper puts a backslash before what its grammar uses
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


@dataclass(slots=True)
class Run:
    """One experiment: its prediction, its real run, or both."""

    folder: Path
    sim: Record | None = None
    real: Record | None = None
    replay_equal: bool | None = None
    void: str | None = None
    parity: dict[str, Any] | None = None  # as the run itself found it, whole
    notes: list[str] = field(default_factory=list)  # what is missing, in words

    @property
    def main(self) -> Record:
        """The record to describe the experiment by: the real run where there is one."""
        record = self.real or self.sim
        assert record is not None
        return record


@dataclass(frozen=True, slots=True)
class SweptRun:
    """One run of a multirun. Only results are read: ledgers and timelines are in each run's own report."""

    number: str
    overrides: Mapping[str, str]
    sim: Mapping[str, Any] | None
    real: Mapping[str, Any] | None
    parity: Mapping[str, Any] | None
    broken: str | None = None  # why its files could not be read: the other runs are still worth a table

    @property
    def main(self) -> Mapping[str, Any] | None:
        return self.real or self.sim


@dataclass(frozen=True, slots=True)
class Sweep:
    """A multirun: its runs in the order in which Hydra numbered them."""

    folder: Path
    runs: Sequence[SweptRun]


@dataclass(frozen=True, slots=True)
class Validation:
    """Published rows beside the simulator, as `twinbed-validate` left them.

    Attributes:
        rows: row_id, table, quantity, unit, source; paper, ours, rel_error (None: not simulated); fitted, verified.
        statistics: What `validate.json` says of each table, where it is there; else empty.
        gates: The same of the gates.
    """

    folder: Path
    rows: Sequence[Mapping[str, Any]]
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gates: Sequence[Mapping[str, Any]] = ()


def load(folder: Path) -> Run | Sweep | Validation:
    """Read whatever kind of folder this is.

    Raises:
        ValueError: If the folder is missing, holds no record, or a file in it is broken; names the file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if (folder / RESULT).is_file():
        record = _read(folder)
        run = Run(folder, real=record) if record.result["target"] == REAL else Run(folder, sim=record)
        run.notes += [*_lacking("run", record), *_beside(folder)]
        return run
    if _has_sides(folder):
        return _load_both(folder)
    if (folder / VALIDATION).is_file():
        return _load_validation(folder)
    children = [child for child in folder.iterdir() if child.is_dir() and _is_run(child)]
    if children:
        runs = [_load_swept(child) for child in sorted(children, key=_numeric_order)]
        if all(run.main is None for run in runs):
            why = next((f"; {run.broken}" for run in runs if run.broken), "")
            raise ValueError(f"{folder}: none of its {len(runs)} runs has left a {RESULT}{why}")
        return Sweep(folder, runs)
    raise ValueError(
        f"{folder} holds no records: expected {RESULT} (a run), {SIM}/ and {REAL}/ (target=both), numbered "
        f"runs (a multirun), or {VALIDATION} (twinbed-validate)"
    )


def load_side(folder: Path, target: str) -> Record:
    """The record of one target: from its own folder, or out of a `target=both` folder.

    Raises:
        ValueError: As `load`, or if the folder holds the other target.
    """
    inner = folder / target
    record = _read(inner if (inner / RESULT).is_file() else folder)
    found = record.result["target"]
    if found != target:
        raise ValueError(f"{folder} holds a run of target={found}, expected target={target}")
    return record


def _load_both(folder: Path) -> Run:
    run = Run(folder)
    if (folder / SIM / RESULT).is_file():
        run.sim = _read(folder / SIM)
        run.notes += _lacking("simulation", run.sim)
    else:
        run.notes.append("The simulation left no record.")
    if (folder / REAL / RESULT).is_file():
        run.real = _read(folder / REAL)
        run.notes += _lacking("real run", run.real)
    else:
        run.notes.append("The real run left no record.")
    parity = _json(folder / PARITY) if (folder / PARITY).is_file() else {}
    run.replay_equal = parity.get("replay_equal")
    run.void = void_reason(parity)
    run.parity = read_whole(parity)
    return run


def _lacking(who: str, record: Record) -> list[str]:
    """A ledger that is gone is not an empty one."""
    if not lacks_ledger(record):
        return []
    return [f"The {who} left no {LEDGER}: what it communicated is not known."]


def _beside(folder: Path) -> list[str]:
    """Where this is one side of a `target=both` folder, the other is to be said."""
    own = folder.resolve()
    other = {SIM: REAL, REAL: SIM}.get(own.name)
    if other is None or not (own.parent / other / RESULT).is_file():
        return []
    return [f"This is one side alone; twinbed-report {folder.parent} sets it beside {other}/."]


def _load_swept(folder: Path) -> SweptRun:
    overrides: Mapping[str, str] = {}
    try:
        overrides = _overrides(folder)
        return _read_swept(folder, overrides)
    except (ValueError, OSError) as err:
        return SweptRun(folder.name, overrides, None, None, None, broken=str(err))


def _read_swept(folder: Path, overrides: Mapping[str, str]) -> SweptRun:
    sim = real = None
    if (folder / RESULT).is_file():
        result = _result(folder)
        sim, real = (None, result) if result["target"] == REAL else (result, None)
    else:
        sim = _result(folder / SIM) if (folder / SIM / RESULT).is_file() else None
        real = _result(folder / REAL) if (folder / REAL / RESULT).is_file() else None
    parity = _json(folder / PARITY) if (folder / PARITY).is_file() else None
    return SweptRun(folder.name, overrides, sim, real, parity)


def _load_validation(folder: Path) -> Validation:
    path = folder / VALIDATION
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = [_validated(row, f"{path}:{reader.line_num}") for row in reader]
    except (UnicodeDecodeError, csv.Error) as err:
        raise ValueError(f"{path}: broken: {err}") from err
    if not rows:
        raise ValueError(f"{path}: no rows in it")
    beside = folder / VALIDATION_STATISTICS
    found = _json(beside) if beside.is_file() else {}
    tables, gates = found.get("tables") or {}, found.get("gates") or []
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{beside}: tables must be an object of objects")
    if not isinstance(gates, list) or not all(isinstance(gate, dict) for gate in gates):
        raise ValueError(f"{beside}: gates must be a list of objects")
    return Validation(folder, rows, {k: t.get("statistics") or {} for k, t in tables.items()}, gates)


def _validated(cells: Mapping[str | None, Any], where: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in (*_TEXTS, "paper", "ours", "rel_error", "fitted", "verified"):
        if not isinstance(cells.get(column), str):
            raise ValueError(f"{where}: column {column} is missing")
        text = cells[column]
        if column in ("fitted", "verified"):
            if text not in _FLAGS:
                raise ValueError(f"{where}: column {column}: {text!r} must be one of {list(_FLAGS)}")
            row[column] = _FLAGS[text]
        elif column in _TEXTS:
            row[column] = text
        elif text or column == "paper":
            row[column] = _figure(text, f"{where}: column {column}")
        else:
            row[column] = None
    return row


def _figure(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError as err:
        raise ValueError(f"{where}: {text!r} is not a number") from err
    if not math.isfinite(found):
        raise ValueError(f"{where}: {text!r} must be finite")
    return found


def _overrides(folder: Path) -> dict[str, str]:
    path = folder / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return {}
    try:
        lines = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        pairs = [str(line).lstrip("+~").partition("=") for line in lines]
    except (yaml.YAMLError, TypeError, UnicodeDecodeError) as err:
        raise ValueError(f"{path}: broken: {err}") from err
    return {key: _ESCAPED.sub(r"\1", text) for key, _, text in pairs}


def _read(folder: Path) -> Record:
    record = read_record(folder)
    _check_result(record.result, folder / RESULT)
    return record


def _result(folder: Path) -> dict[str, Any]:
    result = _json(folder / RESULT)
    _check_result(result, folder / RESULT)
    return result


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{path}: broken JSON: {err}") from err
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _check_result(result: object, path: Path) -> None:
    if not isinstance(result, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(result).__name__}")
    if result.get("target") not in (SIM, REAL):
        raise ValueError(f"{path}: target={result.get('target')!r}: must be one of {[SIM, REAL]}")
    version, status = result.get("schema_version"), result.get("status")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version={version!r}: only {SCHEMA_VERSION} is known here")
    if status not in STATUSES:
        raise ValueError(f"{path}: status={status!r}: must be one of {list(STATUSES)}")
    groups = ("experiment", "iteration_s", "phases_s", "comm", "memory_bytes")
    for key in groups:
        if not isinstance(result.get(key) or {}, dict):
            raise ValueError(f"{path}: {key} must be an object, found {type(result[key]).__name__}")
    for key in ("ranks", "loss", "guessed_inputs", "fitted_constants", "warnings", "classes"):
        if not isinstance(result.get(key) or [], list):
            raise ValueError(f"{path}: {key} must be a list, found {type(result[key]).__name__}")
    if not all(isinstance(entry, dict) for entry in result.get("ranks") or []):
        raise ValueError(f"{path}: ranks must be a list of objects")


def _has_sides(folder: Path) -> bool:
    return any((folder / side / RESULT).is_file() for side in (SIM, REAL))


def _is_run(folder: Path) -> bool:
    return (folder / RESULT).is_file() or _has_sides(folder) or (folder / ".hydra").is_dir()


def _numeric_order(folder: Path) -> tuple[int, int, str]:
    number = re.fullmatch(r"\d+", folder.name)
    return (0, int(folder.name), "") if number else (1, 0, folder.name)
