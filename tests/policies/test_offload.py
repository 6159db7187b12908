"""Offload policies: never above the budget, Belady's rule against LRU, and answers that a log replays."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.conf.schema import OffloadConf, OffloadKind
from twinbed.policies.offload import (
    Chunk,
    ChunkNeeded,
    ChunkOutdated,
    ChunkReleased,
    ChunkStep,
    Evict,
    Fetch,
    IterationBegins,
    Kind,
    Place,
    Prefetch,
    Step,
    build_offload,
    cut_chunks,
    describe_offload_actions,
    describe_offload_event,
    parse_offload_event,
    spread_far,
)


def weights(*sizes):
    return cut_chunks({f"u{i}": size for i, size in enumerate(sizes)}, Kind.parameters)


def name_of(unit):
    return f"parameters/{unit}"


def auto(chunks, budget, **keys):
    conf = OffloadConf(name="disk", policy=OffloadKind.auto, **({"activations": 0.0, "prefetch": 0} | keys))
    return build_offload(conf, chunks, memory_bytes=budget)


def use(policy, chunk, *, changed=False):
    """One use, alone; the actions of its begin and end."""
    return (*policy.decide(ChunkNeeded(chunk)), *policy.decide(ChunkReleased(chunk, changed)))


def fetches(actions):
    return [action.chunk for action in actions if isinstance(action, Fetch | Prefetch)]


def test_none_has_no_policy():
    assert build_offload(OffloadConf(), weights(1), memory_bytes=1) is None


def test_units_are_cut_in_equal_parts():
    assert [
        (c.name, c.nbytes) for c in cut_chunks({"a": 10, "b": 3, "c": 0}, Kind.optimizer, chunk_bytes=4)
    ] == [
        ("optimizer/a/0", 4),
        ("optimizer/a/1", 4),
        ("optimizer/a/2", 2),
        ("optimizer/b", 3),
        ("optimizer/c", 0),
    ]


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30), limit=st.integers(1, 300))
def test_parts_add_up_and_respect_the_limit(sizes, limit):
    units = {f"u{i}": size for i, size in enumerate(sizes)}
    chunks = cut_chunks(units, Kind.parameters, chunk_bytes=limit)
    assert max(c.nbytes for c in chunks) <= limit
    for unit, size in units.items():
        assert sum(c.nbytes for c in chunks if c.unit == unit) == size
    assert len({c.name for c in chunks}) == len(chunks)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), share=st.floats(0, 1))
def test_far_bytes_are_the_stated_share_within_half_a_chunk(sizes, share):
    chunks = weights(*sizes)
    far = spread_far(chunks, share)
    total = sum(c.nbytes for c in chunks if c.name in far)
    assert abs(total - share * sum(sizes)) <= max(sizes) / 2 + 1e-6
    if share in (0, 1):
        assert len(far) == share * len(chunks)


def test_half_of_equal_chunks_is_every_other_one():
    assert spread_far(weights(4, 4, 4, 4), 0.5) == {name_of("u0"), name_of("u2")}


def test_static_fetches_when_needed_and_evicts_when_released():
    conf = OffloadConf(name="cpu", parameters=0.5, prefetch=0)
    policy = build_offload(conf, weights(8, 8))
    near, far = name_of("u1"), name_of("u0")
    assert (policy.place(near), policy.place(far)) == (Place.near, Place.far)
    assert use(policy, far) == (Fetch(far), Evict(far, write_back=False))
    assert use(policy, near) == ()
    assert use(policy, far, changed=True) == (Fetch(far), Evict(far, write_back=True))


def test_static_fetches_ahead_once_the_order_is_known_and_keeps_what_comes_again():
    policy = build_offload(OffloadConf(name="cpu", prefetch=1), weights(8, 8, 8))
    a, b, c = (name_of(f"u{i}") for i in range(3))
    order = (a, b, c, c, b, a)  # forward and backward
    policy.decide(IterationBegins("train"))
    assert [fetches(use(policy, chunk)) for chunk in order] == [[a], [b], [c], [c], [b], [a]]
    policy.decide(IterationBegins("train"))
    assert [fetches(use(policy, chunk)) for chunk in order] == [[a, b], [c], [], [b], [a], []]
    policy.decide(IterationBegins("eval"))  # an order of its own
    assert [fetches(use(policy, chunk)) for chunk in (a, b)] == [[a], [b]]


def test_auto_evicts_what_is_needed_farthest_in_the_future():
    policy = auto(weights(8, 8, 8), 16, warmup_activations=0.0)
    a, b, c = (name_of(f"u{i}") for i in range(3))
    policy.decide(IterationBegins("train"))
    for chunk in (a, b, c, a, b):
        use(policy, chunk)
    policy.decide(IterationBegins("train"))  # LRU has left a and b; c's next use is behind
    assert use(policy, a) == ()
    assert use(policy, b) == ()
    assert use(policy, c) == (Evict(b, write_back=False), Fetch(c))  # a comes next, then b
    assert use(policy, a) == ()
    assert policy.decide(ChunkNeeded(b)) == (Evict(c, write_back=False), Fetch(b))


def test_while_it_records_most_memory_is_left_to_others():
    policy = auto(weights(10, 10, 10), 40, warmup_activations=0.75)
    policy.decide(IterationBegins("train"))
    for i in range(3):
        use(policy, name_of(f"u{i}"))
        assert policy.near_bytes == 10
    policy.decide(IterationBegins("train"))
    for i in range(3):
        use(policy, name_of(f"u{i}"))
    assert policy.near_bytes == 30


def test_what_changed_is_written_back_once():
    policy = auto(weights(8, 8), 8)
    a, b = name_of("u0"), name_of("u1")
    use(policy, a, changed=True)
    assert policy.changed == (a,)
    assert policy.decide(ChunkNeeded(b)) == (Evict(a, write_back=True), Fetch(b))
    policy.decide(ChunkReleased(b, False))
    assert use(policy, a) == (Evict(b, write_back=False), Fetch(a))
    assert policy.changed == ()


def test_a_host_steps_what_lies_there_and_new_weights_go_up():
    conf = OffloadConf(name="cpu", parameters=0.0)
    chunks = [*weights(2), *cut_chunks({"u0": 12}, Kind.optimizer)]
    policy = build_offload(conf, chunks)
    assert policy.decide(ChunkStep("optimizer/u0")) == (Step("optimizer/u0", Place.far),)
    assert policy.decide(ChunkOutdated("parameters/u0")) == (Fetch("parameters/u0"),)
    assert policy.near_bytes == 2


def test_a_disk_steps_nothing():
    policy = build_offload(OffloadConf(name="disk"), cut_chunks({"u0": 12}, Kind.optimizer))
    chunk = "optimizer/u0"
    assert policy.decide(ChunkStep(chunk)) == (Fetch(chunk), Step(chunk, Place.near))
    assert policy.decide(ChunkReleased(chunk, True)) == (Evict(chunk, write_back=True),)


def test_an_old_copy_is_dropped_without_writing_it():
    chunks = [*weights(2), *cut_chunks({"u0": 12}, Kind.optimizer)]
    policy = build_offload(
        OffloadConf(name="cpu", policy=OffloadKind.auto, activations=0.0), chunks, memory_bytes=8
    )
    use(policy, "parameters/u0")
    assert policy.decide(ChunkOutdated("parameters/u0")) == (Evict("parameters/u0", write_back=False),)
    assert policy.decide(ChunkOutdated("parameters/u0")) == ()


@pytest.mark.parametrize("kind", OffloadKind)
def test_a_unit_that_does_not_fit_is_refused_before_anything_runs(kind):
    conf = OffloadConf(name="disk", policy=kind, memory_bytes=20e6, activations=0.5)
    with pytest.raises(ValueError, match=r"offload\.memory_bytes=20000000 .* unit 'u1'.* 12\.000 MB") as err:
        build_offload(conf, weights(1_000_000, 12_000_000))
    assert "offload.activations=0.5" in str(err.value)
    assert str(err.value).endswith("give offload.memory_bytes=24000000")  # weights that are needed at once
    build_offload(replace(conf, memory_bytes=24e6), weights(1_000_000, 12_000_000))
    states = cut_chunks({"u0": 40_000_000}, Kind.optimizer)
    with pytest.raises(
        ValueError, match="'u0'.* or smaller chunks .offload.chunk_bytes, now null; simulated only."
    ):
        build_offload(conf, [*weights(1_000_000, 12_000_000), *states])


def test_what_is_in_use_at_once_has_to_fit():
    policy = auto(weights(8, 8), 12)
    policy.decide(ChunkNeeded(name_of("u0")))
    with pytest.raises(ValueError, match=r"offload\.memory_bytes=12 .*'parameters/u1'"):
        policy.decide(ChunkNeeded(name_of("u1")))


def test_misuse_is_refused():
    policy = auto(weights(8), 12)
    with pytest.raises(
        ValueError, match=r"chunk='b': there is no such chunk; use one of \['parameters/u0'\]"
    ):
        policy.decide(ChunkNeeded("b"))
    with pytest.raises(RuntimeError, match="not in use"):
        policy.decide(ChunkReleased("parameters/u0", False))
    with pytest.raises(ValueError, match=r"offload\.name='tape'"):
        OffloadConf(name="tape")
    with pytest.raises(ValueError, match=r"offload\.parameters=1\.5"):
        OffloadConf(parameters=1.5)


traces = st.lists(st.integers(0, 7), min_size=1, max_size=40)


class _Lru:
    """The rival: at most `room` equal chunks, the least recently used goes."""

    def __init__(self, room, near):
        self.room, self.near, self.fetched = room, OrderedDict.fromkeys(near), 0

    def use(self, chunk):
        if chunk in self.near:
            self.near.move_to_end(chunk)
            return
        self.fetched += 1
        if len(self.near) == self.room:
            self.near.popitem(last=False)
        self.near[chunk] = None


@given(trace=traces, room=st.integers(1, 7), rounds=st.integers(1, 4))
def test_belady_fetches_no_more_than_lru(trace, room, rounds):
    chunks = weights(*[1] * 8)
    policy = auto(chunks, room, warmup_activations=0.0)
    policy.decide(IterationBegins("train"))
    for i in trace:
        use(policy, name_of(f"u{i}"))
    rival = _Lru(room, [c.name for c in chunks if policy.place(c.name) is Place.near])
    fetched = 0
    for _ in range(rounds):
        policy.decide(IterationBegins("train"))
        for i in trace:
            fetched += len(fetches(use(policy, name_of(f"u{i}"))))
            rival.use(name_of(f"u{i}"))
    assert fetched <= rival.fetched


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=8, max_size=8),
    trace=traces,
    other=traces,
    spare=st.integers(0, 200),
    prefetch=st.integers(0, 3),
    warmup=st.floats(0, 0.9),
    kind=st.sampled_from(list(OffloadKind)),
    data=st.data(),
)
def test_budget_and_bookkeeping_hold_for_any_trace(sizes, trace, other, spare, prefetch, warmup, kind, data):
    """What is in use is near, near bytes are those of the actions and fit; the same events give the same actions."""
    chunks = weights(*sizes)
    budget = max(sizes) + spare
    conf = OffloadConf(
        name="disk",
        policy=kind,
        activations=0.0,
        warmup_activations=warmup,
        prefetch=prefetch,
        memory_bytes=budget,
    )
    policy, twin = build_offload(conf, chunks), build_offload(conf, chunks)
    near = {}
    for round_, uses in enumerate((trace, trace, other, trace, trace)):
        events = [IterationBegins("train" if round_ != 2 else data.draw(st.sampled_from(["train", "eval"])))]
        for i in uses:
            events += [ChunkNeeded(name_of(f"u{i}")), ChunkReleased(name_of(f"u{i}"), i % 2 == 0)]
        for event in events:
            if isinstance(event, ChunkReleased) and event.changed:
                near[event.chunk] = True
            actions = policy.decide(event)
            assert twin.decide(parse_offload_event(describe_offload_event(event))) == actions
            for action in actions:
                if isinstance(action, Evict):
                    changed = near.pop(action.chunk)
                    assert action.write_back is changed
                else:
                    assert action.chunk not in near
                    near[action.chunk] = False
                assert sum(policy.chunks[name].nbytes for name in near) <= budget
            if isinstance(event, ChunkNeeded):
                assert event.chunk in near
            assert policy.near_bytes == sum(policy.chunks[name].nbytes for name in near)
        assert policy.state() == twin.state()
        twin = copy.deepcopy(policy)


def test_actions_are_told_in_a_line():
    chunk = "parameters/u0"
    actions = (Evict("a", True), Evict("b", False), Fetch(chunk), Prefetch("c"), Step("d", Place.far))
    assert describe_offload_actions(actions) == (
        "write back a, evict b, fetch parameters/u0, prefetch c, step d far"
    )
    assert describe_offload_actions(()) == "nothing"
    with pytest.raises(ValueError, match="no offload event"):
        parse_offload_event("WeightsNeeded(unit=root)")


def test_chunks_of_one_name_are_refused():
    twice = Chunk("a", Kind.parameters, "u", 1)
    with pytest.raises(ValueError, match="same name"):
        auto([twice, twice], 8)
