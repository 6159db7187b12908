"""The tables of `twinbed-validate` as plain text, at most 110 columns wide."""

import textwrap
from collections.abc import Mapping, Sequence

from .evaluated import OOM, Evaluated
from .gates import Verdict
from .left_out import LEFT_OUT
from .quantities import QUANTITIES
from .statistics import Errors, Statistics, null_errors, table_statistics
from .tables import table_of

WIDTH = 110
_ID_WIDTH = 34
_MISSING = "-"
_LEGEND = (
    "error: ours / paper - 1. null: the error of one constant FLOP/s of a GPU for the whole table, recomputation "
    "counted, fitted without the row itself (of speed-ups: one constant speed-up). range: ours with all guessed "
    "inputs at their worst and best. F: a constant was fitted on this row. U: the figure is not verified. Both "
    "are left out of the held-out means."
)


def legend() -> str:
    return _wrapped(_LEGEND, indent="")


def table_text(name: str, rows: Sequence[Evaluated]) -> str:
    """One table: a line a row, its statistics, the constants fitted, the choices made."""
    table = table_of(name)
    units = list(dict.fromkeys((e.row.quantity, e.row.unit) for e in rows))
    lines = [_wrapped(f"{name}: {table.title}" if table.title != name else name, indent="")]
    lines += [_wrapped(f"{quantity} in {unit}{_about(quantity)}") for quantity, unit in units]
    lines += ["", *_row_lines(rows, mixed=len({unit for _, unit in units}) > 1), ""]
    lines += _statistics_lines(table_statistics(rows))
    lines += [_wrapped(f"fitted: {told}") for told in fitted_constants(rows)]
    lines += [_wrapped(f"free choice, not published: {choice}") for choice in table.free_choices]
    lines += [_wrapped(f"note: {note}") for note in table.notes]
    guessed = list(dict.fromkeys(key for e in rows for key in e.guessed_inputs))
    lines += [_wrapped(f"guessed inputs: {', '.join(guessed)}")] if guessed else []
    lines += [_wrapped(told) for told in _by_reason(rows)]
    return "\n".join(lines) + "\n"


def gates_text(verdicts: Sequence[Verdict]) -> str:
    """One line a gate."""
    if not verdicts:
        return "gates: none for these tables\n"
    lines = ["gates"]
    for verdict in verdicts:
        lines.append(_wrapped(f"{'MISSED' if verdict.missed else 'held  '} {verdict.sentence}", hanging=9))
    return "\n".join(lines) + "\n"


def left_out_text() -> str:
    """Published figures that are no rows: what they are, and why, a line each."""
    total = sum(each.figures for each in LEFT_OUT)
    lines = [f"published, and no rows here: {total} figures"]
    lines += [
        _wrapped(f"{each.what} ({each.figures}, {each.source}): {each.reason}", hanging=4)
        for each in LEFT_OUT
    ]
    return "\n".join(lines) + "\n"


def overview_text(tables: Mapping[str, Sequence[Evaluated]]) -> str:
    """One line a table."""
    counted, errors = ("rows", "held out", "simulated"), ("mean", "largest", "bias", "ranks")
    cells: list[tuple[str, ...]] = [("table", *counted, *errors, "null mean", "null largest")]
    for name, rows in tables.items():
        found = table_statistics(rows)
        ours = _error_cells(found.ours)
        null = _error_cells(found.null)
        counts = (found.num_rows, found.num_held_out, found.num_rows - found.num_not_simulated)
        cells.append((name, *(str(count) for count in counts), *ours, null[0], null[1]))
    return "\n".join(_laid_out(cells, first_number=1)) + "\n"


def fitted_constants(rows: Sequence[Evaluated]) -> list[str]:
    """`name = value, on rows`, each constant once."""
    told = [
        f"{c.get('name')} = {c.get('value')}, on {c.get('rows')}" for e in rows for c in e.fitted_constants
    ]
    return list(dict.fromkeys(told))


def figure(value: float | None) -> str:
    """About four digits."""
    if value is None:
        return _MISSING
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def percent(error: float | None) -> str:
    return _MISSING if error is None else f"{error:+.1%}"


