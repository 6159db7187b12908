"""Error feedback: what quantizing has lost is added, as a moving average, to what is quantized next.

After LoCo (Xie et al., arXiv 2407.04480), as DeepSpeed releases it (`zeropp_loco_param`, kernel
`loco_swizzled_quant`): total = x + error; message = quantize(total); error = beta * error + (1 - beta) * (total -
dequantize(message)). beta = 0 is classic error feedback (Seide et al., 2014). LoCo's buffer is as large as the model on
every rank; here a buffer holds errors of those slices only that the rank quantizes: give `encode_with_feedback` the
slices of a shard, or `reduce_quantize_with_feedback` the sum that a rank keeps between two hops, and the ranks' buffers
together hold each error once.

Sums are fp32; the buffer is fp32, bf16 or fp16. A block that holds NaN or Inf is poisoned as everywhere, and its error
starts anew from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference as plain
from .codec import (
    DTYPES,
    NATIVE_BITS,
    check,
    messages_of,
    native_for,
    native_layout,
    out_rows,
    row_indices,
    rows_of,
    threads_for,
)
from .gpu import codec_for
from .layout import Layout, layout_of
from .reduce import own_part

BETA = 0.8  # DeepSpeed's err_beta
RESET_EVERY = 1024  # DeepSpeed's reset_T; counted here in uses of a buffer


@dataclass(slots=True)
class ErrorBuffer:
    """The errors of one rank's slices, and when they start anew.

    Args:
        values: [n] or [rows, n], fp32, bf16 or fp16; changed in place.
        beta: Share of the old error in the new one, in [0, 1).
        reset_every: The errors are zeroed before each such use; 0: never. LoCo does it to forget stale errors.
    """

    values: Tensor
    beta: float = BETA
    reset_every: int = RESET_EVERY
    uses: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise ValueError(f"beta={self.beta:g} must be in [0, 1)")
        if self.reset_every < 0:
            raise ValueError(f"reset_every={self.reset_every} must be >= 0 (0: never)")
        if self.values.dtype not in DTYPES:
            raise ValueError(
                f"errors of {self.values.dtype} are not kept; use one of {[str(d) for d in DTYPES]}"
            )

    def use(self) -> Tensor:
        """The values for the next call, zeroed where their time has come."""
        if self.reset_every and self.uses and self.uses % self.reset_every == 0:
            self.values.zero_()
        self.uses += 1
        return self.values


def encode_with_feedback(
    x: Tensor,
    error: Tensor,
    *,
    segments: Sequence[int],
    bits: int,
    block: int,
    beta: float = BETA,
    order: Sequence[int] | None = None,
    out: Tensor | None = None,
    reference: bool = False,
) -> Tensor:
    """`encode_segments` of x + error, with the new error written over the old one, in one pass.

    Args:
        x, segments, bits, block, order, out: As in `encode_segments`.
        error: fp32, bf16 or fp16, last dimension contiguous: one row for each row of the result, in its order, so that
            rows which `order` leaves out need none.
        beta: Share of the old error in the new one, in [0, 1).

    Returns:
        uint8 [wire] or [rows, wire].
    """
    layout = layout_of(segments, bits=bits, block=block)
    rows = rows_of(x, layout.numel, "x")
    if order is not None and x.dim() != 2:
        raise ValueError(f"order picks rows, but x has shape {tuple(x.shape)}; give it as [rows, n]")
    indices = None if order is None else row_indices(tuple(order), rows.shape[0])
    num_out = rows.shape[0] if indices is None else len(indices)
    errors = _error_rows(error, num_out, layout.numel)
    _check_beta(beta)
    if out is None:
        out = torch.empty(num_out, layout.wire_bytes, dtype=torch.uint8, device=x.device)
        result = out if x.dim() == 2 else out[0]
    else:
        result, out = out, out_rows(out, num_out, layout.wire_bytes, (torch.uint8,))
    gpu = None if reference else codec_for(rows, bits=bits, block=block)
    library = None if reference else native_for(rows, bits)
    if gpu is not None:
        gpu.encode(rows, layout, order, out, error=errors, beta=beta)
    elif library is None:
        picked = rows if order is None else rows[list(order)]
        _encode_plain(picked.float() + errors.float(), layout, out, errors, beta)
    else:
        check(
            library.twinbed_encode_corrected(
                rows.data_ptr(),
                rows.stride(0) * rows.element_size(),
                DTYPES[rows.dtype],
                num_out,
                indices,
                *native_layout(layout),
                out.data_ptr(),
                out.stride(0),
                errors.data_ptr(),
                errors.stride(0),
                DTYPES[errors.dtype],
                beta,
                1.0 - beta,
                threads_for(rows.element_size() * num_out * layout.numel),
            )
        )
    return result


def reduce_quantize_with_feedback(
    bufs: Tensor,
    own: Tensor | None,
    error: Tensor,
    *,
    segments: Sequence[int],
    bits: int,
    block: int,
    out_bits: int | None = None,
    out_block: int | None = None,
    beta: float = BETA,
    out: Tensor | None = None,
    reference: bool = False,
) -> Tensor:
    """`dequantize_reduce_quantize` of the sum + error, with the new error written over the old one, in one pass.

    Args:
        bufs, own, segments, bits, block, out_bits, out_block, out: As in `dequantize_reduce_quantize`.
        error: [n], fp32, bf16 or fp16, contiguous.
        beta: Share of the old error in the new one, in [0, 1).
    """
    layout = layout_of(segments, bits=bits, block=block)
    target = layout_of(
        segments, bits=bits if out_bits is None else out_bits, block=block if out_block is None else out_block
    )
    messages = messages_of(bufs, layout)
    own = own_part(own, layout.numel)
    errors = _error_rows(error, 1, layout.numel)
    _check_beta(beta)
    if out is None:
        out = torch.empty(target.wire_bytes, dtype=torch.uint8, device=bufs.device)
    elif out.shape != (target.wire_bytes,) or out.dtype != torch.uint8 or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; it must be contiguous uint8 [{target.wire_bytes}]"
        )
    serves = target.bits in NATIVE_BITS
    gpu = None if reference or not serves else codec_for(messages, bits=bits, block=block)
    library = None if reference or not serves else native_for(messages, bits)
    if gpu is not None and target.block == block:
        gpu.reduce_encode(messages, own, layout, target, out, error=errors[0], beta=beta)
    elif gpu is not None and codec_for(messages, bits=target.bits, block=target.block) is not None:
        total = torch.empty(layout.numel, device=bufs.device)
        gpu.reduce(messages, own, layout, total)
        gpu.encode(total[None], target, None, out[None], error=errors, beta=beta)
    elif library is None:
        total = plain.reduce(messages, own, layout)
        _encode_plain(total[None] + errors.float(), target, out[None], errors, beta)
    else:
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
                errors.data_ptr(),
                DTYPES[errors.dtype],
                beta,
                1.0 - beta,
                threads_for(messages.nbytes),
            )
        )
    return out


def _encode_plain(total_Rn: Tensor, layout: Layout, out: Tensor, errors: Tensor, beta: float) -> None:
    plain.encode(total_Rn, layout, out)
    decoded = plain.decode(out, layout)
    moved = beta * errors.float() + (1.0 - beta) * (total_Rn - decoded)
    errors.copy_(moved.masked_fill(decoded.isnan(), 0.0))


def _error_rows(error: Tensor, rows: int, numel: int) -> Tensor:
    view = error if error.dim() == 2 else error[None]
    fits = view.shape == (rows, numel) and error.dtype in DTYPES and (numel <= 1 or view.stride(-1) == 1)
    if not fits:
        raise ValueError(
            f"error is {error.dtype} {tuple(error.shape)} with strides {error.stride()}; it must be [{rows}, {numel}]"
            f"{f' or [{numel}]' if rows == 1 else ''}, one of {[str(d) for d in DTYPES]}, last stride 1"
        )
    return view.detach()


def _check_beta(beta: float) -> None:
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta={beta:g} must be in [0, 1)")
