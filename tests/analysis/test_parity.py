"""Verdicts on a prediction and its run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinbed.analysis.parity import compare_records, experiment_differences, rank_classes, write_parity
from twinbed.analysis.record import Decision, LedgerRow, Record, read_record, write_record
from twinbed.analysis.wording import ledger_sentence

Make = Callable[..., Record]


def test_equal_ledgers_and_ratios_of_times(make_record: Make) -> None:
    parity = compare_records(make_record(step_s=0.4), make_record("runtime", step_s=0.5), replay_equal=True)
    assert parity["status"] == "ok"
    assert parity["reasons"] == []
    assert parity["ledger_equal"] is True
    assert parity["ledger_rows"] == {"sim": 120, "runtime": 120}  # 5 steps, 4 ranks, 3 units, 2 collectives
    assert parity["first_difference"] is None
    assert parity["decisions_equal"] is True
    assert parity["replay_equal"] is True
    assert parity["iteration_s_ratio"] == pytest.approx(0.8)
    assert parity["phases_s_ratio"]["comm_exposed"] == pytest.approx(0.8)
    assert parity["phases_s_ratio"]["quantize"] is None  # nothing was measured: no ratio
    assert parity["comm_ratio"]["inter_node_bytes"] == 1.0
    assert parity["void"] is False


@pytest.mark.parametrize("column", ["payload_bytes", "wire_bytes", "inter_node_bytes"])
def test_one_byte_is_a_difference(make_record: Make, column: str) -> None:
    real = make_record("runtime")
    at = next(
        i for i, row in enumerate(real.ledger) if (row.rank, row.stream, row.iteration) == (2, "reduce", 1)
    )
    real.ledger[at] = replace(real.ledger[at], **{column: getattr(real.ledger[at], column) + 1})
    parity = compare_records(make_record(), real)
    assert parity["ledger_equal"] is False
    assert parity["status"] == "failed"
    difference = parity["first_difference"]
    # iteration 1 begins at the fourth of a track's entries: three units an iteration
    assert (difference["rank"], difference["stream"], difference["index"]) == (2, "reduce", 3)
    assert difference["columns"] == [column]
    assert difference["runtime"][column] == difference["sim"][column] + 1
    assert column in difference["message"]


def test_a_missing_row_is_named(make_record: Make) -> None:
    real = make_record("runtime")
    del real.ledger[-1]  # rank 3, reduce, last entry: nothing follows it that could differ
    difference = compare_records(make_record(), real)["first_difference"]
    assert (difference["rank"], difference["stream"], difference["index"]) == (3, "reduce", 14)
    assert difference["runtime"] is None
    assert "missing in the real run" in difference["message"]
    extra = compare_records(real, make_record())["first_difference"]
    assert extra["sim"] is None
    assert "missing in the simulation" in extra["message"]


def test_order_counts_within_a_stream_but_not_across(make_record: Make) -> None:
    real = make_record("runtime")
    real.ledger.sort(key=lambda row: row.stream)  # stable: each track keeps its order
    assert compare_records(make_record(), real)["ledger_equal"] is True
    first, second = (
        i
        for i, row in enumerate(real.ledger)
        if row.rank == 0 and row.stream == "gather" and row.iteration == 0 and row.layer != "block.1"
    )
    real.ledger[first], real.ledger[second] = real.ledger[second], real.ledger[first]
    parity = compare_records(make_record(), real)
    assert parity["ledger_equal"] is False
    assert parity["first_difference"]["columns"] == ["layer"]


def test_folded_rows_stand_for_their_class(make_record: Make) -> None:
    assert compare_records(make_record(folded=True), make_record("runtime"))["ledger_equal"] is True
    real = make_record("runtime")
    at = next(i for i, row in enumerate(real.ledger) if row.rank == 2)
    real.ledger[at] = replace(real.ledger[at], wire_bytes=1)
    difference = compare_records(make_record(folded=True), real)["first_difference"]
    assert (difference["rank"], difference["index"]) == (2, 0)


def test_a_row_that_counts_all_ranks_needs_no_class(make_record: Make) -> None:
    sim = make_record()
    sim.ledger = [replace(row, count=4) for row in sim.ledger if row.rank == 0]
    assert rank_classes(sim) == {0: (0, 1, 2, 3)}
    assert compare_records(sim, make_record("runtime"))["ledger_equal"] is True


def test_classes_that_do_not_fit_are_refused(make_record: Make) -> None:
    sim = make_record(folded=True)
    sim.result["classes"] = [
        {"rank": 0, "count": 3, "ranks": [[0, 3, 1]]},
        {"rank": 1, "count": 2, "ranks": [[1, 4, 2]]},
    ]
    with pytest.raises(ValueError, match=r"rank 0 counts 2 ranks, its class in result\.json has 3"):
        compare_records(sim, make_record("runtime"))
    del sim.result["classes"]
    with pytest.raises(ValueError, match="no class that starts with rank 0"):
        compare_records(sim, make_record("runtime"))


@pytest.mark.parametrize("side", ["sim", "runtime"])
def test_parity_fails_if_either_target_does(
    make_record: Make, make_unfinished: Callable[[str, str, str], Record], side: str
) -> None:
    broken = make_unfinished(side, "failed", "rank 1 died at step 3")
    pair = (broken, make_record("runtime")) if side == "sim" else (make_record(), broken)
    parity = compare_records(*pair)
    assert parity["status"] == "failed"
    assert any("rank 1 died at step 3" in reason for reason in parity["reasons"])
    assert parity["ledger_equal"] is None
    assert parity["iteration_s_ratio"] is None


def test_out_of_memory_is_a_result_without_a_ledger(
    make_record: Make, make_unfinished: Callable[[str, str, str], Record]
) -> None:
    parity = compare_records(make_unfinished("sim", "oom", "does not fit"), make_record("runtime"))
    assert parity["status"] == "ok"
    assert parity["ledger_equal"] is None


def test_replay_that_differs_fails(make_record: Make) -> None:
    parity = compare_records(make_record(), make_record("runtime"), replay_equal=False)
    assert parity["status"] == "failed"
    assert parity["ledger_equal"] is True


def test_live_decisions_are_compared_rank_by_rank(make_record: Make) -> None:
    real = make_record("runtime")
    real.decisions[1] = Decision(0, 0, "WeightsNeeded block.0", "wait")
    parity = compare_records(make_record(), real)
    assert parity["decisions_equal"] is False
    assert parity["first_decision_difference"]["index"] == 1
    assert parity["status"] == "ok"  # live events may carry times, so they need not agree
    assert compare_records(make_record(folded=True), make_record("runtime"))["decisions_equal"] is True


def balanced(record: Record, *answers: tuple[str, str], wire_bytes: int) -> Record:
    """With a balancing policy's events and answers, and a ledger that follows from them."""
    record.decisions[:] = [Decision(0, 1, event, answer) for event, answer in answers]
    record.ledger[0] = replace(record.ledger[0], wire_bytes=wire_bytes)
    return record


