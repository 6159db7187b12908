"""Products that take other times than their units and columns say: what a pretest of them tells."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from twinbed.conf.schema import BalanceConf
from twinbed.policies.balance import (
    GroupMeasured,
    Half,
    Prune,
    describe_balance_event,
    parse_balance_event,
    sizes_of,
)
from twinbed.policies.balance.build import build_balance
from twinbed.policies.balance.policy import ProductsTimed
from twinbed.policies.balance.product_cost import ProductCost, fit_products

from .balance_group import OWN, RANKS, SIXTEEN

FIXED = 16  # units in whose time products start
UNIT_NS = 1_000


def took_ns(units: int, slow: float = 1.0) -> int:
    return round(slow * UNIT_NS * (units + FIXED))


def timed(half: Half, slowness: Sequence[float], kept: Sequence[float] = ()) -> ProductsTimed:
    """Of ranks that take so many times as long; pruning gathers for a tenth of even work."""
    sizes = sizes_of(SIXTEEN, half)
    whole = tuple(tuple(took_ns(units, slow) for slow in slowness) for units in sizes)
    pruned = tuple(tuple(round((share + 0.1) * took_ns(OWN, slow)) for slow in slowness) for share in kept)
    return ProductsTimed(half, sizes, whole, tuple(kept), pruned)


def test_the_line_is_found_whoever_is_slow() -> None:
    for slowness in ((1, 1, 1, 1), (4, 1, 2, 1)):
        cost = fit_products(timed(Half.ffn, slowness), SIXTEEN)
        assert (cost.slope, cost.fixed) == (pytest.approx(0.5), pytest.approx(8))
        for units in (1, 2, 5, 8, 16, 20, 24, 30):  # also beyond what was timed, and between
            assert cost.effort(units) == pytest.approx((units + FIXED) / 2, rel=1e-3)
        assert cost.effort(0) == 0


def test_one_rank_whose_clock_is_off_is_outvoted() -> None:
    event = timed(Half.ffn, (1, 1, 1, 1))
    off = tuple((times[0] * (1 + i), *times[1:]) for i, times in enumerate(event.units_ns))
    assert fit_products(replace(event, units_ns=off), SIXTEEN) == fit_products(event, SIXTEEN)


def test_without_a_pretest_time_is_proportional() -> None:
    cost = ProductCost(OWN)
    assert [cost.effort(units) for units in (0, 3, 40)] == [0, 3, 40]
    assert (cost.slope, cost.fixed, cost.pruning(0.5)) == (1, 0, 0)


def test_more_units_take_no_less() -> None:
    event = timed(Half.ffn, (1, 1, 1, 1))
    falls = ((5,) * RANKS, (9,) * RANKS, (7,) * RANKS, *event.units_ns[3:])
    cost = fit_products(replace(event, units_ns=falls), SIXTEEN)
    efforts = [cost.effort(units) for units in range(1, 40)]
    assert efforts == sorted(efforts)
    assert efforts[0] > 0


def test_the_smallest_kernels_have_a_floor() -> None:
    """Where the two smallest sizes take alike, fewer units do as well, whatever more of them add."""
    event = timed(Half.ffn, (1, 1, 1, 1))
    assert event.units[:2] == (1, 2)
    flat = (event.units_ns[1], *event.units_ns[1:])
    cost = fit_products(replace(event, units_ns=flat), SIXTEEN)
    assert cost.effort(1) == cost.effort(2) < cost.effort(3)
    assert cost.effort(0) == 0


def test_what_pruning_takes_is_on_top() -> None:
    cost = fit_products(timed(Half.ffn, (1, 4, 1, 1), kept=(0.25, 0.5, 0.75)), SIXTEEN)
    for kept in (0.25, 0.4, 0.75, 0.9):
        assert cost.pruning(kept) == pytest.approx(0.1, abs=1e-3)
    assert cost.pruning(1.0) == 0


def test_a_log_has_it_as_it_was() -> None:
    for kept in ((), (0.25, 0.5, 0.75)):
        event = timed(Half.attention, (1, 4, 1, 1), kept)
        assert parse_balance_event(describe_balance_event(event)) == event


@pytest.mark.parametrize(
    "wrong",
    [
        {"units": (1, 2, 4, 8, 12, 20, 24)},
        {"units_ns": ((1, 1, 1, 1),)},
        {"units_ns": ((1, 1, 1),) * 7},
        {"kept": (0.5,)},
    ],
)
def test_times_that_do_not_fit_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must have 4 times for each size, and 16 units"):
        fit_products(replace(timed(Half.ffn, (1, 1, 1, 1)), **wrong), SIXTEEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["migrate", "semi"])
def test_a_rank_is_not_slow_for_having_few_units(name: str) -> None:
    """Half of a rank's time at even work is its products' start."""
    policy = build_balance(
        BalanceConf(name=name, period=1, accuracy_budget=0.0 if name == "semi" else None), SIXTEEN
    )
    for half in Half:
        policy.decide(timed(half, (1, 1, 1, 1)))
    units, slow, answers = [OWN] * RANKS, 4.0, []
    for step in range(8):
        if step == 4:
            slow = 1.0
        times = tuple(
            took_ns(count, slow if rank == 0 else 1.0) if count else 0 for rank, count in enumerate(units)
        )
        answer = policy.decide(GroupMeasured(step + 1, times, times, (10**9,) * RANKS))
        answers.append(answer)
        if answer is not None:
            assert not any(isinstance(action, Prune) for action in answer)
            units = [OWN] * RANKS
            for action in answer:
                if action.half is Half.ffn:  # type: ignore[union-attr]
                    units[action.src] -= action.units  # type: ignore[union-attr]
                    units[action.dst] += action.units  # type: ignore[union-attr]
    assert answers[0]
    # 4 (n + 16) = (16 + (16 - n) / 3) + 16 has no n > 0: it keeps as little as it may
    assert answers[4] == ()
    assert answers[5:] == [None] * 3
