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

from torch import Tensor

from .arguments import DTYPES
from .codec import encode_rows
from .layout import layout_of
from .reduce import reduce_encode

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
    _check_beta(beta)
    layout = layout_of(segments, bits=bits, block=block)
    return encode_rows(x, layout, order, out, error=error, beta=beta, reference=reference)


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
    _check_beta(beta)
    return reduce_encode(bufs, own, layout, target, out, error=error, beta=beta, reference=reference)


def _check_beta(beta: float) -> None:
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta={beta:g} must be in [0, 1)")
