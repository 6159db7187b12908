"""Tables for people: units chosen, numbers rounded, missing values said; and their rendering as text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .parity import COMPARED
from .tables import SIDES, records
from .units import MISSING_TEXT, is_absent, number, scale

MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class ShownTable:
    """Text cells, ready to lay out. `columns` from `first_number` on are right-aligned."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    first_number: int
    left_out: int = 0  # rows that only the CSV has
    marked: frozenset[tuple[int, int]] = frozenset()  # (row, column) to point at


def parity_shown(table: pd.DataFrame) -> ShownTable:
    """metric, unit, predicted, measured, ratio, naive."""
    rows = []
    for row in records(table):
        factor, unit = scale(str(row["unit"]), [row["predicted"], row["measured"]])
        cells = [number(row[key], factor) for key in (*SIDES, "naive")]
        rows.append((str(row["metric"]), unit, cells[0], cells[1], _ratio(row["ratio"]), cells[2]))
    return _without_empty(
        ShownTable(("metric", "unit", *SIDES, "ratio", "naive: bytes / bandwidth"), tuple(rows), 2)
    )


def iteration_shown(table: pd.DataFrame) -> ShownTable:
    """One row a side: n, mean, median, smallest and largest, range over guessed inputs."""
    keys = ("mean", "p50", "min", "max", "low", "high")
    factor, unit = scale("s", _numbers(item for key in keys for item in table[key]))
    rows = [
        (str(row["side"]), number(row["n"]), *(number(row[key], factor) for key in keys))
        for row in records(table)
    ]
    columns = ("", "n", *(f"{name} ({unit})" for name in ("mean", "median", "min", "max", "low", "high")))
    return ShownTable(columns, tuple(rows), 1)


def plain_shown(table: pd.DataFrame, units: dict[str, str], *, first_number: int) -> ShownTable:
    """Any table with one unit a column; `units` maps a column to `s`, `byte` or `count`."""
    shown = table.head(MAX_ROWS)
    headers, cells = [], []
    for column in table.columns:
        name = str(column).removesuffix("_bytes").removesuffix("_s").replace("_", " ")
        if column in units:
            factor, unit = scale(units[column], _numbers(table[column]))
            headers.append(name if units[column] == "count" else f"{name} ({unit})")
            cells.append([number(item, factor) for item in shown[column]])
        else:
            headers.append(name)
            cells.append([text(item) for item in shown[column]])
    rows = tuple(zip(*cells, strict=True)) if len(shown) else ()
    return ShownTable(tuple(headers), rows, first_number, left_out=len(table) - len(shown))


def sides_shown(table: pd.DataFrame, by: str, unit: str, amount: str) -> ShownTable:
    """Rows of `by`, a column a side, each row in its own unit. `table` has columns side, `by`, `amount`."""
    present = [side for side in SIDES if side in set(table["side"])]
    rows = []
    names = list(dict.fromkeys(table[by]))
    for name in names[:MAX_ROWS]:
        of = table[table[by] == name].set_index("side")[amount]
        amounts = [of.get(side) for side in present]
        factor, label = scale(unit, _numbers(amounts))
        rows.append((str(name).replace("_", " "), label, *(number(item, factor) for item in amounts)))
    return ShownTable((by, "unit", *present), tuple(rows), 2, left_out=max(len(names) - MAX_ROWS, 0))


def other_shown(table: pd.DataFrame) -> ShownTable:
    """quantity, unit, predicted, measured."""
    rows = [
        (str(row["quantity"]), str(row["unit"]), number(row["predicted"]), number(row["measured"]))
        for row in records(table)
    ]
    return _without_empty(ShownTable(("quantity", "unit", *SIDES), tuple(rows), 2))


def input_shown(table: pd.DataFrame) -> ShownTable:
    """What a prediction rests on: texts as they are, numbers to four digits."""
    cells = [
        tuple(number(item) if isinstance(item, int | float) else text(item) for item in row.values())
        for row in records(table)
    ]
    return ShownTable(tuple(str(column) for column in table.columns), tuple(cells), len(table.columns))


def difference_shown(difference: Mapping[str, Any]) -> ShownTable:
    """The two rows of `parity.first_difference` side by side, a line a column, differing ones marked."""
    rows = []
    for column in COMPARED:
        pair = (difference[side] for side in ("sim", "runtime"))
        rows.append((column.replace("_", " "), *(str(row[column]) if row else "no entry" for row in pair)))
    marked = {(COMPARED.index(column), c) for column in difference["columns"] for c in (1, 2)}
    return ShownTable(("column", *SIDES), tuple(rows), 1, marked=frozenset(marked))


