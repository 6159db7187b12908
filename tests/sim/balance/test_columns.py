"""Ways by columns: what the pretest tells, whether predictions hold, and that nothing is lent where it does not pay."""

import itertools
from dataclasses import replace

import pytest

from twinbed.conf.schema import (
    Backend,
    BalanceConf,
    DeviceConf,
    InterNodeConf,
    IntraNodeConf,
    Way,
)
from twinbed.policies.balance import (
    ColumnsTimed,
    GroupMeasured,
    Half,
    Leg,
    Migrate,
    Prune,
)
from twinbed.sim.simulate import simulate

WAYS = (Way.scatter, Way.broadcast)
# chi, stragglers, links
GRID = tuple(itertools.product((2, 8), (1, 3), ("nvlink", "pcie", "slow")))
SLOWER = 0.97  # of doing nothing, that steps must at the least be


def setting(decision_map, at, budget=0.0, way=Way.scatter):
    return decision_map.Setting("vit_1b", "v100_8", *at, budget, way=way.value)


@pytest.mark.timeout(240)
def test_predictions_hold_and_nothing_is_lent_where_it_does_not_pay(decision_map):
    found = {}
    for at, way in itertools.product(GRID, WAYS):
        composed = decision_map.experiment_of(setting(decision_map, at), 2)
        none_s, _ = decision_map.run(composed, "none", 0.0)
        with_s, periods = decision_map.run(composed, "migrate", 0.0, way)
        products_s = (max(periods[0]["attention_ns"]) + max(periods[0]["ffn_ns"])) / 1e9
        found[at, way] = decision_map.speedup_of(none_s, products_s, with_s, periods)
    assert all(speedup.settled for speedup in found.values())
    moves = {key for key, speedup in found.items() if speedup.decision == "migrate"}
    for kind in ("step", "work"):
        pairs = [(getattr(found[key], f"predicted_{kind}"), getattr(found[key], kind)) for key in moves]
        errors = [decision_map.error_of(*pair) for pair in pairs]
        assert decision_map.mean(errors) < 0.07, kind
        assert max(errors) < 0.15, kind
    assert min(speedup.step for speedup in found.values()) > SLOWER
    assert moves >= {(at, way) for at, way in found if at[2] == "nvlink"}
    assert not {(at, way) for at, way in moves if at[2] == "slow"}
    # broadcasts send more
    for at in GRID:
        assert found[at, Way.scatter].step >= found[at, Way.broadcast].step


def test_without_a_pretest_it_would_be_slower_than_nothing(decision_map):
    composed = decision_map.experiment_of(setting(decision_map, (2, 3, "pcie")), 2)
    none_s, _ = decision_map.run(composed, "none", 0.0)
    for way, pretest in itertools.product(WAYS, (True, False)):
        conf = BalanceConf(name="migrate", period=2, way=way, pretest=pretest)
        record = simulate(replace(composed.experiment, balance=conf), spec=composed.spec)
        speedup = none_s / record.result["iteration_s"]["mean"]
        assert (speedup > SLOWER) == pretest


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", WAYS)
def test_semi_prunes_and_moves_columns(decision_map, way):
    settings = {
        (4, 3, "nvlink", 2.0): "both",
        (8, 2, "pcie", 0.0): "migrate",
        (4, 1, "slow", 2.0): "prune",
    }
    for (*at, budget), decision in settings.items():
        row = decision_map.row(setting(decision_map, at, budget, way), layers=2)
        assert row.semi.decision == decision
        assert row.over_better >= 0.97
        # copies on the compute stream are in no leg: of three lenders up to 10%
        assert decision_map.error_of(row.semi.predicted_work, row.semi.work) < 0.12
        if decision == "both":
            assert row.over_better > 1.05


