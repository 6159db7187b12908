"""Max-min sharing: hand-counted cases, and what must hold for any set of flows."""

import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.sim.network import Network
from twinbed.sim.topology import Link


def finish_times(flows, *, capacity=1.0):
    """Ends in ns of (start, amount, weight, limit) flows that share one link."""
    env = simpy.Environment()
    network, link, ends = Network(env), Link("wire", capacity), {}

    def run(name, start, amount, weight, limit):
        yield env.timeout(start)
        yield network.flow(amount, ((link, weight),), limit=limit)
        ends[name] = env.now

    for name, flow in enumerate(flows):
        env.process(run(name, *flow))
    env.run()
    return [ends[name] for name in range(len(flows))]


def test_one_flow_takes_bytes_over_bandwidth():
    assert finish_times([(0, 1_000_000, 1, math.inf)], capacity=0.0125) == [80_000_000]


def test_two_flows_share_a_link_evenly():
    assert finish_times([(0, 100, 1, math.inf), (0, 100, 1, math.inf)]) == [200, 200]


def test_a_flow_speeds_up_when_the_other_ends_and_slows_down_when_one_starts():
    # alone until 100; both at half until the second ends at 300; the first has 100 left then
    assert finish_times([(0, 300, 1, math.inf), (100, 100, 1, math.inf)]) == [400, 300]


def test_a_limit_leaves_the_rest_to_the_others():
    assert finish_times([(0, 100, 1, 0.25), (0, 300, 1, math.inf)]) == [400, 400]


def test_a_weighted_flow_stands_for_many():
    # one flow of weight 3 beside one of weight 1: four equal shares
    assert finish_times([(0, 100, 3, math.inf), (0, 100, 1, math.inf)]) == [400, 400]


def test_four_tasks_on_two_cores_take_twice_as_long_and_two_take_their_own_time():
    assert finish_times([(0, 1_000, 1, 1.0)] * 4, capacity=2.0) == [2_000] * 4
    assert finish_times([(0, 1_000, 1, 1.0)] * 2, capacity=2.0) == [1_000] * 2
    assert finish_times([(0, 1_000, 1, 1.0)] * 3, capacity=2.0) == [1_500] * 3


def test_the_bottleneck_of_one_flow_leaves_its_share_elsewhere():
    env = simpy.Environment()
    network, wide, narrow = Network(env), Link("wide", 1.0), Link("narrow", 0.2)
    first = network.flow(100, ((wide, 1), (narrow, 1)))
    second = network.flow(80, ((wide, 1),))
    env.run(until=second)
    assert env.now == 100  # 0.8 of the wide link
    env.run(until=first)
    assert env.now == 500


def test_overtaken_wake_ups_disturb_nothing():
    # each start moves the end of the long flow, and leaves an event behind for the old end
    starts = [(10 * i, 5, 1, math.inf) for i in range(20)]
    assert finish_times([(0, 1_000, 1, math.inf), *starts])[0] == 1_100


def test_a_flow_that_nothing_limits_is_refused():
    with pytest.raises(ValueError, match="a link or a limit"):
        Network(simpy.Environment()).flow(1, ())


flow_lists = st.lists(
    st.tuples(
        st.integers(0, 500), st.integers(1, 10_000), st.integers(1, 4), st.sampled_from([0.25, 1.0, math.inf])
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(flows=flow_lists)
def test_the_link_is_never_overfull_and_never_idle_with_work(flows):
    ends = finish_times(flows)
    load = sum(amount * weight for _, amount, weight, _ in flows)
    assert max(ends) >= load - 1  # capacity 1
    for end, (start, amount, weight, limit) in zip(ends, flows, strict=True):
        assert end - start >= amount / min(limit, 1 / weight) - 1
    if all(limit == math.inf for *_, limit in flows):
        # work-conserving: by then every flow that started has moved all it had
        assert max(ends) <= max(start for start, *_ in flows) + load + len(flows)


@settings(deadline=None, max_examples=60)
@given(flows=flow_lists, factor=st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(flows, factor):
    slow, fast = finish_times(flows), finish_times(flows, capacity=factor)
    assert max(fast) <= max(slow) + 1
