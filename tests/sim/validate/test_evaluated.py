"""From a record to published quantities; what cannot be simulated is a result."""

from collections.abc import Callable, Sequence

import pytest

from twinbed.conf.model_spec import ModelSpec, num_parameters
from twinbed.conf.schema import ExperimentConf
from twinbed.sim.validate.evaluated import Evaluator
from twinbed.sim.validate.quantities import QUANTITIES, UNITS, Outcome
from twinbed.sim.validate.rows import PublishedRow

MakeExperiment = Callable[..., ExperimentConf]
MakeSpec = Callable[..., ModelSpec]


@pytest.fixture
def outcome(make_experiment: MakeExperiment, make_spec: MakeSpec) -> Outcome:
    """4 ranks, 0.5 s an iteration, 400 tokens/s, 3 model TFLOP/s, 4 with recomputation."""
    result = {
        "status": "ok",
        "error": None,
        "warnings": [],
        "iteration_s": {"mean": 0.5, "low": 0.4, "high": 0.625},
        "tokens_per_s": 400.0,
        "tflops_per_gpu": 3.0,
        "tflops_per_gpu_hardware": 4.0,
        "memory_bytes": {
            "parameters": 2e9,
            "gradients": 2e9,
            "optimizer": 12e9,
            "secondary_shard": 4e9,
            "peak": 30e9,
        },
        "guessed_inputs": [{"key": "cluster.device.launch_ns"}],
        "fitted_constants": [{"name": "rate", "value": 1, "rows": "a"}],
    }
    return Outcome(make_experiment(), make_spec(sequence=50), result)


def published(quantity: str, unit: str, value: float, against: tuple[str, ...] = ()) -> PublishedRow:
    return PublishedRow("r", "t", quantity, unit, value, True, False, "a paper", ("x=1",), against)


def evaluator(outcomes: dict[tuple[str, ...], Outcome]) -> Evaluator:
    def simulate(overrides: Sequence[str]) -> Outcome:
        return outcomes[tuple(overrides)]

    return Evaluator(simulate)


def test_quantities_by_hand(outcome: Outcome) -> None:
    tokens = 400.0 * 0.5
    expected = {
        "iteration_time": 0.5,
        "tflops_8pt": 8 * num_parameters(outcome.spec) * tokens / 4 / 0.5,
        "tokens_per_s": 400.0,
        "tokens_per_s_per_gpu": 100.0,
        "samples_per_s": 400.0 / 50,
        "state_bytes": 16e9,
        "node_copy_bytes": 4e9,
        "peak_bytes": 30e9,
    }
    for name, value in expected.items():
        assert QUANTITIES[name].measure(outcome) == pytest.approx(value), name
    assert set(QUANTITIES) == {*expected, "speedup", "state_ratio"}
    assert all(quantity.dimension in UNITS for quantity in QUANTITIES.values())


def test_times_carry_a_range_and_a_null_rate(outcome: Outcome) -> None:
    found = evaluator({("x=1",): outcome}).evaluate(published("iteration_time", "ms", 400.0))
    assert found.ours == pytest.approx(500.0)
    assert found.rel_error == pytest.approx(0.25)
    assert (found.low, found.high) == pytest.approx((400.0, 625.0))
    assert found.in_range
    assert found.is_time
    # 4 TFLOP/s for 0.5 s are 2 TFLOP; the paper took 0.4 s for them, of which 3/4 are the model's
    assert found.paper_rate == pytest.approx(5e12)
    assert found.rank_paper == pytest.approx(3.75e12)
    assert found.rank_ours == pytest.approx(3e12)
    assert found.rank_share == pytest.approx(0.75)
    assert found.guessed_inputs == ("cluster.device.launch_ns",)


def test_a_rate_turns_its_range_round(outcome: Outcome) -> None:
    found = evaluator({("x=1",): outcome}).evaluate(published("tokens_per_s_per_gpu", "tokens/s", 200.0))
    assert found.ours == pytest.approx(100.0)
    assert (found.low, found.high) == pytest.approx((80.0, 125.0))
    assert not found.in_range
    assert not found.is_time
    assert found.paper_rate == pytest.approx(8e12)


def test_ratios_relate_two_experiments(outcome: Outcome) -> None:
    slower = Outcome(outcome.experiment, outcome.spec, {**outcome.result, "tokens_per_s": 250.0})
    both = evaluator({("x=1",): outcome, ("x=2",): slower})
    found = both.evaluate(published("speedup", "ratio", 1.5, ("x=2",)))
    assert found.ours == pytest.approx(1.6)
    assert found.paper_rate == 1.5
    assert found.low is None
    memory = both.evaluate(published("state_ratio", "ratio", 1.0, ("x=2",)))
    assert memory.ours == pytest.approx(1.0)
    assert memory.paper_rate is None


def test_out_of_memory_is_noted(outcome: Outcome) -> None:
    full = Outcome(
        outcome.experiment,
        outcome.spec,
        {**outcome.result, "status": "oom", "error": "out of memory: too much", "warnings": ["odd"]},
    )
    found = evaluator({("x=1",): full}).evaluate(published("peak_bytes", "GB", 30.0))
    assert found.rel_error == pytest.approx(0.0)
    assert found.notes == ("out of memory: too much", "odd")


def test_what_cannot_be_simulated_is_said() -> None:
    calls = []

    def simulate(overrides: Sequence[str]) -> Outcome:
        calls.append(tuple(overrides))
        raise ValueError("engine=warp is\nnot simulated")

    refusing = Evaluator(simulate)
    row = published("iteration_time", "s", 1.0)
    found = refusing.evaluate(row)
    assert found.ours is None
    assert found.rel_error is None
    assert found.reason == "engine=warp is not simulated"
    refusing.evaluate(row)
    assert calls == [("x=1",)]  # once, however many rows ask


def test_a_bug_names_its_kind() -> None:
    def simulate(overrides: Sequence[str]) -> Outcome:
        raise KeyError("stage")

    assert Evaluator(simulate).evaluate(published("iteration_time", "s", 1.0)).reason == "KeyError: 'stage'"


def test_a_record_without_the_figure(outcome: Outcome) -> None:
    bare = Outcome(outcome.experiment, outcome.spec, {**outcome.result, "tokens_per_s": None})
    found = evaluator({("x=1",): bare}).evaluate(published("tokens_per_s", "tokens/s", 1.0))
    assert found.ours is None
    assert "the record has no tokens_per_s" in found.reason
