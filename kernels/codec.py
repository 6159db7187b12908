"""Block quantization of tensors, and the messages that collectives send: one function each for all backends.

Symmetric: a block's scale is absmax / qmax (fp32; qmax = 127, 31, 7, 1 for 8, 6, 4, 2 bits), its codes are
x / scale rounded to the nearest, ties to even. So the error is at most half a step (in a block of denormals, whose
scale is rounded to one itself, at most its largest value), zero stays zero, and a block of zeros gives zeros. A block
that holds NaN or Inf reads back as NaN throughout, so that it is noticed.
(DeepSpeed divides by absmax / 8 at 4 bits and clips +absmax to 7: there the largest value errs by a step.)

8 and 4 bits run natively on a CPU (codec.cpp) and in Triton on a GPU (triton_codec.py), the rest in plain
torch (reference.py), with equal results. `reference=True` asks for the latter, to check or to compare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference as plain
from .arguments import (
    DTYPES,
    check_dtype,
    error_rows,
    flat_of,
    messages_of,
    out_rows,
    row_indices,
    rows_of,
)
from .gpu import codec_for
from .layout import Layout, check_format, code_bytes, layout_of, num_blocks
from .native import load

NATIVE_BITS = (8, 4)
# Bytes that a thread more is worth: it codes so many in 13 us, and wakes in a few. A guess, near torch's own grain.
THREAD_BYTES = 1 << 18


def quantize_blocks(x: Tensor, *, bits: int, block: int, reference: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x`, flattened and cut into blocks.

    Args:
        x: fp32, bf16 or fp16, of any shape.
        bits: 8, 6, 4 or 2.
        block: Elements that share a scale, a multiple of 4; 0: one scale for all. The last block may
            be short; its missing codes are zero and present.
        reference: Use plain torch.

    Returns:
        codes: 8 bits: int8 [whole blocks]; else packed uint8 [code_bytes(numel, bits, block)], see layout.py.
        scales: fp32 [blocks].
    """
    check_format(bits=bits, block=block)
    flat = flat_of(x)
    numel = flat.numel()
    gpu = None if reference else codec_for(flat, bits=bits, block=block)
    library = None if reference else native_for(flat, bits)
    codes = torch.empty(code_bytes(numel, bits=bits, block=block), dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_blocks(numel, block=block), device=x.device)
    if gpu is not None:
        gpu.encode_split(flat, layout_of((numel,), bits=bits, block=block), codes, scales)
    elif library is None:
        packed, scales_1B = plain.quantize(flat[None], bits=bits, block=block)
        codes, scales = packed[0], scales_1B[0]
    else:
        check(
            library.twinbed_quantize(
                flat.data_ptr(),
                DTYPES[flat.dtype],
                numel,
                bits,
                block,
                codes.data_ptr(),
                scales.data_ptr(),
                threads_for(flat.nbytes),
            )
        )
    return codes.view(torch.int8) if bits == 8 else codes, scales


def dequantize_blocks(
    codes: Tensor,
    scales: Tensor,
    *,
    bits: int,
    block: int,
    numel: int,
    dtype: torch.dtype,
    reference: bool = False,
) -> Tensor:
    """Values [numel] in `dtype` from what `quantize_blocks` returned for `numel` elements."""
    expected = code_bytes(numel, bits=bits, block=block), num_blocks(numel, block=block)
    if (codes.numel(), scales.numel()) != expected:
        raise ValueError(
            f"{codes.numel()} bytes of codes and {scales.numel()} scales do not fit numel={numel}, "
            f"bits={bits}, block={block}: that takes {expected[0]} and {expected[1]}"
        )
    if codes.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"codes are {codes.dtype}; they must be int8 or uint8, as quantize_blocks returned them"
        )
    if scales.device != codes.device:
        raise ValueError(f"scales are on {scales.device}; they must be on {codes.device}, as the codes are")
    check_dtype(dtype)
    packed, scales = codes.contiguous().view(torch.uint8), scales.float().contiguous()
    gpu = None if reference else codec_for(packed, bits=bits, block=block)
    library = None if reference else native_for(packed, bits)
    if gpu is None and library is None:
        values = plain.dequantize(packed.view(1, -1), scales.view(1, -1), bits=bits, block=block, numel=numel)
        return values[0].to(dtype)
    out = torch.empty(numel, dtype=dtype, device=codes.device)
    if gpu is not None:
        gpu.decode_split(packed, scales, layout_of((numel,), bits=bits, block=block), out)
    elif library is not None:
        check(
            library.twinbed_dequantize(
                packed.data_ptr(),
                scales.data_ptr(),
                numel,
                bits,
                block,
                out.data_ptr(),
                DTYPES[dtype],
                threads_for(out.nbytes),
            )
        )
    return out


