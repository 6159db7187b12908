"""The report on a folder of `twinbed-validate`: the simulator against published rows."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from .blocks import PAGE, Block, Report, Section, html, terminal
from .load import Validation
from .show import ShownTable, percent
from .units import number

BAND = 0.1  # the shaded band of the figures
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#555a66")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK, _GRID = "#1d2733", "#dfe4ea"
_MAX_COLUMNS = 3  # panels side by side
_LOG_SPAN = 8.0  # figures that differ by more are drawn on logarithmic axes


def validation_report(found: Validation) -> Report:
    """The report: errors by table, and every row."""
    report = Report()
    rows = rows_table(found)
    tables = tables_table(found)
    sentences = _sentences(rows, found)
    errors = Section("errors", "Errors by table", "Errors")
    errors.blocks.append(
        Block(
            text="The error is ours / paper - 1. Of each table the rows that are held out: verified, and no "
            "constant of the simulator was fitted on them. The null baseline is one constant rate for the whole "
            "table, fitted without the row itself."
        )
    )
    errors.blocks.append(Block(table=tables_shown(tables), csv=report.add_table("tables", tables)))
    simulated = rows[rows["ours"].notna()]
    if len(simulated):
        uri = report.add_figure("errors", errors_figure(simulated))
        caption = (
            "A dot is a row, hollow where it is fitted or not verified. Bars go from the smallest to the largest "
            f"error of the held-out rows; the mark is their mean. Shaded: within {BAND:.0%}."
        )
        errors.blocks.append(Block(figure_uri=uri, caption=caption))
    scatter = Section("scatter", "Paper and simulator", "Scatter")
    if len(simulated):
        uri = report.add_figure("scatter", scatter_figure(simulated))
        caption = f"One panel a unit. The line is equality, the band {BAND:.0%} around it; hollow as above."
        scatter.blocks.append(Block(figure_uri=uri, caption=caption, wide=True))
    else:
        scatter.blocks.append(Block(text="No row could be simulated."))
    all_rows = Section("rows", "All rows", "Rows")
    csv = report.add_table("rows", rows)
    for table in dict.fromkeys(rows["table"]):
        shown = rows_shown(rows[rows["table"] == table])
        all_rows.blocks.append(Block(table=shown, caption=str(table), folded=True))
    all_rows.blocks.append(Block(text="All rows with their sources:", csv=csv))
    missed = [gate for gate in found.gates if gate.get("missed")]
    chips = [("gates: all held", "good")] if found.gates and not missed else []
    chips = [(f"gates missed: {len(missed)} of {len(found.gates)}", "bad")] if missed else chips
    heading = "The simulator against published rows"
    report.files[PAGE] = html(heading, sentences, chips, [errors, scatter, all_rows])
    report.terminal = terminal(heading, sentences, [], errors)
    return report


def rows_table(found: Validation) -> pd.DataFrame:
    """One line a row: the columns of validate.csv; `ours` and `rel_error` are NaN where it was not simulated."""
    table = pd.DataFrame(list(found.rows))
    return table.astype({"paper": float, "ours": float, "rel_error": float, "fitted": bool, "verified": bool})


def tables_table(found: Validation) -> pd.DataFrame:
    """One line a table: rows, held_out, not_simulated; mean, largest (absolute), bias; null_mean, null_largest.

    Errors are fractions, of held-out rows that were simulated; the null baseline's are from validate.json.
    """
    rows = rows_table(found)
    lines: list[dict[str, Any]] = []
    for name in dict.fromkeys(rows["table"]):
        of = rows[rows["table"] == name]
        errors = of[_held_out(of) & of["ours"].notna()]["rel_error"]
        null = found.statistics.get(str(name), {}).get("null") or {}
        lines.append(
            {
                "table": name,
                "rows": len(of),
                "held_out": len(errors),
                "not_simulated": int(of["ours"].isna().sum()),
                "mean": errors.abs().mean(),
                "largest": errors.abs().max(),
                "bias": errors.mean(),
                "null_mean": null.get("mean"),
                "null_largest": null.get("largest"),
            }
        )
    numeric = ("mean", "largest", "bias", "null_mean", "null_largest")
    return pd.DataFrame(lines).astype(dict.fromkeys(numeric, float))


def tables_shown(table: pd.DataFrame) -> ShownTable:
    """Of `tables_table`."""
    errors = ("mean", "largest", "bias", "null_mean", "null_largest")
    columns = ("table", "rows", "held out", "not simulated", *(name.replace("_", " ") for name in errors))
    counts = ("rows", "held_out", "not_simulated")
    lines = [
        (
            str(row["table"]),
            *(number(row[key]) for key in counts),
            # only the bias has a sign
            *(percent(row[key]).removeprefix("" if key == "bias" else "+") for key in errors),
        )
        for row in table.to_dict("records")
    ]
    return ShownTable(columns, tuple(lines), 1)


def rows_shown(rows: pd.DataFrame) -> ShownTable:
    """Of one table of `rows_table`; every row, however many."""
    lines = [
        (
            str(row["row_id"]),
            str(row["quantity"]).replace("_", " "),
            str(row["unit"]),
            ", ".join(word for word, is_so in _marks(row) if is_so),
            *(number(row[key]) for key in ("paper", "ours")),
            percent(row["rel_error"]),
        )
        for row in rows.to_dict("records")
    ]
    return ShownTable(("row", "quantity", "unit", "", "paper", "ours", "error"), tuple(lines), 4)


def scatter_figure(rows: pd.DataFrame) -> Figure:
    """Paper against simulator, a panel a unit; `rows`: simulated rows of `rows_table`."""
    units = list(dict.fromkeys(rows["unit"]))
    columns = min(len(units), _MAX_COLUMNS)
    lines = -(-len(units) // columns)
    size = (3.6 * columns, 3.5 * lines + 0.5)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(lines, columns, squeeze=False)
    tables = list(dict.fromkeys(rows["table"]))
    for axes in grid.flat[len(units) :]:
        axes.set_visible(False)
    for axes, unit in zip(grid.flat, units, strict=False):
        _draw_panel(axes, rows[rows["unit"] == unit], str(unit), tables)
    labelled: dict[str, Artist] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    figure.legend(
        list(labelled.values()),
        list(labelled),
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    return figure


def errors_figure(rows: pd.DataFrame) -> Figure:
    """Signed errors by table; `rows`: simulated rows of `rows_table`."""
    tables = list(dict.fromkeys(rows["table"]))
    figure = Figure(figsize=(7.0, 0.9 + 0.42 * len(tables)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    _style(axes, grid="x")
    axes.axvspan(-100 * BAND, 100 * BAND, color="#eef2f6", zorder=0)
    axes.axvline(0, color=_INK, linewidth=1)
    for position, table in enumerate(reversed(tables)):
        of = rows[rows["table"] == table]
        colour = _COLOURS[tables.index(table) % len(_COLOURS)]
        held_out = of[_held_out(of)]["rel_error"] * 100
        _dots(axes, of["rel_error"] * 100, [position] * len(of), of, colour, "o", size=22)
        if len(held_out):
            axes.plot([held_out.min(), held_out.max()], [position] * 2, color=colour, linewidth=2, zorder=1)
            axes.plot(held_out.mean(), position, marker="|", color=_INK, markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(tables)), [str(table).replace("_", " ") for table in reversed(tables)])
    axes.set_ylim(-0.6, len(tables) - 0.4)
    axes.set_xlabel("error, ours / paper - 1 (%)")
    return figure


def _draw_panel(axes: Axes, rows: pd.DataFrame, unit: str, tables: Sequence[Any]) -> None:
    _style(axes, grid="both")
    figures = [*rows["paper"], *rows["ours"]]
    low, high = min(figures), max(figures)
    if high > _LOG_SPAN * low > 0:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_locator(NullLocator())
        low, high = low / 1.3, high * 1.3
    else:
        margin = 0.08 * (high - low) or 0.1 * high
        low, high = max(low - margin, 0.0), high + margin
    ends = [low, high]
    upper, lower = ([end * factor for end in ends] for factor in (1 + BAND, 1 - BAND))
    axes.fill_between(ends, lower, upper, color="#e4e9ee", linewidth=0, zorder=0)
    axes.plot(ends, ends, color=_INK, linewidth=1, zorder=1)
    for table in dict.fromkeys(rows["table"]):
        of = rows[rows["table"] == table]
        at = tables.index(table)
        colour = _COLOURS[at % len(_COLOURS)]
        marker = _MARKERS[(at + at // len(_COLOURS)) % len(_MARKERS)]  # a second round pairs them anew
        _dots(axes, of["paper"], of["ours"], of, colour, marker, label=str(table).replace("_", " "))
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    axes.set_xlabel(f"paper ({unit})")
    axes.set_ylabel(f"simulator ({unit})")


def _dots(
    axes: Axes,
    xs: Any,
    ys: Any,
    rows: pd.DataFrame,
    colour: str,
    marker: str,
    *,
    label: str | None = None,
    size: float = 26,
) -> None:
    """Filled where a row is held out, else hollow."""
    faces = [colour if held_out else "white" for held_out in _held_out(rows)]
    edges = [colour] * len(rows)
    axes.scatter(xs, ys, s=size, marker=marker, facecolors=faces, edgecolors=edges, linewidths=1.1, zorder=3)
    if label is not None:  # a key of its own: filled, whichever row comes first
        axes.scatter([], [], s=size, marker=marker, facecolors=colour, edgecolors=colour, label=label)


def _style(axes: Axes, *, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa5b1")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="x" if grid == "x" else "both", color=_GRID)
    axes.set_axisbelow(True)


def _held_out(rows: pd.DataFrame) -> "pd.Series[bool]":
    return rows["verified"] & ~rows["fitted"]


def _marks(row: dict[Any, Any]) -> tuple[tuple[str, bool], ...]:
    return ("fitted", bool(row["fitted"])), ("not verified", not row["verified"])


def _sentences(rows: pd.DataFrame, found: Validation) -> list[str]:
    held_out = rows[_held_out(rows)]
    errors = held_out[held_out["ours"].notna()]["rel_error"].abs()
    told = [
        f"{len(rows)} published rows in {rows['table'].nunique()} tables; {len(held_out)} are held out: verified, "
        f"and nothing was fitted on them."
    ]
    if len(errors):
        within = int((errors <= BAND).sum())
        told.append(
            f"Of {len(errors)} held-out rows that could be simulated, {within} are within {BAND:.0%}; the mean "
            f"error is {errors.mean():.1%}, the largest {errors.max():.1%}."
        )
    lacking = int(rows["ours"].isna().sum())
    if lacking:
        told.append(f"{lacking} {'row' if lacking == 1 else 'rows'} could not be simulated.")
    return told
