"""Small experiments for the simulator's tests, built without Hydra."""

from collections.abc import Callable
from typing import Any

import pytest

from twinbed.conf.model_spec import ModelSpec, spec_from_keys
from twinbed.conf.schema import (
    Backend,
    BatchConf,
    ClusterConf,
    CommConf,
    DataConf,
    DeviceConf,
    ExperimentConf,
    InterNodeConf,
    IntraNodeConf,
    ModelConf,
    OptimizerConf,
    TrainConf,
)

# comm=NAME as conf/comm has it
COMM: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "ps": {"zero_stage": 0, "parameter_server": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {},
    "qwz": {"zero_quantized_weights": True},
    "hpz": {"zero_hpz_partition_size": None},
    "qgz": {"zero_quantized_gradients": True},
}
COMM["qwz+hpz"] = COMM["qwz"] | COMM["hpz"]
COMM["qwz+qgz"] = COMM["qwz"] | COMM["qgz"]
COMM["hpz+qgz"] = COMM["hpz"] | COMM["qgz"]
COMM["zeropp"] = COMM["qwz"] | COMM["hpz"] | COMM["qgz"]

MakeExperiment = Callable[..., ExperimentConf]


def _experiment(comm: str = "zero3", *, nodes: int = 2, ranks: int = 2, **changes: Any) -> ExperimentConf:
    """`changes` are fields of ExperimentConf, and of ClusterConf with the prefix `cluster_`."""
    cluster: dict[str, Any] = {
        "name": "test",
        "nodes": nodes,
        "devices_per_node": ranks,
        "backend": Backend.gloo,
        "device": DeviceConf(),
        "intra_node": IntraNodeConf(),
        "inter_node": InterNodeConf(),
    }
    for key in [key for key in changes if key.startswith("cluster_")]:
        cluster[key.removeprefix("cluster_")] = changes.pop(key)
    fields: dict[str, Any] = {
        "cluster": ClusterConf(**cluster),
        "model": ModelConf(name="test"),
        "comm": CommConf(name=comm, **(COMM[comm] | changes.pop("comm_keys", {}))),
        "batch": BatchConf(accumulation=changes.pop("accumulation", 1)),
        "data": DataConf(name="synthetic"),
        "optimizer": OptimizerConf(name="adamw"),
        "train": TrainConf(),
        "steps": 3,
        "warmup_steps": 1,
    }
    return ExperimentConf(**(fields | changes))


def _spec(layers: int = 2, hidden: int = 64, **keys: Any) -> ModelSpec:
    given = {"family": "gpt", "layers": layers, "hidden": hidden, "heads": 4, "vocab": 256, "sequence": 32}
    return spec_from_keys(given | keys)


@pytest.fixture
def make_experiment() -> MakeExperiment:
    return _experiment


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    return _spec
