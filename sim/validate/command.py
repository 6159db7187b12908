"""`twinbed-validate`: every published row against the simulator."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .evaluated import Evaluated, Evaluator
from .files import CSV, write
from .gates import judge
from .printed import gates_text, left_out_text, legend, overview_text, table_text
from .rows import PublishedRow, read_folder
from .tables import in_order

ROWS = Path(__file__).parent / "rows"
GATE_MISSED, BAD_INPUT = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, 1 if a gate is missed or output cannot go, 2 for bad input."""
    options = _parser().parse_args(argv)
    try:
        tables = _chosen(read_folder(options.rows or ROWS), options.table)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)  # before a minute of work, not after it
    except ValueError as err:
        sys.stderr.write(f"twinbed-validate: {err}\n")
        return BAD_INPUT
    except OSError as err:
        sys.stderr.write(f"twinbed-validate: cannot write into {options.out}: {err.strerror or err}\n")
        return GATE_MISSED
    evaluated = _evaluate(tables)
    verdicts = judge(evaluated) if options.rows is None else []
    if len(evaluated) > 1:
        sys.stdout.write(f"{overview_text(evaluated)}\n")
    if options.rows is None and not options.table:
        sys.stdout.write(f"{left_out_text()}\n")
    sys.stdout.write(gates_text(verdicts))
    if options.out is not None:
        try:
            write(options.out, evaluated, verdicts)
        except OSError as err:
            sys.stderr.write(f"twinbed-validate: cannot write into {options.out}: {err.strerror or err}\n")
            return GATE_MISSED
        sys.stdout.write(f"\nwritten: {options.out / CSV}; plots: twinbed-report {options.out}\n")
    return GATE_MISSED if any(v.missed for v in verdicts) and not options.no_gate else 0


def _evaluate(tables: dict[str, list[PublishedRow]]) -> dict[str, list[Evaluated]]:
    """Simulate table by table; each is printed as soon as it is done."""
    evaluator, progress = Evaluator(), _Progress(sum(len(rows) for rows in tables.values()))
    sys.stdout.write(f"{legend()}\n\n")
    found: dict[str, list[Evaluated]] = {}
    for name, rows in tables.items():
        found[name] = []
        for row in rows:
            progress.show(row)
            found[name].append(evaluator.evaluate(row))
        progress.clear()
        sys.stdout.write(f"{table_text(name, found[name])}\n")
        sys.stdout.flush()
    return found


class _Progress:
    """On a terminal, one line that is written over; elsewhere a line a table."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._table = total, 0, ""
        self._live = sys.stderr.isatty()

    def show(self, row: PublishedRow) -> None:
        self._done += 1
        if self._live:
            sys.stderr.write(f"\r\x1b[Ksimulating row {self._done} of {self._total}: {row.row_id}")
        elif row.table != self._table:
            sys.stderr.write(f"simulating {row.table}, row {self._done} of {self._total}\n")
        self._table = row.table
        sys.stderr.flush()

    def clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _chosen(
    tables: dict[str, list[PublishedRow]], names: Sequence[str] | None
) -> dict[str, list[PublishedRow]]:
    legal = in_order(tables)
    for name in names or ():
        if name not in tables:
            raise ValueError(f"--table {name}: no such table; use one of {legal}")
    return {name: tables[name] for name in legal if not names or name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinbed-validate",
        description="Simulate every published row we know, and show the errors beside those of a null baseline.",
    )
    parser.add_argument(
        "--table", metavar="NAME", action="append", help="only this table; may be given several times"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="write validate.csv and validate.json there, for twinbed-report",
    )
    parser.add_argument(
        "--no-gate", action="store_true", help="exit with 0 also when the errors are larger than promised"
    )
    parser.add_argument(
        "--rows",
        metavar="DIR",
        type=Path,
        help="rows of your own: a folder of CSV files with the columns of those in sim/validate/rows; no gates",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
