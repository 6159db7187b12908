"""Speed of the kernels on this machine's cores: bytes read and written per second, beside a copy in the same run.

Run: python benchmarks/codec_speed.py [--threads N] [--compiled]. With two threads, as the targets are stated, it says
for each whether it is met; with `--threads 1` the figures are those of a rank that has a core for itself. `--compiled`
sets the reference under torch.compile beside them, which is how the C++ was chosen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from twinbed.kernels import (
    decode,
    decode_segments,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode,
    encode_segments,
    encode_with_feedback,
    first_bad_block,
    prepare,
    pruned_matmul,
    wire_bytes,
)
from twinbed.kernels import reference as plain

SIZES = (1 << 18, 1 << 22, 1 << 26)
NUM_SLICES = 8
FORMATS = ((8, 2048), (4, 256))  # what qwZ and qgZ send by default
ROUNDS = 5  # kernel, copy and eager in turn, so that all see the same machine

# From bf16, of tensors that may lie in a cache (4M elements) and that lie in memory (67M): share of a copy's bytes per
# second, and times as fast as eager.
MUST_OF_COPY = {"quantize 8": 0.6, "quantize 4": 0.5, "dequantize 8": 0.5, "dequantize 4": 0.5}
GOAL_OF_COPY = {"quantize 8": 0.8}
MUST_OF_EAGER = {"quantize": 10.0, "dequantize": 1.5}
MUST_OF_PARTS = 2.0


def main(argv: Sequence[str] = ()) -> None:
    """Print one row a kernel: GB/s, against copy_ of as many bytes, and against the eager reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        ready = prepare()
        print(
            f"backend {ready.backend}: {ready.reason} (first call: {ready.seconds:.2f} s); {arguments.threads} threads"
        )
        print(f"{'kernel':37}{'input':>6}{'elements':>10}{'us':>9}{'GB/s':>7}{'of copy':>9}{'of eager':>10}")
        judged: dict[int, list[tuple[str, float, float]]] = {}
        for numel in SIZES:
            judge = numel != SIZES[0]
            verdicts = judged.setdefault(numel, [])
            for dtype in (torch.bfloat16, torch.float32):
                verdicts += _codec_rows(numel, dtype, judge=judge and dtype == torch.bfloat16)
            verdicts += _reduce_rows(numel, judge=judge)
        _feedback_and_check_rows(SIZES[-1])
        _call_row()
        _pruned_rows()
        if arguments.compiled:
            _compiled_rows(SIZES[1])
        if arguments.threads == 2:
            for numel in SIZES[1:]:
                print(f"\ntargets, two threads, from bf16, {numel:,} elements:")
                for name, measured, wanted in judged[numel]:
                    verdict = "met" if measured >= wanted else "MISSED"
                    print(f"  {name:52}{measured:>7.2f}  at least {wanted:<5g} {verdict}")
    finally:
        torch.set_num_threads(threads)


def _codec_rows(numel: int, dtype: torch.dtype, *, judge: bool) -> list[tuple[str, float, float]]:
    x = torch.randn(numel).to(dtype)
    values = torch.empty_like(x)
    verdicts = []
    for bits, block in FORMATS:
        message = encode(x, bits=bits, block=block)
        nbytes = x.nbytes + message.nbytes
        calls = {
            "quantize": partial(encode, x, bits=bits, block=block, out=message),
            "dequantize": partial(decode, message, bits=bits, block=block, numel=numel, out=values),
        }
        for kind, call in calls.items():
            of_copy, of_eager = _row(f"{kind} {bits} bits, block {block}", dtype, numel, nbytes, call)
            if judge:
                name = f"{kind} {bits}"
                verdicts.append((f"{kind} {bits} bits, of a copy", of_copy, MUST_OF_COPY[name]))
                if name in GOAL_OF_COPY:
                    verdicts.append((f"{kind} {bits} bits, of a copy (goal)", of_copy, GOAL_OF_COPY[name]))
                verdicts.append((f"{kind} {bits} bits, times eager", of_eager, MUST_OF_EAGER[kind]))
    return verdicts


