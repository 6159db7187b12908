"""What ways by columns are predicted to take, in closed form, and what policies make of it."""

import itertools
from dataclasses import replace

import pytest

from twinbed.conf.schema import BalanceConf, Way
from twinbed.policies.balance import (
    Assignment,
    BlockWork,
    ColumnsTimed,
    Half,
    Leg,
    Migrate,
    Prune,
    describe_balance_event,
    parse_balance_event,
    pretest_moves,
)
from twinbed.policies.balance.column_costs import column_half_ns
from twinbed.policies.balance.costs import predicted_ns
from twinbed.policies.balance.movement_cost import ColumnsCost, MovementCost, fit_columns
from twinbed.policies.balance.split import Lending

from .balance_group import Group, work_of

A, F = Half.attention, Half.ffn
NONE = ColumnsCost({})
ONE = Lending((4, 0, 0), (0, 3, 1))  # of units of which each rank has 8
TWO = Lending((4, 2, 0), (0, 0, 6))


def columns(ranks: int, units: int = 32) -> BlockWork:
    """Two blocks of as many units by columns, of each half; a third of a half's work is in its second product."""
    work = work_of(ranks, hidden=1024)
    numel = dict.fromkeys(Half, 3 * work.hidden * (1024 // units))
    return replace(
        work,
        units=dict.fromkeys(Half, units),
        unit_numel=numel,
        unit_features=dict.fromkeys(Half, 1024 // units),
        unit_flop={half: 2 * work.tokens * numel[half] for half in Half},
        by_columns=True,
    )


def legs(**each_ns: float) -> ColumnsCost:
    """Whose times are the same whatever moves, and one after the other of several ranks."""
    return ColumnsCost({Leg(name): MovementCost(ns) for name, ns in each_ns.items()})


def half_ns(cost: ColumnsCost, lending: Lending = ONE, slow: float = 3.0) -> float:
    """Of three ranks with 8 units, each 90 ns forward and 180 ns backward at full speed; the first is slower."""
    work = columns(3, 8)
    assert work.first_share(F) == pytest.approx(2 / 3)
    step = work.blocks * work.passes
    return column_half_ns(work, F, (270 * step * slow, 270 * step, 270 * step), lending, cost, (0.0,) * 3)


def test_without_movement_a_half_takes_as_long_as_its_slowest_rank() -> None:
    assert half_ns(NONE, Lending((0, 0, 0), (0, 0, 0))) == pytest.approx(3 * 8 * 270)
    assert half_ns(NONE) == pytest.approx(3 * 4 * 270)  # which keeps four
    assert half_ns(NONE, slow=1) == pytest.approx(11 * 270)  # and another has eleven


@pytest.mark.parametrize(
    ("leg", "hides_ns"),
    [
        # beside eight units of a helper's own: two thirds of each in the first product, one third of it forward
        (Leg.weights, 8 * 60),
        (Leg.operands, 8 * 30),
        (Leg.output_gradients, 8 * 120),
        (Leg.outputs, 0),
        (Leg.weight_gradients, 0),
        # what the helper computes of its own comes last
        (Leg.gradients, 8 * 60),
    ],
)
def test_what_of_each_leg_hides(leg: Leg, hides_ns: float) -> None:
    even_ns = half_ns(NONE, slow=1)
    assert half_ns(legs(**{leg.value: hides_ns}), slow=1) == pytest.approx(even_ns)
    assert half_ns(legs(**{leg.value: hides_ns + 500}), slow=1) == pytest.approx(even_ns + 500)
    # a straggler that is the last anyway hides more, but of what nobody computes beside
    more_ns = (half_ns(legs(**{leg.value: hides_ns + 500})) - half_ns(NONE)) if hides_ns else 500
    assert more_ns < 500 or not hides_ns
    # nothing moves where nothing is lent
    nothing = Lending((0, 0, 0), (0, 0, 0))
    assert half_ns(legs(**{leg.value: 10**6}), nothing) == half_ns(NONE, nothing)


def test_legs_add_up_and_lenders_take_turns() -> None:
    cost = legs(outputs=100, weight_gradients=40, weights=8 * 60 + 7, gradients=8 * 60 + 3)
    assert half_ns(cost, slow=1) == pytest.approx(11 * 270 + 150)
    assert half_ns(legs(outputs=100), TWO, slow=1) == pytest.approx(14 * 270 + 200)
    apart = ColumnsCost({Leg.outputs: MovementCost(100, 5, shared=0)})
    assert half_ns(apart, TWO, slow=1) == pytest.approx(14 * 270 + 100 + 5 * 6)  # the one that gets the most


def test_a_line_for_each_leg() -> None:
    few, many = (10, 20, 30, 40, 50, 60), (110, 20, 130, 20, 150, 160)
    timed = ColumnsTimed(F, (2, 12), few, many, (110, 60, 260, 20, 450, 10), lenders=3)
    found = fit_columns(timed).legs
    assert found[Leg.weights] == MovementCost(0, 10, 0)  # through 10 at 2
    assert found[Leg.outputs] == MovementCost(20, 0, 1)  # however much moves, one rank after the other
    assert found[Leg.operands] == MovementCost(10, 10, pytest.approx(0.5))
    assert found[Leg.gradients] == MovementCost(40, 0, 0)  # noise does not make it fall
    assert found[Leg.output_gradients].shared == 1
    assert found[Leg.weight_gradients].shared == 0
    for wrong in (
        replace(timed, few_ns=few[:5]),
        replace(timed, units=(0, 12)),
        replace(timed, many_ns=(-1, *many[1:])),
    ):
        with pytest.raises(ValueError, match="ColumnsTimed"):
            fit_columns(wrong)
    for event in (timed, replace(timed, together_ns=(0,) * 6, lenders=1)):
        assert parse_balance_event(describe_balance_event(event)) == event


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("units", [1, 2, 3, 32])
def test_what_the_pretest_moves(ranks: int, units: int) -> None:
    work = columns(ranks, units)
    moved = [Assignment(work, moves) for moves in pretest_moves(work, F)]  # all can be carried out
    assert bool(moved) == (units > 1)  # a rank keeps one
    if not moved:
        return
    few, many, *together = moved
    assert few.sources(F) == many.sources(F) == (0,)
    assert sum(few.lent(F, 0)) <= sum(many.lent(F, 0)) == max(1, units // 2, min(2, units - 1))
    assert len(together) == (ranks > 3)
    for each in together:
        assert each.sources(F) == tuple(range(ranks // 2))
        assert {sum(each.lent(F, src)) for src in each.sources(F)} == {sum(many.lent(F, 0))}
        if units > 3:  # who helps two of them makes one wait
            assert all(sum(part > 0 for part in each.lent(F, src)) == 2 for src in each.sources(F))


def timed(half: Half, start_ns: int, unit_ns: int) -> ColumnsTimed:
    """Whole outputs and their gradients cost the same, whatever is lent; all else goes with it."""
    whole = (Leg.outputs, Leg.output_gradients)
    few, many = ([start_ns if leg in whole else units * unit_ns for leg in Leg] for units in (4, 16))
    both = [2 * ns for ns in many]
    return ColumnsTimed(half, (4, 16), tuple(few), tuple(many), tuple(both), 2)


def group_of(start_ns: int, unit_ns: int, slow: float = 4.0, **keys: object) -> Group:
    conf = BalanceConf(**({"name": "migrate", "way": Way.scatter} | keys))  # type: ignore[arg-type]
    group = Group(columns(4), conf)
    for half in Half:
        assert not group.tell(timed(half, start_ns, unit_ns))
    list(group.periods([(slow, 1, 1, 1)] * 4))
    return group


def test_less_is_lent_the_more_movement_costs() -> None:
    work = columns(4)
    unit_ns = work.unit_flop[F] // 100 * 3  # forward and backward of a unit at full speed, all blocks
    lent = []
    for start, each in ((0, 0), (2, 0.05), (20, 0.3), (50, 0), (0, 3)):
        group = group_of(int(start * unit_ns), int(each * unit_ns))
        lent.append(sum(sum(group.assignment.lent(half, 0)) for half in Half))
    assert lent == sorted(lent, reverse=True)
    assert lent[0] > 0.9 * 2 * 32 * 0.69  # 9/13 of its units, where it is free
    assert lent[-2:] == [0, 0]  # neither what is constant nor what goes with units pays any more


def test_a_prediction_counts_what_moves() -> None:
    work = columns(4)
    unit_ns = dict.fromkeys(Half, (400.0, 100.0, 100.0, 100.0))
    lent = Assignment(work, (Migrate(0, 1, F, 10), Migrate(0, 2, F, 10)))
    movement = {F: legs(outputs=1_000, weight_gradients=100)}
    free_ns = predicted_ns(lent, unit_ns, {})
    assert free_ns == pytest.approx(32 * 400 + 12 * 400)
    assert predicted_ns(lent, unit_ns, movement) == pytest.approx(free_ns + work.blocks * 1_100)
    # what a lender leaves out of the columns that it keeps is off its own time, and no movement
    both = Assignment(work, (Prune(0, 0.5), *lent.actions))
    assert predicted_ns(both, unit_ns, movement) == pytest.approx(16 * 400 + 42 * 100 + work.blocks * 1_100)


def test_semi_lends_no_columns_to_who_prunes() -> None:
    """Also where pruning alone makes a straggler as fast as helpers."""
    seen = set()
    for slow, budget, unit_ns in itertools.product((2.0, 4.0, 8.0), (0.3, 1.0, 3.0), (0, 2_000, 10**6)):
        group = group_of(10 * unit_ns, unit_ns, slow, name="semi", accuracy_budget=budget)
        found = group.assignment  # checked as it was made
        seen |= {(found.prunes(0), any(found.lent(F, 0)))}
        assert not any(found.received(half, 0) for half in Half)
    assert seen == {(True, True), (True, False), (False, True)}
