"""`twinbed-report` on a folder of `twinbed-validate`."""

import json
from pathlib import Path

import pandas as pd
import pytest

from twinbed.analysis.load import Validation, load
from twinbed.analysis.report import main
from twinbed.analysis.validation import errors_figure, rows_table, scatter_figure, tables_table

HEAD = "row_id,table,quantity,unit,paper,ours,rel_error,fitted,verified,source\n"
ROWS = (
    "a,first,iteration_time,s,10,11,0.1,no,yes,a paper\n"
    "b,first,iteration_time,s,20,16,-0.2,no,yes,a paper\n"
    "c,first,iteration_time,s,20,40,1,yes,yes,a paper\n"
    "d,second,peak_bytes,GB,2,,,no,yes,a paper\n"
    "e,second,peak_bytes,GB,2,2.1,0.05,no,no,a paper\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "validate.csv").write_text(HEAD + ROWS)
    return tmp_path


def loaded(folder: Path) -> Validation:
    found = load(folder)
    assert isinstance(found, Validation)
    return found


def test_errors_are_of_held_out_rows(folder: Path) -> None:
    table = tables_table(loaded(folder)).set_index("table")
    first, second = table.loc["first"], table.loc["second"]
    assert (first["mean"], first["largest"], first["bias"]) == pytest.approx((0.15, 0.2, -0.05))
    assert (first["rows"], first["held_out"], first["not_simulated"]) == (3, 2, 0)
    assert (second["rows"], second["held_out"], second["not_simulated"]) == (2, 0, 1)
    assert pd.isna(second["mean"])


def test_scatter_has_identity_and_band(folder: Path) -> None:
    rows = rows_table(loaded(folder))
    figure = scatter_figure(rows[rows["ours"].notna()])
    seconds, gigabytes = figure.axes
    assert seconds.get_xlabel() == "paper (s)"
    assert gigabytes.get_xlabel() == "paper (GB)"
    (identity,) = seconds.lines
    assert list(identity.get_xdata()) == list(identity.get_ydata())
    band, dots, _ = seconds.collections
    low, high = identity.get_xdata()
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(9)}
    assert {(round(low, 9), round(low * 1.1, 9)), (round(high, 9), round(high * 0.9, 9))} <= corners
    assert dots.get_offsets().tolist() == [[10, 11], [20, 16], [20, 40]]
    white = [1, 1, 1, 1]
    assert [face.tolist() == white for face in dots.get_facecolors()] == [False, False, True]


def test_error_bars_by_table(folder: Path) -> None:
    rows = rows_table(loaded(folder))
    (axes,) = errors_figure(rows[rows["ours"].notna()]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["second", "first"]
    _, bar, mean = axes.lines  # the zero line first; the second table has no held-out row
    assert list(bar.get_xdata()) == pytest.approx([-20, 10])
    assert list(mean.get_xdata()) == pytest.approx([-5])


def test_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statistics = {"first": {"statistics": {"null": {"mean": 0.4, "largest": 0.6}}}}
    gates = [{"missed": True}, {"missed": False}]
    (folder / "validate.json").write_text(json.dumps({"tables": statistics, "gates": gates}))
    assert main([str(folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "5 published rows in 2 tables; 3 are held out" in out
    assert "Of 2 held-out rows that could be simulated, 1 are within 10%; the mean error is 15.0%" in out
    assert "first 3 2 0 15.0% 20.0% -5.0% 40.0% 60.0%" in out
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "gates missed: 1 of 2" in page
    assert page.count('src="data:image/png;base64,') == 2
    for name in ("report_rows.csv", "report_tables.csv", "report_scatter.png", "report_errors.png"):
        assert (folder / name).is_file()


def test_report_without_a_simulated_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "validate.csv").write_text(HEAD + "d,t,peak_bytes,GB,2,,,no,yes,a paper\n")
    assert main([str(tmp_path)]) == 0
    assert "1 row could not be simulated." in capsys.readouterr().out
    assert "No row could be simulated." in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + ROWS.replace(",16,", ",slow,"), "validate.csv:3: column ours: 'slow' is not a number"),
        (HEAD.replace("rel_error", "error") + ROWS, "validate.csv:2: column rel_error is missing"),
        (HEAD + ROWS.replace("no,yes", "no,1", 1), "validate.csv:2: column verified: '1' must be one of"),
        (HEAD + "a,first,iteration_time,s,10\n", "validate.csv:2: column source is missing"),
        (HEAD + ROWS.replace(",10,", ",inf,"), "validate.csv:2: column paper: 'inf' must be finite"),
        (HEAD, "validate.csv: no rows in it"),
    ],
)
def test_a_broken_file_is_one_error(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "validate.csv").write_text(text)
    assert main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
