"""Uneven shares: the best whole split, what noise and memory do to it, and closed forms."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.policies.balance import (
    GroupMeasured,
    ReplicasMeasured,
    ShareBlocks,
    ShareSequences,
    StagesMeasured,
    describe_balance_actions,
    describe_balance_event,
    parse_balance_event,
)
from twinbed.policies.balance.batch import BalanceBatch
from twinbed.policies.balance.best_split import best_split, taken_for_equal
from twinbed.policies.balance.layers import BalanceLayers
from twinbed.policies.balance.shares import replica_ns
from twinbed.policies.partition import even_split

ENOUGH = 100  # room
times = st.integers(1, 10**6)


def splits(total, takers):
    """All, with at least one each."""
    for cuts in itertools.combinations(range(1, total), takers - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def slowest(counts, each, ends=None):
    return max(n * t + e for n, t, e in zip(counts, each, ends or [0] * len(counts), strict=True))


class Cluster:
    """Replicas with a time for each sequence, and the policy that balances them.

    Args:
        fixed: What a micro-batch takes beside, in sequences.
        tile: Sequences are computed in whole tiles of so many.
    """

    def __init__(self, each_ns, *, micro, slack=0.15, room=ENOUGH, fixed=0, tile=1):
        self.each_ns, self.room = each_ns, room
        self.fixed, self.tile = fixed, tile
        self.policy = BalanceBatch(replicas=len(each_ns), micro=micro, slack=slack)
        self.counts = (micro,) * len(each_ns)
        self.step = self.changes = 0

    def period(self, noise=None):
        factors = [1.0] * len(self.each_ns) if noise is None else noise
        self.step += 5
        compute = tuple(
            round((-(-n // self.tile) * self.tile + self.fixed) * t * f)
            for n, t, f in zip(self.counts, self.each_ns, factors, strict=True)
        )
        answer = self.policy.decide(ReplicasMeasured(self.step, compute, (self.room,) * len(compute)))
        for action in answer or ():
            assert isinstance(action, ShareSequences)
            self.counts = action.counts
            self.changes += 1
        return self.counts

    @property
    def slowest_ns(self):
        return slowest(self.counts, self.each_ns)


# ---- the split


@given(data=st.data(), takers=st.integers(1, 4))
def test_no_split_is_faster(data, takers):
    total = data.draw(st.integers(takers, 9))
    each = data.draw(st.lists(times, min_size=takers, max_size=takers))
    ends = data.draw(st.lists(st.integers(0, 10**6), min_size=takers, max_size=takers))
    most = data.draw(st.lists(st.integers(1, 9), min_size=takers, max_size=takers))
    if sum(most) < total:
        with pytest.raises(ValueError, match="units over"):
            best_split(total, each, most=most, ends_ns=ends)
        return
    found = best_split(total, each, most=most, ends_ns=ends)
    assert sum(found) == total
    assert all(1 <= n <= limit for n, limit in zip(found, most, strict=True))
    allowed = [s for s in splits(total, takers) if all(n <= m for n, m in zip(s, most, strict=True))]
    assert slowest(found, each, ends) == min(slowest(s, each, ends) for s in allowed)


@given(total=st.integers(1, 99), takers=st.integers(1, 12))
def test_an_even_split_differs_by_one(total, takers):
    found = even_split(total, takers)
    assert sum(found) == total
    assert max(found) - min(found) <= 1


def test_those_within_the_slack_are_equal():
    assert taken_for_equal([100, 105, 110, 200], 0.15) == [105, 105, 105, 200]
    assert taken_for_equal([100, 105], 0.0) == [100, 105]


def test_a_pipeline_fills_and_drains():
    assert replica_ns([500], 4) == 500
    assert replica_ns([400, 800, 400], 4) == 800 + 200  # four micro-batches of 200, and one of 100 twice


# ---- batch


def test_one_at_half_speed_takes_half():
    """Speeds 1, 1, 1, 0.5: an even split takes 2.00 times as long as four equal replicas, the best one 8/7."""
    cluster = Cluster((1000, 1000, 1000, 2000), micro=7)
    assert cluster.slowest_ns == 2 * 7000
    assert cluster.period() == (8, 8, 8, 4)
    assert cluster.slowest_ns * 7 == 8 * 7000
    assert cluster.period() == (8, 8, 8, 4)
    assert cluster.changes == 1


def test_memory_bounds_what_a_fast_one_takes():
    cluster = Cluster((1000, 1000, 1000, 4000), micro=4, room=1)
    assert cluster.period() == (5, 5, 5, 1)
    tight = Cluster((1000, 3000), micro=4, room=0)
    assert tight.period() == (4, 4)


def test_balanced_within_two_periods_of_a_change():
    cluster = Cluster([1000] * 4, micro=7)
    assert cluster.period() == (7, 7, 7, 7)
    for where in (3, 1):  # a straggler that moves; the first measurement sees it for half a period
        before = list(cluster.each_ns)
        after = [2000 if i == where else 1000 for i in range(4)]
        cluster.each_ns = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
        cluster.period()
        cluster.each_ns = after
        cluster.period()
        assert cluster.slowest_ns <= 1.15 * slowest(best_split(28, after), after)
    cluster.each_ns = [1000] * 4  # and leaves
    cluster.period()
    cluster.period()
    assert cluster.counts == (7, 7, 7, 7)


@pytest.mark.parametrize("replicas", [2, 4, 8, 32])
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_tenth_does_not_make_it_flap(replicas, seed):
    random = np.random.default_rng(seed)
    for slow, allowed in ((1, 0), (1.5, 2), (2, 2)):
        cluster = Cluster([1000] * (replicas - 1) + [1000 * slow], micro=7)
        for _ in range(200):
            cluster.period(random.uniform(0.9, 1.1, replicas))
        assert cluster.changes <= allowed
        assert cluster.slowest_ns <= 1.15 * slowest(
            best_split(7 * replicas, cluster.each_ns), cluster.each_ns
        )


@pytest.mark.parametrize(("micro", "fixed", "tile"), [(4, 1, 1), (4, 1, 2), (8, 2, 1), (8, 0, 3), (8, 3, 2)])
@pytest.mark.parametrize("partly", [0, 0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("periods", [1, 2, 5])
def test_even_within_two_periods_though_few_sequences_take_longer_each(micro, fixed, tile, partly, periods):
    """A straggler by two leaves, `partly` through the first period."""
    even = (micro,) * 8
    cluster = Cluster([1000] * 8, micro=micro, fixed=fixed, tile=tile)
    cluster.period()
    cluster.each_ns = [2000] + [1000] * 7
    for _ in range(periods):
        cluster.period()
    assert cluster.counts[0] < micro
    if partly:
        cluster.each_ns = [1000 * (1 + partly)] + [1000] * 7
        cluster.period()
    cluster.each_ns = [1000] * 8
    cluster.period()
    cluster.period()
    assert cluster.counts == even
    for _ in range(20):
        assert cluster.period() == even


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("fixed", "tile"), [(1, 1), (2, 1), (0, 2)])
def test_nor_does_it_flap_where_few_take_longer_each(fixed, tile, seed):
    random = np.random.default_rng(seed)
    cluster = Cluster([2000] + [1000] * 7, micro=8, fixed=fixed, tile=tile)
    for _ in range(100):
        cluster.period(random.uniform(0.9, 1.1, 8))
    assert cluster.changes <= 3
    assert cluster.counts[0] < 8
    cluster.each_ns = [1000] * 8
    for _ in range(100):
        cluster.period(random.uniform(0.9, 1.1, 8))
    assert cluster.changes <= 4
    assert cluster.counts == (8,) * 8


@given(
    data=st.data(),
    replicas=st.integers(1, 6),
    micro=st.integers(1, 9),
    slack=st.floats(0, 0.9),
)
def test_nothing_is_lost_and_nothing_gets_slower(data, replicas, micro, slack):
    each = data.draw(st.lists(times, min_size=replicas, max_size=replicas))
    room = data.draw(st.integers(0, 4))
    cluster = Cluster(each, micro=micro, slack=slack, room=room)
    for _ in range(3):
        before, slow_before = cluster.counts, cluster.slowest_ns
        cluster.period()
        assert sum(cluster.counts) == replicas * micro
        assert min(cluster.counts) >= 1
        assert all(n <= b + room for n, b in zip(cluster.counts, before, strict=True))
        # those that are taken for equal may be up to the slack apart
        assert cluster.slowest_ns <= (1 + slack) * slow_before


def test_same_events_same_answers_and_words_for_them():
    events = [
        ReplicasMeasured(5, (700, 1400), (3, 3)),
        GroupMeasured(5, (1,), (1,), (1,)),  # of another policy
        ReplicasMeasured(10, (900, 900), (1, 5)),
    ]
    first, second = (BalanceBatch(replicas=2, micro=6, slack=0.1) for _ in range(2))
    again = [parse_balance_event(describe_balance_event(event)) for event in events]
    assert again == events
    assert [first.decide(e) for e in events] == [second.decide(e) for e in again]
    assert describe_balance_actions((ShareSequences((8, 4)),)) == "share sequences 8/4"


# ---- layers


def test_a_stage_at_half_speed_holds_half():
    policy = BalanceLayers(stages=4, layers=28, slack=0.15)
    assert policy.decide(StagesMeasured((10, 10, 10, 20), (0, 0))) == (ShareBlocks((8, 8, 8, 4)),)


def test_the_ends_count():
    """The head is worth two blocks here."""
    policy = BalanceLayers(stages=3, layers=10, slack=0.15)
    assert policy.decide(StagesMeasured((10, 10, 10), (0, 20))) == (ShareBlocks((4, 4, 2)),)


@given(data=st.data(), stages=st.integers(1, 4))
def test_no_split_of_blocks_is_faster(data, stages):
    layers = data.draw(st.integers(stages, 9))
    block = data.draw(st.lists(times, min_size=stages, max_size=stages))
    first, last = data.draw(st.tuples(times, times))
    event = StagesMeasured(tuple(block), (first, last))
    assert parse_balance_event(describe_balance_event(event)) == event
    (action,) = BalanceLayers(stages=stages, layers=layers, slack=0).decide(event)
    ends = [0] * stages
    ends[0] += first
    ends[-1] += last
    assert slowest(action.counts, block, ends) == min(slowest(s, block, ends) for s in splits(layers, stages))
