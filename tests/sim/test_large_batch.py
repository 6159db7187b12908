"""A global batch of 65,536 is a configuration: micro-batches add up, and a real cluster's time is predicted."""

from itertools import pairwise
from pathlib import Path

import pytest

from twinbed.analysis.record import Record
from twinbed.conf import model_spec
from twinbed.conf.compose import Composed, compose
from twinbed.sim.simulate import simulate

EXPERIMENTS = Path(model_spec.__file__).parent / "experiment"
BASE = ("+experiment=large_batch", "target=sim")


def run(*overrides: str) -> tuple[Composed, Record]:
    composed = compose([*BASE, *overrides])
    return composed, simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)


def test_65536_pictures_are_accumulated_and_predicted() -> None:
    composed, record = run()
    experiment, result = composed.experiment, record.result
    assert experiment.cluster.num_ranks * experiment.batch.micro * experiment.batch.accumulation == 65_536
    assert (experiment.batch.accumulation, experiment.steps) == (2, 6)  # 6 epochs of 60,000
    assert result["status"] == "ok"
    mean_s = result["iteration_s"]["mean"]
    assert result["iteration_s"]["low"] < mean_s < result["iteration_s"]["high"]
    assert result["time_to_train_s"] == pytest.approx(6 * mean_s)
    assert result["tokens_per_s"] == pytest.approx(65_536 * 5 / mean_s)
    # ddp: each unit's gradient once a step, whatever is accumulated: root, two blocks, 16 bits
    assert result["comm"]["payload_bytes"] == 2 * 32_298
    assert result["comm"]["collectives"] == 3


def test_fewer_ranks_accumulate_more_and_take_longer() -> None:
    times = []
    for nodes, accumulation in ((8, 2), (4, 4), (2, 8), (1, 16)):
        composed, record = run(f"cluster.nodes={nodes}")
        assert composed.experiment.batch.accumulation == accumulation
        times.append(record.result["iteration_s"]["mean"])
    ratios = [slow / fast for fast, slow in pairwise(times)]
    assert all(1.3 < ratio < 2.1 for ratio in ratios), times


def test_a_large_model_is_bound_by_its_products() -> None:
    """vit_1b: twice the accumulation takes twice the time, less what is done once a step."""
    keys = ("model=vit_1b", "data=synthetic", "train.epochs=null", "batch.micro=32", "comm=zero2", "steps=3")
    (_, once), (_, twice) = run(*keys), run(*keys, "batch.global_sequences=131072")
    ratio = twice.result["iteration_s"]["mean"] / once.result["iteration_s"]["mean"]
    assert 1.8 < ratio < 2.0
    assert once.result["mfu"] > 0.3


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch.global_sequences=65536 must be a multiple of .* 512 \* 24"):
        compose([*BASE, "cluster.nodes=3"])


@pytest.mark.parametrize("name", sorted(path.stem for path in EXPERIMENTS.glob("*.yaml")))
def test_every_shipped_experiment_is_simulated(name: str) -> None:
    composed = compose([f"+experiment={name}", "target=sim"])
    assert simulate(composed.experiment, spec=composed.spec).result["status"] == "ok"
    compose([f"+experiment={name}", "target=both"])  # and can be asked for with every target
