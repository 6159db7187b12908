"""What ranks do beside products: learned by rank, lent with units or not at all, never pruned."""

from dataclasses import replace

import pytest

from twinbed.conf.schema import BalanceConf
from twinbed.policies.balance import (
    Assignment,
    GroupMeasured,
    Half,
    Migrate,
    Prune,
    describe_balance_event,
    parse_balance_event,
)
from twinbed.policies.balance.beside import BesideTracker, Extra
from twinbed.policies.balance.build import build_balance

from .balance_group import OWN, RANKS, SIXTEEN

PRODUCTS_NS, BETWEEN_NS, AROUND_NS = 1_000, 100, 4_400  # of a unit, of a unit, of a half
ROOM = (10**9,) * RANKS


def measured(chi: float, lent: int = 0, *, beside: bool = True, step: int = 1) -> GroupMeasured:
    """Rank 0 takes `chi` times as long for everything, and has lent units of both halves to rank 1."""
    units = [OWN - lent, OWN + lent, OWN, OWN]
    slow = [chi, 1.0, 1.0, 1.0]
    products, between, around = (
        tuple(round(factor * of(count)) for factor, count in zip(slow, units, strict=True))
        for of in (
            lambda count: PRODUCTS_NS * count,
            lambda count: BETWEEN_NS * count,
            lambda _: 2 * AROUND_NS,
        )
    )
    more = (between, between, around) if beside else ()
    return GroupMeasured(step, products, products, ROOM, *more)


def lends(units: int) -> Assignment:
    return Assignment(SIXTEEN, tuple(Migrate(0, 1, half, units) for half in Half))


def test_ranks_that_are_no_stragglers_are_taken_for_equal() -> None:
    event = measured(3)
    off = replace(event, around_ns=(*event.around_ns[:2], 8_900, 8_700))
    found = BesideTracker(SIXTEEN, 16).observe(off, Assignment(SIXTEEN), counts=(1,) * RANKS, fast=(1, 2, 3))
    for half in Half:
        slow, *others = found.of(half, SIXTEEN)
        assert slow == Extra(3 * BETWEEN_NS, 3 * AROUND_NS)
        assert others == [Extra(BETWEEN_NS, AROUND_NS)] * 3
    assert found.even_ns(SIXTEEN)[0] == 2 * 3 * (OWN * BETWEEN_NS + AROUND_NS)


def test_few_units_do_not_tell_what_one_takes() -> None:
    """A kernel's start would seem to be the unit's; how slow a rank is around its products says more."""
    tracker = BesideTracker(SIXTEEN, 16)
    few = replace(measured(3, 15), attention_between_ns=(9_000, 3_100, 1_600, 1_600))
    found = tracker.observe(few, lends(15), counts=(1,) * RANKS, fast=(1, 2, 3))
    assert found.of(Half.attention, SIXTEEN)[0].unit_ns == pytest.approx(3 * BETWEEN_NS)


def test_only_measurements_since_a_change_count() -> None:
    tracker = BesideTracker(SIXTEEN, 16)
    even = Assignment(SIXTEEN)
    tracker.observe(measured(1), even, counts=(1,) * RANKS, fast=(0, 1, 2, 3))
    found = tracker.observe(measured(4), even, counts=(1, 2, 2, 2), fast=(1, 2, 3))
    assert found.of(Half.ffn, SIXTEEN)[0] == Extra(4 * BETWEEN_NS, 4 * AROUND_NS)
    found = tracker.observe(measured(2), even, counts=(2, 3, 3, 3), fast=(1, 2, 3))
    assert found.of(Half.ffn, SIXTEEN)[0] == Extra(3 * BETWEEN_NS, 3 * AROUND_NS)


def test_nothing_is_known_where_nothing_was_measured() -> None:
    found = BesideTracker(SIXTEEN, 16).observe(
        measured(3, beside=False), Assignment(SIXTEEN), counts=(1,) * RANKS, fast=(1, 2, 3)
    )
    assert found.of(Half.ffn, SIXTEEN) == (Extra(),) * RANKS


def test_a_rank_too_many_is_refused() -> None:
    event = replace(measured(3), around_ns=(1,) * (RANKS + 1))
    with pytest.raises(ValueError, match="must have 4 times of what ranks did beside products"):
        BesideTracker(SIXTEEN, 16).observe(event, Assignment(SIXTEEN), counts=(1,) * RANKS, fast=(1, 2, 3))


@pytest.mark.parametrize(("beside", "moved"), [(False, 11), (True, 14)])
def test_a_straggler_lends_for_its_norms_too(beside: bool, moved: int) -> None:
    """A unit and what goes with it is 1,100 ns, and as much as 4 of them go with nothing.

    Of products alone 4 x 5 = 20 units is what others then have at the most; with all 4 (2 + 4) < 21 + 4 < 4 (3 + 4).
    """
    policy = build_balance(BalanceConf(name="migrate", period=1), SIXTEEN)
    answer = policy.decide(measured(4, beside=beside))
    assert answer is not None
    for half in Half:
        assert sum(move.units for move in answer if isinstance(move, Migrate) and move.half is half) == moved


@pytest.mark.parametrize(("beside", "ratio"), [(False, 0.5), (True, 0.6875)])
def test_pruning_makes_up_for_what_it_does_not_shorten(beside: bool, ratio: float) -> None:
    """gamma = (T - T*) / M = (2 x 22,000 - 22,000) / (2 x 16,000), ns of a half."""
    policy = build_balance(BalanceConf(name="resize", period=1), SIXTEEN)
    assert policy.decide(measured(2, beside=beside)) == (Prune(0, ratio),)


def test_a_prediction_has_all_of_a_blocks_work() -> None:
    policy = build_balance(BalanceConf(name="migrate", period=1), SIXTEEN)
    policy.decide(measured(4))
    # 4 (16 + 4) units' time with nothing done, 21 + 4 of the slowest of ranks 1 to 3 then
    assert getattr(policy, "predicted_speedup") == pytest.approx(80 / 25)  # noqa: B009


@pytest.mark.parametrize("beside", [False, True])
def test_a_log_has_it_as_it_was(beside: bool) -> None:
    event = measured(3, beside=beside)
    text = describe_balance_event(event)
    assert ("around_ns" in text) is beside  # logs of products alone are as they were
    assert parse_balance_event(text) == event
