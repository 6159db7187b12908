"""Block quantization: error bounds, wire format, poison, and native against reference bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.kernels import (
    code_bytes,
    decode,
    decode_segments,
    dequantize_blocks,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode,
    encode_segments,
    encode_with_feedback,
    prepare,
    quantize_blocks,
    slice_order,
    wire_bytes,
)

QMAX = {8: 127, 6: 31, 4: 7, 2: 1}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

numels = st.one_of(
    st.sampled_from([0, 1, 2, 3, 127, 128, 129, 255, 256, 257, 1000, 2047, 2049]), st.integers(0, 5000)
)
formats = st.tuples(st.sampled_from([8, 6, 4, 2]), st.sampled_from([0, 4, 12, 36, 256, 2048]))
any_dtype = st.sampled_from(DTYPES)
# From denormal to near the largest of fp32; narrower types round some of it to zero or to infinity.
magnitudes = st.sampled_from([1e-44, 1e-39, 1e-30, 1e-8, 1e-3, 1.0, 3e4, 1e30, 3e38])
relaxed = settings(max_examples=150, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Without the native code these tests would compare the reference with itself."""
    assert prepare().backend == "native", prepare().reason


def sample(numel: int, dtype: torch.dtype, seed: int, magnitude: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator).clamp(-1, 1) * magnitude
    x[torch.rand(numel, generator=generator) < 0.1] = 0.0
    return x.to(dtype)


