"""Published rows: one CSV file holds one table or several, one line a figure that somebody printed."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .quantities import QUANTITIES, UNITS

REQUIRED = ("row_id", "table", "quantity", "unit", "value", "verified", "source", "overrides")
OPTIONAL = ("fitted", "against", "note", "needs")
_FLAGS = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published figure, and the experiment that should give it.

    Attributes:
        row_id: Unique over all files.
        quantity: One of `quantities.QUANTITIES`.
        value: In `unit`, > 0.
        verified: Whether the figure was read in a source. Others are shown, and enter no statistic.
        fitted: Whether a constant of the simulator was chosen by this figure. Such rows are not held out.
        overrides: The experiment, as on the command line of `twinbed`.
        against: The experiment to which a ratio relates; empty for all other quantities.
        needs: What the simulator would have to be able to do for this row; empty: it should be able to.
    """

    row_id: str
    table: str
    quantity: str
    unit: str
    value: float
    verified: bool
    fitted: bool
    source: str
    overrides: tuple[str, ...]
    against: tuple[str, ...] = ()
    note: str = ""
    needs: str = ""

    @property
    def held_out(self) -> bool:
        return self.verified and not self.fitted


def read_folder(folder: Path) -> dict[str, list[PublishedRow]]:
    """All `*.csv` files of a folder: table -> rows, in the order of the files' names and lines.

    Raises:
        ValueError: If the folder has no such file, or a file is broken; names the file, the line and the column.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise ValueError(f"{folder}: no *.csv file with published rows in it")
    tables: dict[str, list[PublishedRow]] = {}
    seen: dict[str, str] = {}
    for path in files:
        for line, row in _read_lines(path):
            where = f"{path}:{line}"
            if row.row_id in seen:
                raise ValueError(
                    f"{where}: column row_id: {row.row_id!r} stands in {seen[row.row_id]} already"
                )
            seen[row.row_id] = where
            tables.setdefault(row.table, []).append(row)
    return tables


def read_rows(path: Path) -> list[PublishedRow]:
    """The rows of one file.

    Raises:
        ValueError: If the file cannot be read or is broken; names the file, the line and the column.
    """
    return [row for _, row in _read_lines(path)]


def _read_lines(path: Path) -> list[tuple[int, PublishedRow]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as err:
        raise ValueError(
            f"{path}: byte {err.start} is not UTF-8 text; save the table as CSV in UTF-8"
        ) from err
    except OSError as err:
        raise ValueError(f"{path}: {err.strerror}") from err
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    found: list[tuple[int, PublishedRow]] = []
    header: list[str] | None = None
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = _header(cells, where)
            else:
                found.append((reader.line_num, _row(_by_column(header, cells, where), where)))
    except csv.Error as err:
        raise ValueError(f"{path}:{reader.line_num}: broken CSV: {err}") from err
    if header is None:
        raise ValueError(f"{path}:1: empty file; the first line must name the columns {list(REQUIRED)}")
    return found


def _header(cells: Sequence[str], where: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    legal = (*REQUIRED, *OPTIONAL)
    for column in REQUIRED:
        if column not in header:
            raise ValueError(f"{where}: column {column} is missing; needed are {list(REQUIRED)}")
    for column in header:
        if column not in legal:
            raise ValueError(f"{where}: column {column!r} is not known; may be one of {list(legal)}")
        if header.count(column) > 1:
            raise ValueError(f"{where}: column {column} stands there {header.count(column)} times")
    return header


def _by_column(header: Sequence[str], cells: Sequence[str], where: str) -> dict[str, str]:
    if len(cells) < len(header):
        raise ValueError(
            f"{where}: column {header[len(cells)]} is missing: {len(cells)} of {len(header)} cells"
        )
    if len(cells) > len(header):
        raise ValueError(
            f"{where}: {len(cells)} cells for {len(header)} columns, after column {header[-1]}; a cell with a "
            "comma in it must stand in double quotes"
        )
    return dict(zip(header, (cell.strip() for cell in cells), strict=True))


def _row(cells: dict[str, str], where: str) -> PublishedRow:
    for column in ("row_id", "table", "source", "overrides"):
        if not cells[column]:
            raise ValueError(f"{where}: column {column} is empty")
    quantity = _one_of(cells, "quantity", list(QUANTITIES), where)
    legal = UNITS[QUANTITIES[quantity].dimension]
    unit = _one_of(cells, "unit", list(legal), where)
    against = tuple(cells.get("against", "").split())
    if QUANTITIES[quantity].is_ratio != bool(against):
        needs = "must give the experiment that the ratio relates to" if not against else "has no effect"
        raise ValueError(f"{where}: column against {needs} for quantity {quantity}")
    return PublishedRow(
        row_id=cells["row_id"],
        table=cells["table"],
        quantity=quantity,
        unit=unit,
        value=_positive(cells, "value", where),
        verified=_flag(cells, "verified", where),
        fitted=_flag(cells, "fitted", where) if cells.get("fitted") else False,
        source=cells["source"],
        overrides=tuple(cells["overrides"].split()),
        against=against,
        note=cells.get("note", ""),
        needs=cells.get("needs", ""),
    )


def _positive(cells: dict[str, str], column: str, where: str) -> float:
    try:
        value = float(cells[column])
    except ValueError as err:
        raise ValueError(f"{where}: column {column}: {cells[column]!r} is not a number") from err
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{where}: column {column}: {cells[column]!r} must be a finite number > 0")
    return value


def _flag(cells: dict[str, str], column: str, where: str) -> bool:
    return _FLAGS[_one_of(cells, column, list(_FLAGS), where)]


def _one_of(cells: dict[str, str], column: str, legal: Sequence[str], where: str) -> str:
    if cells[column] not in legal:
        raise ValueError(f"{where}: column {column}: {cells[column]!r} must be one of {list(legal)}")
    return cells[column]
