"""A straggler appears, moves to another rank and leaves, and noise comes on top: policies that decide by themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from twinbed.conf.compose import compose
from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import Backend, DeviceConf, ExperimentConf, IntraNodeConf, SlowdownBy
from twinbed.policies.balance import (
    BalanceAction,
    BalanceEvent,
    BalancePolicy,
    BlockWork,
    GroupMeasured,
    build_balance,
)
from twinbed.sim.balance.run import BalancedRun
from twinbed.sim.simulate import make_engine, simulate

POLICIES = ("migrate", "semi", "resize")
PERIOD = 5
DEVICE = DeviceConf(flop_per_s=1e12, memory_Bps=1e12, launch_ns=1_000)
NETWORK = IntraNodeConf(bandwidth_Bps=50e9, latency_ns=2_000)
SIZES = {"hidden": 256, "heads": 32, "sequence": 128}
CHI = 4.0
# (first step, last one + 1, the slow rank): changes come at any point of a period, also where it begins
PHASES = {
    "first step of a period": ((0, 10, None), (10, 30, 1), (30, 50, 2), (50, 65, None)),
    "second": ((0, 11, None), (11, 31, 1), (31, 51, 2), (51, 66, None)),
    "third": ((0, 12, None), (12, 33, 1), (33, 53, 2), (53, 69, None)),
    "last": ((0, 14, None), (14, 34, 1), (34, 54, 2), (54, 69, None)),
}
NEAR = 0.05  # of the best time of a step
# A first measurement that holds one fast step of five is so near to the truth that what it gave is kept: what is in
# force stays until a change promises more than the slack
NEAR_SLACK = 0.15
NOISE, PERIODS, SEEDS = 0.1, 100, 12
# Changes after the first balance, in all periods: what one noisy measurement gave is bettered once more are there
MOST_CHANGES = {"migrate": 1, "semi": 2, "resize": 2}

Build = Callable[[BlockWork], BalancePolicy]


@dataclass
class Noisy:
    """Is told times that are off by a normal share of themselves."""

    policy: BalancePolicy
    rng: np.random.Generator

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        if isinstance(event, GroupMeasured):
            event = replace(event, attention_ns=self._off(event.attention_ns), ffn_ns=self._off(event.ffn_ns))
        return self.policy.decide(event)

    def _off(self, times: Sequence[int]) -> tuple[int, ...]:
        factors = 1 + NOISE * self.rng.normal(size=len(times))
        return tuple(round(time * max(0.3, factor)) for time, factor in zip(times, factors, strict=True))


def group_of(make: Callable[..., Any], name: str, slow: Any, **changes: Any) -> ExperimentConf:
    """Four ranks at which products are most of a step."""
    experiment: ExperimentConf = make(
        4,
        cluster_backend=Backend.nccl,
        cluster_device=DEVICE,
        cluster_intra_node=NETWORK,
        cluster_slowdown=slow,
        cluster_slowdown_by=SlowdownBy.repeat,
        balance_name=name,
        **changes,
    )
    return experiment


def run(
    experiment: ExperimentConf, spec: ModelSpec, make_policy: Build | None = None
) -> tuple[list[float], list[str]]:
    """(time of each step, what was in force after each period)"""
    balanced = BalancedRun(experiment, spec, None, None, make_engine, make_policy=make_policy)
    steps_s = balanced.iteration_s(balanced.simulate(experiment.cluster))
    periods: list[Mapping[str, Any]] = balanced.balance["groups"][0]["periods"]
    return steps_s, [period["actions"] for period in periods]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("when", PHASES)
def test_it_is_balanced_again_within_two_periods(
    make: Callable[..., Any], spec_of: Callable[..., ModelSpec], when: str, name: str
) -> None:
    spec, phases = spec_of(**SIZES), PHASES[when]
    slow = [
        {"rank": rank, "factor": CHI, "from_step": first, "until_step": end}
        for first, end, rank in phases
        if rank is not None
    ]
    experiment = group_of(make, name, slow, balance_period=PERIOD, steps=phases[-1][1])
    steps_s, in_force = run(experiment, spec)
    # what the policy comes to where nothing ever changes; a step behind which is measured takes a little longer
    best_s = {
        rank: min(
            run(
                group_of(
                    make, name, {rank: CHI} if rank is not None else None, balance_period=PERIOD, steps=12
                ),
                spec,
            )[0]
        )
        for rank in (None, 1, 2)
    }
    none_s = max(steps_s)
    assert none_s > 2.5 * best_s[None]
    for first, end, rank in phases:
        again = first + 2 * PERIOD if first else 0
        near = NEAR_SLACK if when == "second" else NEAR
        late = {
            step: steps_s[step] for step in range(again, end) if steps_s[step] > (1 + near) * best_s[rank]
        }
        assert not late, (rank, best_s[rank], late)
        ended = in_force[end // PERIOD - 1].split(", ")
        if rank is None:
            assert ended == ["nothing"]
        else:
            assert all(f"from {rank} " in action or f"rank {rank} " in action for action in ended), ended


# (model, tensor ranks, the most of a step with nothing done that one with a straggler takes): the head and what is no
# product stay slow. Of GPT-2's short products gathering columns takes longer than leaving them out saves
IN_WAVES = (
    (("model=llama2_13b", "model.layers=4"), 8, 0.85),
    (("model=gpt2_small", "model.layers=2"), 4, 1.01),
)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("model", "ranks", "most"), IN_WAVES, ids=["llama2_13b", "gpt2_small"])
def test_a_straggler_that_leaves_is_let_go_where_kernels_run_in_waves(
    model: Sequence[str], ranks: int, most: float, name: str
) -> None:
    """Of a tensor core's products, half of the units take much more than half of the time: so little that a rank with
    few of them seems slow, if it is not known.
    """
    first, end, steps = PERIOD, 5 * PERIOD, 8 * PERIOD
    made = compose(
        [
            *("target=sim", "cluster=dgx_a100", "cluster.nodes=1", f"cluster.devices_per_node={ranks}"),
            *(*model, "comm=ddp", "precision=bf16", f"parallel.tensor={ranks}"),
            f"cluster.slowdown=[{{rank: 0, factor: {CHI}, from_step: {first}, until_step: {end}}}]",
            *(f"balance={name}", f"balance.period={PERIOD}", f"steps={steps}"),
        ]
    )
    steps_s, in_force = run(made.experiment, made.spec)
    even_s = min(steps_s[:first])
    balanced_s = steps_s[first + PERIOD + 1 : end - 1]
    assert max(balanced_s) < most * steps_s[first + 1]
    assert in_force[end // PERIOD + 1 :] == ["nothing"] * (steps // PERIOD - end // PERIOD - 1)
    assert max(steps_s[end + 2 * PERIOD :]) < 1.01 * even_s


@pytest.mark.parametrize("name", POLICIES)
def test_noise_does_not_make_it_flap(
    make: Callable[..., Any], spec_of: Callable[..., ModelSpec], name: str
) -> None:
    """Balance is never given up, and hardly ever bettered."""
    spec = spec_of(layers=1, **SIZES)
    experiment = group_of(make, name, {1: CHI}, balance_period=1, steps=PERIODS + 1)
    changes = []
    for seed in range(SEEDS):
        _, in_force = run(
            experiment,
            spec,
            lambda work, seed=seed: Noisy(
                build_balance(experiment.balance, work), np.random.default_rng(seed)
            ),
        )
        assert len(in_force) == PERIODS + 1
        assert all(each != "nothing" for each in in_force)  # one measurement is enough for such a straggler
        changes.append(sum(now != before for before, now in pairwise(in_force)))
        assert len(set(in_force)) == changes[-1] + 1  # what was left never comes back
    assert max(changes) <= MOST_CHANGES[name], changes
    assert changes.count(0) >= SEEDS / 2, changes


# Kernels of next to no columns are as short as they get: a straggler that keeps so few must not seem slow for ever.
KEEPS_NEXT_TO_NOTHING = (
    "target=sim",
    "cluster=v100_8",
    "model=gpt",
    "model.layers=2",
    "model.hidden=2048",
    "model.heads=32",
    "model.sequence=1024",
    "data=synthetic",
    "batch.micro=8",
    "precision=bf16",
    "parallel.tensor=8",
    "comm=ddp",
    "balance.period=2",
    "cluster.slowdown=[{rank: 0, factor: 8, until_step: 8}]",
    "steps=14",
)


@pytest.mark.parametrize("name", ["migrate", "semi"])
def test_one_that_kept_next_to_nothing_gets_its_work_back(name: str) -> None:
    """All of it was slow, norms too, so it lent all heads and all but a few hidden features."""
    composed = compose((*KEEPS_NEXT_TO_NOTHING, f"balance={name}"))
    known = replace(composed.experiment.cluster, guesses={})
    record = simulate(replace(composed.experiment, cluster=known), spec=composed.spec)
    (group,) = record.result["balance"]["groups"]
    actions = {period["step"]: period["actions"] for period in group["periods"]}
    assert actions[8].count("attention") == 4  # heads: all
    assert actions[12] == actions[14] == "nothing"  # the second period at its new speed