def absmax_per_element(x: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude of each element's own block, counted the slow way."""
    result = torch.zeros(x.numel(), dtype=torch.float64)
    for start in range(0, x.numel(), block or max(1, x.numel())):
        end = start + (block or x.numel())
        result[start:end] = x[start:end].double().abs().max()
    return result


@relaxed
@given(numels, formats, any_dtype, magnitudes, st.integers(0, 2**16))
def test_error_is_at_most_half_a_step(numel, fmt, dtype, magnitude, seed):
    bits, block = fmt
    x = sample(numel, dtype, seed, magnitude)
    finite = absmax_per_element(x, block).isfinite()
    codes, scales = quantize_blocks(x, bits=bits, block=block)
    back = dequantize_blocks(codes, scales, bits=bits, block=block, numel=numel, dtype=torch.float32)
    assert back.shape == (numel,)
    largest = absmax_per_element(x, block)[finite]
    error = (back.double() - x.double()).abs()[finite]
    # half a step, the roundings of fp32, and the granularity of a denormal scale
    bound = largest / QMAX[bits] / 2 + largest * 2.0**-21 + QMAX[bits] * 2.0**-149
    assert (error <= bound).all()
    assert not back[~finite].isfinite().any()


@relaxed
@given(
    numels, formats, any_dtype, magnitudes, st.integers(0, 2**16), st.sampled_from([None, math.nan, math.inf])
)
def test_native_equals_reference_bit_for_bit(numel, fmt, dtype, magnitude, seed, poison):
    bits, block = fmt
    x = sample(numel, dtype, seed, magnitude)
    if poison is not None and numel:
        x[seed % numel] = poison
    message = encode(x, bits=bits, block=block)
    assert torch.equal(message, encode(x, bits=bits, block=block, reference=True))
    for out_dtype in DTYPES:
        back = decode(message, bits=bits, block=block, numel=numel, dtype=out_dtype)
        plain = decode(message, bits=bits, block=block, numel=numel, dtype=out_dtype, reference=True)
        assert back.dtype == out_dtype
        assert torch.equal(back.nan_to_num(nan=77.0), plain.nan_to_num(nan=77.0))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_native_equals_reference(bits, dtype):
    """All values of the narrow types, denormals, Inf and NaN among them, beside their neighbours."""
    x = torch.arange(2**16).to(torch.uint16).view(dtype)
    for block in (4, 256):
        assert torch.equal(
            encode(x, bits=bits, block=block), encode(x, bits=bits, block=block, reference=True)
        )


@pytest.mark.parametrize("block", [4, 64])  # shorter and as long as what wide vectors work on
def test_every_rounding_to_16_bits_equals_torch(block):
    """Decoding writes bf16 and fp16 with torch's own rounding: scales chosen to fall on and beside ties."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-150, 128, (4096,), generator=generator).double()
    mantissas = torch.randint(0, 2**11, (4096,), generator=generator).double() / 2**11 + 1
    scales = (mantissas * 2.0**exponents).float()
    codes = torch.randint(-127, 128, (4096 * block,), generator=generator).to(torch.int8)
    for dtype in DTYPES:
        args = {"bits": 8, "block": block, "numel": codes.numel(), "dtype": dtype}
        native = dequantize_blocks(codes, scales, **args)
        assert torch.equal(native, (codes.float().view(-1, block) * scales[:, None]).view(-1).to(dtype))
        packed = codes.view(torch.uint8).view(-1, 2)[:, 0].contiguous()
        args = {"bits": 4, "block": block, "numel": codes.numel(), "dtype": dtype}
        native = dequantize_blocks(packed, scales, **args)
        assert torch.equal(native, dequantize_blocks(packed, scales, **args, reference=True))


@relaxed
@given(
    st.lists(
        st.sampled_from([0.0, 1e-44, 1e-30, 1e-3, 1.0, 1.0, 1.0, 3e38, math.nan]), min_size=1, max_size=40
    ),
    st.sampled_from([64, 128, 192, 256, 512, 2048, 4096]),
    st.sampled_from([0, 1, 63, 64]),
    st.sampled_from([8, 4]),
    any_dtype,
    st.integers(0, 2**16),
)
def test_blocks_of_all_kinds_beside_each_other_native_equals_reference(kinds, block, more, bits, dtype, seed):
    """Short blocks are packed in groups, each while the next is looked at: none may have another's scale."""
    x = sample(len(kinds) * block + more, torch.float32, seed)
    for index, magnitude in enumerate(kinds):
        x[index * block : (index + 1) * block] *= magnitude
    x = x.to(dtype)
    message = encode(x, bits=bits, block=block)
    assert torch.equal(message, encode(x, bits=bits, block=block, reference=True))
    back = decode(message, bits=bits, block=block, numel=x.numel(), dtype=dtype)
    plain = decode(message, bits=bits, block=block, numel=x.numel(), dtype=dtype, reference=True)
    assert torch.equal(back.nan_to_num(nan=77.0), plain.nan_to_num(nan=77.0))


def test_ties_go_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5])
    codes, scales = quantize_blocks(x, bits=8, block=8)
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2, 4]
    assert scales.tolist() == [1.0]


def test_four_bit_codes_lie_in_two_planes():
    x = torch.tensor([7.0, 1.0, -2.0, 0.0, -7.0, 3.0, 0.0, -1.0])
    codes, scales = quantize_blocks(x, bits=4, block=8)
    low, high = [7, 1, -2, 0], [-7, 3, 0, -1]
    assert codes.tolist() == [(a & 15) | (b & 15) << 4 for a, b in zip(low, high, strict=True)]
    assert scales.tolist() == [1.0]


def test_six_and_two_bit_codes_are_packed_lowest_first():
    codes, _ = quantize_blocks(torch.tensor([31.0, 1.0, -1.0, -31.0]), bits=6, block=4)
    word = 31 | 1 << 6 | 63 << 12 | (-31 & 63) << 18
    assert codes.tolist() == [word & 255, word >> 8 & 255, word >> 16]
    codes, _ = quantize_blocks(torch.tensor([1.0, 0.0, -1.0, 1.0]), bits=2, block=4)
    assert codes.tolist() == [1 | 0 << 2 | 3 << 4 | 1 << 6]