def test_decisions_are_compared_by_actions_where_events_hold_measured_times(make_record: Make) -> None:
    ours, theirs = (f"GroupMeasured(step=2, ffn_ns={ns}/90)" for ns in (80, 81))
    lends = "migrate 1 ffn from 1 to 0"
    sim = balanced(make_record(), (ours, lends), wire_bytes=1)
    parity = compare_records(sim, balanced(make_record("runtime"), (theirs, lends), wire_bytes=1))
    assert (parity["decisions_equal"], parity["first_decision_difference"]) == (True, None)
    changes = ("ChangesMeasured(step=2, changes=0.1/0.1)", lends)
    parity = compare_records(sim, balanced(make_record("runtime"), changes, wire_bytes=1))
    assert parity["decisions_equal"] is False  # another kind of event
    parity = compare_records(sim, balanced(make_record("runtime"), (theirs, "keep"), wire_bytes=1))
    assert parity["decisions_equal"] is False
    assert parity["first_decision_difference"]["runtime"]["event"] == theirs  # shown whole


def test_ledgers_of_policies_that_were_told_different_times_are_not_comparable(make_record: Make) -> None:
    ours, theirs = (f"GroupMeasured(step=2, ffn_ns={ns}/90)" for ns in (80, 20))
    sim = balanced(make_record(), (ours, "keep"), wire_bytes=1)
    real = balanced(make_record("runtime"), (theirs, "migrate 1 ffn from 1 to 0"), wire_bytes=2)
    parity = compare_records(sim, real)
    assert (parity["status"], parity["reasons"], parity["ledger_equal"]) == ("ok", [], None)
    assert parity["first_difference"] is None
    assert parity["decisions_equal"] is False
    assert ledger_sentence(parity) == (
        "The ledgers are not comparable: the balancing policies were told different times and decided differently; "
        "ledgers of balanced runs are compared only when the simulation is told the run's events, as target=both does."
    )
    # a simulation that was told the run's events must have done the same
    told = balanced(make_record(), (theirs, "migrate 1 ffn from 1 to 0"), wire_bytes=3)
    assert compare_records(sim, real, told=told)["ledger_equal"] is False
    assert compare_records(sim, real, told=replace_wire(told, 2))["ledger_equal"] is True
    # policies that decided alike, whatever they were told, must have the same ledger
    alike = balanced(make_record(), (ours, "migrate 1 ffn from 1 to 0"), wire_bytes=1)
    assert compare_records(alike, real)["status"] == "failed"
    # and so must runs of which only one was balanced
    assert compare_records(balanced(make_record(), wire_bytes=1), real)["status"] == "failed"


