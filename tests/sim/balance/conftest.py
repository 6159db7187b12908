"""Small experiments whose tensor groups are balanced by scripted policies."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twinbed.conf.model_spec import ModelSpec, spec_from_keys
from twinbed.conf.schema import (
    Backend,
    BalanceConf,
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
from twinbed.policies.balance import (
    BalanceAction,
    BalanceEvent,
    BlockWork,
    GroupMeasured,
    Half,
)
from twinbed.policies.balance.assignment import moves

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass
class Scripted:
    """Answers the measurement after so many steps with the actions that are written for it.

    `events`: all that it was told.
    """

    answers: Mapping[int, tuple[BalanceAction, ...]]
    events: list[BalanceEvent] = field(default_factory=list)
    name: str = "scripted"

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        self.events.append(event)
        return self.answers.get(event.step) if isinstance(event, GroupMeasured) else None


class Proportional:
    """Lends of each half what levels the measured times best, from the slowest rank to all others; works it out from
    every measurement, by the units that its own last answer left to each.
    """

    name = "proportional"

    def __init__(self, work: BlockWork) -> None:
        self._work = work

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        if not isinstance(event, GroupMeasured) or event.step > 1:
            return None
        actions: tuple[BalanceAction, ...] = ()
        for half in Half:
            times = event.time_ns(half)
            slow = max(range(len(times)), key=lambda rank: (times[rank], -rank))
            chi = times[slow] / min(times)
            _, parts = integral_ceiling(chi, self._work.units[half], len(times) - 1)
            actions += tuple(moves(half, slow, (*parts[:slow], 0, *parts[slow:])))
        return actions


def integral_ceiling(chi: float, units: int, helpers: int) -> tuple[float, tuple[int, ...]]:
    """(the least time of a half, in times of an even share at full speed; units for each helper) where whole units of
    one straggler go to helpers of full speed.
    """
    found = []
    for moved in range(units + 1):
        each = -(-moved // helpers)
        found.append((max(chi * (units - moved), units + each) / units, moved))
    time, moved = min(found)
    return time, tuple(moved // helpers + (i < moved % helpers) for i in range(helpers))


def _experiment(ranks: int = 4, *, per_node: int | None = None, comm: str = "ddp", **changes: Any) -> Any:
    """`changes` are fields of ExperimentConf, of ClusterConf with the prefix `cluster_`, of BalanceConf with
    `balance_`, and of ParallelConf.
    """
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
    balance: dict[str, Any] = {"name": "migrate", "period": 1}
    for key in [key for key in changes if key.startswith("balance_")]:
        balance[key.removeprefix("balance_")] = changes.pop(key)
    layout = {"tensor": ranks} | {
        key: changes.pop(key) for key in list(changes) if hasattr(ParallelConf, key)
    }
    layout |= {"order": changes.pop("order")} if "order" in changes else {}
    fields: dict[str, Any] = {
        "cluster": ClusterConf(**cluster),
        "model": ModelConf(name="test"),
        "comm": CommConf(name=comm, zero_stage=STAGES[comm]),
        "batch": BatchConf(micro=4, accumulation=changes.pop("accumulation", 1)),
        "data": DataConf(name="synthetic"),
        "optimizer": OptimizerConf(name="adamw"),
        "train": TrainConf(gradient_clipping=0.0),
        "parallel": ParallelConf(**layout),
        "balance": BalanceConf(**balance),
        "precision": Precision.fp32,
        "steps": 3,
        "warmup_steps": 0,
    }
    return ExperimentConf(**(fields | changes))


def _spec(**keys: Any) -> ModelSpec:
    given = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 8, "vocab": 256, "sequence": 16}
    return spec_from_keys(given | keys)


@pytest.fixture
def unbalanced() -> Callable[[ExperimentConf], ExperimentConf]:
    """The same experiment with balance=none."""
    return lambda experiment: replace(experiment, balance=BalanceConf())


@pytest.fixture
def proportional() -> type[Proportional]:
    return Proportional


@pytest.fixture
def ceiling() -> Callable[[float, int, int], tuple[float, tuple[int, ...]]]:
    return integral_ceiling


@pytest.fixture
def make() -> Callable[..., ExperimentConf]:
    return _experiment


@pytest.fixture
def spec_of() -> Callable[..., ModelSpec]:
    return _spec


@pytest.fixture
def scripted() -> Callable[..., tuple[list[Scripted], Callable[[BlockWork], Scripted]]]:
    """(the policies that were made, one for each tensor group; what makes them)"""

    def factory(answers: Mapping[int, Sequence[BalanceAction]]) -> Any:
        made: list[Scripted] = []

        def make_policy(_work: BlockWork) -> Scripted:
            made.append(Scripted({step: tuple(actions) for step, actions in answers.items()}))
            return made[-1]

        return made, make_policy

    return factory


@pytest.fixture(scope="session")
def decision_map() -> ModuleType:
    """benchmarks/balance_map.py."""
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "balance_map.py"
    spec = importlib.util.spec_from_file_location("benchmark_balance_map", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
