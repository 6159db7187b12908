"""Sums of quantized slices against their parts, and the slice order of the hierarchical all-to-all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.kernels import (
    decode_segments,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode_segments,
    reorder_slices,
    slice_order,
)

formats = st.tuples(st.sampled_from([8, 6, 4, 2]), st.sampled_from([0, 4, 12, 64, 256]))
own_dtypes = st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 600), min_size=0, max_size=4),
    st.one_of(st.integers(0, 5), st.integers(15, 35)),
    formats,
    formats,
    own_dtypes,
    st.integers(0, 2**16),
)
def test_fused_equals_its_parts(segments, peers, fmt, out_fmt, own_dtype, seed):
    bits, block = fmt
    out_bits, out_block = out_fmt
    n = sum(segments)
    generator = torch.Generator().manual_seed(seed)
    bufs = encode_segments(
        torch.randn(peers, n, generator=generator), segments=segments, bits=bits, block=block
    )
    own = None if own_dtype is None else torch.randn(n, generator=generator).to(own_dtype)

    expected = torch.zeros(n) if own is None else own.float().clone()
    for buf in bufs:
        decode_segments(buf, segments=segments, bits=bits, block=block, out=expected, accumulate=True)
    options = {"segments": segments, "bits": bits, "block": block}
    assert torch.equal(dequantize_reduce(bufs, own, **options), expected)
    assert torch.equal(dequantize_reduce(bufs, own, **options, reference=True), expected)

    message = encode_segments(expected, segments=segments, bits=out_bits, block=out_block)
    options |= {"out_bits": out_bits, "out_block": out_block}
    assert torch.equal(dequantize_reduce_quantize(bufs, own, **options), message)
    assert torch.equal(dequantize_reduce_quantize(bufs, own, **options, reference=True), message)


def test_format_of_the_sum_is_that_of_the_parts_by_default():
    x = torch.randn(3, 500)
    bufs = encode_segments(x, segments=(200, 300), bits=4, block=64)
    total = dequantize_reduce(bufs, segments=(200, 300), bits=4, block=64)
    again = dequantize_reduce_quantize(bufs, segments=(200, 300), bits=4, block=64)
    assert torch.equal(again, encode_segments(total, segments=(200, 300), bits=4, block=64))


def test_own_part_is_exact_and_may_hold_the_sum():
    own = torch.randn(1000)
    peers = torch.zeros(2, 1000)
    bufs = encode_segments(peers, segments=(1000,), bits=4, block=256)
    assert torch.equal(dequantize_reduce(bufs, own, segments=(1000,), bits=4, block=256), own)
    bufs = encode_segments(torch.ones(2, 1000), segments=(1000,), bits=4, block=256)
    expected = own + 1.0 + 1.0
    assert dequantize_reduce(bufs, own, segments=(1000,), bits=4, block=256, out=own) is own
    assert torch.equal(own, expected)


def test_a_peer_with_several_slices_sent_repeated_segments():
    segments = (10, 30)
    x = torch.randn(2, 3, 40)  # 2 peers, 3 slices each
    bufs = torch.stack([encode_segments(peer, segments=segments, bits=4, block=16).view(-1) for peer in x])
    total = dequantize_reduce(bufs, segments=segments * 3, bits=4, block=16)
    for index in range(3):
        slices = encode_segments(x[:, index], segments=segments, bits=4, block=16)
        expected = dequantize_reduce(slices, segments=segments, bits=4, block=16)
        assert torch.equal(total.view(3, 40)[index], expected)


@pytest.mark.parametrize("reference", [False, True])
def test_poison_reaches_the_sum_and_the_next_hop(reference):
    x = torch.ones(2, 512)
    x[1, 300] = torch.inf
    options = {"segments": (512,), "bits": 4, "block": 256, "reference": reference}
    bufs = encode_segments(x, **options)
    total = dequantize_reduce(bufs, **options)
    assert torch.equal(total[:256], torch.full((256,), 2.0))
    assert total[256:].isnan().all()
    back = decode_segments(dequantize_reduce_quantize(bufs, **options), **options)
    assert back[256:].isnan().all()
    own = torch.zeros(512)
    own[5] = torch.nan
    assert decode_segments(dequantize_reduce_quantize(bufs, own, **options), **options)[:256].isnan().all()


def test_wrong_input_is_named():
    bufs = encode_segments(torch.ones(2, 8), segments=(8,), bits=8, block=4)
    options = {"segments": (8,), "bits": 8, "block": 4}
    with pytest.raises(ValueError, match="own is"):
        dequantize_reduce(bufs, torch.ones(7), **options)
    with pytest.raises(ValueError, match="out is"):
        dequantize_reduce(bufs, out=torch.ones(8, dtype=torch.bfloat16), **options)
    with pytest.raises(ValueError, match="out is"):
        dequantize_reduce_quantize(bufs, out=torch.ones(8), **options)
    with pytest.raises(ValueError, match="out_bits|bits=3"):
        dequantize_reduce_quantize(bufs, out_bits=3, **options)
    with pytest.raises(ValueError, match="buf has shape"):
        dequantize_reduce(bufs[:, 1:], **options)


def test_slice_order_of_two_nodes_of_four():
    assert slice_order(2, 4) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert slice_order(1, 3) == slice_order(3, 1) == (0, 1, 2)
    x = torch.arange(8)
    assert reorder_slices(x, nodes=2, ranks_per_node=4).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@given(st.integers(1, 4), st.integers(1, 4))
def test_reorder_is_the_slice_order(nodes, ranks_per_node):
    ranks = nodes * ranks_per_node
    x = torch.arange(ranks * 6).view(ranks, 2, 3)
    order = slice_order(nodes, ranks_per_node)
    assert [order.index(p) for p in range(ranks)] == [
        p % ranks_per_node * nodes + p // ranks_per_node for p in range(ranks)
    ]
    moved = reorder_slices(x, nodes=nodes, ranks_per_node=ranks_per_node)
    assert torch.equal(moved, x[list(order)])
    moved.zero_()
    assert x[-1, -1, -1] == ranks * 6 - 1  # a copy, also where the order changes nothing


def test_reorder_refuses_other_sizes():
    with pytest.raises(ValueError, match=r"2 nodes of 4 take \[8, \.\.\.\]"):
        reorder_slices(torch.zeros(6, 2), nodes=2, ranks_per_node=4)
    with pytest.raises(ValueError, match="nodes=0"):
        slice_order(0, 4)
