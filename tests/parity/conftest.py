"""Shared by the parity tests: run cases on real ranks, simulate the same experiments, compare."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from twinbed.analysis.parity import compare_records
from twinbed.analysis.record import Record, read_record
from twinbed.conf.compose import Composed, compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local
from twinbed.sim.simulate import simulate

# Nothing divides: 1-D parameters, a vocabulary of 257, a width of 36 over 8 ranks, blocks of 256 and 2048.
ODD_MODEL = (
    "model=gpt",
    "model.layers=3",
    "model.hidden=36",
    "model.heads=3",
    "model.vocab=257",
    "model.sequence=12",
)


Runs = dict[str, tuple[Composed, Record]]


@pytest.fixture
def odd_model() -> tuple[str, ...]:
    return ODD_MODEL


@pytest.fixture
def run_cases(tmp_path: Path) -> Callable[[Mapping[str, Sequence[str]]], Runs]:
    return lambda cases: _run_cases(tmp_path, cases)


@pytest.fixture
def same_ledger() -> Callable[[Composed, Record], Record]:
    return _same_ledger


def _run_cases(folder: Path, cases: Mapping[str, Sequence[str]]) -> Runs:
    """One launch for all cases; each is overrides that agree on the cluster."""
    composed = {name: compose(["target=runtime", *overrides]) for name, overrides in cases.items()}
    outcome = launch_local(
        folder,
        cluster=next(iter(composed.values())).experiment.cluster,
        cases=[Case(name=name, folder=name, experiment=c.resolved) for name, c in composed.items()],
        timeout_s=240,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error
    return {name: (c, read_record(folder / name)) for name, c in composed.items()}


def _same_ledger(composed: Composed, real: Record) -> Record:
    """The simulator's ledger of the same experiment equals the run's, row by row; returns the simulation."""
    sim = simulate(
        composed.experiment, spec=composed.spec, resolved=composed.resolved, balance_events=real.decisions
    )
    assert real.result["status"] == "ok", real.result["error"]
    assert real.ledger, "the run left no rows"
    parity = compare_records(sim, real)
    assert parity["ledger_equal"], parity["first_difference"]["message"]
    assert parity["decisions_equal"], parity["first_decision_difference"]
    return sim