@relaxed
@given(numels, formats)
def test_wire_bytes_is_the_formula_and_the_buffer(numel, fmt):
    bits, block = fmt
    padded = math.ceil(numel / block) * block if block else numel + numel % 2
    blocks = math.ceil(numel / block) if block else min(numel, 1)
    assert code_bytes(numel, bits=bits, block=block) == math.ceil(padded * bits / 8)
    assert wire_bytes(numel, bits=bits, block=block) == math.ceil(padded * bits / 8) + 4 * blocks
    x = torch.ones(numel)
    codes, scales = quantize_blocks(x, bits=bits, block=block)
    message = encode(x, bits=bits, block=block)
    assert message.dtype == torch.uint8
    assert codes.nbytes + scales.nbytes == message.nbytes == wire_bytes(numel, bits=bits, block=block)
    assert torch.equal(message, torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)]))


def test_hand_counted_bytes():
    assert wire_bytes(1000, bits=8, block=256) == 1024 + 4 * 4
    assert wire_bytes(1000, bits=4, block=256) == 512 + 4 * 4
    assert wire_bytes(1001, bits=4, block=0) == 501 + 4
    assert wire_bytes(1001, bits=6, block=0) == 752 + 4  # 1002 * 6 / 8 = 751.5
    assert wire_bytes(32, bits=4, block=256) == 128 + 4
    assert wire_bytes(0, bits=8, block=0) == wire_bytes(0, bits=4, block=256) == 0


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
@pytest.mark.parametrize("block", [0, 256])
def test_a_block_of_zeros_gives_zeros(bits, block):
    x = torch.zeros(512)
    x[300] = 1.0
    codes, scales = quantize_blocks(x, bits=bits, block=block)
    back = dequantize_blocks(codes, scales, bits=bits, block=block, numel=512, dtype=torch.float32)
    assert torch.equal(back[:256], torch.zeros(256))
    assert back[300] == 1.0
    zeros = encode(torch.zeros(512), bits=bits, block=block)
    assert not zeros.any()


def test_a_thousand_elements_keep_their_length():
    x = torch.randn(1000)
    codes, scales = quantize_blocks(x, bits=8, block=256)
    assert codes.shape == (1024,)
    assert scales.shape == (4,)
    assert not codes[1000:].any()
    assert dequantize_blocks(codes, scales, bits=8, block=256, numel=1000, dtype=x.dtype).shape == (1000,)


@pytest.mark.parametrize("reference", [False, True])
def test_maximum_of_a_millionth_in_fp16(reference):
    x = (torch.linspace(-1, 1, 256) * 1e-6).half()
    codes, scales = quantize_blocks(x, bits=8, block=256, reference=reference)
    back = dequantize_blocks(
        codes, scales, bits=8, block=256, numel=256, dtype=torch.float32, reference=reference
    )
    largest = x.float().abs().max()
    assert (back - x.float()).abs().max() <= largest / 254 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_nan_and_inf_poison_their_block_and_no_other(dtype, bad, bits):
    x = torch.ones(700, dtype=dtype)
    x[300] = bad
    message = encode(x, bits=bits, block=256)
    back = decode(message, bits=bits, block=256, numel=700, dtype=dtype)
    assert back[256:512].isnan().all()
    assert torch.equal(back[:256], x[:256])
    assert torch.equal(back[512:], x[512:])


def test_largest_float_stays_finite():
    x = torch.tensor([torch.finfo(torch.float32).max, 1.0, -torch.finfo(torch.float32).max, 0.0])
    for bits in QMAX:
        assert decode(encode(x, bits=bits, block=4), bits=bits, block=4, numel=4).isfinite().all()


def test_one_huge_outlier_costs_its_own_block_only():
    x = torch.ones(512)
    x[0] = 1e30
    back = decode(encode(x, bits=8, block=256), bits=8, block=256, numel=512)
    assert back[0] == pytest.approx(1e30)
    assert torch.equal(back[256:], x[256:])
    assert not back[1:256].any()


