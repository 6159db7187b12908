"""What an optimizer costs: hand counts of bytes, states and norms."""

from collections.abc import Callable
from typing import Any

import pytest

from twinbed.conf.model_spec import ModelSpec, num_parameters, parameters
from twinbed.conf.schema import DeviceConf, LambCorrection, OptimizerConf
from twinbed.sim.optimizer import buffer_bytes, moment_bytes, num_norms, pass_bytes
from twinbed.sim.simulate import simulate

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("keys", "passes", "moments", "buffers"),
    [
        ({"name": "adamw"}, 7, 2, 0),
        ({"name": "sgd"}, 3, 0, 0),
        ({"name": "sgd", "momentum": 0.9}, 8, 1, 0),
        ({"name": "sgd", "weight_decay": 0.1}, 6, 0, 1),
        ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}, 11, 1, 1),
        ({"name": "lamb", "weight_decay": 0.01, "decay_in_ratio": False}, 26, 2, 2),
        ({"name": "lamb", "weight_decay": 0.01}, 27, 2, 2),
        ({"name": "lamb", "correction": LambCorrection.rate}, 22, 2, 2),
        ({"name": "lamb", "bias_correction": False}, 22, 2, 2),
        ({"name": "lars"}, 12, 0, 1),
        ({"name": "lars", "momentum": 0.9}, 17, 1, 1),
    ],
)
def test_fp32_numbers_of_a_parameter(keys: dict[str, Any], passes: int, moments: int, buffers: int) -> None:
    optimizer = OptimizerConf(**keys)
    counted = (pass_bytes(optimizer), moment_bytes(optimizer), buffer_bytes(optimizer))
    assert counted == (4 * passes, 4 * moments, 4 * buffers)


def test_two_norms_for_each_matrix(make_spec: Callable[..., ModelSpec]) -> None:
    units = parameters(make_spec(layers=3))
    everything = sum(len(unit.tensors) for unit in units)
    matrices = 3 * 4 + 3  # four in each block; tokens, positions and the head
    assert num_norms(OptimizerConf(name="adamw"), units) == 0
    assert num_norms(OptimizerConf(name="lamb"), units) == 2 * matrices
    assert num_norms(OptimizerConf(name="lars"), units) == 2 * matrices
    assert num_norms(OptimizerConf(name="lamb", exclude_1d=False), units) == 2 * everything


def test_a_sharded_step_has_its_all_reduce(make_experiment: Make, make_spec: Make) -> None:
    spec = make_spec()
    rows = {}
    for comm in ("ddp", "zero3"):
        experiment = make_experiment(comm, optimizer=OptimizerConf(name="lamb"))
        record = simulate(experiment, spec=spec)
        rows[comm] = [r.payload_bytes for r in record.ledger if r.phase == "step" and r.rank == 0]
    assert rows == {
        "ddp": [],
        "zero3": 3 * [4, 2 * 4 * (2 * 4 + 3)],
    }  # steps; of the gradient, and of the norms


def test_states_and_buffers_are_held(make_experiment: Make, make_spec: Make) -> None:
    spec = make_spec()
    experiment = make_experiment("zero3", optimizer=OptimizerConf(name="lamb", weight_decay=0.1))
    result = simulate(experiment, spec=spec).result
    shard = -(-num_parameters(spec) // 4)
    assert result["memory_bytes"]["optimizer"] == 8 * shard
    (step,) = (point for point in result["memory_over_time"] if point["phase"] == "step")
    assert step["buffers"] == pytest.approx(8 * shard, rel=1e-3)


def test_a_step_takes_as_long_as_its_bytes(make_experiment: Make, make_spec: Make) -> None:
    """On a device whose memory is all that counts: 27 numbers a parameter of LAMB against 7 of AdamW."""
    spec = make_spec(hidden=256)
    times = {}
    for name in ("adamw", "lamb"):
        keys = {"weight_decay": 0.01} if name == "lamb" else {}
        slow = DeviceConf(memory_Bps=1e8)
        experiment = make_experiment("ddp", optimizer=OptimizerConf(name=name, **keys), cluster_device=slow)
        times[name] = simulate(experiment, spec=spec).result["iteration_s"]["mean"]
    more_s = 4 * (27 - 7) * num_parameters(spec) / 1e8
    assert times["lamb"] - times["adamw"] == pytest.approx(more_s, rel=0.35)
