"""What `twinbed-validate --out DIR` writes: `validate.csv`, which `twinbed-report` plots, and `validate.json`."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .evaluated import Evaluated
from .gates import Verdict
from .printed import fitted_constants
from .statistics import null_errors, table_statistics
from .tables import table_of

CSV, JSON = "validate.csv", "validate.json"
COLUMNS = (
    "row_id",
    "table",
    "quantity",
    "unit",
    "paper",
    "ours",
    "rel_error",
    "fitted",
    "verified",
    "source",
)


def write(folder: Path, tables: Mapping[str, Sequence[Evaluated]], verdicts: Sequence[Verdict]) -> None:
    """Write both files; the same rows and the same simulator give the same bytes.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((CSV, csv_text(tables)), (JSON, json_text(tables, verdicts))):
        (folder / name).write_text(text, encoding="utf-8", newline="")


def csv_text(tables: Mapping[str, Sequence[Evaluated]]) -> str:
    """One line a row; `ours` and `rel_error` are empty where the row could not be simulated."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for e in (e for rows in tables.values() for e in rows):
        row = e.row
        ours = ("", "") if e.ours is None else (repr(e.ours), repr(e.rel_error))
        flags = ("yes" if row.fitted else "no", "yes" if row.verified else "no")
        figures = (repr(row.value), *ours)
        writer.writerow((row.row_id, row.table, row.quantity, row.unit, *figures, *flags, row.source))
    return buffer.getvalue()


def json_text(tables: Mapping[str, Sequence[Evaluated]], verdicts: Sequence[Verdict]) -> str:
    """Statistics, gates, and of each row what the CSV has no column for."""
    whole: dict[str, Any] = {
        "schema_version": 1,
        "tables": {name: _table(name, rows) for name, rows in tables.items()},
        "gates": [
            {
                "tables": list(v.gate.tables),
                "measure": v.gate.measure.name,
                "bound": v.gate.bound,
                "found": v.found,
                "missed": v.missed,
                "why": v.why,
            }
            for v in verdicts
        ],
    }
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def _table(name: str, rows: Sequence[Evaluated]) -> dict[str, Any]:
    table, null = table_of(name), null_errors(rows)
    return {
        "title": table.title,
        "statistics": asdict(table_statistics(rows)),
        "fitted_constants": fitted_constants(rows),
        "free_choices": list(table.free_choices),
        "guessed_inputs": list(dict.fromkeys(key for e in rows for key in e.guessed_inputs)),
        "rows": [_row(e, null.get(e.row.row_id)) for e in rows],
    }


def _row(e: Evaluated, null_error: float | None) -> dict[str, Any]:
    return {
        "row_id": e.row.row_id,
        "paper": e.row.value,
        "ours": e.ours,
        "rel_error": e.rel_error,
        "low": e.low,
        "high": e.high,
        "null_rel_error": null_error,
        "fitted": e.row.fitted,
        "verified": e.row.verified,
        "overrides": list(e.row.overrides),
        "against": list(e.row.against),
        "not_simulated": e.reason,
        "notes": list(e.notes),
        "note": e.row.note,
        "needs": e.row.needs,
    }
