"""Sums of quantized slices in one pass: what a rank does between the hops of a quantized reduce-scatter.

Block by block over all messages, so the sum never leaves the nearest cache. Sums are fp32, in the messages'
order; codes are always decoded before they are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference as plain
from .arguments import DTYPES, error_rows, messages_of, out_vector, own_part
from .codec import NATIVE_BITS, check, encode_rows, native_for, native_layout, threads_for
from .gpu import codec_for
from .layout import Layout, layout_of


def dequantize_reduce(
    bufs: Tensor,
    own: Tensor | None = None,
    *,
    segments: Sequence[int],
    bits: int,
    block: int,
    out: Tensor | None = None,
    reference: bool = False,
) -> Tensor:
    """Sum of `own` and of the decoded messages.

    Args:
        bufs: uint8 [k, wire]: one message of these segments from each of k peers; k = 0 is allowed. A peer
            that sent N slices sent one message of `segments * N`.
        own: This rank's part [n], exact, in fp32, bf16 or fp16; None: nothing of its own.
        segments, bits, block: As they were encoded.
        out: fp32 [n], contiguous; may be `own`.

    Returns:
        fp32 [n]; blocks with NaN or Inf in any message are NaN, and elements with one in `own` NaN or Inf.
    """
    layout = layout_of(segments, bits=bits, block=block)
    messages = messages_of(bufs, layout)
    own = own_part(own, layout.numel, bufs.device)
    if out is None:
        out = torch.empty(layout.numel, device=bufs.device)
    else:
        out_vector(out, layout.numel, torch.float32, bufs.device)
    gpu = None if reference else codec_for(messages, bits=bits, block=block)
    library = None if reference else native_for(messages, bits)
    if gpu is not None:
        gpu.reduce(messages, own, layout, out)
    elif library is None:
        out.copy_(plain.reduce(messages, own, layout))
    else:
        check(
            library.twinbed_reduce(
                messages.data_ptr(),
                messages.stride(0),
                messages.shape[0],
                None if own is None else own.data_ptr(),
                0 if own is None else DTYPES[own.dtype],
                *native_layout(layout),
                out.data_ptr(),
                threads_for(messages.nbytes),
            )
        )
    return out


def dequantize_reduce_quantize(
    bufs: Tensor,
    own: Tensor | None = None,
    *,
    segments: Sequence[int],
    bits: int,
    block: int,
    out_bits: int | None = None,
    out_block: int | None = None,
    out: Tensor | None = None,
    reference: bool = False,
) -> Tensor:
    """`dequantize_reduce`, then `encode_segments` of the sum, without ever storing the sum.

    Args:
        bufs, own, segments, bits, block: As in `dequantize_reduce`.
        out_bits, out_block: Format of the result; None: as it came in. It is cheapest where one block size
            divides the other.
        out: uint8 [wire of the result], contiguous.

    Returns:
        uint8 [wire]: the message of the sum, ready for the next hop.
    """
    return reduce_encode(
        bufs,
        own,
        layout_of(segments, bits=bits, block=block),
        layout_of(
            segments,
            bits=bits if out_bits is None else out_bits,
            block=block if out_block is None else out_block,
        ),
        out,
        reference=reference,
    )


def reduce_encode(
    bufs: Tensor,
    own: Tensor | None,
    layout: Layout,
    target: Layout,
    out: Tensor | None,
    *,
    error: Tensor | None = None,
    beta: float = 0.0,
    reference: bool = False,
) -> Tensor:
    """The message of the sum, in the format of `target`; with `error` [n] as in `codec.encode_rows`."""
    messages = messages_of(bufs, layout)
    own = own_part(own, layout.numel, bufs.device)
    if out is None:
        out = torch.empty(target.wire_bytes, dtype=torch.uint8, device=bufs.device)
    else:
        out_vector(out, target.wire_bytes, torch.uint8, bufs.device)
    errors = None if error is None else error_rows(error, 1, layout.numel, bufs.device)
    serves = target.bits in NATIVE_BITS
    gpu = None if reference else codec_for(messages, bits=layout.bits, block=layout.block)
    library = None if reference or not serves else native_for(messages, layout.bits)
    if gpu is not None and serves and target.block == layout.block:
        gpu.reduce_encode(
            messages, own, layout, target, out, error=None if errors is None else errors[0], beta=beta
        )
    elif library is None:
        # On a GPU blocks that end elsewhere go in two passes, with the sum in memory.
        total = torch.empty(layout.numel, device=bufs.device)
        if gpu is not None:
            gpu.reduce(messages, own, layout, total)
        else:
            total.copy_(plain.reduce(messages, own, layout))
        encode_rows(total[None], target, None, out[None], error=errors, beta=beta, reference=reference)
    else:
        feedback: tuple[int | None, int, float, float] = (None, 0, 0.0, 0.0)
        if errors is not None:
            feedback = (errors.data_ptr(), DTYPES[errors.dtype], beta, 1.0 - beta)
        check(
            library.twinbed_reduce_encode(
                messages.data_ptr(),
                messages.stride(0),
                messages.shape[0],
                None if own is None else own.data_ptr(),
                0 if own is None else DTYPES[own.dtype],
                *native_layout(layout),
                target.bits,
                target.block,
                out.data_ptr(),
                *feedback,
                threads_for(messages.nbytes),
            )
        )
    return out