def test_shapes_strides_and_gradients_do_not_matter():
    x = torch.randn(6, 5, 4, requires_grad=True)
    flat = encode(x.detach().reshape(-1), bits=8, block=16)
    assert torch.equal(encode(x, bits=8, block=16), flat)
    strided = x.transpose(0, 2)
    assert torch.equal(
        encode(strided, bits=8, block=16), encode(strided.detach().contiguous(), bits=8, block=16)
    )


@relaxed
@given(
    st.lists(st.integers(0, 700), min_size=0, max_size=6),
    st.integers(1, 4),
    formats,
    any_dtype,
    st.integers(0, 2**16),
)
def test_segments_are_messages_one_after_the_other(segments, rows, fmt, dtype, seed):
    bits, block = fmt
    n = sum(segments)
    x = sample(rows * n, dtype, seed).view(rows, n)
    together = encode_segments(x, segments=segments, bits=bits, block=block)
    assert together.shape == (rows, sum(wire_bytes(s, bits=bits, block=block) for s in segments))
    for row, message in zip(x, together, strict=True):
        apart = [encode(part, bits=bits, block=block) for part in row.split(segments)]
        assert torch.equal(message, torch.cat([*apart, torch.empty(0, dtype=torch.uint8)]))
    plain = encode_segments(x, segments=segments, bits=bits, block=block, reference=True)
    assert torch.equal(together, plain)
    back = decode_segments(together, segments=segments, bits=bits, block=block, dtype=dtype)
    plain = decode_segments(together, segments=segments, bits=bits, block=block, dtype=dtype, reference=True)
    assert back.shape == (rows, n)
    assert torch.equal(back, plain)


@given(st.integers(0, 2), st.integers(0, 2**16))
@settings(deadline=None)
def test_changing_a_segment_changes_no_other(which, seed):
    segments = (100, 33, 301)  # block 256 would otherwise reach over all three
    x = sample(sum(segments), torch.float32, seed)
    before = encode_segments(x, segments=segments, bits=4, block=256)
    x.split(segments)[which].mul_(1000.0).add_(1.0)
    after = encode_segments(x, segments=segments, bits=4, block=256)
    sizes = [wire_bytes(s, bits=4, block=256) for s in segments]
    for index, (old, new) in enumerate(zip(before.split(sizes), after.split(sizes), strict=True)):
        assert torch.equal(old, new) == (index != which)


def test_rows_are_quantized_in_the_order_asked_for():
    x = torch.randn(8, 50).bfloat16()
    options = {"segments": (20, 30), "bits": 4, "block": 16}
    plain_order = encode_segments(x, **options)
    order = slice_order(2, 4)
    for reference in (False, True):
        swizzled = encode_segments(x, **options, order=order, reference=reference)
        assert torch.equal(swizzled, plain_order[list(order)])
        without_own = encode_segments(x, **options, order=order[2:], reference=reference)
        assert torch.equal(without_own, swizzled[2:])
    wide = torch.randn(8, 90).bfloat16()[:, 7:57]  # rows of a larger buffer: no copy is needed
    assert torch.equal(encode_segments(wide, **options), encode_segments(wide, **options, reference=True))


@pytest.mark.parametrize("reference", [False, True])
def test_out_and_accumulate(reference):
    x = torch.randn(2, 300)
    options = {"segments": (300,), "bits": 8, "block": 256, "reference": reference}
    wire = wire_bytes(300, bits=8, block=256)
    frame = torch.zeros(2, wire + 3, dtype=torch.uint8)
    target = frame[:, 1 : wire + 1]  # an odd address, and rows of a larger frame
    assert encode_segments(x, **options, out=target) is target
    assert torch.equal(target, encode_segments(x, **options))
    assert not frame[:, 0].any()
    assert not frame[:, wire + 1 :].any()
    values = decode_segments(target, **options)
    total = torch.full((2, 300), 5.0)
    assert decode_segments(target, **options, out=total, accumulate=True) is total
    assert torch.equal(total, values + 5.0)
    half = torch.empty(300, dtype=torch.bfloat16)
    assert torch.equal(decode_segments(target[1], **options, out=half), values[1].bfloat16())


