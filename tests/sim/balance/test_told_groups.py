"""What a record says of balancing: of every tensor group, by ranks of the world, and why nothing was changed."""

from collections.abc import Sequence

import pytest

from twinbed.analysis.balancing import balance_sentences
from twinbed.conf.compose import compose
from twinbed.sim.simulate import simulate

CASE = (
    "target=sim",
    "cluster=v100_8",
    "model=vit_1b",
    "data=synthetic",
    "precision=fp32",
    "comm=ddp",
    "batch.micro=64",
    "warmup_steps=1",
    "balance.period=2",
)


def told(*overrides: str) -> Sequence[str]:
    composed = compose((*CASE, *overrides))
    composed.experiment.cluster.guesses = {}
    return balance_sentences(simulate(composed.experiment, spec=composed.spec))


def test_the_group_that_lends_is_told_though_it_is_not_the_first() -> None:
    lends, others = told("parallel.tensor=4", "cluster.slowdown={5:4}", "balance=migrate", "steps=4")
    assert lends.startswith("balance=migrate: ranks 4 to 7: 1 change; at the end rank 5 lends ")
    assert "its blocks were predicted" in lends
    assert "from the first period to the last" in lends
    assert others == "balance=migrate: nothing was changed in 1 of 2 groups of ranks"


def test_ranks_of_a_group_that_do_not_lie_side_by_side_are_those_of_the_world() -> None:
    lends, others = told(
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.order=[data,sequence,tensor,pipeline]",
        "batch.accumulation=2",
        "cluster.slowdown={2:4}",
        "balance=migrate",
        "steps=4",
    )
    assert lends.startswith("balance=migrate: ranks 0, 2: 1 change; at the end rank 2 lends ")
    assert others == "balance=migrate: nothing was changed in 3 of 4 groups of ranks"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("balance.ratio=0.5", "balance.max_ratio=0.25"),
            "less than balance.ratio=0.5: balance.max_ratio=0.25",
        ),
        (
            ("balance.ratio=0.5", "balance.accuracy_budget=1", "balance.loss_points=[[0.25,1],[0.5,4]]"),
            "less than balance.ratio=0.5: balance.accuracy_budget=1",
        ),
    ],
)
def test_a_bound_on_pruning_is_named(overrides: tuple[str, ...], said: str) -> None:
    (sentence,) = told("parallel.tensor=8", "cluster.slowdown={3:4}", "balance=resize", "steps=4", *overrides)
    assert f"rank 3 leaves 0.25 of its columns out, {said} allows no more" in sentence


def test_a_group_without_memory_for_a_unit_says_so() -> None:
    (sentence,) = told(
        "parallel.tensor=8",
        "cluster.slowdown={3:4}",
        "balance=migrate",
        "steps=2",
        "cluster.device.memory_bytes=6000000000",
    )
    assert sentence.endswith("in the last period: no other rank has memory for a unit of it")
