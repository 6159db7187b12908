"""Attention over ranks of a sequence: who holds which tokens, the work of each, and what the ring's plans send when."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.policies.layout import Border, Direction, Kind, LayerRuns
from twinbed.policies.layout.ring import step_pairs
from twinbed.policies.layout.sequence import AttentionPlans
from twinbed.policies.layout.tokens import block_pairs, causal_work, token_runs
from twinbed.policies.plan import AllToAll, Apply, Plan, SendRecv

sizes = st.integers(2, 9)


def plan_of(mode: str, direction: Direction, *, size: int, causal: bool = True, zigzag: bool = False) -> Plan:
    event = LayerRuns(Kind.attention, direction, Border(), number=int(causal))
    plan = AttentionPlans(mode, size=size, zigzag=zigzag).plan(event)
    assert plan is not None
    return plan


def seen_pairs(tokens: int, *, size: int, zigzag: bool) -> list[int]:
    """Counted one by one: how many tokens those of each rank see, themselves included."""
    counts = []
    for rank in range(size):
        runs = token_runs(tokens, size=size, zigzag=zigzag, rank=rank)
        counts.append(sum(place + 1 for start, end in runs for place in range(start, end)))
    return counts


def imbalance(work: list[float] | list[int]) -> float:
    return max(work) * len(work) / sum(work)


def test_causal_work_of_four_ranks() -> None:
    assert causal_work(4, zigzag=False) == [2, 6, 10, 14]
    assert causal_work(4, zigzag=True) == [8, 8, 8, 8]
    assert imbalance(causal_work(4, zigzag=False)) == 1.75
    assert imbalance(causal_work(2, zigzag=False)) == 1.5


def test_token_by_token_contiguous_tends_to_it_and_zigzag_is_balanced_at_any_length() -> None:
    far = [abs(imbalance(seen_pairs(tokens, size=4, zigzag=False)) - 1.75) for tokens in (8, 64, 512, 4096)]
    assert all(nearer < before / 4 for before, nearer in pairwise(far))
    assert far[-1] < 2e-4
    for tokens in (8, 64, 512):
        assert len(set(seen_pairs(tokens, size=4, zigzag=True))) == 1


@given(size=sizes, zigzag=st.booleans())
def test_the_blocks_of_a_rank_add_up_to_its_work(size: int, zigzag: bool) -> None:
    for rank, work in enumerate(causal_work(size, zigzag)):
        blocks = [
            block_pairs(size=size, zigzag=zigzag, causal=True, rank=rank, step=step) for step in range(size)
        ]
        assert 4 * sum(blocks) == work  # a full block is four of half the side
        if zigzag:
            assert set(blocks) == {0.5}  # at every step, so nobody waits in between either
    full = {
        block_pairs(size=size, zigzag=zigzag, causal=False, rank=r, step=s)
        for r in range(size)
        for s in range(size)
    }
    assert full == {1.0}


@given(size=sizes, zigzag=st.booleans(), length=st.integers(1, 5))
def test_every_token_lies_on_one_rank(size: int, zigzag: bool, length: int) -> None:
    tokens = 2 * size * length
    held = [
        place
        for rank in range(size)
        for start, end in token_runs(tokens, size=size, zigzag=zigzag, rank=rank)
        for place in range(start, end)
    ]
    assert sorted(held) == list(range(tokens))


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=4 of a ring of 4 must be in \[0, 3\]"):
        block_pairs(size=4, zigzag=True, causal=True, rank=4, step=0)
    with pytest.raises(ValueError, match=r"step=-1 of a ring of 4"):
        block_pairs(size=4, zigzag=True, causal=True, rank=0, step=-1)
    with pytest.raises(ValueError, match=r"12 tokens cannot be cut in 8 equal pieces for 4 ranks"):
        token_runs(12, size=4, zigzag=True, rank=0)
    with pytest.raises(ValueError, match=r"sequence_mode='megatron' has no plans of attention"):
        plan_of("megatron", Direction.forward, size=2)
    plans = AttentionPlans("ring", size=4, zigzag=True)
    with pytest.raises(ValueError, match=r"sequence=4 must cut batch\.sequence=12.*: 8 does not divide"):
        plans.check(tokens=12, heads=2, kv_heads=2, features=1)
    AttentionPlans("ring", size=4).check(tokens=12, heads=2, kv_heads=1, features=1)
    with pytest.raises(ValueError, match=r"must divide the 2 of model\.heads=4 that a rank has"):
        AttentionPlans("ulysses", size=4).check(tokens=12, heads=4, kv_heads=4, features=2)


def test_one_rank_needs_no_other() -> None:
    assert AttentionPlans("ring", size=1).plan(LayerRuns(Kind.attention, Direction.forward, Border())) is None


def blocks(plan: Plan) -> list[int]:
    """Positions of the attention of blocks."""
    return [
        i for i, step in enumerate(plan.steps) if isinstance(step, Apply) and "attention" in step.function
    ]


def waits(plan: Plan, at: int) -> set[int]:
    """All steps that `at` waits for, directly or through others."""
    found: set[int] = set()
    ahead = [at]
    while ahead:
        new = set(plan.dependencies(ahead.pop())) - found
        found |= new
        ahead += new
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_keys_are_on_their_way_beside_the_block_before(size: int) -> None:
    plan = plan_of("ring", Direction.forward, size=size)
    at = blocks(plan)
    assert [plan.steps[i].number for i in at] == list(range(size))  # type: ignore[attr-defined]
    sends = [i for i, step in enumerate(plan.steps) if isinstance(step, SendRecv)]
    assert len(sends) == size - 1
    for s, send in enumerate(sends):
        assert plan.is_beside(send)
        assert plan.stream_of(send) == "ring"
        assert send < at[s]  # issued first
        assert send not in waits(plan, at[s])
        assert at[s] not in waits(plan, send)
        assert send in waits(plan, at[s + 1])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_gradients_of_keys_follow_one_hop_behind_them(size: int) -> None:
    plan = plan_of("ring", Direction.backward, size=size, zigzag=True)
    at = blocks(plan)
    order = [plan.steps[i].number for i in at]  # type: ignore[attr-defined]
    assert order == [*range(1, size), 0]  # r - 1, r - 2, ..., r
    sends = {
        step.reads[0]: i
        for i, step in enumerate(plan.steps)
        if isinstance(step, SendRecv) and step.shift == 1
    }
    keys = [name for name in sends if name.startswith("kv")]
    gradients = [name for name in sends if name.startswith("dkv")]
    assert (len(keys), len(gradients)) == (size - 1, size - 1)
    for t, name in enumerate(gradients):  # beside the next block
        assert at[t] in waits(plan, sends[name])
        assert sends[name] not in waits(plan, at[t + 1])
    for s, name in enumerate(keys[1:], start=1):  # beside the block of the keys that it passes on
        assert at[s - 1] not in waits(plan, sends[name])
        assert sends[name] not in waits(plan, at[s - 1])
    assert plan.operands == ("kv0", "dy", "q", "y", "log_sums")


@pytest.mark.parametrize(
    ("causal", "zigzag", "function"),
    [
        (True, True, "zigzag_attention_block"),
        (True, False, "causal_attention_block"),
        (False, False, "attention_block"),
        (False, True, "attention_block"),  # nothing to balance
    ],
)
def test_the_mask_is_said_in_the_plan(causal: bool, zigzag: bool, function: str) -> None:
    for direction, name in ((Direction.forward, function), (Direction.backward, f"{function}_gradient")):
        plan = plan_of("ring", direction, size=2, causal=causal, zigzag=zigzag)
        found = {plan.steps[i].function for i in blocks(plan)}  # type: ignore[attr-defined]
        assert found == {name}


@pytest.mark.parametrize("zigzag", [True, False])
def test_steps_of_a_plan_say_their_work(zigzag: bool) -> None:
    for direction in (Direction.forward, Direction.backward):
        plan = plan_of("ring", direction, size=3, zigzag=zigzag)
        for rank, work in enumerate(causal_work(3, zigzag)):
            said = [step_pairs(step, size=3, rank=rank) for step in plan.steps if isinstance(step, Apply)]
            assert 4 * sum(pairs for pairs in said if pairs is not None) == work
            assert None in said  # a merge is none


def test_ulysses_exchanges_four_operands_each_way() -> None:
    for direction in (Direction.forward, Direction.backward):
        plan = plan_of("ulysses", direction, size=4)
        assert sum(isinstance(step, AllToAll) for step in plan.steps) == 4
