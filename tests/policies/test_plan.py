"""The plan vocabulary, mesh axes, shards and the bytes that ranks send, against hand counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.policies import wire
from twinbed.policies.mesh import Mesh
from twinbed.policies.partition import copy_slice, real_elements, shard_segments
from twinbed.policies.plan import AllGather, Dequantize, Plan, Quantize, ReduceScatter, block_aligned_cuts

TWO_BY_TWO = Mesh(4, 2)
FOUR_BY_TWO = Mesh(8, 2)


def test_axes_of_two_nodes_of_four() -> None:
    mesh = Mesh(8, 4, hpz_size=2)
    assert mesh.group("local", 5) == (4, 5, 6, 7)
    assert mesh.group("node", 5) == (1, 5)
    assert mesh.group("hpz", 5) == (4, 5)
    assert mesh.groups("node") == ((0, 4), (1, 5), (2, 6), (3, 7))
    with pytest.raises(ValueError, match="axis='expert' is not on the mesh"):
        mesh.group("expert", 0)


def test_nodes_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node=3 must divide num_ranks=8; use one of"):
        Mesh(8, 3)


def test_a_step_cannot_wait_for_a_later_one() -> None:
    with pytest.raises(ValueError, match=r"step 0 \(AllGather\) waits for step 1"):
        Plan((AllGather(axis="world", after=(1,)), Dequantize()))


@pytest.mark.parametrize("chunks", [0, -2, 1025])
def test_chunks_have_limits(chunks: int) -> None:
    with pytest.raises(ValueError, match=rf"step 0 \(AllGather\): chunks={chunks}: must be in \[1, 1024\]"):
        Plan((AllGather(axis="world", chunks=chunks),))


def test_steps_must_agree_on_chunks() -> None:
    with pytest.raises(ValueError, match="same chunks"):
        Plan((Quantize(bits=8, block=256, chunks=2), AllGather(axis="world")))


def test_a_sequence_waits_for_the_step_before() -> None:
    plan = Plan((Quantize(bits=8, block=4), AllGather(axis="world"), Dequantize(after=(0,))))
    assert [plan.dependencies(i) for i in range(3)] == [(), (0,), (0,)]


@given(numel=st.integers(0, 5000), chunks=st.integers(1, 8), block=st.sampled_from([0, 2, 256]))
def test_cuts_cover_a_slice_once_and_start_at_blocks(numel: int, chunks: int, block: int) -> None:
    cuts = block_aligned_cuts(numel, chunks, block)
    assert sum(b - a for a, b in cuts) == numel
    assert len(cuts) <= chunks
    at = 0
    for a, b in cuts:
        assert a == at
        assert a % max(block, 1) == 0
        at = b


def test_ring_bytes_on_two_nodes_of_two() -> None:
    """Each rank sends 3 shards; only ranks 1 and 3 send over the link."""
    sent = [wire.all_gather(TWO_BY_TWO, r, (0, 1, 2, 3), 100) for r in range(4)]
    assert [s.wire_bytes for s in sent] == [300] * 4
    assert [s.inter_node_bytes for s in sent] == [0, 300, 0, 300]
    sent = [wire.all_reduce(TWO_BY_TWO, r, (0, 1, 2, 3), 100, 4) for r in range(4)]
    assert [s.wire_bytes for s in sent] == [600] * 4
    assert [s.inter_node_bytes for s in sent] == [600, 0, 600, 0]


def test_all_to_all_bytes() -> None:
    world = [wire.all_to_all(TWO_BY_TWO, r, (0, 1, 2, 3), 10) for r in range(4)]
    assert [(s.wire_bytes, s.inter_node_bytes) for s in world] == [(30, 20)] * 4
    assert wire.all_to_all(TWO_BY_TWO, 0, (0, 2), 10) == wire.Sent(10, 10)


def test_binomial_broadcast_on_four_nodes_of_two() -> None:
    """Rank 0 sends to 1, 2, 4; rank 1 to 3, 5; 2 to 6; 3 to 7: the busiest node sends four times."""
    group = tuple(range(8))
    assert [wire.binomial_children(group, 0, r) for r in range(8)] == [
        [1, 2, 4],
        [3, 5],
        [6],
        [7],
        [],
        [],
        [],
        [],
    ]
    inter = [wire.broadcast(FOUR_BY_TWO, r, group, 0, 1).inter_node_bytes for r in range(8)]
    assert [inter[0] + inter[1], inter[2] + inter[3]] == [4, 2]
    assert wire.binomial_children(group, 3, 3) == [4, 5, 7]


@given(size=st.integers(1, 40), root=st.integers(0, 39))
def test_a_broadcast_reaches_every_rank_once(size: int, root: int) -> None:
    group = tuple(range(size))
    root %= size
    reached = [c for r in group for c in wire.binomial_children(group, root, r)]
    assert sorted([*reached, root]) == list(group)


def test_reduce_to_sends_each_chunk_to_the_root() -> None:
    sent = [wire.reduce_to(TWO_BY_TWO, r, (0, 1, 2, 3), 0, 4, 4) for r in range(4)]
    assert [s.wire_bytes for s in sent] == [12, 16, 16, 16]
    assert [s.inter_node_bytes for s in sent] == [12, 0, 12 + 4, 4]


def test_encoded_sizes_by_hand() -> None:
    assert wire.encoded_bytes([1000], 8, 256) == 1024 + 4 * 4
    assert wire.encoded_bytes([1000, 24], 4, 256) == 512 + 16 + 128 + 4
    assert wire.encoded_bytes([5, 0], 4, 0) == 3 + 4
    assert wire.encoded_bytes([256], 6, 256) == 192 + 4
    assert wire.encoded_bytes([], 4, 256) == 0


def test_shards_are_padded_along_dimension_0() -> None:
    assert shard_segments([(5, 7), (3,), (8, 2)], 4) == (2 * 7, 1, 2 * 2)


def test_a_small_parameter_fills_the_first_secondary_shards() -> None:
    assert real_elements(32, 2048, 16) == [32] + [0] * 15
    assert copy_slice(2048, 16, 3) == (384, 512)
    with pytest.raises(ValueError, match="16 must divide the padded size 2050"):
        copy_slice(2050, 16, 0)


@pytest.mark.parametrize("numel", [0, 1, 127, 129, 2047])
def test_secondary_shards_hold_every_element_once(numel: int) -> None:
    held = real_elements(numel, 2048, 16)
    assert sum(held) == numel
    assert all(0 <= h <= 128 for h in held)
    assert sorted(held, reverse=True) == held


@pytest.mark.parametrize(
    ("keys", "message"), [({"hop_bits": 5}, "hop_bits"), ({"hop_block": 3}, "hop_block")]
)
def test_a_ring_requantizes_to_what_a_codec_can(keys: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=rf"{message} must be .*, got"):
        ReduceScatter(axis="world", **keys)
