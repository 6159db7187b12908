"""Balanced tensor groups: told the run's recorded events, the simulator's ledger and decisions are the run's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

SMALL = (
    "model=gpt",
    "model.vocab=64",
    "model.layers=4",
    "model.hidden=64",
    "model.heads=8",
    "model.sequence=16",
    "data=synthetic",
    "cluster.shaped=false",
    "precision=fp32",
    "comm=ddp",
    "batch.micro=2",
    "steps=8",
    "warmup_steps=0",
    "balance.period=2",
    "cluster.emulated_flops_per_s=4e8",
)
LONG = "cluster.emulated_flops_per_s=1e8"  # products so long that columns are worth their messages
ONE_GROUP = ("cluster.nodes=1", "cluster.devices_per_node=4", "parallel.tensor=4")
TWO_GROUPS = ("cluster.nodes=2", "cluster.devices_per_node=2", "parallel.tensor=2")
SLOW = {"one group": "cluster.slowdown={3:4}", "two groups": "cluster.slowdown={1:4}"}
CASES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "one group": {
        "resize": ("balance=resize", "balance.refresh=3"),
        "differentiated": ("balance=resize", "balance.selection=differentiated", "balance.refresh=2"),
        "migrate": ("balance=migrate", "train.eval_every=3", "train.eval_batches=1"),
        "broadcast": ("balance=migrate", "balance.way=broadcast", "train.eval_every=3", LONG),
        "scatter": ("balance=migrate", "balance.way=scatter", LONG),
        "semi": ("balance=semi", "batch.accumulation=2"),
        "semi, columns": (
            "balance=semi",
            "balance.way=scatter",
            "balance.accuracy_budget=0.6",
            "cluster.slowdown={3:6,1:3}",
            LONG,
        ),
        "rotating": (
            "balance=migrate",
            "cluster.slowdown=[{rank:0,factor:4,until_step:4},{rank:2,factor:4,from_step:4}]",
        ),
    },
    "two groups": {
        "zero3": ("balance=migrate", "comm=zero3"),
        "zeropp": ("balance=semi", "comm=zeropp"),
        "ddp": ("balance=migrate", "balance.way=scatter", LONG),
        "pipeline": ("balance=migrate", "parallel.pipeline=2", "batch.accumulation=4"),
        "pipeline, columns": (
            "balance=migrate",
            "balance.way=broadcast",
            LONG,
            "parallel.pipeline=2",
            "batch.accumulation=2",
        ),
    },
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ("one group", ("differentiated", "scatter", "semi", "semi, columns")),
        ("two groups", ("zero3", "pipeline, columns")),
        *(pytest.param(groups, tuple(CASES[groups]), marks=pytest.mark.long) for groups in CASES),
    ],
)
def test_ledgers_are_equal(
    groups: str, names: Sequence[str], run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    where = ONE_GROUP if groups == "one group" else TWO_GROUPS
    differences = []
    cases = {name: (*SMALL, *where, *keys) for name, keys in CASES[groups].items() if name in names}
    runs = run_cases(
        {
            name: keys if any(key.startswith("cluster.slowdown=") for key in keys) else (*keys, SLOW[groups])
            for name, keys in cases.items()
        }
    )
    for name, (composed, real) in runs.items():
        measured = [d for d in real.decisions if d.event.startswith("GroupMeasured") and d.rank == 0]
        assert len(measured) == 4
        assert any(word in d.action for d in measured for word in ("prune", "migrate")), f"{name}: {measured}"
        if name == "semi, columns":
            assert any("prune" in d.action and "migrate" in d.action for d in measured), measured
        ops = {row.op for row in real.ledger}
        moved = (
            {"scatter", "gather"} if composed.experiment.balance.way.value != "broadcast" else {"broadcast"}
        )
        if composed.experiment.balance.name == "migrate":
            assert moved <= ops, name
        try:
            same_ledger(composed, real)
        except (AssertionError, ValueError) as err:
            differences.append(f"{name}: {err}")
    assert not differences, "\n".join(differences)
