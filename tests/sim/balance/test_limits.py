"""What balance=migrate reaches when it decides by itself, against the most that whole units allow."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from twinbed.conf.compose import Composed, compose
from twinbed.policies.balance import (
    Assignment,
    Half,
    Migrate,
    balanced_work,
    build_balance,
)
from twinbed.policies.balance.split import lossless_ceiling
from twinbed.policies.layout import layout_of
from twinbed.sim.simulate import simulate

MIX = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
FREE = (
    "cluster.intra_node.bandwidth_Bps=1e18",
    "cluster.intra_node.latency_ns=0",
    "cluster.nccl.base_latency=false",
)
SIMULATED = (
    "target=sim",
    "precision=fp32",
    "comm=ddp",
    "warmup_steps=0",
    "balance=migrate",
    "balance.period=1",
)
# Four ranks whose products take no more than their operations do
FOUR = (
    *SIMULATED,
    "cluster=local_2x2",
    "cluster.nodes=1",
    "cluster.devices_per_node=4",
    "cluster.emulated_flops_per_s=1e9",
    "cluster.intra_node.bandwidth_Bps=1e15",
    "parallel.tensor=4",
    "model.layers=2",
    "model.hidden=224",
    "model.heads=28",
    "batch.micro=4",
    "steps=3",
)
HALF_SPEED = ("cluster.slowdown={3:2}", "cluster.slowdown_by=repeat")


class Watched:
    """A policy, and what is in force after each of its answers."""

    def __init__(self, policy: Any, work: Any) -> None:
        self._policy, self.work = policy, work
        self.in_force = Assignment(work)
        self.name = policy.name

    def decide(self, event: Any) -> Any:
        answer = self._policy.decide(event)
        if answer is not None:
            self.in_force = Assignment(self.work, answer)
        return answer


def balanced(composed: Composed) -> tuple[list[dict[str, Any]], Watched]:
    """(periods of the first group, its policy)"""
    experiment = composed.experiment
    experiment.cluster.guesses = {}
    made: list[Watched] = []

    def make_balance(work: Any) -> Watched:
        made.append(Watched(build_balance(experiment.balance, work), work))
        return made[-1]

    result = simulate(experiment, spec=composed.spec, make_balance=make_balance).result
    return result["balance"]["groups"][0]["periods"], made[0]


def products_ns(period: dict[str, Any], halves: Sequence[Half] = tuple(Half)) -> int:
    """Of a step: at the end of a half all wait for its slowest rank."""
    return sum(max(period[f"{half.value}_ns"]) for half in halves)


@pytest.mark.parametrize("slowness", [(2.0, *(1.0,) * 7), (8.0, *(1.0,) * 7), MIX], ids=["2", "8", "mix"])
def test_migration_reaches_the_ceiling_of_whole_units(slowness: Sequence[float]) -> None:
    slow = ",".join(f"{rank}:{factor:g}" for rank, factor in enumerate(slowness) if factor > 1)
    composed = compose(
        (
            *SIMULATED,
            "cluster=v100_8",
            "model=vit_1b",
            "batch.micro=64",
            "parallel.tensor=8",
            f"cluster.slowdown={{{slow}}}",
            "cluster.slowdown_by=repeat",
            "steps=4",
            *FREE,
        )
    )
    experiment = composed.experiment
    work = balanced_work(experiment, composed.spec, layout_of(experiment, composed.spec))
    assert work is not None
    ceiling = lossless_ceiling(slowness, work)
    assert (
        ceiling
        < lossless_ceiling(slowness)
        == pytest.approx(max(slowness) * sum(1 / s for s in slowness) / 8)
    )
    periods, _ = balanced(composed)
    reached = products_ns(periods[0]) / products_ns(periods[-1])
    # products of fewer units are a little less than linear: nothing may be far above either
    assert 0.95 <= reached / ceiling < 1.01
    assert periods[0]["actions"] == periods[-1]["actions"]


def test_a_half_as_fast_rank_of_four_costs_eight_sevenths_in_place_of_two() -> None:
    even, _ = balanced(compose((*FOUR, "model=gpt")))
    equal = even[0]["attention_ns"][0], even[0]["ffn_ns"][0]
    assert all(period["actions"] == "nothing" for period in even)
    composed = compose((*FOUR, "model=gpt", *HALF_SPEED))
    periods, policy = balanced(composed)
    own = {half: policy.work.units[half] for half in Half}
    assert own == {Half.attention: 7, Half.ffn: 224}
    for half, equal_ns in zip(Half, equal, strict=True):
        assert products_ns(periods[0], [half]) == pytest.approx(2 * equal_ns, rel=1e-6)
        shares = [policy.in_force.computed(half, rank) for rank in range(4)]
        assert sum(shares) == 4 * own[half]
        assert [Fraction(units, 4 * own[half]) for units in shares] == [Fraction(2, 7)] * 3 + [Fraction(1, 7)]
        assert products_ns(periods[-1], [half]) == pytest.approx(equal_ns * 8 / 7, rel=1e-6)
    assert [policy.in_force.computed(Half.attention, rank) for rank in range(4)] == [8, 8, 8, 4]


def test_hidden_units_that_are_no_multiple_of_seven_are_shared_out_within_one() -> None:
    periods, policy = balanced(compose((*FOUR, "model=gpt", "model.ffn=1000", *HALF_SPEED)))
    # 1000 * 2/7 = 285.7, and half of that: 143 take as long as 286 elsewhere
    assert [policy.in_force.computed(Half.ffn, rank) for rank in range(4)] == [286, 286, 285, 143]
    even_ns = products_ns(periods[0], [Half.ffn]) / 2
    assert products_ns(periods[-1], [Half.ffn]) == pytest.approx(even_ns * 286 / 250, rel=1e-6)


def test_a_rank_with_one_key_head_moves_hidden_units_alone() -> None:
    """28 heads share 4 key heads: a rank cannot part with some of its own."""
    llama = (*FOUR, "model=llama_tiny", "model.kv_heads=4", "model.ffn=448")
    composed = compose((*llama, *HALF_SPEED))
    (warning,) = [text for text in composed.warnings if "key head" in text]
    assert "each rank has one key head, which its 7 heads share" in warning
    assert "only hidden units of the FFN move" in warning
    periods, policy = balanced(composed)
    assert policy.in_force.actions
    assert {action.half for action in policy.in_force.actions if isinstance(action, Migrate)} == {Half.ffn}
    assert [policy.in_force.computed(Half.attention, rank) for rank in range(4)] == [1] * 4
    assert [policy.in_force.computed(Half.ffn, rank) for rank in range(4)] == [128, 128, 128, 64]
    before, after = periods[0], periods[-1]
    assert max(after["attention_ns"]) == max(before["attention_ns"]) == 2 * min(before["attention_ns"])
    assert products_ns(after, [Half.ffn]) == pytest.approx(products_ns(before, [Half.ffn]) * 4 / 7, rel=1e-6)


def test_two_kinds_of_gpus_are_balanced_without_being_called_slow() -> None:
    keys = (
        *SIMULATED[:-2],
        "cluster=mixed_group",
        "model=vit_1b",
        "batch.micro=64",
        "parallel.tensor=8",
        "steps=8",
        "warmup_steps=7",
    )
    composed = compose((*keys, *SIMULATED[-2:]))
    assert composed.experiment.cluster.slowdown is None
    periods, policy = balanced(composed)
    actions = [action for action in policy.in_force.actions if isinstance(action, Migrate)]
    assert {action.src for action in actions} == {4, 5, 6, 7}  # the V100s
    assert {action.dst for action in actions} <= {0, 1, 2, 3}
    before, after = periods[0], periods[-1]
    spread = [max(period["ffn_ns"]) / min(period["ffn_ns"]) for period in (before, after)]
    # an A100's time does not grow with its units, but with whole waves of tiles: what is left is within the slack
    assert spread[0] > 1.2 > 1 + composed.experiment.balance.slack > spread[1]
    none = compose(keys)
    none.experiment.cluster.guesses = {}
    steps_s = [
        simulate(each.experiment, spec=each.spec).result["iteration_s"]["mean"] for each in (composed, none)
    ]
    assert steps_s[0] < 0.98 * steps_s[1]
