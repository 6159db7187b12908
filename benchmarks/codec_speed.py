"""Speed of the kernels on one core: bytes read and written per second, beside a copy in the same run.

Run: python benchmarks/codec_speed.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from twinbed.kernels import (
    decode,
    decode_segments,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode,
    encode_segments,
    prepare,
    wire_bytes,
)

SIZES = (1 << 18, 1 << 22)
NUM_SLICES = 8
FORMATS = ((8, 2048), (4, 256))  # what qwZ and qgZ send by default


def main() -> None:
    """Print one row a kernel: GB/s, against copy_ of as many bytes, and against the eager reference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank runs
    try:
        ready = prepare()
        print(f"backend {ready.backend}: {ready.reason} ({ready.seconds:.2f} s)")
        print(f"{'kernel':37}{'input':>6}{'elements':>10}{'us':>9}{'GB/s':>7}{'of copy':>9}{'of eager':>10}")
        for numel in SIZES:
            for dtype in (torch.bfloat16, torch.float32):
                _codec_rows(numel, dtype)
            _reduce_rows(numel)
        _call_row()
    finally:
        torch.set_num_threads(threads)


def _codec_rows(numel: int, dtype: torch.dtype) -> None:
    x = torch.randn(numel).to(dtype)
    values = torch.empty_like(x)
    for bits, block in FORMATS:
        message = encode(x, bits=bits, block=block)
        nbytes = x.nbytes + message.nbytes
        quantize = partial(encode, x, bits=bits, block=block, out=message)
        dequantize = partial(decode, message, bits=bits, block=block, numel=numel, out=values)
        _row(f"quantize {bits} bits, block {block}", dtype, numel, nbytes, quantize)
        _row(f"dequantize {bits} bits, block {block}", dtype, numel, nbytes, dequantize)


def _reduce_rows(numel: int) -> None:
    """Over `NUM_SLICES` received slices that hold `numel` elements together, at 4 bits."""
    bits, block = FORMATS[1]
    segments = (numel // NUM_SLICES,)
    slices = torch.randn(NUM_SLICES, segments[0])
    received = encode_segments(slices, segments=segments, bits=bits, block=block)
    total = torch.empty(segments[0])
    message = torch.empty(wire_bytes(segments[0], bits=bits, block=block), dtype=torch.uint8)
    options = {"segments": segments, "bits": bits, "block": block}
    name = f"{NUM_SLICES} slices, 4 bits"
    nbytes = received.nbytes + total.nbytes
    _row(
        f"reduce {name}",
        torch.float32,
        numel,
        nbytes,
        partial(dequantize_reduce, received, **options, out=total),
    )
    fused = partial(dequantize_reduce_quantize, received, **options, out=message)
    _row(f"reduce and quantize {name}", torch.float32, numel, received.nbytes + message.nbytes, fused)

    def in_parts() -> None:  # the natural way with the same native codec: decode all, torch's sum, encode
        values = decode_segments(received, **options)
        encode(values.sum(0), bits=bits, block=block, out=message)

    def accumulated() -> None:  # the best that the parts can do
        total.zero_()
        for one in received:
            decode(one, bits=bits, block=block, numel=segments[0], out=total, accumulate=True)
        encode(total, bits=bits, block=block, out=message)

    fused_s = _median_s(fused)
    print(
        f"    native parts in its place: {_median_s(in_parts) / fused_s:.1f} times as long as fused; "
        f"adding in place: {_median_s(accumulated) / fused_s:.1f}"
    )


def _call_row() -> None:
    x = torch.randn(256)
    message = encode(x, bits=8, block=256)
    out_s = _median_s(partial(encode, x, bits=8, block=256, out=message))
    back_s = _median_s(partial(decode, message, bits=8, block=256, numel=256))
    print(f"one call on 256 elements: encode {out_s * 1e6:.1f} us, decode {back_s * 1e6:.1f} us")


def _row(name: str, dtype: torch.dtype, numel: int, nbytes: int, call: Callable[..., object]) -> None:
    source, target = torch.randint(255, (2, nbytes // 2), dtype=torch.uint8)
    copy_s = _median_s(lambda: target.copy_(source))
    native_s = _median_s(call)
    eager_s = _median_s(partial(call, reference=True))
    short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    print(
        f"{name:37}{short:>6}{numel:>10}{native_s * 1e6:>9.0f}{nbytes / native_s / 1e9:>7.1f}"
        f"{copy_s / native_s:>9.2f}{eager_s / native_s:>9.0f}x"
    )


def _median_s(call: Callable[[], object]) -> float:
    """Median over a twentieth of a second, and at least three calls; small calls need many to settle."""
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < 0.05:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
