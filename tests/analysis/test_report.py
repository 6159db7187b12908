"""The command `twinbed-report` and its page."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from twinbed.analysis.load import Run, Sweep, load
from twinbed.analysis.parity import compare_records, write_parity
from twinbed.analysis.record import Decision, Record, write_record
from twinbed.analysis.report import main, write_files

Make = Callable[..., Record]
Unfinished = Callable[[str, str, str], Record]
VOID = {"meta", "img", "br", "wbr", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting; collects text, links and sources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found["src"]] if "src" in found else []
        assert tag not in ("script", "link", "iframe", "object")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def report(folder: Path) -> Page:
    assert main([str(folder)]) == 0
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_page_of_a_prediction_beside_its_run(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(both)
    out = capsys.readouterr().out
    for text in (page.text, out):
        assert "The ledgers are equal: 120 collectives" in text
        assert "Training gpt_tiny with ZeRO-3 (comm=zero3) on 2 nodes of 2 ranks with 100 Mbit/s" in " ".join(
            text.split()
        )
        assert "iteration time, mean" in text
        assert "0.952" in text
    assert str(both / "report.html") in out
    assert "the prediction is 4.8% less than measured, within 10%" in " ".join(out.split())
    assert "Guessed inputs: none." in page.text
    assert "Fitted constants: none." in page.text
    assert "ui.perfetto.dev" in page.text


def test_page_is_self_contained(both: Path) -> None:
    page = report(both)
    assert len(page.sources) == 6  # iteration, phases, bytes, memory, losses, timeline
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (both / link).is_file()
    assert "http" not in (both / "report.html").read_text(encoding="utf-8").replace(page.text, "")


def test_what_quantized_and_its_first_cost_are_on_the_page(both: Path) -> None:
    assert "at the start" not in report(both).text  # a record from before
    result = json.loads((both / "runtime" / "result.json").read_text())
    result["kernels"] = {"backend": "reference", "reason": "no C++ compiler <c++>", "prepare_s": 1.234}
    (both / "runtime" / "result.json").write_text(json.dumps(result))
    assert "no C++ compiler <c++>: 1.23 s at the start." in report(both).text


def test_files_beside_the_page(both: Path) -> None:
    report(both)
    names = {path.name for path in both.iterdir() if path.is_file()}
    for plot in ("iteration_time", "phases", "bytes", "memory", "losses", "timeline"):
        assert {f"report_{plot}.png", f"report_{plot}.csv"} <= names
    assert json.loads((both / "report_timeline.json").read_text())["traceEvents"]
    assert (both / "report_parity.csv").read_text().startswith("metric,unit,predicted,measured,ratio,naive\n")
    assert not [name for name in names if name.startswith(".")]


def test_the_same_records_give_the_same_files(both: Path, tmp_path: Path) -> None:
    other = shutil.copytree(both, tmp_path / "other")
    report(both)
    report(other)
    for path in both.glob("report*"):
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_a_difference_is_shown_with_both_rows(
    tmp_path: Path, make_record: Make, both_folder: Callable[..., Path]
) -> None:
    real = make_record("runtime")
    real.ledger[0] = replace(real.ledger[0], wire_bytes=3001)
    page = report(both_folder(tmp_path, make_record(), real))
    assert "wire_bytes is 3000 predicted, 3001 executed" in page.text
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count('marked">') == 2


def test_a_void_run_and_warnings_are_said(both: Path) -> None:
    (both / "parity.json").write_text(
        '{"void": true, "void_reason": "load 3.2 on 2 cores", "replay_equal": true}'
    )
    result = json.loads((both / "sim" / "result.json").read_text())
    result["warnings"] = ["comm.overlap had no <effect>"]
    result["guessed_inputs"] = [{"key": "device.launch_ns", "worst": 10000, "best": 3000}]
    (both / "sim" / "result.json").write_text(json.dumps(result))
    page = report(both)
    assert "The times are void: load 3.2 on 2 cores." in page.text
    assert "Replaying the events through the policy gives the same actions." in page.text
    assert "comm.overlap had no <effect>" in page.text  # escaped in the source
    assert "device.launch_ns\n10,000\n3,000" in page.text


@pytest.mark.parametrize("status", ["failed", "oom"])
@pytest.mark.parametrize("target", ["sim", "runtime"])
def test_a_run_without_figures_is_told_in_words(
    tmp_path: Path, make_unfinished: Unfinished, target: str, status: str
) -> None:
    write_record(tmp_path, make_unfinished(target, status, "rank 1 ran into a wall"))
    text = report(tmp_path).text
    assert "rank 1 ran into a wall" in text
    assert ("does not fit in memory" in text) == (status == "oom")
    assert "There is no iteration time" in text
    assert "The record holds no timeline." in text


def test_one_side_failed(
    tmp_path: Path, make_record: Make, make_unfinished: Unfinished, both_folder: Callable[..., Path]
) -> None:
    folder = both_folder(
        tmp_path, make_record(), make_unfinished("runtime", "failed", "rank 1 died at step 3")
    )
    text = report(folder).text
    assert "The real run failed: rank 1 died at step 3." in text
    assert "The ledgers were not compared: a side did not run to its end." in text
    assert "Predicted: 400 ms an iteration. Not measured: the run failed." in text


def test_one_side_missing_and_too_few_steps(tmp_path: Path, make_record: Make) -> None:
    record = make_record(folded=True)
    record.result["iteration_s"] = {"mean": None, "p50": None, "min": None, "max": None, "n": 0}
    write_record(tmp_path / "sim", record)
    text = report(tmp_path).text
    assert "The real run left no record." in text
    assert "no iteration was left after the warm-up (n = 0)" in text


def test_an_empty_experiment_is_no_crash(tmp_path: Path, make_unfinished: Unfinished) -> None:
    record = make_unfinished("runtime", "failed", "cannot compose")
    record.result["experiment"] = {}
    write_record(tmp_path, record)
    assert "configuration is empty" in report(tmp_path).text


def test_multirun(
    tmp_path: Path,
    make_record: Make,
    make_unfinished: Unfinished,
    sweep_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs: list[tuple[list[str], Record | None]] = [
        (
            [f"comm={policy}", f"cluster.inter_node.links={links}"],
            make_record(policy=policy, links=links, step_s=step_s / links),
        )
        for policy, step_s in (("zero3", 0.8), ("zeropp", 0.4))
        for links in (1, 2)
    ]
    runs.append(
        (["comm=qwz", "cluster.inter_node.links=3"], make_unfinished("sim", "failed", "links=3 is odd"))
    )
    page = report(sweep_folder(tmp_path, runs))
    out = capsys.readouterr().out
    for text in (page.text, out):
        assert "A multirun of 5 runs: 4 ok, 1 failed." in text
        assert "run 4 (comm=qwz, cluster.inter_node.links=3), failed: links=3 is odd" in text
        assert "4.000" in text  # zeropp on 2 links against the first
    assert "The fastest is run 3 (comm=zeropp, cluster.inter_node.links=2): 200 ms an iteration." in page.text
    assert len(page.sources) == 1
    times = (tmp_path / "report_times.csv").read_text().splitlines()
    assert times[0] == "cluster.inter_node.links,series,policy,status,iteration_s,low_s,high_s"
    assert times[-1].startswith("2,zeropp,zeropp,ok,0.2")


def test_multirun_over_seeds_plots_losses(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path]
) -> None:
    runs = [
        (
            [f"comm={policy}", f"seed={seed}"],
            make_record("runtime", policy=policy, seed=seed, losses=[3.0, 2.0, 1.0 + seed]),
        )
        for policy in ("zero3", "zeropp")
        for seed in (0, 1)
    ]
    page = report(sweep_folder(tmp_path, runs))
    assert len(page.sources) == 2
    losses = (tmp_path / "report_losses.csv").read_text().splitlines()
    assert losses[1:4] == [
        '"zero3, seed=0",zero3,0,3.0',
        '"zero3, seed=0",zero3,1,2.0',
        '"zero3, seed=0",zero3,2,1.0',
    ]
    assert len(losses) == 1 + 4 * 3


def test_a_broken_run_leaves_the_others_their_table(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep_folder(tmp_path, [(["comm=zero3"], make_record()), (["comm=qwz"], make_record())])
    (folder / "1" / "result.json").write_text("{")
    assert main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "1 ok, 1 broken" in shown
    assert "1/result.json: broken JSON" in shown


def test_multirun_of_both_targets(
    tmp_path: Path, make_record: Make, both_folder: Callable[..., Path]
) -> None:
    for number, policy in enumerate(("zero3", "zeropp")):
        folder = tmp_path / str(number)
        both_folder(folder, make_record(policy=policy), make_record("runtime", policy=policy, step_s=0.5))
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text(f"- comm={policy}\n")
        (folder / "parity.json").write_text(json.dumps({"ledger_equal": number == 0}))
    page = report(tmp_path)
    assert "0.800" in page.text  # predicted / measured
    assert "DIFFER" in page.text
    assert "The ledgers differ in run 1." in page.text


def test_compare_sets_an_earlier_prediction_against_a_later_run(
    tmp_path: Path, make_record: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "laptop", make_record(folded=True))
    write_record(tmp_path / "cluster" / "runtime", make_record("runtime", step_s=0.5, links=2))
    assert main(["--compare", str(tmp_path / "laptop"), str(tmp_path / "cluster")]) == 0
    out = capsys.readouterr().out
    assert "0.800" in out
    assert "cluster.inter_node.links: 1 / 2" in " ".join(out.split())
    parity = json.loads((tmp_path / "cluster" / "compare" / "parity.json").read_text())
    assert parity["ledger_equal"] is True
    assert (tmp_path / "cluster" / "compare" / "report.html").is_file()
    # the wrong way round
    assert main(["--compare", str(tmp_path / "cluster" / "runtime"), str(tmp_path / "laptop")]) == 2
    assert "holds a run of target=runtime, expected target=sim" in capsys.readouterr().err


def balanced_pair(make_record: Make) -> tuple[Record, Record]:
    """A prediction and its run, whose balancing policies were told different times and decided differently."""
    sim, real = make_record(), make_record("runtime", step_s=0.5)
    sim.decisions[:] = [Decision(0, 1, "GroupMeasured(step=2, ffn_ns=80/90)", "keep")]
    real.decisions[:] = [Decision(0, 1, "GroupMeasured(step=2, ffn_ns=20/90)", "migrate 1 ffn from 1 to 0")]
    real.ledger.append(replace(real.ledger[0], stream="lend", op="scatter"))
    return sim, real


def test_the_report_of_a_balanced_run_says_what_its_parity_file_says(
    tmp_path: Path, make_record: Make, both_folder: Callable[..., Path]
) -> None:
    sim, real = balanced_pair(make_record)
    folder = both_folder(tmp_path, sim, real)
    # as run.py: the second simulation, told the run's events, leaves no record
    write_parity(folder, compare_records(sim, real, told=real, replay_equal=True))
    page = report(folder)
    assert (
        "The ledgers are equal: 121 collectives over all ranks, entry by entry, in every column (the simulation's is "
        "of a second simulation, told the run's balance events)." in page.text
    )
    assert "Both runs took the same decisions." in page.text
    assert "differ" not in page.text
    assert "0.800" in page.text
    # a file that is not whole, as of an earlier version, leaves the records to be compared
    (folder / "parity.json").write_text('{"ledger_equal": true, "replay_equal": true}')
    assert "The ledgers are not comparable" in report(folder).text


def test_compare_of_balanced_runs_says_that_they_are_not_comparable_and_does_not_fail(
    tmp_path: Path, make_record: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    for record in balanced_pair(make_record):
        write_record(tmp_path / record.result["target"], record)
    assert main(["--compare", str(tmp_path / "sim"), str(tmp_path / "runtime")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "The ledgers are not comparable: the balancing policies were told different times" in out
    assert "only when the simulation is told the run's events" in out
    parity = json.loads((tmp_path / "runtime" / "compare" / "parity.json").read_text())
    assert (parity["status"], parity["ledger_equal"]) == ("ok", None)


def test_output_goes_elsewhere_on_request(both: Path, tmp_path: Path) -> None:
    assert main([str(both), "--output", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there" / "report.html").is_file()
    assert not (both / "report.html").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, "", "no such folder"),
        ("note.txt", "hello", "holds no records"),
        ("result.json", "{", "broken"),
        ("result.json", "[1]", "expected a JSON object, found list"),
        ("result.json", "{}", "target=None"),
        (
            "result.json",
            '{"target": "sim", "schema_version": 1, "status": "ok", "loss": 3}',
            "loss must be a list",
        ),
        ("result.json", '{"target": "sim", "schema_version": 7}', "schema_version=7: only 1 is known here"),
        (
            "result.json",
            '{"target": "sim", "schema_version": 1, "status": "fine"}',
            "status='fine': must be one of ['ok', 'oom', 'failed']",
        ),
        ("sim/result.json", "{", "sim: broken record"),
        ("3/result.json", "{", "3/result.json: broken JSON"),
    ],
)
def test_bad_folders_give_one_clear_message(
    tmp_path: Path, file: str | None, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if file is not None:
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", ["ledger.csv", "decisions.jsonl", "timeline.json"])
def test_a_broken_part_names_the_run(both: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    (both / "runtime" / file).write_text("rank,oops\n1,2\n")
    assert main([str(both)]) == 2
    assert f"{both / 'runtime'}: broken record" in capsys.readouterr().err


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fdopen, calls = os.fdopen, []

    def full_disk(handle: int, mode: str) -> object:
        calls.append(mode)
        if len(calls) == 2:
            os.close(handle)
            raise OSError(28, "No space left on device")
        return real_fdopen(handle, mode)

    monkeypatch.setattr(os, "fdopen", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path, {"a.png": b"1", "b.png": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (both / "blocked").write_text("a file where a folder should be")
    assert main([str(both), "--output", str(both / "blocked" / "inner")]) == 1
    captured = capsys.readouterr()
    assert "cannot write the report into" in captured.err
    assert "Not a directory" in captured.err
    assert captured.out == ""


def test_command_needs_one_of_folder_and_compare(both: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    with pytest.raises(SystemExit):
        main([str(both), "--compare", "a", "b"])


def test_parity_needs_neither_pandas_nor_matplotlib() -> None:
    code = (
        "import sys, twinbed.analysis.parity; "
        "assert not {'pandas', 'matplotlib', 'torch', 'numpy'} & {*sys.modules}, 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_report_imports_no_engine() -> None:
    code = (
        "import sys, twinbed.analysis.report; "
        "rooms = ('torch', 'twinbed.sim', 'twinbed.runtime', 'twinbed.policies', 'twinbed.kernels'); "
        "bad = [name for name in sys.modules if name.startswith(rooms)]; "
        "assert not bad, bad; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_multirun_says_which_times_are_void(
    tmp_path: Path, make_record: Make, both_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, policy in enumerate(("zero3", "zeropp")):
        folder = both_folder(tmp_path / str(number), make_record(policy=policy), make_record("runtime"))
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text(f"- comm={policy}\n")
        void = {"void": True, "void_reason": "others took 40% of the cores"} if number else {"void": False}
        (folder / "parity.json").write_text(json.dumps({"ledger_equal": True} | void))
    page = report(tmp_path)
    out = capsys.readouterr().out
    for text in (page.text, out):
        assert "The times are void in run 1" in text
        assert "run 1: others took 40% of the cores" in text
        assert text.count("VOID") == 1
    assert "times void in 1 of 2 runs" in page.text


def test_a_multirun_in_which_nothing_fits_has_times(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path]
) -> None:
    runs = [([f"batch.micro={n}"], make_record(step_s=n, status="oom")) for n in (1, 2)]
    page = report(sweep_folder(tmp_path, runs))
    assert "No run fits in memory; the times are what an iteration would take if it did." in page.text
    assert "No run gave an iteration time" not in page.text
    assert "Crossed out: does not fit in memory" in page.text
    assert "To need less: more ranks (cluster.nodes)." in page.text
    assert "1,1,ok" not in (tmp_path / "report_times.csv").read_text()
    assert (tmp_path / "report_times.csv").read_text().count("oom") == 2


@pytest.mark.parametrize("side", ["sim", "runtime"])
def test_one_side_of_a_pair_points_to_the_pair(both: Path, side: str) -> None:
    text = report(both / side).text
    assert f"This is one side alone; twinbed-report {both} sets it beside" in text
    assert "there was no" not in text


def test_what_a_prediction_rests_on_is_a_table(both: Path) -> None:
    result = json.loads((both / "sim" / "result.json").read_text())
    result["fitted_constants"] = [{"name": "a.B", "value": 12345.678, "rows": "table 2"}, "one as text"]
    (both / "sim" / "result.json").write_text(json.dumps(result))
    text = report(both).text
    assert "name\nvalue\nrows" in text
    assert "a.B\n12,346\ntable 2" in text
    assert "one as text" in text


def test_overrides_are_shown_as_they_were_typed(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [([f"comm.policy=a.py\\:{name}", "x=[1\\,2]"], make_record()) for name in ("One", "Two")]
    assert main([str(sweep_folder(tmp_path, runs))]) == 0
    out = capsys.readouterr().out
    assert "a.py:One" in out
    assert "\\" not in out


def test_measured_memory_says_what_it_is(both: Path) -> None:
    assert "peak memory (measured: the process, with Python and torch)" in report(both).text


def test_the_trace_says_what_it_holds(both: Path) -> None:
    text = report(both).text
    assert (
        "holds the first iterations of the prediction (4 ranks, 2 s) and the whole real run (4 ranks, 2.1 s)"
        in text
    )


def test_compare_refuses_what_is_no_prediction_of_the_run(
    tmp_path: Path, make_record: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    sim, real = make_record(), make_record("runtime")
    sim.result["experiment"]["model"]["layers"] = 9
    sim.result["experiment"]["cluster"]["nodes"] = 3
    write_record(tmp_path / "sim", sim)
    write_record(tmp_path / "runtime", real)
    assert main(["--compare", str(tmp_path / "sim"), str(tmp_path / "runtime")]) == 2
    said = capsys.readouterr().err
    assert "different experiments (predicted / measured): cluster.nodes: 3 / 2; model.layers: 9 / 2" in said
    assert not (tmp_path / "runtime" / "compare").exists()


def test_compare_fails_where_ledgers_differ(
    tmp_path: Path, make_record: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    real = make_record("runtime")
    real.ledger[0] = replace(real.ledger[0], wire_bytes=1)
    write_record(tmp_path / "sim", make_record())
    write_record(tmp_path / "runtime", real)
    assert main(["--compare", str(tmp_path / "sim"), str(tmp_path / "runtime")]) == 3
    assert "ledgers differ first at rank 0" in capsys.readouterr().err
    assert (tmp_path / "runtime" / "compare" / "report.html").is_file()


def test_one_broken_overrides_file_leaves_the_multirun_its_table(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path]
) -> None:
    sweep_folder(tmp_path, [(["comm=zero3"], make_record()), (["comm=hpz"], make_record(policy="hpz"))])
    (tmp_path / "1" / ".hydra" / "overrides.yaml").write_text("[unclosed")
    found = load(tmp_path)
    assert isinstance(found, Sweep)
    assert [run.broken is None for run in found.runs] == [True, False]
    assert "overrides.yaml: broken" in str(found.runs[1].broken)


def test_a_run_without_its_ledger_says_so(both: Path) -> None:
    (both / "runtime" / "ledger.csv").unlink()
    found = load(both)
    assert isinstance(found, Run)
    assert found.notes == ["The real run left no ledger.csv: what it communicated is not known."]
