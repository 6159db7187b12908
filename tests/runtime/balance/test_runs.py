"""Balanced runs from start to record, helpers that die while they are lent something, and who goes on after that."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.policies.balance import (
    ColumnsTimed,
    Half,
    MovementTimed,
    ProductsTimed,
    is_balance_event,
    parse_balance_event,
)
from twinbed.runtime.case import TRAIN, Case
from twinbed.runtime.launcher import LaunchOutcome, launch_local

CASES = f"{Path(__file__).with_name('balance_cases.py')}:scripted"
BASE = (
    "target=runtime",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "precision=fp32",
    "warmup_steps=0",
    "model=gpt",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=8",
    "model.ffn=32",
    "model.vocab=257",
    "model.sequence=8",
    "data=text",
    "batch.micro=4",
    "train.timeout_s=20",
    "optimizer.lr=1e-3",
)
FOUR = ("cluster.devices_per_node=4", "parallel.tensor=4", "comm=ddp")
SEMI = ("balance=semi", "balance.period=2")


def launch(
    folder: Path, cases: Mapping[str, tuple[Sequence[str], Mapping[str, Any] | None]]
) -> LaunchOutcome:
    """Each case has its keys, and options of a scripted one, or None."""
    made = {name: compose([*BASE, *keys]) for name, (keys, _) in cases.items()}
    return launch_local(
        folder,
        cluster=next(iter(made.values())).experiment.cluster,
        cases=[
            Case(
                name=name,
                folder=name,
                experiment=made[name].resolved,
                kind=TRAIN if options is None else CASES,
                options=dict(options or {}),
            )
            for name, (_, options) in cases.items()
        ],
        timeout_s=150,
        show_progress=False,
    )


def result(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "result.json").read_text())
    return found


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_run_tells_what_was_balanced(tmp_path: Path) -> None:
    answers = {"2": "lends", "4": "both", "6": "prunes", "8": "nothing"}
    data = ("cluster.devices_per_node=4", "parallel.tensor=2", "comm=zero3", *SEMI, "steps=4")
    outcome = launch(
        tmp_path,
        {
            "semi": (
                (*FOUR, *SEMI, "steps=10", "train.eval_every=5", "train.eval_batches=1"),
                {"answers": answers},
            ),
            "two groups": (data, {"answers": {"2": "prunes"}}),
            "scatter": ((*FOUR, *SEMI, "balance.way=scatter", "steps=4"), {"answers": {"2": "columns"}}),
            "two groups, broadcast": ((*data, "balance.way=broadcast"), {"answers": {"2": "columns"}}),
        },
    )
    assert outcome.status == "ok", outcome.error
    (group,) = result(tmp_path, "semi")["balance"]["groups"]
    assert group["ranks"] == [0, 1, 2, 3]
    (guess,) = result(tmp_path, "semi")["guessed_inputs"]
    assert guess["key"] == "balance.loss_points"
    assert [period["step"] for period in group["periods"]] == [2, 4, 6, 8, 10]
    assert [period["actions"] for period in group["periods"]] == [
        "migrate 1 attention from 0 to 1, migrate 3 ffn from 0 to 2",
        "prune rank 0 by 0.25, migrate 2 ffn from 0 to 3",
        "prune rank 0 by 0.5",
        "nothing",
        "nothing",
    ]
    assert all(len(period["ffn_ns"]) == 4 and min(period["ffn_ns"]) > 0 for period in group["periods"])
    assert {period["predicted_speedup"] for period in group["periods"]} == {1.25}
    assert group["overhead_s"] == pytest.approx(sum(period["overhead_s"] for period in group["periods"]))
    assert 0 < group["overhead_s"] < 0.2 * sum(result(tmp_path, "semi")["iterations_s"])

    logged = [d for d in read_record(tmp_path / "semi").decisions if is_balance_event(d.event)]
    timed = [event for d in logged if isinstance(event := parse_balance_event(d.event), MovementTimed)]
    assert [d.iteration for d in logged] == [0, 0, 0, 0, 1, 3, 5, 7, 9]
    assert [event.units for event in timed] == [(1, 2), (2, 4)]
    assert all(min(*event.time_ns, event.together_ns) > 0 for event in timed)
    products = [event for d in logged if isinstance(event := parse_balance_event(d.event), ProductsTimed)]
    assert [event.units for event in products] == [(1, 2, 3), (1, 2, 4, 6, 8, 10, 12)]
    for event in products:
        times = (*event.units_ns, *event.kept_ns)
        assert len(times) == len(event.units) + len(event.kept) > 3
        assert all(len(of_size) == 4 and min(of_size) > 0 for of_size in times)
    assert logged[4].action.startswith("migrate 1 attention from 0 to 1")

    for name, lenders in (("scatter", 2), ("two groups, broadcast", 1)):
        decisions = read_record(tmp_path / name).decisions
        logged = [d for d in decisions if is_balance_event(d.event) and d.rank == 0]
        columns = [e for d in logged if isinstance(e := parse_balance_event(d.event), ColumnsTimed)]
        assert [d.iteration for d in logged] == [0, 0, 1, 3]
        assert [event.half for event in columns] == list(Half)
        for event in columns:
            assert event.units == ((2, 4) if lenders == 2 else (1, 8)), name
            assert event.lenders == lenders
            assert min(*event.few_ns, *event.many_ns) > 0
            assert (min(event.together_ns) > 0) == (lenders > 1)
        assert logged[2].action.startswith("prune rank 0 by 0.5, migrate 3 attention from 0 to 1")

    groups = result(tmp_path, "two groups")["balance"]["groups"]
    assert [each["ranks"] for each in groups] == [[0, 1], [2, 3]]
    told = [
        d.rank for d in read_record(tmp_path / "two groups").decisions if d.event.startswith("GroupMeasured")
    ]
    assert sorted(told) == [0, 0, 2, 2]


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_ranks_that_decide_differently_or_wrongly_end_the_run(tmp_path: Path) -> None:
    keys = (*FOUR, *SEMI, "steps=2", "balance.pretest=false")
    outcome = launch(tmp_path, {"differs": (keys, {"differs": 2})})
    assert outcome.status == "failed"
    assert "rank 2 took other decisions than rank 0" in str(outcome.error)
    outcome = launch(tmp_path, {"wrong": (keys, {"answers": {"2": "too many"}})})
    assert "policy 'scripted': rank 0 is to lend 9 units of attention to others, and has 2" in str(
        outcome.error
    )


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_helper_that_dies_ends_the_run_and_fewer_go_on(tmp_path: Path) -> None:
    keys = (
        *FOUR,
        *SEMI,
        "balance.pretest=false",
        "steps=8",
        "train.save_every=4",
        "train.gradient_clipping=1",
    )
    lends = {"answers": {"2": "lends"}}
    whole = launch(tmp_path / "whole", {"whole": (keys, lends)})
    assert whole.status == "ok", whole.error
    losses = result(tmp_path / "whole", "whole")["loss"]
    for i, (fault, rank, stream, says) in enumerate(
        (
            ("raise", 2, "lend", r"rank 2 failed in step 5 of dies: this helper has had enough"),
            ("exit", 1, "return", r"rank 1"),
        )
    ):
        began = time.monotonic()
        options = {**lends, "fault": fault, "rank": rank, "stream": stream, "step": 5}
        outcome = launch(tmp_path / f"{i}", {"dies": (keys, options)})
        assert outcome.status == "failed"
        assert says in str(outcome.error)
        assert time.monotonic() - began < 60
        if fault == "raise":
            assert "Traceback" in (tmp_path / f"{i}" / "rank2.log").read_text()
    where = f"train.resume_from={tmp_path / '0' / 'dies'}"
    more = (where, "steps=8", "train.gradient_clipping=1")
    plain = ("comm=ddp", *more)
    outcome = launch(
        tmp_path / "two",
        {
            "tensor of 2": (("cluster.devices_per_node=2", "parallel.tensor=2", *plain), None),
            "balanced": (
                ("cluster.devices_per_node=2", "parallel.tensor=2", *plain, *SEMI, "balance.pretest=false"),
                {"answers": {}},
            ),
            "stages": (
                (
                    "cluster.devices_per_node=2",
                    "parallel.pipeline=2",
                    "batch.micro=2",
                    "batch.accumulation=2",
                    *plain,
                ),
                None,
            ),
            "replicas": (("cluster.devices_per_node=2", "batch.micro=2", *plain), None),
        },
    )
    assert outcome.status == "ok", outcome.error
    for name in ("tensor of 2", "balanced", "stages", "replicas"):
        found = result(tmp_path / "two", name)
        assert found["first_step"] == 4, name
        assert found["loss"] == pytest.approx(losses[4:], rel=1e-5), name


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(240)
def test_sharded_parts_are_cut_anew_too(tmp_path: Path) -> None:
    keys = ("cluster.devices_per_node=4", "comm=zero3", "optimizer=lamb", "steps=6", "train.save_every=3")
    layouts = {
        "tensor": ("parallel.tensor=2", "batch.micro=2"),
        "pipeline": ("parallel.pipeline=2", "batch.micro=1", "batch.accumulation=2"),
        "plain": ("batch.micro=1",),
    }
    outcome = launch(tmp_path / "first", {name: ((*keys, *more), None) for name, more in layouts.items()})
    assert outcome.status == "ok", outcome.error
    resumed = {
        f"{old} to {new}": (
            (*keys, *layouts[new], f"train.resume_from={tmp_path / 'first' / old}/checkpoints/step_00000003"),
            None,
        )
        for old in layouts
        for new in layouts
        if old != new
    }
    outcome = launch(tmp_path / "then", resumed)
    assert outcome.status == "ok", outcome.error
    for name in resumed:
        old = name.partition(" ")[0]
        found = result(tmp_path / "then", name)
        assert found["loss"] == pytest.approx(result(tmp_path / "first", old)["loss"][3:], rel=1e-4), name


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_quota_does_not_outlive_the_run(tmp_path: Path) -> None:
    slow = ("cluster.slowdown={1:4}", "cluster.slowdown_by=quota")
    outcome = launch(tmp_path, {"quota": ((*FOUR, *slow, "steps=3"), None)})
    assert outcome.status == "ok", outcome.error
    options = {"answers": {"2": "lends"}, "fault": "raise", "rank": 1, "stream": "lend", "step": 2}
    keys = (*FOUR, *slow, *SEMI, "balance.pretest=false", "steps=4")
    outcome = launch(tmp_path, {"dies": (keys, options)})
    assert "rank 1 failed in step 2 of dies: this helper has had enough" in str(outcome.error)
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    assert not [
        line for line in listed.splitlines() if "runtime.balance.quota" in line and line.split()[0] == "1"
    ]
