"""What a log says is what policies answer, and which ledger a verdict on a balanced run is of."""

from dataclasses import replace

import pytest

from twinbed.analysis.parity import compare_records
from twinbed.analysis.record import Decision, Record
from twinbed.policies.balance import GroupMeasured, Half, Migrate
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import layout_of, replicas_of
from twinbed.run import replays
from twinbed.sim.simulate import simulate


class Every:
    """Lends a unit more at each measurement: the answer depends on how often it was asked."""

    name = "every"

    def __init__(self, work=None):
        self.times = 0

    def decide(self, event):
        if not isinstance(event, GroupMeasured):
            return None
        self.times += 1
        return (Migrate(event.ffn_ns.index(max(event.ffn_ns)), 3, Half.ffn, self.times),)


@pytest.fixture
def balanced(make, spec_of):
    """(experiment, spec, its record)"""
    experiment, spec = make(4, cluster_slowdown={0: 2.0}), spec_of()
    return experiment, spec, simulate(experiment, spec=spec, make_balance=Every)


def test_a_log_replays(balanced):
    experiment, spec, record = balanced
    seen = replicas_of(experiment)
    policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    layout = layout_of(experiment, spec)
    assert replays(policy, record, None, layout, Every)
    # of several ranks, each with a memory of its own
    both = Record(
        record.result, decisions=[*record.decisions, *(replace(d, rank=2) for d in record.decisions)]
    )
    assert replays(policy, both, None, layout, Every)
    at = next(i for i, d in enumerate(record.decisions) if d.event.startswith("GroupMeasured(step=2"))
    changed = list(record.decisions)
    changed[at] = replace(changed[at], action="nothing")
    assert not replays(policy, Record(record.result, decisions=changed), None, layout, Every)


def test_a_run_is_compared_with_what_was_told_its_events(balanced):
    experiment, spec, real = balanced
    moved = replace(experiment, cluster=replace(experiment.cluster, slowdown={1: 2.0}))
    own = simulate(moved, spec=spec, make_balance=Every)
    told = simulate(moved, spec=spec, make_balance=Every, balance_events=real.decisions)
    alone, with_told = compare_records(own, real), compare_records(own, real, told=told)
    assert alone["ledger_equal"] is None
    assert "told different times" in alone["ledger_not_comparable"]
    assert alone["ledger_of"] == "prediction"
    assert with_told["ledger_equal"] is True
    assert with_told["decisions_equal"] is True
    assert "told the run's balance events" in with_told["ledger_of"]
    assert with_told["iteration_s_ratio"] == alone["iteration_s_ratio"]


def test_a_difference_in_what_was_told_is_found(balanced):
    experiment, spec, real = balanced
    told = simulate(experiment, spec=spec, make_balance=Every, balance_events=real.decisions)
    at = next(i for i, row in enumerate(told.ledger) if row.stream == "lend")
    told.ledger[at] = replace(told.ledger[at], wire_bytes=told.ledger[at].wire_bytes + 1)
    parity = compare_records(real, real, told=told)
    assert parity["status"] == "failed"
    assert parity["first_difference"]["columns"] == ["wire_bytes"]


def test_decisions_about_other_things_are_no_balance_events(balanced):
    *_, record = balanced
    kinds = {d.event.partition("(")[0] for d in record.decisions}
    assert {"MovementTimed", "GroupMeasured", "LayerRuns"} <= kinds
    first = [d for d in record.decisions if d.iteration == 0]
    assert [d.event.partition("(")[0] for d in first[:2]] == ["MovementTimed"] * 2
    assert first[-1].event.startswith("GroupMeasured(step=1,")
    assert isinstance(first[-1], Decision)
