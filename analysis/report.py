"""`twinbed-report DIR`: tables in the terminal; a page, plots and CSV files beside the records."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .blocks import PAGE, Report
from .load import REAL, SIM, Run, Sweep, Validation, load, load_side
from .page import TRACE, run_report, sweep_report
from .parity import PARITY, unrelated
from .validation import validation_report

BAD_INPUT, CANNOT_WRITE, DISAGREE = 2, 1, 3


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code.

    0; 2 for folders that are no records, or two that are no prediction and its run; 1 where output cannot go;
    3 where --compare finds that the two do not agree (`parity.json` says `failed`).
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.folder is None) == (options.compare is None):
        parser.error("give either DIR or --compare SIM_DIR REAL_DIR")
    try:
        if options.compare:
            report, folder = _compare(*options.compare)
        else:
            folder = options.folder
            report = build_report(folder)
    except (ValueError, OSError) as err:
        sys.stderr.write(f"twinbed-report: {err}\n")
        return BAD_INPUT
    folder = options.output or folder
    try:
        write_files(folder, report.files)
    except OSError as err:
        sys.stderr.write(f"twinbed-report: cannot write the report into {folder}: {err.strerror or err}\n")
        return CANNOT_WRITE
    sys.stdout.write(report.terminal)
    sys.stdout.write(f"\n  report: {folder / PAGE}\n")
    if TRACE in report.files:
        sys.stdout.write(f"  timelines, for ui.perfetto.dev: {folder / TRACE}\n")
    if options.compare and report.parity is not None and report.parity["status"] != "ok":
        sys.stderr.write(f"twinbed-report: {'; '.join(report.parity['reasons'])}\n")
        return DISAGREE
    return 0


def build_report(folder: Path) -> Report:
    """All files of the report on a run's, a `target=both`, a multirun or a validation folder; nothing is written yet.

    Raises:
        ValueError: If the folder is missing, holds no record, or a file in it is broken.
    """
    found = load(folder)
    if isinstance(found, Validation):
        return validation_report(found)
    return sweep_report(found) if isinstance(found, Sweep) else run_report(found)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files into `folder`, or none: each is complete under another name before the first appears.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporaries: dict[str, str] = {}
    try:
        for name, content in files.items():
            handle, temporaries[name] = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporaries[name], 0o644)
        for name in files:
            os.replace(temporaries[name], folder / name)
            del temporaries[name]
    finally:
        for temporary in temporaries.values():
            Path(temporary).unlink(missing_ok=True)


def _compare(sim_folder: Path, real_folder: Path) -> tuple[Report, Path]:
    """A prediction made elsewhere beside a run made later; the report goes to `compare/` in its folder."""
    run = Run(real_folder, sim=load_side(sim_folder, SIM), real=load_side(real_folder, REAL))
    assert run.sim is not None
    assert run.real is not None
    differ = unrelated(run.sim.result, run.real.result)
    if differ:
        raise ValueError(
            f"{sim_folder} does not predict {real_folder}: they are different experiments (predicted / measured): "
            + "; ".join(differ)
        )
    report = run_report(run)
    report.files[PARITY] = (json.dumps(report.parity, indent=1, allow_nan=False) + "\n").encode()
    return report, real_folder / "compare"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinbed-report",
        description="Tables, plots and an HTML page from the records of a run or a multirun.",
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="a run's folder (result.json), a target=both folder (sim/, runtime/), a multirun folder, or one that "
        "twinbed-validate --out wrote",
    )
    parser.add_argument(
        "--compare",
        metavar=("SIM_DIR", "REAL_DIR"),
        type=Path,
        nargs=2,
        help="set a prediction against a run made later elsewhere; writes into REAL_DIR/compare",
    )
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="write the report there instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