def _row_lines(rows: Sequence[Evaluated], *, mixed: bool) -> list[str]:
    null = null_errors(rows)
    cells = [("row", *(("unit",) if mixed else ()), "paper", "ours", "error", "null", "range", "")]
    for e in rows:
        ranged = "" if e.low is None or e.high is None else f"{figure(e.low)} .. {figure(e.high)}"
        if ranged and figure(e.low) == figure(e.high):
            ranged = ""
        cells.append(
            (
                textwrap.shorten(e.row.row_id, _ID_WIDTH, placeholder="..."),
                *((e.row.unit,) if mixed else ()),
                figure(e.row.value),
                figure(e.ours) if e.ours is not None else "not simulated",
                percent(e.rel_error),
                percent(null.get(e.row.row_id)),
                ranged,
                _marks(e),
            )
        )
    return _laid_out(cells, first_number=2 if mixed else 1, last_text=True)


def _marks(e: Evaluated) -> str:
    marks = ["F"] if e.row.fitted else []
    marks += [] if e.row.verified else ["U"]
    marks += ["oom"] if any(note.startswith(OOM) for note in e.notes) else []
    return " ".join(marks)


def _statistics_lines(found: Statistics) -> list[str]:
    counts = [f"{found.num_rows} rows", f"{found.num_held_out} held out"]
    counts += [f"{found.num_fitted} fitted"] if found.num_fitted else []
    counts += [f"{found.num_unverified} unverified"] if found.num_unverified else []
    counts += [f"{found.num_not_simulated} not simulated"] if found.num_not_simulated else []
    cells = [("", "mean", "largest", "bias", "rank correlation")]
    sides = (
        ("ours, held out", found.ours),
        ("null, held out", found.null),
        ("null, recomputation not counted", found.null_model),
    )
    cells += [(name, *_error_cells(errors)) for name, errors in sides if errors is not None]
    if found.num_fitted and found.ours_with_fitted is not None:
        cells.append(("ours, with fitted rows", *_error_cells(found.ours_with_fitted)))
    lines = [f"  {', '.join(counts)}"]
    lines += _laid_out(cells, first_number=1) if len(cells) > 1 else []
    if found.in_range is not None:
        inside, of = found.in_range
        lines.append(f"  {inside} of {of} published figures lie in the range of the guessed inputs")
    return lines


def _error_cells(errors: Errors | None) -> tuple[str, str, str, str]:
    if errors is None:
        return (_MISSING,) * 4
    ranks = _MISSING if errors.rank_correlation is None else f"{errors.rank_correlation:+.3f}"
    return (f"{errors.mean:.1%}", f"{errors.largest:.1%}", percent(errors.bias), ranks)


def _by_reason(rows: Sequence[Evaluated]) -> list[str]:
    """What rows have in common is said once: why they were not simulated, and what the simulation warned of."""
    told: dict[str, list[str]] = {}
    for e in rows:
        texts = [f"simulation: {note}" for note in e.notes] if e.ours is not None else [_why_not(e)]
        for text in texts:
            told.setdefault(text, []).append(e.row.row_id)
    return [f"{text} ({_listed(text, ids)})" for text, ids in told.items()]


def _why_not(e: Evaluated) -> str:
    needs = e.row.needs
    return f"not simulated: waits for {needs}" if needs else f"not simulated: {e.reason}"


def _listed(text: str, ids: Sequence[str]) -> str:
    """All rows that were not simulated; of those that were, the first."""
    if text.startswith("not simulated"):
        return ", ".join(ids)
    return ids[0] if len(ids) == 1 else f"{len(ids)} rows, {ids[0]} first"


def _about(quantity: str) -> str:
    about = QUANTITIES[quantity].about
    return f" ({about})" if about else ""


def _laid_out(cells: Sequence[Sequence[str]], *, first_number: int, last_text: bool = False) -> list[str]:
    widths = [max(len(line[c]) for line in cells) for c in range(len(cells[0]))]
    lines = []
    for line in cells:
        parts = []
        for c, cell in enumerate(line):
            left = c < first_number or (last_text and c == len(line) - 1)
            parts.append(cell.ljust(widths[c]) if left else cell.rjust(widths[c]))
        lines.append(("  " + "  ".join(parts)).rstrip())
    return lines


def _wrapped(text: str, *, indent: str = "  ", hanging: int = 2) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * hanging,
        break_on_hyphens=False,
    )
