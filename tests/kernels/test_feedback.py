"""Error feedback: native against reference bit for bit, its arithmetic, and what it is for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.kernels import (
    ErrorBuffer,
    decode,
    decode_segments,
    dequantize_reduce,
    encode_segments,
    encode_with_feedback,
    prepare,
    reduce_quantize_with_feedback,
    slice_order,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
formats = st.tuples(st.sampled_from([8, 6, 4, 2]), st.sampled_from([0, 4, 12, 36, 256]))
any_dtype = st.sampled_from(DTYPES)
betas = st.sampled_from([0.0, 0.5, 0.8, 0.99])
relaxed = settings(max_examples=100, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Without the native code these tests would compare the reference with itself."""
    assert prepare().backend == "native", prepare().reason


def sample(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@relaxed
@given(
    st.lists(st.integers(0, 400), min_size=0, max_size=4),
    st.integers(1, 3),
    formats,
    any_dtype,
    any_dtype,
    betas,
    st.integers(0, 2**16),
    st.sampled_from([None, torch.nan, torch.inf]),
)
def test_native_equals_reference_bit_for_bit(segments, rows, fmt, dtype, error_dtype, beta, seed, poison):
    bits, block = fmt
    n = sum(segments)
    x = sample(rows, n, seed=seed, dtype=dtype)
    if poison is not None and n:
        x[0, seed % n] = poison
    error = sample(rows, n, seed=seed + 1, dtype=error_dtype) / 8
    order = tuple(reversed(range(rows)))
    options = {"segments": segments, "bits": bits, "block": block, "beta": beta, "order": order}
    native, plain = error.clone(), error.clone()
    message = encode_with_feedback(x, native, **options)
    assert torch.equal(message, encode_with_feedback(x, plain, **options, reference=True))
    assert torch.equal(native, plain)
    assert native.isfinite().all()

    total = x[list(order)].float() + error.float()
    assert torch.equal(message, encode_segments(total, segments=segments, bits=bits, block=block))
    back = decode_segments(message, segments=segments, bits=bits, block=block)
    moved = beta * error.float() + (1 - beta) * (total - back)
    assert torch.equal(native, moved.masked_fill(back.isnan(), 0.0).to(error_dtype))


@relaxed
@given(
    st.lists(st.integers(0, 400), min_size=0, max_size=3),
    st.integers(0, 4),
    formats,
    formats,
    st.sampled_from([None, *DTYPES]),
    any_dtype,
    st.integers(0, 2**16),
)
def test_sum_with_feedback_equals_its_parts(segments, peers, fmt, out_fmt, own_dtype, error_dtype, seed):
    (bits, block), (out_bits, out_block) = fmt, out_fmt
    n = sum(segments)
    bufs = encode_segments(sample(peers, n, seed=seed), segments=segments, bits=bits, block=block)
    own = None if own_dtype is None else sample(n, seed=seed + 1, dtype=own_dtype)
    error = sample(n, seed=seed + 2, dtype=error_dtype)
    options = {"segments": segments, "bits": bits, "block": block}
    out_options = {"out_bits": out_bits, "out_block": out_block}
    native, plain, parts = error.clone(), error.clone(), error.clone()
    message = reduce_quantize_with_feedback(bufs, own, native, **options, **out_options)
    expected = reduce_quantize_with_feedback(bufs, own, plain, **options, **out_options, reference=True)
    assert torch.equal(message, expected)
    assert torch.equal(native, plain)
    total = dequantize_reduce(bufs, own, **options)
    apart = encode_with_feedback(total, parts, segments=segments, bits=out_bits, block=out_block)
    assert torch.equal(message, apart)
    assert torch.equal(native, parts)


def test_what_one_step_loses_the_next_ones_send():
    """Classic feedback (beta = 0): after any number of steps only the last step's error is missing."""
    x = sample(1000, seed=0)
    options = {"segments": (1000,), "bits": 4, "block": 256}
    error = torch.zeros(1000)
    sent, without = torch.zeros(1000), torch.zeros(1000)
    steps = 50
    for _ in range(steps):
        sent += decode_segments(encode_with_feedback(x, error, **options, beta=0.0), **options)
        without += decode_segments(encode_segments(x, **options), **options)
    assert torch.allclose(sent + error, steps * x, atol=1e-3)
    assert (without - steps * x).norm() > 10 * (sent - steps * x).norm()


def test_the_moving_average_halves_the_bias_that_plain_quantizing_leaves():
    """LoCo's beta = 0.8 compensates for a part of the past: less bias than without, more than classic feedback."""
    x = sample(4096, seed=1)
    options = {"segments": (4096,), "bits": 4, "block": 256}
    bias = {}
    for beta in (None, 0.8, 0.0):
        error, sent = torch.zeros(4096), torch.zeros(4096)
        for _ in range(200):
            if beta is None:
                message = encode_segments(x, **options)
            else:
                message = encode_with_feedback(x, error, **options, beta=beta)
            sent += decode_segments(message, **options) / 200
        bias[beta] = (sent - x).norm()
    assert bias[0.0] < bias[0.8] < bias[None] / 2


def test_a_poisoned_block_starts_anew():
    x, error = torch.ones(700), torch.full((700,), 0.01)
    x[300] = torch.nan
    options = {"segments": (700,), "bits": 4, "block": 256}
    message = encode_with_feedback(x, error, **options)
    assert decode(message, bits=4, block=256, numel=700)[256:512].isnan().all()
    assert not error[256:512].any()
    assert error[:256].all()
    assert error[512:].all()
    x[300] = 1.0
    again = encode_with_feedback(x, error, **options)
    assert decode(again, bits=4, block=256, numel=700).isfinite().all()


@pytest.mark.parametrize("reference", [False, True])
def test_an_error_too_large_for_fp16_stays_finite(reference):
    x, error = torch.tensor([1e7, 3e6, 2e6, 1.3e6]), torch.zeros(4, dtype=torch.float16)
    options = {"segments": (4,), "bits": 4, "block": 4}
    for _ in range(3):
        message = encode_with_feedback(x, error, **options, beta=0.0, reference=reference)
        assert decode(message, bits=4, block=4, numel=4).isfinite().all()
    assert error.abs().max() == 65504


def test_the_ranks_buffers_together_hold_each_error_once():
    """The sum between the hops of a hierarchical reduce-scatter, 2 nodes x 2: shards equal one buffer over all."""
    nodes, local, n = 2, 2, 300
    options = {"segments": (n,), "bits": 4, "block": 256}
    gradients = sample(nodes * local, nodes * local, n, seed=2)  # rank, slice
    order = slice_order(nodes, local)
    whole = torch.zeros(nodes * local, n)
    buffers = [
        torch.zeros(nodes, n) for _ in range(local)
    ]  # each of a node's ranks: one row a slice it adds up
    for _ in range(3):
        first_hop = [encode_segments(gradients[rank], **options, order=order) for rank in range(local)]
        received = torch.stack(first_hop)  # peer, place
        for place in range(nodes * local):
            rank, row = divmod(place, nodes)
            sharded = reduce_quantize_with_feedback(received[:, place], None, buffers[rank][row], **options)
            together = reduce_quantize_with_feedback(received[:, place], None, whole[place], **options)
            assert torch.equal(sharded, together)
    assert torch.equal(torch.cat(buffers), whole)
    assert sum(buffer.numel() for buffer in buffers) == nodes * local * n
    assert whole.any()


def test_a_buffer_starts_anew_after_its_uses():
    buffer = ErrorBuffer(torch.zeros(4), reset_every=3)
    seen = []
    for _ in range(7):
        seen.append(float(buffer.use()[0]))
        buffer.values += 1.0
    assert seen == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0]
    never = ErrorBuffer(torch.ones(4), reset_every=0)
    assert all(bool(never.use().all()) for _ in range(5))


def test_wrong_input_is_named():
    x = torch.ones(2, 8)
    options = {"segments": (8,), "bits": 8, "block": 4}
    with pytest.raises(ValueError, match=r"error is torch.float32 \(2, 7\)"):
        encode_with_feedback(x, torch.zeros(2, 7), **options)
    with pytest.raises(ValueError, match=r"must be \[1, 8\]"):
        encode_with_feedback(x, torch.zeros(2, 8), **options, order=(1,))
    with pytest.raises(ValueError, match="float64"):
        encode_with_feedback(x, torch.zeros(2, 8).double(), **options)
    with pytest.raises(ValueError, match="beta=1"):
        encode_with_feedback(x, torch.zeros(2, 8), **options, beta=1.0)
    bufs = encode_segments(x, **options)
    with pytest.raises(ValueError, match="error is"):
        reduce_quantize_with_feedback(bufs, None, torch.zeros(7), **options)
    for values in ({"beta": -0.1}, {"reset_every": -1}):
        with pytest.raises(ValueError, match=next(iter(values))):
            ErrorBuffer(torch.zeros(4), **values)
    with pytest.raises(ValueError, match="float64"):
        ErrorBuffer(torch.zeros(4).double())
