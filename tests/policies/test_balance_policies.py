"""What policies answer: ratios in closed form, budgets, movement that pays, logs that replay, and the user's own."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.conf.schema import BalanceConf, Goal, Selection
from twinbed.policies.balance import (
    Assignment,
    BalanceEvent,
    ChangesMeasured,
    GroupMeasured,
    Half,
    Migrate,
    MovementTimed,
    Product,
    Prune,
    describe_balance_actions,
    describe_balance_event,
    parse_balance_event,
    pretest_moves,
    search,
)
from twinbed.policies.balance.budget import AccuracyBudget
from twinbed.policies.balance.build import build_balance
from twinbed.policies.balance.costs import (
    HalfTimes,
    all_reduce_ns,
    block_ns,
    half_times,
    predicted_ns,
)
from twinbed.policies.balance.differentiated import differentiated
from twinbed.policies.balance.movement_cost import MovementCost, fit_movement
from twinbed.policies.balance.speeds import kept_shares
from twinbed.policies.balance.split import Lending, lossless_ceiling

from .balance_group import Group, work_of

ROOT = Path(__file__).resolve().parents[2]
MIX = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
NAMES = ("resize", "migrate", "semi")
POINTS = ((0.25, 0.3), (0.5, 0.7), (0.75, 1.5))  # (ratio, what it costs)


def one_of_eight(chi: float) -> tuple[float, ...]:
    return (chi, *(1.0,) * 7)


def settled(slowness: Sequence[float], *, heads: int = 64, periods: int = 4, **keys: object) -> Group:
    """A group that has been told these speeds for some periods."""
    group = Group(work_of(len(slowness), heads=heads), BalanceConf(**keys))  # type: ignore[arg-type]
    list(group.periods([slowness] * periods))
    return group


def ratios(group: Group) -> list[float]:
    return [group.assignment.ratio(rank, "") for rank in range(group.work.ranks)]


# ---- resize


@pytest.mark.parametrize(
    ("chi", "to_fastest", "to_mean"),
    [(2, 0.5, 0.4375), (4, 0.75, 0.656), (6, 0.833, 0.729), (8, 0.875, 0.766)],
)
def test_ratio_from_times(chi: float, to_fastest: float, to_mean: float) -> None:
    for goal, ratio in ((Goal.fastest, to_fastest), (Goal.mean, to_mean)):
        group = settled(one_of_eight(chi), name="resize", goal=goal)
        assert ratios(group) == [pytest.approx(ratio, abs=6e-4), *(0,) * 7]
        assert group.policy.predicted_speedup == pytest.approx(
            group.true_speedup(one_of_eight(chi)), rel=1e-2
        )


def test_ratio_has_a_limit_and_several_ranks_have_their_own() -> None:
    assert ratios(settled(one_of_eight(8.0), name="resize", max_ratio=0.6)) == [0.6, *(0,) * 7]
    found = ratios(settled(MIX, name="resize"))
    assert found == pytest.approx([7 / 8, 5 / 6, 3 / 4, 1 / 2, 0, 0, 0, 0], abs=1e-3)


def test_a_fixed_ratio_is_for_all_stragglers_within_the_budget() -> None:
    assert ratios(settled(MIX, name="resize", ratio=0.3)) == [0.3] * 4 + [0] * 4
    # four at 0.5 would cost 2.8 points
    found = ratios(settled(MIX, name="resize", ratio=0.5, accuracy_budget=1.2, loss_points=POINTS))
    assert found == [pytest.approx(0.25, abs=1e-4)] * 4 + [0] * 4
    assert settled(one_of_eight(4.0), name="resize", ratio=0.0).assignment.is_even


def test_points_of_pruning() -> None:
    budget = AccuracyBudget(POINTS, 0.5, 0.9)
    for ratio, points in ((0, 0), (0.125, 0.15), (0.25, 0.3), (0.375, 0.5), (0.75, 1.5), (0.875, 1.9)):
        assert budget.points(ratio) == pytest.approx(points)
    assert budget.to_level({0: 8.0}, 1.0) == {0: pytest.approx(0.375, abs=1e-4)}


def test_points_that_were_measured_elsewhere_count_by_the_share_of_all_columns() -> None:
    few, many = (AccuracyBudget.of(BalanceConf(name="semi", accuracy_budget=0.5), ranks) for ranks in (2, 8))
    given = AccuracyBudget.of(BalanceConf(name="semi", accuracy_budget=0.5, loss_points=POINTS), 8)
    for ratio in (0.25, 0.5, 0.75):
        assert few.points(ratio) == pytest.approx(4 * many.points(ratio))
        assert given.points(ratio) == dict(POINTS)[ratio]


@given(
    slowness=st.lists(st.floats(1.3, 9), min_size=1, max_size=7),
    allowed=st.floats(0, 4),
    goal=st.floats(0.5, 1.5),
)
@settings(deadline=None)
def test_stragglers_share_a_budget_to_the_last(slowness: list[float], allowed: float, goal: float) -> None:
    budget = AccuracyBudget(POINTS, allowed, 0.9)
    times = dict(enumerate(slowness))
    found = budget.to_level(times, goal)
    spent = sum(map(budget.points, found.values()))
    assert spent <= allowed + 1e-6
    wanted = {rank: min(0.9, max(0, 1 - goal / by)) for rank, by in times.items()}
    if sum(map(budget.points, wanted.values())) <= allowed:
        assert found == pytest.approx(wanted, abs=1.1e-4)
    else:
        assert spent >= allowed - 0.01  # four digits of each ratio
        ends = [
            by * (1 - ratio) for by, ratio in zip(slowness, found.values(), strict=True) if 0 < ratio < 0.9
        ]
        assert max(ends, default=1) - min(ends, default=1) < 1e-2  # all to the same time


@given(
    ratio=st.floats(0, 0.89),
    changes=st.lists(st.floats(0, 3), min_size=2, max_size=12),
    data=st.data(),
)
@settings(deadline=None)
def test_ratios_by_change_keep_their_mean(ratio: float, changes: list[float], data: st.DataObject) -> None:
    count = len(changes)
    weights = data.draw(st.lists(st.floats(0.5, 4), min_size=count, max_size=count))
    found = differentiated(ratio, changes, weights, 0.9)
    assert all(0 <= each <= 0.9 + 1e-9 for each in found)
    assert sum(each * by for each, by in zip(found, weights, strict=True)) == pytest.approx(
        ratio * sum(weights), abs=1e-6
    )
    order = sorted(range(count), key=lambda i: changes[i])
    for less, more in itertools.pairwise(order):
        assert found[less] >= found[more] - 1e-9


def test_products_that_change_less_are_pruned_more() -> None:
    group = Group(work_of(4), BalanceConf(name="resize", selection=Selection.differentiated))
    names = [name for name, _ in group.work.products()]
    assert names == [f"block.{i}.{product}" for i in (0, 1) for product in ("qkv", "out", "fc1", "fc2")]
    changes = tuple(1.0 + i for i in range(8))
    assert not group.tell(ChangesMeasured(1, (changes,) * 4))
    now = (1.0, 2.0, 1.0, 1.0)
    list(group.periods([now] * 3))
    found = [group.assignment.ratio(1, name) for name in names]
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1]
    done = group.assignment
    left = {
        half: sum(kept_shares(done, half, 1)) / 2 * done.work.unit_flop[half] * done.work.units[half]
        for half in Half
    }
    assert sum(left.values()) / sum(
        done.work.unit_flop[half] * done.work.units[half] for half in Half
    ) == pytest.approx(0.5, rel=0.01)
    # blocks that are pruned less than the mean hold all ranks up, those that are pruned more win nothing
    assert 1.3 < group.true_speedup(now) < 1.8
    assert group.policy.predicted_speedup == pytest.approx(group.true_speedup(now), rel=0.01)
    backwards = ChangesMeasured(99, (changes[::-1],) * 4)
    assert group.tell(backwards)
    assert [group.assignment.ratio(1, name) for name in names] == pytest.approx(
        differentiated(
            0.5,
            changes[::-1],
            [work_share(group, product) for _, product in group.work.products()],
            0.9,
        ),
        abs=2e-4,
    )
    assert not group.tell(backwards)
    assert not any(group.periods([now] * 20))
    assert sum(group.assignment.ratio(0, name) for name in names) == 0


def work_share(group: Group, product: Product) -> float:
    first = group.work.first_share(product.half)
    whole = group.work.units[product.half] * group.work.unit_flop[product.half]
    return whole * (first if product.is_first else 1 - first)


def test_changes_of_other_products_are_refused() -> None:
    group = Group(work_of(4), BalanceConf(name="resize", selection=Selection.differentiated))
    group.tell(ChangesMeasured(1, ((1.0, 2.0),) * 4))
    with pytest.raises(ValueError, match=r"must be of 8, for each of 4 ranks"):
        group.period((1.0, 4.0, 1.0, 1.0))


def test_changes_do_not_matter_to_other_selections() -> None:
    group = settled(one_of_eight(4.0), name="resize")
    assert not group.tell(ChangesMeasured(50, ((1.0, 2.0),) * 8))


# ---- movement and the model


def test_movement_is_a_line() -> None:
    assert fit_movement(MovementTimed(Half.ffn, (10, 110), (1_500, 6_500))) == MovementCost(1_000, 50)
    assert fit_movement(MovementTimed(Half.ffn, (1, 1), (300, 500))) == MovementCost(0, 400)
    assert fit_movement(MovementTimed(Half.ffn, (1, 9), (300, 200))) == MovementCost(300, 0)  # noise
    with pytest.raises(ValueError, match="at least one unit"):
        fit_movement(MovementTimed(Half.ffn, (0, 9), (300, 200)))


def test_several_that_lend_share_links_or_do_not() -> None:
    lending = Lending((0, 20, 0, 40), (35, 0, 25, 0))
    in_turn, longest = 1_000 + 50 * 20 + 1_000 + 50 * 40, 1_000 + 50 * 40
    timed = MovementTimed(Half.ffn, (10, 110), (1_500, 6_500))
    for together_ns, lenders, shared in (
        (0, 1, 1),
        (13_000, 2, 1),
        (20_000, 2, 1),
        (26_000, 4, 1),
        (6_500, 2, 0),
        (6_000, 4, 0),
        (9_750, 2, 0.5),
        (9_750, 4, 1 / 6),
    ):
        cost = fit_movement(replace(timed, together_ns=together_ns, lenders=lenders))
        assert cost == MovementCost(1_000, 50, pytest.approx(shared))
        assert cost.one_way_ns(lending) == pytest.approx((longest + shared * (in_turn - longest)) / 2)
    # what comes to one rank is on its links
    assert MovementCost(1_000, 50, 0).one_way_ns(Lending((20, 40, 0), (0, 0, 60))) == (1_000 + 50 * 60) / 2
    assert MovementCost(1_000, 50).one_way_ns(Lending((0, 0), (0, 0))) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_what_the_pretest_moves(ranks: int) -> None:
    work = work_of(ranks, heads=2 * ranks, hidden=64 * ranks)
    for half in Half:
        few, many, *together = (Assignment(work, moves) for moves in pretest_moves(work, half))
        most = max(2, work.units[half] // 2)
        assert sum(few.lent(half, 0)) <= sum(many.lent(half, 0)) == most
        assert max(few.lent(half, 0)) == 1
        assert len(together) == (ranks >= 4)
        for both in together:
            lent, middle = [sum(both.lent(half, rank)) for rank in range(ranks)], ranks // 2
            assert lent == [most] * middle + [0] * (ranks - middle)
            assert max(both.received(half, rank) for rank in range(ranks)) == most


def test_what_of_movement_hides() -> None:
    even = HalfTimes(300, 0, 0)
    assert block_ns(even, even, ahead=False) == pytest.approx(600)
    # forward: the FFN's 60 hide behind attention's 100. Backward: they hide behind attention's 200
    assert block_ns(even, HalfTimes(300, 300, 60), ahead=False) == pytest.approx(600)
    # 40 of 140 do not hide in forward, though who borrows nothing goes on
    assert block_ns(even, HalfTimes(300, 300, 140), ahead=False) == pytest.approx(640)
    assert block_ns(even, HalfTimes(300, 300, 140), ahead=True) == pytest.approx(600)
    # attention's: out before the block can begin, back behind its end
    assert block_ns(HalfTimes(300, 300, 60), even, ahead=False) == pytest.approx(720)
    assert block_ns(HalfTimes(300, 270, 10), even, ahead=False) == pytest.approx(610)
    assert block_ns(HalfTimes(300, 300, 60), even, ahead=True) == pytest.approx(660)
    # a link that is never idle
    assert block_ns(HalfTimes(300, 300, 500), HalfTimes(300, 300, 700), ahead=True) == pytest.approx(
        1_200 + 200 + 700 + 500
    )


def test_movement_holds_up_all_reduces() -> None:
    def alike(move_ns: float, reduce_ns: float, *, ahead: bool = True) -> float:
        return block_ns(
            HalfTimes(300, 300, 0), HalfTimes(300, 300, move_ns), ahead=ahead, reduce_ns=reduce_ns
        )

    for ahead in (False, True):
        # behind attention's forward; in backward it meets the all-reduce at once
        assert alike(60, 1_000, ahead=ahead) == pytest.approx(660)
        # 40 of 140 meet the first all-reduce, and all of it that of the FFN's backward
        assert alike(140, 1_000, ahead=ahead) == pytest.approx(600 + 40 + 140)
        # who reduces still gets a part of the link
        assert alike(140, 10, ahead=ahead) == pytest.approx(600 + (30 if ahead else 40) + 30)
        assert alike(140, 0, ahead=ahead) == pytest.approx(600 + (0 if ahead else 40))


def test_an_all_reduce_takes_what_movement_tells_of_the_links() -> None:
    work = work_of(8)
    byte_ns = 0.5
    movement = {half: MovementCost(500, 2 * byte_ns * work.unit_bytes(half)) for half in Half}
    nbytes = 8 * 64 * 1024 * 4  # of the activation
    assert all_reduce_ns(work, movement) == pytest.approx(2 * 7 / 8 * nbytes * byte_ns)
    assert all_reduce_ns(work, {}) == 0


@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
def test_free_movement_reaches_the_ceiling(chi: float) -> None:
    now = one_of_eight(chi)
    group = settled(now, name="migrate")
    ceiling = lossless_ceiling(now, group.work)
    assert group.true_speedup(now) > 0.98 * ceiling
    assert group.policy.predicted_speedup == pytest.approx(group.true_speedup(now), rel=1e-3)


def test_movement_that_costs_more_than_it_gains_is_left() -> None:
    now = one_of_eight(4.0)
    done = {}
    for unit_us in (0, 10, 20, 60, 1_000_000):
        group = Group(work_of(8), BalanceConf(name="migrate"))
        for half in Half:
            unit_ns = 1_000 * unit_us * (64 if half is Half.attention else 1) // 64
            group.tell(MovementTimed(half, (1, 101), (unit_ns, 101 * unit_ns)))
        list(group.periods([now] * 3))
        done[unit_us] = sum(sum(group.assignment.lent(half, 0)) for half in Half)
        assert (group.policy.predicted_speedup or 0) >= 1
    assert list(done.values()) == sorted(done.values(), reverse=True)
    assert done[0] > 300
    assert done[1_000_000] == 0


def test_memory_of_helpers_bounds_what_moves() -> None:
    work = work_of(4)
    unit = work.blocks * 2 * work.unit_bytes(Half.ffn)
    for free, most in ((0, 0), (300 * unit, 300)):
        group = Group(work, BalanceConf(name="migrate"), free_bytes=free)
        list(group.periods([(4.0, 1.0, 1.0, 1.0)] * 3))
        assert all(group.assignment.received(Half.ffn, rank) <= most for rank in range(4))
        assert group.assignment.is_even == (most == 0)


# ---- all


movements = st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 10**5))


@given(
    name=st.sampled_from(NAMES),
    slowness=st.lists(st.sampled_from([1.0, 1.1, 1.4, 2.0, 3.0, 5.0, 8.0]), min_size=2, max_size=8),
    heads=st.sampled_from([1, 2, 8]),
    free=st.integers(0, 3000),
    movement=movements,
    budget=st.none() | st.sampled_from([0.0, 0.5, 2.0]),
    later=st.integers(0, 7),
)
@settings(max_examples=120, deadline=None)
def test_what_holds_of_all_answers(
    name: str,
    slowness: list[float],
    heads: int,
    free: int,
    movement: tuple[int, int] | None,
    budget: float | None,
    later: int,
) -> None:
    ranks = len(slowness)
    work = work_of(ranks, heads=heads * ranks, hidden=64 * heads * ranks)
    conf = BalanceConf(name=name, accuracy_budget=budget, loss_points=POINTS)
    group = Group(work, conf, free_bytes=free * 2 * work.blocks * work.unit_bytes(Half.ffn))
    if movement is not None:
        start, unit = movement
        for half in Half:
            group.tell(MovementTimed(half, (1, 11), (start + unit, start + 11 * unit)))
    rotated = slowness[later % ranks :] + slowness[: later % ranks]
    for now in [slowness, slowness, rotated, rotated, *[[1.0] * ranks] * 10]:
        changed = group.period(now)
        event = group.log[-1][0]
        assert isinstance(event, GroupMeasured)
        if changed:  # never slower than doing nothing, by the model
            assert (group.policy.predicted_speedup or 0) >= 1 - 1e-3
        done = group.assignment
        for half in Half:
            counts = [done.computed(half, rank) for rank in range(ranks)]
            assert sum(counts) == work.units[half] * ranks
            assert min(counts) >= 0
            literal = work.blocks * 2 * work.unit_bytes(half)
            assert all(
                done.received(half, rank) <= event.free_bytes[rank] // literal for rank in range(ranks)
            )
        if budget is not None:
            points = AccuracyBudget.of(conf, ranks)
            assert sum(points.points(done.ratio(rank, "")) for rank in range(ranks)) <= budget + 1e-6
        if name == "resize":
            assert all(isinstance(action, Prune) for action in done.actions)
        if name == "migrate":
            assert all(isinstance(action, Migrate) for action in done.actions)
    assert group.assignment.is_even  # all have recovered
    replayed = build_balance(conf, work)
    for event, answer in group.log:
        text = describe_balance_event(event)
        assert parse_balance_event(text) == event
        assert describe_balance_actions(replayed.decide(parse_balance_event(text))) == answer


def test_noisy_logs_replay() -> None:
    conf = BalanceConf(
        name="semi", accuracy_budget=0.5, loss_points=POINTS, selection=Selection.differentiated
    )
    group = Group(work_of(4), conf, noise=0.1, seed=3)
    list(group.periods([(1.0, 1.0, 4.0, 1.0)] * 5))
    group.tell(ChangesMeasured(6, tuple(tuple(0.1 * (1 + i + rank) for i in range(8)) for rank in range(4))))
    list(group.periods([(1.0, 2.0, 1.0, 1.0)] * 5))
    assert any("prune" in answer for _, answer in group.log)
    replayed = build_balance(conf, group.work)
    for event, answer in group.log:
        again = parse_balance_event(describe_balance_event(event))
        assert describe_balance_actions(replayed.decide(again)) == answer


events = st.one_of(
    st.builds(
        MovementTimed,
        st.sampled_from(Half),
        st.tuples(st.integers(1, 999), st.integers(1, 999)),
        st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)),
    ),
    st.integers(1, 8).flatmap(
        lambda ranks: st.builds(
            GroupMeasured,
            st.integers(0, 10**6),
            *(st.tuples(*(st.integers(0, 10**15),) * ranks) for _ in range(3)),
        )
    ),
    st.integers(1, 8).flatmap(
        lambda products: st.builds(
            ChangesMeasured,
            st.integers(0, 10**6),
            st.lists(
                st.tuples(*(st.floats(0, 1e6).map(lambda x: float(f"{x:.3g}")),) * products),
                min_size=1,
                max_size=8,
            ).map(tuple),
        )
    ),
)


@given(event=events)
@settings(deadline=None)
def test_events_are_what_their_words_say(event: BalanceEvent) -> None:
    assert parse_balance_event(describe_balance_event(event)) == event


@pytest.mark.parametrize("name", NAMES)
def test_a_decision_looks_at_few_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight ranks, seven of them slow. At 40 microseconds each that is 6 ms; `benchmarks/balance_limits.py` has what
    deciding takes of a step.
    """
    looked_at: list[object] = []

    def counted(*args: Any) -> HalfTimes:
        looked_at.append(args)
        return half_times(*args)

    monkeypatch.setattr(search, "half_times", counted)
    group = Group(
        work_of(8, blocks=24, heads=16), BalanceConf(name=name, accuracy_budget=0.5, loss_points=POINTS)
    )
    for half in Half:
        group.tell(MovementTimed(half, (1, 101), (100_000, 1_000_000)))
    for _ in range(15):
        looked_at.clear()
        group.period((7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.5, 1.0))
        assert len(looked_at) <= 150
        assert bool(looked_at) is (name != "resize")