def replace_wire(record: Record, wire_bytes: int) -> Record:
    record.ledger[0] = replace(record.ledger[0], wire_bytes=wire_bytes)
    return record


def test_void_keeps_its_reason_and_the_file_is_json(make_record: Make, tmp_path: Path) -> None:
    parity = compare_records(make_record(), make_record("runtime"), void="load 3.2 on 2 cores")
    path = write_parity(tmp_path, parity)
    assert path.name == "parity.json"
    back = json.loads(path.read_text())
    assert (back["void"], back["void_reason"]) == (True, "load 3.2 on 2 cores")


def test_experiments_that_differ_are_listed(make_record: Make) -> None:
    sim, real = make_record(), make_record("runtime", links=2)
    sim.result["experiment"]["cluster"]["host"] = {"cores": 2}  # a probe's constants are one side's own
    assert experiment_differences(sim.result, real.result) == ["cluster.inter_node.links: 1 / 2"]


def test_empty_ledgers_are_equal() -> None:
    result: dict[str, Any] = {"target": "sim", "status": "ok"}
    parity = compare_records(Record(result), Record(result | {"target": "runtime"}))
    assert parity["ledger_equal"] is True
    assert parity["ledger_rows"] == {"sim": 0, "runtime": 0}


def test_every_column_but_count_is_compared(make_record: Make) -> None:
    other: dict[str, Any] = {
        "iteration": 7,
        "phase": "eval",
        "layer": "x",
        "op": "broadcast",
        "axis": "node",
        "group_size": 3,
        "payload_bytes": 1,
        "wire_bytes": 1,
        "inter_node_bytes": 1,
    }
    assert {*other, "rank", "stream", "count"} == {*LedgerRow.__dataclass_fields__}
    for column, value in other.items():
        real = make_record("runtime")
        real.ledger[0] = replace(real.ledger[0], **{column: value})
        difference = compare_records(make_record(), real)["first_difference"]
        assert difference["columns"] == [column]


@pytest.mark.parametrize("side", ["sim", "runtime"])
def test_a_ledger_that_is_gone_is_not_an_empty_one(make_record: Make, tmp_path: Path, side: str) -> None:
    for target in ("sim", "runtime"):
        write_record(tmp_path / target, make_record(target))
    (tmp_path / side / "ledger.csv").unlink()
    parity = compare_records(read_record(tmp_path / "sim"), read_record(tmp_path / "runtime"))
    assert parity["ledger_equal"] is None
    assert parity["ledger_missing"] == [side]
    assert parity["status"] == "failed"
    who = {"sim": "simulation", "runtime": "real run"}[side]
    assert parity["reasons"] == [f"{who}: the run left no ledger.csv"]
    assert ledger_sentence(parity) == f"The ledgers were not compared: the {who} left no ledger.csv."
