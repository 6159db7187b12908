"""Small experiments with a layout, built without Hydra."""

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
    ParallelConf,
    Precision,
    TrainConf,
)

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def _experiment(
    ranks: int = 4, *, per_node: int | None = None, comm: str = "ddp", micro: int = 4, **changes: Any
) -> ExperimentConf:
    """`changes` are fields of ExperimentConf, of ClusterConf with the prefix `cluster_`, and of ParallelConf."""
    per_node = per_node or ranks
    cluster: dict[str, Any] = {
        "name": "test",
        "nodes": ranks // per_node,
        "devices_per_node": per_node,
        "backend": Backend.gloo,
        "device": DeviceConf(),
        "intra_node": IntraNodeConf(),
        "inter_node": InterNodeConf(),
    }
    for key in [key for key in changes if key.startswith("cluster_")]:
        cluster[key.removeprefix("cluster_")] = changes.pop(key)
    layout = {key: changes.pop(key) for key in list(changes) if hasattr(ParallelConf, key)}
    layout |= {"order": changes.pop("order")} if "order" in changes else {}
    fields: dict[str, Any] = {
        "cluster": ClusterConf(**cluster),
        "model": ModelConf(name="test"),
        "comm": CommConf(name=comm, zero_stage=STAGES[comm]),
        "batch": BatchConf(micro=micro, accumulation=changes.pop("accumulation", 1)),
        "data": DataConf(name="synthetic"),
        "optimizer": OptimizerConf(name="adamw"),
        "train": TrainConf(gradient_clipping=0.0),
        "parallel": ParallelConf(**layout),
        "precision": Precision.fp32,
        "steps": 2,
        "warmup_steps": 0,
    }
    return ExperimentConf(**(fields | changes))


def _spec(**keys: Any) -> ModelSpec:
    given = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 8, "vocab": 256, "sequence": 16}
    return spec_from_keys(given | keys)


@pytest.fixture
def make() -> Callable[..., ExperimentConf]:
    return _experiment


@pytest.fixture
def spec_of() -> Callable[..., ModelSpec]:
    return _spec