def test_legs_are_timed_before_the_first_step(make, spec_of, scripted):
    """By what moves and the rate of links, of one group: 4 ranks, whose copies take nothing."""
    rate = 1e8
    times = {}
    for way in WAYS:
        made, factory = scripted({})
        experiment = make(
            4,
            balance_way=way,
            cluster_backend=Backend.nccl,
            cluster_device=DeviceConf(memory_Bps=1e18, launch_ns=0),
            cluster_intra_node=IntraNodeConf(bandwidth_Bps=rate, latency_ns=0),
            cluster_inter_node=InterNodeConf(bandwidth_Bps=rate, latency_ns=0),
        )
        simulate(experiment, spec=spec_of(), make_balance=factory)
        events = [event for event in made[0].events if isinstance(event, ColumnsTimed)]
        assert [event.half for event in events] == list(Half)
        assert isinstance(made[0].events[2], GroupMeasured)
        times[way] = events[1]
    # 16 units of each rank; fc1 has 64 rows and columns, fc2 64 rows and columns; 64 tokens
    columns, rows, tokens = 64, 64, 64
    for way, event in times.items():
        assert event.units == (2, 8)
        for units, found in zip(event.units, (event.few_ns, event.many_ns), strict=True):
            lent = columns * units // 16
            numbers = {
                Leg.weights: rows * lent,
                Leg.outputs: tokens * rows,
                Leg.operands: (rows + tokens) * lent,
                Leg.gradients: (rows + tokens) * lent,
                Leg.output_gradients: tokens * rows,
                Leg.weight_gradients: rows * lent,
            }
            for leg, ns in zip(Leg, found, strict=True):
                assert ns == pytest.approx(4 * numbers[leg] / rate * 1e9, rel=0.1), (way, leg)
        assert event.lenders == 2
    # of two lenders at once broadcasts follow each other; scatters share helpers alone
    both, alone = (times[Way.broadcast].together_ns, times[Way.broadcast].many_ns)
    assert both == pytest.approx([2 * ns for ns in alone], rel=0.1)


def test_who_prunes_and_lends_columns_computes_less(make, spec_of, scripted):
    """A lender's products are of half of what it keeps, of one that lends none of half of all; nothing else moves."""
    keys = {"cluster_emulated_flops_per_s": 1e8, "balance_name": "semi", "balance_pretest": False}
    moves = tuple(Migrate(0, 1, half, 8) for half in Half)  # of 16
    prunes = (Prune(0, 0.5), Prune(3, 0.5))
    times, rows = [], []
    for actions in (moves, (*prunes, *moves)):
        made, factory = scripted({1: actions})
        record = simulate(make(4, balance_way=Way.scatter, **keys), spec=spec_of(), make_balance=factory)
        times.append([event for event in made[0].events if isinstance(event, GroupMeasured)])
        rows.append([row for row in record.ledger if row.iteration == 1])
    assert rows[0] == rows[1]
    for half in Half:
        even = times[0][0].time_ns(half)[1]
        lent, both = (each[1].time_ns(half) for each in times)
        for got, shares in ((lent, (0.5, 1.5, 1, 1)), (both, (0.25, 1.5, 1, 0.5))):
            assert got == pytest.approx([even * share for share in shares], rel=0.01)


def test_a_half_that_nobody_lends_of_is_pruned_as_ever(make, spec_of, scripted):
    keys = {"cluster_emulated_flops_per_s": 1e8, "balance_name": "semi", "balance_pretest": False}
    actions = (Prune(2, 0.25), Prune(2, 0.75, "block.1.fc2"), Migrate(0, 1, Half.attention, 8))
    made, factory = scripted({1: actions})
    simulate(make(4, balance_way=Way.broadcast, **keys), spec=spec_of(), make_balance=factory)
    before, after = [event for event in made[0].events if isinstance(event, GroupMeasured)][:2]
    # of the FFN's four products, which are alike, one is left out by three quarters
    assert after.ffn_ns[2] == pytest.approx((3 * 0.75 + 0.25) / 4 * before.ffn_ns[2], rel=0.01)
    assert after.attention_ns[2] == pytest.approx(0.75 * before.attention_ns[2], rel=0.01)
    assert after.ffn_ns[1] == before.ffn_ns[1]
