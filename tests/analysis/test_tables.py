"""Figures in the tables, counted by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from twinbed.analysis import plots, show, tables, units, wording
from twinbed.analysis.load import Run, Sweep, load
from twinbed.analysis.record import Record

Make = Callable[..., Record]


def test_bytes_of_ranks_and_nodes(make_record: Make) -> None:
    run = Run(Path(), real=make_record("runtime"))
    ranks = tables.rank_bytes_table(run)
    # an iteration of a rank: 3 units, each gathered and reduced
    assert list(ranks["wire_bytes"]) == [6 * 3000] * 4
    assert list(ranks["collectives"]) == [6] * 4
    nodes = tables.node_bytes_table(run)
    assert list(nodes["inter_node_bytes"]) == [2 * 6 * 1500] * 2
    assert tables.naive_s(run) == pytest.approx(18_000 / 12.5e6)


def test_a_folded_prediction_has_the_same_nodes(make_record: Make) -> None:
    folded, full = Run(Path(), sim=make_record(folded=True)), Run(Path(), sim=make_record())
    assert list(tables.rank_bytes_table(folded)["ranks"]) == [2, 2]
    assert tables.node_bytes_table(folded).equals(tables.node_bytes_table(full))
    assert tables.operation_table(folded).equals(tables.operation_table(full))
    assert tables.naive_s(folded) == tables.naive_s(full)


def test_the_busiest_node_sets_the_naive_time_and_links_share_it(make_record: Make) -> None:
    record = make_record("runtime", links=2)
    record.ledger = [
        replace(row, inter_node_bytes=5000 if row.rank == 3 else row.inter_node_bytes)
        for row in record.ledger
    ]
    assert tables.naive_s(Run(Path(), real=record)) == pytest.approx(6 * (1500 + 5000) / (2 * 12.5e6))


def test_validation_is_left_out_of_bytes(make_record: Make) -> None:
    record = make_record("runtime")
    record.ledger += [replace(row, phase="eval") for row in record.ledger]
    assert tables.naive_s(Run(Path(), real=record)) == pytest.approx(18_000 / 12.5e6)


def test_parity_table_has_the_ratio_and_the_naive_baseline(both: Path) -> None:
    run = load(both)
    assert isinstance(run, Run)
    rows = {row["metric"]: row for row in tables.records(tables.parity_table(run))}
    mean = rows["iteration time, mean"]
    assert (mean["predicted"], mean["measured"]) == (pytest.approx(0.4), pytest.approx(0.42))
    assert mean["ratio"] == pytest.approx(0.4 / 0.42)
    assert mean["naive"] == pytest.approx(18_000 / 12.5e6)
    assert rows["between nodes per rank"]["predicted"] == 9000
    shown = show.render_text(show.parity_shown(tables.parity_table(run)))
    assert "0.952" in shown
    assert "18" in shown


def test_sweep_table(
    tmp_path: Path,
    make_record: Make,
    make_unfinished: Callable[[str, str, str], Record],
    sweep_folder: Callable[..., Path],
) -> None:
    folder = sweep_folder(
        tmp_path,
        [
            (["target=sim", "comm=zero3"], make_unfinished("sim", "failed", "no such file")),
            (["target=sim", "comm=qwz"], make_record(step_s=0.6)),
            (["target=sim", "comm=zeropp"], make_record(step_s=0.2, policy="zeropp")),
            (["target=sim", "comm=hpz"], None),
        ],
    )
    sweep = load(folder)
    assert isinstance(sweep, Sweep)
    assert tables.swept_keys(sweep) == ["comm"]  # target is the same in all
    table = tables.sweep_table(sweep)
    assert list(table["comm"]) == ["zero3", "qwz", "zeropp", "hpz"]
    assert list(table["status"]) == ["failed", "ok", "ok", "no record"]
    assert list(table["speedup"][1:3]) == [1.0, pytest.approx(3.0)]
    assert table["speedup"][[0, 3]].isna().all()
    assert list(table["error"][[0, 3]]) == ["no such file", "the run left no result.json"]
    assert table["inter_node_bytes_per_rank"][1] == 9000  # as in the parity table and on the console


def test_runs_are_ordered_by_number_not_by_name(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path]
) -> None:
    sweep = load(sweep_folder(tmp_path, [([f"seed={i}"], make_record(seed=i)) for i in range(11)]))
    assert isinstance(sweep, Sweep)
    assert [run.number for run in sweep.runs] == [str(i) for i in range(11)]


@pytest.mark.parametrize(
    ("unit", "amount", "text"),
    [
        ("s", 0.4123, "412.3 ms"),
        ("s", 12.0, "12 s"),
        ("s", 3.2e-5, "32 µs"),
        ("byte", 1_562_500_000.0, "1.562 GB"),
        ("byte", 999.0, "999 B"),
        ("byte", 0.0, "0 B"),
        ("fraction", 0.5, "50 %"),
        ("s", None, "-"),
    ],
)
def test_units_are_chosen_for_people(unit: str, amount: float | None, text: str) -> None:
    assert units.amount_text(unit, amount).removesuffix(" s" if amount is None else "") == text


def test_figures_are_deterministic_and_leave_no_global_state(both: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    run = load(both)
    assert isinstance(run, Run)
    times = tables.iteration_table(run)
    first, second = (plots.png(plots.iteration_figure(times, policy="zero3", naive_s=0.1)) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_one_colour_for_each_policy() -> None:
    colours = plots.POLICY_COLOURS
    assert {"ddp", "ps", "zero1", "zero2", "zero3", "qwz", "hpz", "qgz", "zeropp"} <= {*colours}
    assert len({*colours.values()}) == len(colours)


def test_bars_and_lines_show_the_figures(both: Path) -> None:
    run = load(both)
    assert isinstance(run, Run)
    axes = plots.iteration_figure(tables.iteration_table(run), policy="zero3", naive_s=0.1).axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.get_height() for bar in bars] == [pytest.approx(0.4), pytest.approx(0.42), 0.1]
    assert "(s)" in axes.get_ylabel()
    losses = tables.loss_table([("a", "zero3", [3.0, None, 1.0]), ("b", "zeropp", [3.0, 2.0])])
    lines = plots.loss_figure(losses).axes[0].get_lines()
    assert [np.size(line.get_xdata()) for line in lines] == [3, 2]
    assert [line.get_color() for line in lines] == [plots.POLICY_COLOURS[p] for p in ("zero3", "zeropp")]


def sweep_of(policies: tuple[str, ...], status: str = "ok") -> pd.DataFrame:
    rows = [
        {
            "links": n,
            "series": f"{policy}, micro={m}",
            "policy": policy,
            "status": status,
            "iteration_s": m / n,
        }
        for policy in policies
        for m in (1, 2)
        for n in (1, 2)
    ]
    return pd.DataFrame(rows).assign(low_s=np.nan, high_s=np.nan)


def test_series_of_one_policy_differ_in_colour_and_of_several_in_style() -> None:
    one = plots.sweep_figure(sweep_of(("zero3",)), x="links").axes[0].get_lines()
    assert len({line.get_color() for line in one}) == 2
    several = plots.sweep_figure(sweep_of(("zero3", "zeropp")), x="links").axes[0].get_lines()
    assert [line.get_color() for line in several[:2]] == [plots.POLICY_COLOURS["zero3"]] * 2
    assert several[0].get_linestyle() != several[1].get_linestyle()


@pytest.mark.parametrize("numeric", [True, False])
def test_runs_that_do_not_fit_are_crossed_out(numeric: bool) -> None:
    frame = sweep_of(("zero3",), status="oom")
    frame["status"] = ["oom", "ok", "ok", "ok"]
    if not numeric:
        frame["links"] = frame["links"].astype(str)
    axes = plots.sweep_figure(frame, x="links").axes[0]
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert [np.size(line.get_xdata()) for line in crosses] == [1]
    legend = axes.get_legend()
    assert legend is not None
    assert "does not fit in memory" in [text.get_text() for text in legend.get_texts()]


def test_runs_of_different_batches_are_compared_by_tokens(
    tmp_path: Path, make_record: Make, sweep_folder: Callable[..., Path]
) -> None:
    small, large = make_record(step_s=0.2), make_record(step_s=0.6)
    large.result["tokens_per_s"] *= 6
    folder = sweep_folder(tmp_path, [(["batch.micro=1"], small), (["batch.micro=6"], large)])
    sweep = load(folder)
    assert isinstance(sweep, Sweep)
    assert list(tables.sweep_table(sweep)["speedup"]) == [1.0, pytest.approx(2.0)]
    said = " ".join(wording.sweep_summary(sweep))
    assert "The fastest is run 1 (batch.micro=6): 600 ms an iteration, 5,120 tokens a second" in said
