"""SEMI among its rivals: settings of the decision map (benchmarks/balance_map.py), with two blocks each."""

from functools import partial

import pytest

# chi, stragglers, links, budget: what SEMI does there, where products alone are slow
SETTINGS = {
    (4, 1, "nvlink", 0.0): "migrate",
    (4, 3, "nvlink", 2.0): "both",
    (2, 1, "pcie", 0.5): "both",
    (8, 2, "pcie", 0.0): "migrate",
    (2, 1, "slow", 0.0): "none",
    (4, 1, "slow", 2.0): "prune",
}
# where all of a rank is
DEVICES = {
    (2, 3, "nvlink", 2.0): "both",
    (4, 1, "nvlink", 2.0): "prune",
    (8, 1, "nvlink", 2.0): "both",
    (8, 3, "slow", 2.0): "both",
}


@pytest.fixture(scope="module")
def rows(decision_map):
    return {at: decision_map.row(decision_map.Setting("vit_1b", "v100_8", *at), layers=2) for at in SETTINGS}


@pytest.fixture(scope="module")
def devices(decision_map):
    setting = partial(decision_map.Setting, "vit_1b", "v100_8", by="device")
    return {at: decision_map.row(setting(*at), layers=2) for at in DEVICES}


def test_the_grid_has_them(decision_map):
    settings = list(decision_map.settings())
    assert len(set(settings)) == len(settings) >= 24
    assert {decision_map.Setting("vit_1b", "v100_8", *at) for at in SETTINGS} <= set(settings)


def test_semi_is_as_fast_as_the_better_of_resize_and_migrate(rows):
    assert {at: row.semi.decision for at, row in rows.items()} == SETTINGS
    for row in rows.values():
        assert all(speedup.settled for speedup in row.speedups.values())
        assert row.over_better >= 0.97
        assert row.semi.step >= 0.99  # of doing nothing
    # both together beat each
    assert rows[4, 3, "nvlink", 2.0].over_better > 1.1


def test_where_all_of_a_rank_is_slow_too(decision_map, devices):
    """Lending takes attention and activations off a rank, pruning neither: it must not seem as good."""
    assert {at: row.semi.decision for at, row in devices.items()} == DEVICES
    for row in devices.values():
        assert row.over_better >= 0.97
    errors = [
        decision_map.error_of(s.predicted_work, s.work)
        for row in devices.values()
        for s in row.speedups.values()
    ]
    assert decision_map.mean(errors) < 0.1
    assert max(errors) < 0.25


def test_speedups_are_as_predicted(decision_map, rows):
    """Also taken off blocks' work alone, where what is else in a step does not water errors down."""
    for name in decision_map.POLICIES:
        speedups = [row.speedups[name] for row in rows.values()]
        steps = [decision_map.error_of(s.predicted_step, s.step) for s in speedups]
        work = [decision_map.error_of(s.predicted_work, s.work) for s in speedups]
        assert decision_map.mean(steps) < 0.05
        assert decision_map.mean(work) < 0.1
        assert max(work) < 0.2
    # the last is SEMI; movement for nothing is another world
    naive = [decision_map.error_of(row.ceiling, row.semi.work) for row in rows.values()]
    assert decision_map.mean(naive) > 3 * decision_map.mean(work)


def test_the_report_names_what_falls_short(decision_map, rows):
    lines, missed = decision_map.verdicts(list(rows.values()))
    assert not missed
    assert lines[0] == "6 settings: none 1, prune 1, migrate 2, both 2"
    decision_map.MOST_OFF, kept = 0.0, decision_map.MOST_OFF
    assert decision_map.verdicts(list(rows.values()))[1]
    decision_map.MOST_OFF = kept
