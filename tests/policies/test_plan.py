"""The plan vocabulary, mesh axes, shards and the bytes that ranks send, against hand counts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.policies import wire
from twinbed.policies.mesh import Mesh
from twinbed.policies.partition import copy_slice, cut_segments, real_elements, shard_segments
from twinbed.policies.plan import (
    AllGather,
    AllToAll,
    Dequantize,
    Plan,
    Quantize,
    Reduce,
    ReduceScatter,
    Step,
)

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


segments_of_a_slice = st.lists(st.integers(0, 3000), min_size=1, max_size=6).map(tuple)


@given(
    segments=segments_of_a_slice,
    chunks=st.integers(1, 8),
    block=st.sampled_from([0, 4, 256]),
    per_parameter=st.booleans(),
)
def test_chunks_cover_a_slice_once_and_cut_no_block(
    segments: tuple[int, ...], chunks: int, block: int, per_parameter: bool
) -> None:
    quantize = Quantize(bits=4, block=block, per_parameter=per_parameter, chunks=chunks)
    cuts = Plan((quantize,)).cuts(segments)
    assert len(cuts) <= chunks
    assert sum(b - a for a, b in cuts) == sum(segments)
    assert all(a == b for (_, a), (b, _) in itertools.pairwise(cuts))
    parts = segments if per_parameter else (sum(segments),)
    pieces = [cut_segments(parts, a, b) for a, b in cuts]
    # what is sent in chunks is what is sent at once: the same number of blocks, padded alike
    assert sum(wire.encoded_bytes(piece, 4, block) for piece in pieces) == wire.encoded_bytes(parts, 4, block)


def test_chunks_are_near_equal() -> None:
    plan = Plan((Quantize(bits=4, block=256, chunks=4),))
    assert plan.cuts((10_000, 7, 6_001)) == ((0, 4_096), (4_096, 8_192), (8_192, 12_055), (12_055, 16_008))
    assert Plan((AllGather(axis="world", chunks=3),)).cuts((10,)) == ((0, 3), (3, 6), (6, 10))
    assert plan.cuts((100,)) == ((0, 100),)
    assert plan.cuts(()) == ()


def test_a_place_between_chunks_suits_all_quantizations() -> None:
    both = (
        Quantize(bits=8, block=6 * 4, chunks=2, per_parameter=False),
        ReduceScatter(axis="world", hop_bits=4, hop_block=4 * 4, chunks=2),
    )
    # places of the first: 24, 48, ...; of the second: 16, 20 (the edge), 36, 52, ..., 84
    assert Plan(both).cuts((20, 76)) == ((0, 96),)
    assert Plan(both).cuts((32, 64)) == ((0, 48), (48, 96))


def test_without_collectives_beside_chunk_follows_chunk() -> None:
    steps = (Quantize(bits=8, block=256, chunks=2), AllToAll(axis="world", chunks=2), Dequantize(chunks=2))
    assert Plan(steps).order(2) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_hops_of_chunks_are_issued_in_waves() -> None:
    steps: tuple[Step, ...] = (
        Quantize(bits=4, block=256, chunks=3),
        AllToAll(axis="local", stream="inside", chunks=3),
        Reduce(chunks=3),
        AllToAll(axis="node", stream="outside", chunks=3),
        Reduce(chunks=3),
    )
    plan = Plan(steps)
    assert [plan.is_beside(i) for i in range(5)] == [False, True, False, True, False]
    waves = [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1), (0, 2), (0, 3)],
        [(2, 0), (2, 1), (1, 2), (1, 3), (0, 4)],
        [(2, 2), (2, 3), (1, 4)],
        [(2, 4)],
    ]
    assert plan.order(3) == [pair for wave in waves for pair in wave]


def test_a_ring_that_adds_up_is_never_beside() -> None:
    plan = Plan((ReduceScatter(axis="world", stream="other"), AllGather(axis="world", stream="other")))
    assert (plan.is_beside(0), plan.is_beside(1)) == (False, True)


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