def sweep_shown(table: pd.DataFrame, keys: Sequence[str]) -> ShownTable:
    """A row a run. Columns that no run fills are left out."""
    times = [*table["iteration_s"], *table["low_s"], *table["high_s"], *table["predicted_s"]]
    factor, unit = scale("s", _numbers(times))
    byte_factor, byte_unit = scale("byte", _numbers(table["inter_node_bytes_per_rank"]))
    peak_factor, peak_unit = scale("byte", _numbers(table["peak_memory_bytes"]))
    equal = {True: "equal", False: "DIFFER"}
    columns: dict[str, list[str]] = {"run": [str(item) for item in table["run"]]}
    columns |= {key: [str(item) for item in table[key]] for key in keys}
    columns["status"] = [str(item) for item in table["status"]]
    lead = len(columns)
    columns[f"iteration ({unit})"] = [_with_range(row, factor) for row in records(table)]
    columns[f"predicted ({unit})"] = [number(item, factor) for item in table["predicted_s"]]
    columns["predicted / measured"] = [_ratio(item) for item in table["ratio"]]
    columns["times"] = ["VOID" if item else MISSING_TEXT for item in table["void"]]
    columns["ledgers"] = [
        MISSING_TEXT if is_absent(item) else equal[bool(item)] for item in table["ledger_equal"]
    ]
    columns["tokens/s"] = [number(item) for item in table["tokens_per_s"]]
    columns["TFLOP/s per device"] = [number(item) for item in table["tflops_per_gpu"]]
    columns[f"between nodes ({byte_unit} per rank)"] = [
        number(item, byte_factor) for item in table["inter_node_bytes_per_rank"]
    ]
    columns[f"peak memory ({peak_unit})"] = [number(item, peak_factor) for item in table["peak_memory_bytes"]]
    columns["speed-up"] = [_ratio(item) for item in table["speedup"]]
    return _without_empty(ShownTable(tuple(columns), tuple(zip(*columns.values(), strict=True)), lead))


def render_text(table: ShownTable, *, indent: str = "  ") -> str:
    """The table in fixed-width text, one line a row; marked cells stand in asterisks."""
    body = [
        [f"*{cell}*" if (r, c) in table.marked else cell for c, cell in enumerate(row)]
        for r, row in enumerate(table.rows)
    ]
    lines = [list(table.columns), *body]
    widths = [max(len(line[c]) for line in lines) for c in range(len(table.columns))]

    def laid_out(line: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if c >= table.first_number else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return (indent + "  ".join(cells)).rstrip()

    text_lines = [laid_out(lines[0]), indent + "  ".join("-" * width for width in widths)]
    text_lines += [laid_out(line) for line in body]
    if table.left_out:
        text_lines.append(f"{indent}... and {table.left_out} more rows in the CSV")
    return "\n".join(text_lines) + "\n"


def percent(error: object) -> str:
    """A signed fraction as a percentage, or a dash where there is nothing."""
    if is_absent(error):
        return MISSING_TEXT
    assert isinstance(error, int | float)
    return f"{error:+.1%}"


def text(item: object) -> str:
    """A cell that is no number."""
    return MISSING_TEXT if is_absent(item) else str(item)


def _without_empty(table: ShownTable) -> ShownTable:
    """Without the number columns that no row fills."""
    kept = [
        c
        for c in range(len(table.columns))
        if c < table.first_number or any(row[c] not in (MISSING_TEXT, "") for row in table.rows)
    ]
    rows = tuple(tuple(row[c] for c in kept) for row in table.rows)
    return ShownTable(tuple(table.columns[c] for c in kept), rows, table.first_number)


def _ratio(amount: object) -> str:
    return MISSING_TEXT if is_absent(amount) else f"{amount:.3f}"


def _with_range(row: dict[str, Any], factor: float) -> str:
    mean, low, high = row["iteration_s"], row["low_s"], row["high_s"]
    if is_absent(mean) or is_absent(low) or is_absent(high) or low == high:
        return number(mean, factor)
    return f"{number(mean, factor)} ({number(low, factor)}-{number(high, factor)})"


def _numbers(items: Iterable[object]) -> list[float]:
    return [float(item) for item in items if isinstance(item, int | float) and not is_absent(item)]
