"""Which block holds Inf or NaN, before and after quantizing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.kernels import BadBlock, encode_segments, first_bad_block, first_bad_message, prepare

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert prepare().backend == "native", prepare().reason


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([0, 1, 3, 255, 257, 1000]),
    st.sampled_from([0, 1, 7, 256]),
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=3),
)
def test_the_first_bad_block_is_found(numel, block, dtype, poison):
    x = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)  # finite, though its sum is not
    places = []
    for place, value in poison:
        if place < numel:
            x[place] = value
            places.append(place // (block or numel))
    expected = min(places, default=None)
    assert first_bad_block(x, block=block) == expected
    assert first_bad_block(x, block=block, reference=True) == expected
    assert first_bad_block(x.view(1, -1).t(), block=block) == expected


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
@pytest.mark.parametrize("reference", [False, True])
def test_messages_tell_row_segment_and_block(bits, reference):
    segments = (0, 300, 257, 700)
    options = {"segments": segments, "bits": bits, "block": 256}
    x = torch.randn(3, sum(segments))
    assert first_bad_message(encode_segments(x, **options), **options, reference=reference) is None
    x[2, 5] = math.nan
    x[1, 300 + 257 + 512 + 10] = -math.inf
    found = first_bad_message(encode_segments(x, **options), **options, reference=reference)
    assert found == BadBlock(row=1, segment=3, block=2)
    x[1, 300 + 256] = math.nan
    found = first_bad_message(encode_segments(x, **options)[1], **options, reference=reference)
    assert found == BadBlock(row=0, segment=2, block=1)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="block=-1"):
        first_bad_block(torch.ones(4), block=-1)
    with pytest.raises(ValueError, match="float64"):
        first_bad_block(torch.ones(4).double(), block=4)
    with pytest.raises(ValueError, match="buf has shape"):
        first_bad_message(torch.zeros(3, dtype=torch.uint8), segments=(4,), bits=8, block=4)