def encode(x: Tensor, *, bits: int, block: int, out: Tensor | None = None, reference: bool = False) -> Tensor:
    """The message of `x` as one segment: codes, then scales, uint8 [wire_bytes(numel, bits, block)]."""
    flat = flat_of(x)
    return encode_segments(
        flat, segments=(flat.numel(),), bits=bits, block=block, out=out, reference=reference
    )


def decode(
    buf: Tensor,
    *,
    bits: int,
    block: int,
    numel: int,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    accumulate: bool = False,
    reference: bool = False,
) -> Tensor:
    """Values [numel] of a message of one segment; the rest as in `decode_segments`."""
    return decode_segments(
        buf.view(-1),
        segments=(numel,),
        bits=bits,
        block=block,
        out=out,
        dtype=dtype,
        accumulate=accumulate,
        reference=reference,
    )


def encode_segments(
    x: Tensor,
    *,
    segments: Sequence[int],
    bits: int,
    block: int,
    order: Sequence[int] | None = None,
    out: Tensor | None = None,
    reference: bool = False,
) -> Tensor:
    """Messages whose segments share no block: to change one changes no other's bytes.

    Args:
        x: [n] or [rows, n], fp32, bf16 or fp16; n is the sum of `segments`.
        segments: Lengths of the consecutive ranges, say of the parameters in a flat buffer; 0 is allowed.
        bits, block: As in `quantize_blocks`; block = 0 gives each segment one scale.
        order: Rows of `x` to encode, in this order, with no copy made: `slice_order(...)` for the
            hierarchical all-to-all; leave a row out to keep it exact. For 2-D `x` only.
        out: Where to write, uint8, last dimension contiguous.

    Returns:
        uint8 [wire] or [rows, wire]; wire is the sum of `wire_bytes(length)` over the segments.
    """
    layout = layout_of(segments, bits=bits, block=block)
    return encode_rows(x, layout, order, out, reference=reference)


def encode_rows(
    x: Tensor,
    layout: Layout,
    order: Sequence[int] | None,
    out: Tensor | None,
    *,
    error: Tensor | None = None,
    beta: float = 0.0,
    reference: bool = False,
) -> Tensor:
    """`encode_segments`. `error`, a row for each row of the result, is added first; what is lost goes into it in place,
    as `feedback` says.
    """
    rows = rows_of(x, layout.numel, "x")
    check_dtype(x.dtype)
    if order is not None and x.dim() != 2:
        raise ValueError(f"order picks rows, but x has shape {tuple(x.shape)}; give it as [rows, n]")
    indices = None if order is None else row_indices(tuple(order), rows.shape[0])
    num_out = rows.shape[0] if indices is None else len(indices)
    errors = None if error is None else error_rows(error, num_out, layout.numel, x.device)
    if out is None:
        out = torch.empty(num_out, layout.wire_bytes, dtype=torch.uint8, device=x.device)
        result = out if x.dim() == 2 else out[0]
    else:
        result, out = out, out_rows(out, num_out, layout.wire_bytes, (torch.uint8,), x.device)
    gpu = None if reference else codec_for(rows, bits=layout.bits, block=layout.block)
    library = None if reference else native_for(rows, layout.bits)
    if gpu is not None:
        gpu.encode(rows, layout, order, out, error=errors, beta=beta)
        return result
    if library is None:
        picked = rows if order is None else rows[list(order)]
        if errors is None:
            plain.encode(picked, layout, out)
        else:
            plain.encode_corrected(picked, layout, out, errors, beta)
        return result
    source = (
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        DTYPES[rows.dtype],
        num_out,
        indices,
        *native_layout(layout),
        out.data_ptr(),
        out.stride(0),
    )
    threads = threads_for(rows.element_size() * num_out * layout.numel)
    if errors is None:
        check(library.twinbed_encode(*source, threads))
        return result
    feedback = (errors.data_ptr(), errors.stride(0), DTYPES[errors.dtype], beta, 1.0 - beta)
    check(library.twinbed_encode_corrected(*source, *feedback, threads))
    return result


