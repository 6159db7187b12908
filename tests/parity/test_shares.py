"""Uneven shares of sequences and blocks: told the run's recorded events, the simulator's ledger is the run's."""

from collections.abc import Callable, Mapping
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
CASES: Mapping[str, tuple[str, ...]] = {
    "ddp": ("comm=ddp",),
    "ps": ("comm=ps", "train.eval_every=2", "train.eval_batches=1"),
    "zero3": ("comm=zero3", "train.eval_every=3", "train.eval_batches=2"),
    "zeropp": ("comm=zeropp",),
    "1d, zero3": ("comm=zero3", "parallel.tensor=2"),
    "ring, zero1": ("comm=zero1", "parallel.sequence=2", "parallel.sequence_mode=ring"),
    "pipeline, ddp": ("comm=ddp", "parallel.pipeline=2", "train.eval_every=4", "train.eval_batches=1"),
}


def run(folder: Path, cases: Mapping[str, Composed]) -> dict[str, Record]:
    outcome = launch_local(
        folder,
        cluster=next(iter(cases.values())).experiment.cluster,
        cases=[
            Case(name=name, folder=name, experiment=c.resolved, kind=KIND, options={"rates": SLOW_LAST})
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
def test_ledgers_of_uneven_batches_are_equal(tmp_path: Path, same_ledger: Callable[..., Any]) -> None:
    cases = {name: compose([*SMALL, *BATCH, *keys]) for name, keys in CASES.items()}
    differences = []
    for name, real in run(tmp_path, cases).items():
        shared = [d.action for d in real.decisions if d.event.startswith("ReplicasMeasured")]
        assert len(shared) == 3
        assert any(action.startswith("share sequences") for action in shared), f"{name}: {shared}"
        try:
            same_ledger(cases[name], real)
        except (AssertionError, ValueError) as err:
            differences.append(f"{name}: {err}")
    assert not differences, "\n".join(differences)
