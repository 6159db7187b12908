"""`twinbed-validate` on a small folder of rows, simulated for real."""

import csv
import json
from pathlib import Path

import pytest

from twinbed.analysis import report
from twinbed.sim.validate import command
from twinbed.sim.validate.printed import WIDTH

SMALL = "cluster=dgx2_v100 cluster.nodes=2 model=gpt2_small batch.sequence=512"
HEAD = "row_id,table,quantity,unit,value,verified,fitted,source,overrides,against\n"
TIMES = (
    f"one,small,iteration_time,ms,100,yes,no,a paper,{SMALL} comm=zero3,\n"
    f"two,small,iteration_time,ms,200,yes,yes,a paper,{SMALL} comm=zero3 batch.micro=2,\n"
)
ODD = f"odd,small,iteration_time,ms,1,no,no,a paper,{SMALL} comm=zero3 model.colour=red,\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "small.csv").write_text(HEAD + TIMES + ODD)
    return folder


def test_prints_writes_and_plots(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command.main(["--rows", str(rows), "--out", str(out)]) == 0
    printed, progress = capsys.readouterr()
    assert progress == "simulating small, row 1 of 3\n"
    tables, _, written = printed.partition("\nwritten: ")
    assert written.startswith(str(out))
    assert [line for line in tables.splitlines() if len(line) > WIDTH] == []
    assert "3 rows, 1 held out, 1 fitted, 1 unverified, 1 not simulated" in printed
    by_name = {words[0]: words for line in printed.splitlines() if (words := line.split())}
    assert by_name["two"][-1] == "F"
    assert by_name["odd"][-1] == "U"
    assert "not simulated: Could not override 'model.colour'" in printed

    with (out / "validate.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert ",".join(lines[0]) == "row_id,table,quantity,unit,paper,ours,rel_error,fitted,verified,source"
    one, two, odd = lines[1:]
    assert one[:5] == ["one", "small", "iteration_time", "ms", "100.0"]
    assert float(one[6]) == pytest.approx(float(one[5]) / 100 - 1)
    assert 0 < float(one[5]) < float(two[5])
    assert (one[7:9], two[7:9], odd[5:9]) == (["no", "yes"], ["yes", "yes"], ["", "", "no", "no"])
    found = json.loads((out / "validate.json").read_text())["tables"]["small"]
    assert found["statistics"]["ours"]["mean"] == pytest.approx(abs(float(one[6])))
    assert found["rows"][0]["low"] < float(one[5]) < found["rows"][0]["high"]
    assert found["guessed_inputs"]
    # of row one: what row two's rate gives for its computation
    assert found["statistics"]["null"]["mean"] == pytest.approx(abs(found["rows"][0]["null_rel_error"]))

    assert report.main([str(out)]) == 0
    assert "1 row could not be simulated" in " ".join(capsys.readouterr().out.split())
    for name in ("report_scatter.png", "report_errors.png", "report.html", "report_tables.csv"):
        assert (out / name).stat().st_size > 100


def test_a_missed_gate_fails_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    slow, fast = f"{SMALL} comm=zero3 cluster.inter_node.links=1", f"{SMALL} comm=zero3"
    row = f"slow,zeropp_equality,speedup,ratio,1.0,yes,no,a paper,{slow},{fast}\n"
    (folder / "rows.csv").write_text(HEAD + row)
    monkeypatch.setattr(command, "ROWS", folder)
    assert command.main([]) == 1
    assert "MISSED zeropp_equality: least simulated figure 0." in capsys.readouterr().out
    assert command.main(["--no-gate"]) == 0
    (folder / "rows.csv").write_text(HEAD + row.replace(f"{slow},{fast}", f"{fast},{slow}"))
    assert command.main([]) == 0
    assert "held   zeropp_equality: least simulated figure" in capsys.readouterr().out


def test_only_the_chosen_tables(rows: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (rows / "other.csv").write_text(HEAD + ODD.replace("odd,small", "other,other"))
    assert command.main(["--rows", str(rows), "--table", "other"]) == 0
    out = capsys.readouterr().out
    assert "other" in out
    assert "small" not in out.replace("gpt2_small", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--table", "tables"], "--table tables: no such table; use one of ['zeropp', 'zeropp_speedup'"),
        (["--rows", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"twinbed-validate: {words}")


def test_text_in_a_number_column_names_file_and_line(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rows / "small.csv").write_text(HEAD + TIMES.replace(",200,", ",about 200,"))
    assert command.main(["--rows", str(rows)]) == 2
    expected = f"twinbed-validate: {rows / 'small.csv'}:3: column value: 'about 200' is not a number\n"
    assert capsys.readouterr().err == expected


def test_a_folder_that_cannot_be_written(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(["--rows", str(rows), "--out", str(tmp_path / "file")]) == 1
    assert "cannot write into" in capsys.readouterr().err