def decode_segments(
    buf: Tensor,
    *,
    segments: Sequence[int],
    bits: int,
    block: int,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    accumulate: bool = False,
    reference: bool = False,
) -> Tensor:
    """Values of the messages of `encode_segments`.

    Args:
        buf: uint8 [wire] or [rows, wire].
        segments, bits, block: As they were encoded.
        out: Where to write, [n] or [rows, n], last dimension contiguous; its dtype decides.
        dtype: fp32, bf16 or fp16, where `out` is not given.
        accumulate: Add to `out`, which must be given and be fp32, instead of writing over it.

    Returns:
        `out`, or a new tensor [n] or [rows, n].
    """
    layout = layout_of(segments, bits=bits, block=block)
    messages = messages_of(buf, layout)
    if accumulate and (out is None or out.dtype != torch.float32):
        raise ValueError(f"accumulate adds into an fp32 out, got {'none' if out is None else out.dtype}")
    if out is None:
        check_dtype(dtype)
        out = torch.empty(messages.shape[0], layout.numel, dtype=dtype, device=buf.device)
        result = out if buf.dim() == 2 else out[0]
    else:
        result, out = out, out_rows(out, messages.shape[0], layout.numel, tuple(DTYPES), buf.device)
    gpu = None if reference else codec_for(messages, bits=bits, block=block)
    library = None if reference else native_for(messages, bits)
    if gpu is not None:
        gpu.decode(messages, layout, out, accumulate=accumulate)
    elif library is None:
        values = plain.decode(messages, layout)
        out.copy_(out + values if accumulate else values)
    else:
        check(
            library.twinbed_decode(
                messages.data_ptr(),
                messages.stride(0),
                messages.shape[0],
                *native_layout(layout),
                out.data_ptr(),
                out.stride(0) * out.element_size(),
                DTYPES[out.dtype],
                accumulate,
                threads_for(out.element_size() * out.numel()),
            )
        )
    return result


# ---- shared with reduce.py ----


def native_for(x: Tensor, bits: int) -> ctypes.CDLL | None:
    """The library, if it serves codes of `bits` where `x` lies."""
    return load() if bits in NATIVE_BITS and x.device.type == "cpu" else None


def threads_for(nbytes: int) -> int:
    """Threads for so much data: as many as torch may use, where each has enough to do."""
    return max(1, min(torch.get_num_threads(), nbytes // THREAD_BYTES))


def native_layout(layout: Layout) -> tuple[ctypes.Array[ctypes.c_int64], int, int, int]:
    """The four arguments by which the library knows a layout."""
    return layout.lengths, len(layout.segments), layout.bits, layout.block


def check(status: int) -> None:
    """Raise for what the library returns; sizes and types were checked before, so memory is what is left."""
    if status == 1:
        raise MemoryError("no memory for the sum of the longest segment")
    assert status == 0, f"native codec refused a format that it was said to serve (status {status})"
