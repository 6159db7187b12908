"""The Triton kernels in Triton's interpreter, on CPU tensors, against the plain-torch reference: equal integers.

Run by test_triton.py in a process of its own: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import math
from itertools import product

import pytest
import torch

from twinbed.kernels import (
    decode_segments,
    dequantize_blocks,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode_segments,
    encode_with_feedback,
    prepare_gpu,
    pruned_matmul,
    quantize_blocks,
    reduce_quantize_with_feedback,
    slice_order,
)
from twinbed.kernels.gpu import codec_for, matmul_for

# numpy says so where fp16 cannot hold a value; a GPU gives Inf without a word, as torch does.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ((8, 2048), (4, 256), (8, 4), (4, 36), (8, 12), (4, 4))
SIZES = (0, 1, 3, 255, 257, 1000, 4099)


def sample(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_public_functions_take_the_triton_kernels_here():
    x = torch.ones(4)
    assert codec_for(x, bits=8, block=256).__name__ == "twinbed.kernels.triton_codec"
    assert codec_for(x, bits=4, block=0) is None
    assert codec_for(x, bits=6, block=256) is None
    assert matmul_for(x).__name__ == "twinbed.kernels.triton_matmul"
    assert prepare_gpu(torch.device("cpu")).backend == "triton"


@pytest.mark.parametrize(("bits", "block"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(bits, block, dtype):
    for numel, magnitude in (*product(SIZES, (1.0,)), (257, 1e-6)):
        x = (sample(numel, seed=numel) * magnitude).to(dtype)
        codes, scales = quantize_blocks(x, bits=bits, block=block)
        plain_codes, plain_scales = quantize_blocks(x, bits=bits, block=block, reference=True)
        assert torch.equal(codes, plain_codes)
        assert torch.equal(scales, plain_scales)
        for out_dtype in DTYPES:
            options = {"bits": bits, "block": block, "numel": numel, "dtype": out_dtype}
            back = dequantize_blocks(codes, scales, **options)
            assert torch.equal(back, dequantize_blocks(codes, scales, **options, reference=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_denormals_outliers_zeros_and_poison(bits):
    x = sample(256 * 8, seed=5)
    x[:256] = 0.0
    x[256:512] *= 1e-41
    x[512:768] *= 1e-30
    x[800] = 1e30
    x[1024] = torch.finfo(torch.float32).max
    x[1280] = math.nan
    x[1600] = math.inf
    x[1800] = -math.inf
    options = {"segments": (x.numel(),), "bits": bits, "block": 256}
    message = encode_segments(x, **options)
    assert torch.equal(message, encode_segments(x, **options, reference=True))
    for out_dtype in DTYPES:
        back = decode_segments(message, **options, dtype=out_dtype)
        plain = decode_segments(message, **options, dtype=out_dtype, reference=True)
        assert torch.equal(back.nan_to_num(nan=77.0), plain.nan_to_num(nan=77.0))


@pytest.mark.parametrize("bits", [8, 4])
def test_ties_go_to_even(bits):
    qmax = 127 if bits == 8 else 7
    x = torch.tensor([qmax, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5])
    options = {"segments": (8,), "bits": bits, "block": 8}
    assert decode_segments(encode_segments(x, **options), **options).tolist() == [qmax, 0, 2, 2, 0, -2, -2, 4]


@pytest.mark.parametrize(("bits", "block", "dtype"), [
    (8, 2048, torch.float32),
    (8, 2048, torch.bfloat16),
    (4, 256, torch.bfloat16),
    (4, 36, torch.float16),
])  # fmt: skip
def test_segments_rows_and_order(bits, block, dtype):
    segments = (300, 0, 33, 1, 700)
    options = {"segments": segments, "bits": bits, "block": block}
    wide = sample(8, sum(segments) + 9, seed=7, dtype=dtype)
    x = wide[:, 5 : 5 + sum(segments)]  # rows of a larger tensor, at an odd address
    for order in (None, slice_order(2, 4)[3:]):
        message = encode_segments(x, **options, order=order)
        assert torch.equal(message, encode_segments(x, **options, order=order, reference=True))
    total = sample(8, sum(segments), seed=8)
    plain = total.clone()
    decode_segments(message := encode_segments(x, **options), **options, out=total, accumulate=True)
    decode_segments(message, **options, out=plain, accumulate=True, reference=True)
    assert torch.equal(total, plain)
    frame = torch.zeros(8, message.shape[1] + 3, dtype=torch.uint8)
    encode_segments(x, **options, out=frame[:, 1:-2])
    assert torch.equal(frame[:, 1:-2], message)
    assert not frame[:, 0].any()
    assert not frame[:, -2:].any()


@pytest.mark.parametrize(("bits", "out_bits", "block", "out_block", "own_dtype"), [
    *((4, 4, 256, 256, own_dtype) for own_dtype in (None, *DTYPES)),  # qgZ's own
    (8, 4, 256, 256, torch.bfloat16),
    (4, 8, 12, 12, None),
    (8, 8, 2048, 2048, torch.float32),
    (4, 4, 256, 64, torch.float16),
    (4, 6, 256, 256, torch.float32),
])  # fmt: skip
def test_sums(bits, out_bits, block, out_block, own_dtype):
    segments = (700, 0, 33, 256)
    n = sum(segments)
    options = {"segments": segments, "bits": bits, "block": block}
    out_options = {"out_bits": out_bits, "out_block": out_block}
    own = None if own_dtype is None else sample(n, seed=3, dtype=own_dtype)
    for peers in (0, 1, 8):
        bufs = encode_segments(sample(peers, n, seed=peers), **options, reference=True)
        total = dequantize_reduce(bufs, own, **options)
        assert torch.equal(total, dequantize_reduce(bufs, own, **options, reference=True))
        message = dequantize_reduce_quantize(bufs, own, **options, **out_options)
        plain = dequantize_reduce_quantize(bufs, own, **options, **out_options, reference=True)
        assert torch.equal(message, plain)
        error = sample(n, seed=9, dtype=torch.bfloat16)
        ours, theirs = error.clone(), error.clone()
        message = reduce_quantize_with_feedback(bufs, own, ours, **options, **out_options)
        plain = reduce_quantize_with_feedback(bufs, own, theirs, **options, **out_options, reference=True)
        assert torch.equal(message, plain)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("error_dtype", "bits", "block"), [
    (torch.bfloat16, 8, 2048),
    (torch.bfloat16, 4, 256),
    (torch.float16, 4, 256),
    (torch.float32, 4, 36),
])  # fmt: skip
def test_feedback(error_dtype, bits, block):
    segments = (300, 33, 700)
    options = {"segments": segments, "bits": bits, "block": block, "order": (3, 1)}
    x = sample(4, sum(segments), seed=1, dtype=torch.bfloat16)
    x[3, 400] = math.nan
    ours = sample(2, sum(segments), seed=2, dtype=error_dtype) / 8
    theirs = ours.clone()
    for _ in range(3):
        message = encode_with_feedback(x, ours, **options)
        assert torch.equal(message, encode_with_feedback(x, theirs, **options, reference=True))
        assert torch.equal(ours, theirs)
    assert ours.isfinite().all()


# Not bf16: this interpreter multiplies its bits as integers. Compiled, it is a test of make gpu-check.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_pruned_matmul(dtype, transposed):
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    for m, k, n in ((1, 5, 1), (70, 90, 67), (3, 130, 2)):
        kept = tuple(torch.randperm(k, generator=torch.Generator().manual_seed(k))[: max(1, k // 2)].tolist())
        w = sample(n, k, seed=1, dtype=dtype).t() if transposed else sample(k, n, seed=1, dtype=dtype)
        results = []
        for reference in (False, True):
            a = sample(m, k, seed=2, dtype=dtype).requires_grad_()
            b = w.detach().clone().requires_grad_()
            y = pruned_matmul(a, b, kept, reference=reference)
            y.backward(sample(m, n, seed=3, dtype=dtype))
            results.append((y, a.grad, b.grad))
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, rtol=tolerance, atol=4 * tolerance)