def _reduce_rows(numel: int, *, judge: bool) -> list[tuple[str, float, float]]:
    """Over `NUM_SLICES` received slices that hold `numel` elements together, at 4 bits."""
    bits, block = FORMATS[1]
    segments = (numel // NUM_SLICES,)
    slices = torch.randn(NUM_SLICES, segments[0])
    received = encode_segments(slices, segments=segments, bits=bits, block=block)
    total = torch.empty(segments[0])
    message = torch.empty(wire_bytes(segments[0], bits=bits, block=block), dtype=torch.uint8)
    options = {"segments": segments, "bits": bits, "block": block}
    name = f"{NUM_SLICES} slices, 4 bits"
    reduce = partial(dequantize_reduce, received, **options, out=total)
    _row(f"reduce {name}", torch.float32, numel, received.nbytes + total.nbytes, reduce)
    fused = partial(dequantize_reduce_quantize, received, **options, out=message)
    _row(f"reduce and quantize {name}", torch.float32, numel, received.nbytes + message.nbytes, fused)

    def in_parts() -> None:  # the natural way with the same native codec: decode all, torch's sum, encode
        values = decode_segments(received, **options)
        encode(values.sum(0), bits=bits, block=block, out=message)

    def accumulated() -> None:  # the best that the parts can do: the sum is one slice, and stays in a cache
        total.zero_()
        for one in received:
            decode(one, bits=bits, block=block, numel=segments[0], out=total, accumulate=True)
        encode(total, bits=bits, block=block, out=message)

    fused_s, parts_s, accumulated_s = _in_turn(fused, in_parts, accumulated)
    print(
        f"    native parts one after another take {parts_s / fused_s:.1f} times as long as fused; "
        f"adding in place, {accumulated_s / fused_s:.1f}"
    )
    if not judge:
        return []
    return [("reduce and quantize 8 slices, times its parts", parts_s / fused_s, MUST_OF_PARTS)]


def _compiled_rows(numel: int) -> None:
    """The same work by torch.compile of the reference: each kernel, and the parts of the fused one."""
    slice_numel = numel // NUM_SLICES
    for bits, block in FORMATS:
        x = torch.randn(1, numel).bfloat16()
        quantize = torch.compile(partial(plain.quantize, x, bits=bits, block=block), dynamic=False)
        start = time.perf_counter()
        codes, scales = quantize()
        first_s = time.perf_counter() - start
        format_ = {"bits": bits, "block": block, "numel": numel}
        dequantize = torch.compile(partial(plain.dequantize, codes, scales, **format_), dynamic=False)
        message = encode(x, bits=bits, block=block)
        for kind, native, compiled in (
            ("quantize", partial(encode, x, bits=bits, block=block, out=message), quantize),
            ("dequantize", partial(decode, message, **format_), dequantize),
        ):
            native_s, compiled_s = _in_turn(native, compiled)
            print(
                f"torch.compile, {kind} {bits} bits, {numel:,} elements: {compiled_s * 1e6:,.0f} us, "
                f"{compiled_s / native_s:.1f} times the native {native_s * 1e6:,.0f} us (first call {first_s:.0f} s)"
            )
    back = torch.compile(partial(plain.dequantize, bits=bits, block=block, numel=slice_numel), dynamic=False)
    add = torch.compile(lambda values: values.sum(0))
    again = torch.compile(partial(plain.quantize, bits=bits, block=block), dynamic=False)
    slices = torch.randn(NUM_SLICES, slice_numel)
    codes, scales = plain.quantize(slices, bits=bits, block=block)
    received = encode_segments(slices, segments=(slice_numel,), bits=bits, block=block)
    fused_s, parts_s = _in_turn(
        partial(dequantize_reduce_quantize, received, segments=(slice_numel,), bits=bits, block=block),
        lambda: again(add(back(codes, scales))[None]),
    )
    print(
        f"torch.compile, reduce and quantize {NUM_SLICES} slices in parts: {parts_s / fused_s:.1f} times the fused"
    )


def _feedback_and_check_rows(numel: int) -> None:
    bits, block = FORMATS[1]
    x = torch.randn(numel).bfloat16()
    error = torch.zeros_like(x)
    message = encode(x, bits=bits, block=block)
    options = {"segments": (numel,), "bits": bits, "block": block}
    corrected = partial(encode_with_feedback, x, error, **options, out=message)
    nbytes = x.nbytes + 2 * error.nbytes + message.nbytes
    _row(f"with feedback {bits} bits, block {block}", x.dtype, numel, nbytes, corrected)
    _row("first bad block", x.dtype, numel, x.nbytes, partial(first_bad_block, x, block=block))


def _call_row() -> None:
    x = torch.randn(256)
    message = encode(x, bits=8, block=256)
    out_s = _median_s(partial(encode, x, bits=8, block=256, out=message))
    back_s = _median_s(partial(decode, message, bits=8, block=256, numel=256))
    print(f"one call on 256 elements: encode {out_s * 1e6:.1f} us, decode {back_s * 1e6:.1f} us")


def _pruned_rows() -> None:
    """Half of the columns: what is left of half the time, forward and backward."""
    rows, columns, width = 512, 1024, 1024
    x = torch.randn(rows, columns, requires_grad=True)
    weight = torch.randn(width, columns, requires_grad=True)
    kept = tuple(torch.randperm(columns)[: columns // 2].tolist())

    def step(product: Callable[[], torch.Tensor]) -> None:
        x.grad = weight.grad = None
        product().sum().backward()

    whole_s, pruned_s, plain_s = _in_turn(
        partial(step, lambda: x @ weight.t()),
        partial(step, lambda: pruned_matmul(x, weight.t(), kept)),
        partial(step, lambda: pruned_matmul(x, weight.t(), kept, reference=True)),
    )
    print(
        f"matmul {rows} x {columns} x {width} with gradients: {whole_s * 1e3:.1f} ms; half of the columns: "
        f"{pruned_s * 1e3:.1f} ms, by plain indexing {plain_s * 1e3:.1f} ms"
    )


def _row(
    name: str, dtype: torch.dtype, numel: int, nbytes: int, call: Callable[..., object]
) -> tuple[float, float]:
    source, target = torch.randint(255, (2, nbytes // 2), dtype=torch.uint8)
    native_s, copy_s, eager_s = _in_turn(call, lambda: target.copy_(source), partial(call, reference=True))
    short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    print(
        f"{name:37}{short:>6}{numel:>10}{native_s * 1e6:>9.0f}{nbytes / native_s / 1e9:>7.1f}"
        f"{copy_s / native_s:>9.2f}{eager_s / native_s:>9.0f}x"
    )
    return copy_s / native_s, eager_s / native_s


def _in_turn(*calls: Callable[[], object]) -> list[float]:
    """Seconds of each: the median over rounds in which all have their turn."""
    rounds = [[_median_s(call) for call in calls] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


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
    import sys

    main(sys.argv[1:])