def test_wrong_input_is_named():
    x = torch.randn(10)
    with pytest.raises(ValueError, match="bits=5"):
        encode(x, bits=5, block=4)
    for block in (-4, 6, 255):
        with pytest.raises(ValueError, match=f"block={block}"):
            encode(x, bits=8, block=block)
    with pytest.raises(ValueError, match="float64"):
        encode(x.double(), bits=8, block=4)
    with pytest.raises(ValueError, match=r"segments\[1\]=-1"):
        encode_segments(x, segments=(11, -1), bits=8, block=4)
    with pytest.raises(ValueError, match=r"x has shape \(10,\)"):
        encode_segments(x, segments=(4, 5), bits=8, block=4)
    with pytest.raises(ValueError, match=r"buf has shape \(3,\)"):
        decode(torch.zeros(3, dtype=torch.uint8), bits=8, block=4, numel=4)
    with pytest.raises(ValueError, match="messages are uint8"):
        decode(torch.zeros(8), bits=8, block=4, numel=4)
    with pytest.raises(ValueError, match="out is"):
        encode(x, bits=8, block=4, out=torch.empty(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="order names row 2"):
        encode_segments(x.view(2, 5), segments=(5,), bits=8, block=4, order=(0, 2))
    with pytest.raises(ValueError, match="accumulate"):
        decode(encode(x, bits=8, block=4), bits=8, block=4, numel=10, accumulate=True)
    codes, scales = quantize_blocks(x[:8], bits=8, block=4)
    with pytest.raises(ValueError, match="codes are torch.int32"):
        dequantize_blocks(codes.int(), scales, bits=8, block=4, numel=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="do not fit numel=12"):
        dequantize_blocks(
            *quantize_blocks(x[:8], bits=8, block=4), bits=8, block=4, numel=12, dtype=torch.float32
        )


def test_what_lies_elsewhere_or_in_the_same_place_is_refused():
    """The native code gets addresses: on another device there would be nothing, or another process's memory."""
    x, elsewhere = torch.randn(128), torch.device("meta")
    fmt = {"bits": 8, "block": 64}
    message = encode(x, **fmt)
    wire = message.numel()
    slices = {**fmt, "segments": (128,)}
    bytes_there, floats_there = message.to(elsewhere), x.to(elsewhere)
    calls = {
        "out": [
            lambda: encode(x, **fmt, out=bytes_there),
            lambda: decode(message, **fmt, numel=128, out=floats_there),
            lambda: dequantize_reduce(message[None], **slices, out=floats_there),
            lambda: dequantize_reduce_quantize(message[None], **slices, out=bytes_there),
            lambda: encode_segments(torch.randn(4, 128), **slices, out=message.expand(4, wire)),
            lambda: encode_segments(
                torch.randn(4, 128),
                **slices,
                out=torch.zeros(4 * wire).byte().as_strided((4, wire), (wire - 8, 1)),
            ),
        ],
        "error": [lambda: encode_with_feedback(x, floats_there, **slices)],
        "own": [lambda: dequantize_reduce(message[None], floats_there, **slices)],
        "scales": [
            lambda: dequantize_blocks(
                torch.zeros(128, dtype=torch.int8),
                torch.ones(2, device=elsewhere),
                **fmt,
                numel=128,
                dtype=x.dtype,
            )
        ],
    }
    for name, refused in calls.items():
        for call in refused:
            with pytest.raises(ValueError, match=f"^{name} "):
                call()


def test_a_negation_that_torch_keeps_for_later_counts():
    x = torch.randn(256)
    later = torch._neg_view(x)
    assert later.is_neg()
    assert torch.equal(encode(later, bits=8, block=64), encode(-x, bits=8, block=64))
    message = encode(x, bits=8, block=64)
    total = dequantize_reduce(message[None], later, segments=(256,), bits=8, block=64)
    assert torch.equal(total, decode(message, bits=8, block=64, numel=256) - x)
