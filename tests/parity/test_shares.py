"""Uneven shares of sequences and blocks: told the run's recorded events, the simulator's ledger is the run's."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from twinbed.analysis.record import Record, read_record
from twinbed.conf.compose import Composed, compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

KIND = f"{Path(__file__).parents[1] / 'runtime/balance/share_cases.py'}:train"
SMALL = (
    "target=runtime",
    "model=gpt",
    "model.vocab=61",
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.sequence=16",
    "data=synthetic",
    "cluster.shaped=false",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "precision=fp32",
    "steps=6",
    "warmup_steps=0",
    "train.gradient_clipping=1.0",
    "batch.micro=4",
    "batch.accumulation=2",
)
BATCH = ("balance=batch", "balance.period=2")
SLOW_LAST = [4e8, 4e8, 4e8, 1e8]  # flop/s that ranks are slept out to: the last replica takes fewer sequences
SLOWER = [rate / 2 for rate in SLOW_LAST]  # so that a short pretest is not of what else the machine does
CASES: Mapping[str, tuple[str, ...]] = {
    "ddp": ("comm=ddp",),
    "ps": ("comm=ps", "train.eval_every=2", "train.eval_batches=1"),
    "zero3": ("comm=zero3", "train.eval_every=3", "train.eval_batches=2"),
    "zeropp": ("comm=zeropp",),
    "1d, zero3": ("comm=zero3", "parallel.tensor=2"),
    "ring, zero1": ("comm=zero1", "parallel.sequence=2", "parallel.sequence_mode=ring"),
    "pipeline, ddp": ("comm=ddp", "parallel.pipeline=2", "train.eval_every=4", "train.eval_batches=1"),
}


LAYERS = ("balance=layers", "parallel.pipeline=2")
SPLITS: Mapping[str, tuple[str, ...]] = {
    "1f1b, ddp": (*LAYERS, "comm=ddp", "train.eval_every=4", "train.eval_batches=2"),
    "gpipe, zero3": (*LAYERS, "comm=zero3", "parallel.pipeline_schedule=gpipe"),
    "1d, tied": (*LAYERS, "parallel.tensor=2", "model.tied_embeddings=true"),
    "ring, lamb": (*LAYERS, "parallel.sequence=2", "parallel.sequence_mode=ring", "optimizer=lamb"),
    "zeropp": (*LAYERS, "comm=zeropp"),
}
OF_THREE = ("cluster.nodes=1", "cluster.devices_per_node=3", "parallel.pipeline=3", "batch.accumulation=3")


def run(folder: Path, cases: Mapping[str, Composed], rates: Sequence[float]) -> dict[str, Record]:
    outcome = launch_local(
        folder,
        cluster=next(iter(cases.values())).experiment.cluster,
        cases=[
            Case(name=name, folder=name, experiment=c.resolved, kind=KIND, options={"rates": list(rates)})
            for name, c in cases.items()
        ],
        timeout_s=240,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error
    return {name: read_record(folder / name) for name in cases}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [("zero3", "1d, zero3", "pipeline, ddp"), pytest.param(tuple(CASES), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_ledgers_of_uneven_batches_are_equal(
    names: Sequence[str], tmp_path: Path, same_ledger: Callable[..., Any]
) -> None:
    cases = {name: compose([*SMALL, *BATCH, *CASES[name]]) for name in names}
    differences = []
    for name, real in run(tmp_path, cases, SLOW_LAST).items():
        shared = [d.action for d in real.decisions if d.event.startswith("ReplicasMeasured")]
        assert len(shared) == 3
        assert any(action.startswith("share sequences") for action in shared), f"{name}: {shared}"
        try:
            same_ledger(cases[name], real)
        except (AssertionError, ValueError) as err:
            differences.append(f"{name}: {err}")
    assert not differences, "\n".join(differences)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [("1f1b, ddp", "1d, tied"), pytest.param(tuple(SPLITS), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_ledgers_of_uneven_stages_are_equal(
    names: Sequence[str], tmp_path: Path, same_ledger: Callable[..., Any]
) -> None:
    four = {name: compose([*SMALL, *SPLITS[name]]) for name in names}
    three = {"three": compose([*SMALL, *OF_THREE, "balance=layers", "comm=ddp"])}
    reals = run(tmp_path / "4", four, SLOWER) | run(tmp_path / "3", three, SLOWER[1:])
    differences = []
    for name, real in reals.items():
        (split,) = [d.action for d in real.decisions if d.event.startswith("StagesMeasured")]
        # of three stages the first two are as fast, and the extra block is either's
        legal = ("2/1/1", "1/2/1") if name == "three" else ("3/1",)
        assert split.removeprefix("share blocks ") in legal, name
        try:
            same_ledger((four | three)[name], real)
        except (AssertionError, ValueError) as err:
            differences.append(f"{name}: {err}")
    assert not differences, "\n".join(differences)