# ---- semi and the better of both


def told_of_links(name: str, slowness: Sequence[float], bandwidth_Bps: float, points: float) -> Group:
    """Of 24 blocks, told of links of so many bytes a second, and settled."""
    group = Group(
        work_of(8, heads=16, blocks=24, hidden=2048),
        BalanceConf(name=name, accuracy_budget=points, loss_points=POINTS),
    )
    for half in Half:
        own = group.work.units[half]
        units = (1, max(1, own // 2))
        few_ns, many_ns = (
            2 * (20_000 + round(count * group.work.unit_bytes(half) / bandwidth_Bps * 1e9)) for count in units
        )
        group.tell(MovementTimed(half, units, (few_ns, many_ns), many_ns, 4))
    list(group.periods([slowness] * 8))
    return group


@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
def test_semi_predicts_to_be_as_fast_as_the_better_of_both(chi: float) -> None:
    """What simulations make of it: tests/sim/balance/test_semi.py."""
    done = set()
    for stragglers, bandwidth_Bps, points in itertools.product(
        (1, 4), (130e9, 12.5e9, 1.25e9, 0.125e9), (0.0, 0.5, 2.0)
    ):
        slowness = (chi,) * stragglers + (1.0,) * (8 - stragglers)
        found = {name: told_of_links(name, slowness, bandwidth_Bps, points) for name in NAMES}
        speedup = {name: group.policy.predicted_speedup or 0 for name, group in found.items()}
        assert speedup["semi"] >= 0.97 * max(speedup.values())
        assert speedup["migrate"] <= 1.001 * lossless_ceiling(slowness, found["migrate"].work)
        kinds = frozenset(map(type, found["semi"].assignment.actions))
        done.add(kinds)
        if not points:
            assert Prune not in kinds
            assert speedup["resize"] == 1
    assert {frozenset({Migrate}), frozenset({Prune}), frozenset({Prune, Migrate})} <= done


@pytest.mark.parametrize("name", ["none", "batch", "layers"])
def test_other_kinds_have_no_policy_of_a_group(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"balance.name={name}: must be one of \['resize', 'migrate', 'semi'\]"
    ):
        build_balance(BalanceConf(name=name), work_of(4))


def test_pruned_and_lent_work_is_predicted_together() -> None:
    work = work_of(4)
    unit_ns = dict.fromkeys(Half, (4.0, 1.0, 1.0, 1.0))
    own = {half: work.units[half] for half in Half}
    even = predicted_ns(Assignment(work), unit_ns, {})
    assert even == pytest.approx(4 * sum(own.values()))
    half_gone = Assignment(work, (Prune(0, 0.5),))
    assert predicted_ns(half_gone, unit_ns, {}, 0.1) == pytest.approx(0.6 * even, rel=1e-3)
    assert predicted_ns(half_gone, unit_ns, {}) == pytest.approx(even / 2, rel=1e-3)
    lent = Assignment(work, (Prune(0, 0.5), Migrate(0, 1, Half.ffn, own[Half.ffn] // 4)))
    assert predicted_ns(lent, unit_ns, {}) == pytest.approx(
        2 * own[Half.attention] + 1.5 * own[Half.ffn], rel=1e-3
    )
    # what pruning takes beside does not shrink with the units that are lent
    assert predicted_ns(lent, unit_ns, {}, 0.1) == pytest.approx(
        2.4 * own[Half.attention] + 1.9 * own[Half.ffn], rel=1e-3
    )


@pytest.mark.parametrize("overhead", [0.0, 0.04, 0.2])
def test_what_pruning_takes_beside_is_learned(overhead: float) -> None:
    now = one_of_eight(4.0)
    group = Group(work_of(8), BalanceConf(name="resize"), overhead=overhead)
    errors = []
    for straggles in (now, (1.0,) * 8) * 8:
        list(group.periods([straggles] * 4))
        if straggles == now:
            errors.append(abs((group.policy.predicted_speedup or 0) / group.true_speedup(now) - 1))
    assert errors[-1] < 0.05
    assert errors[-1] <= errors[0] + 1e-6
    assert ratios(group) == [0] * 8


@pytest.mark.parametrize("name", ["resize", "semi"])
def test_a_second_look_at_what_pruning_takes_ends_what_does_not_pay(name: str) -> None:
    """Half a point allows four stragglers a tenth of their columns each: less than pruning takes beside."""
    work = work_of(8)
    group = Group(work, BalanceConf(name=name, accuracy_budget=0.5, loss_points=POINTS), overhead=0.2)
    for half in Half:  # nothing can move
        group.tell(MovementTimed(half, (1, 2), (10**12, 2 * 10**12)))
    now = (2.5,) * 4 + (1.0,) * 4
    done = []
    for _ in range(8):
        group.period(now)
        done.append(group.assignment.is_even)
    assert not done[0]
    assert done[4:] == [True] * 4


def test_columns_are_not_gained_by_pruning_another() -> None:
    """Of answers that are as good the one in force stays."""
    now = (2.6, 2.6, 2.6, 2.6, 1.0, 1.0, 1.0, 1.0)
    group = Group(
        work_of(8, heads=16),
        BalanceConf(name="semi", accuracy_budget=0.5, loss_points=POINTS),
        noise=0.01,
        seed=3,
    )
    changed = list(group.periods([now] * 30))
    assert any(group.assignment.prunes(rank) for rank in range(4))
    assert sum(changed) <= 2


def test_pruning_that_takes_more_than_it_gains_is_not_chosen() -> None:
    now = one_of_eight(1.5)
    for overhead, prunes in ((0.04, True), (0.5, False)):
        group = Group(work_of(8), BalanceConf(name="semi"), overhead=overhead)
        for _ in range(10):  # it has to prune to learn what that takes
            list(group.periods([now] * 4))
            last = any(group.assignment.prunes(rank) for rank in range(8))
            list(group.periods([(1.0,) * 8] * 4))
        assert last == prunes
