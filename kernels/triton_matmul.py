# mypy: disallow-untyped-decorators=False
"""A matmul that reads and writes only some rows or columns, by index: the pruned products on a GPU.

C[i, j] = sum over k of A[i, k] B[k, j], where each of i, j and k may run over a list of indices instead of a range.
A list counts for all tensors that have the dimension, so that one kernel is the forward and both gradients: nothing is
ever gathered in memory. Shape letters: I, J, K.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# Tile of the result and of the sum; a common choice for 16-bit products (Triton's matmul tutorial), not tuned here.
_TILE_I, _TILE_J, _TILE_K = 64, 64, 32


def indexed_matmul(
    a_IK: Tensor,
    b_KJ: Tensor,
    out_IJ: Tensor,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    inner: Tensor | None = None,
) -> None:
    """Write into `out_IJ` at the given rows and columns; what they leave out stays as it is.

    Args:
        a_IK, b_KJ, out_IJ: Of one floating type, with any strides; sums are fp32.
        rows, columns, inner: int64 indices into I, J and K; None: all, in order.
    """
    num_i = a_IK.shape[0] if rows is None else len(rows)
    num_j = b_KJ.shape[1] if columns is None else len(columns)
    num_k = a_IK.shape[1] if inner is None else len(inner)
    if not num_i or not num_j:
        return
    grid = (triton.cdiv(num_i, _TILE_I), triton.cdiv(num_j, _TILE_J))
    _matmul_kernel[grid](
        a_IK,
        *a_IK.stride(),
        b_KJ,
        *b_KJ.stride(),
        out_IJ,
        *out_IJ.stride(),
        a_IK if rows is None else rows,
        a_IK if columns is None else columns,
        a_IK if inner is None else inner,
        num_i,
        num_j,
        num_k,
        PICK_I=rows is not None,
        PICK_J=columns is not None,
        PICK_K=inner is not None,
        I=_TILE_I,
        J=_TILE_J,
        K=_TILE_K,
        # TF32 would round fp32 operands to 10 bits; follow what torch was told
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    )


@triton.jit
def _matmul_kernel(
    a: tl.tensor,
    a_i: tl.tensor,
    a_k: tl.tensor,
    b: tl.tensor,
    b_k: tl.tensor,
    b_j: tl.tensor,
    out: tl.tensor,
    out_i: tl.tensor,
    out_j: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    num_i: tl.tensor,
    num_j: tl.tensor,
    num_k: tl.tensor,
    PICK_I: tl.constexpr,
    PICK_J: tl.constexpr,
    PICK_K: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    J: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    i = (tl.program_id(0) * I + tl.arange(0, I)).to(tl.int64)
    j = (tl.program_id(1) * J + tl.arange(0, J)).to(tl.int64)
    has_i = i < num_i
    has_j = j < num_j
    if PICK_I:
        i = tl.load(rows + i, mask=has_i, other=0)
    if PICK_J:
        j = tl.load(columns + j, mask=has_j, other=0)
    total = tl.zeros([I, J], tl.float32)
    for first in range(0, num_k, K):
        k = (first + tl.arange(0, K)).to(tl.int64)
        has_k = k < num_k
        if PICK_K:
            k = tl.load(inner + k, mask=has_k, other=0)
        a_part = tl.load(
            a + i[:, None] * a_i + k[None, :] * a_k, mask=has_i[:, None] & has_k[None, :], other=0.0
        )
        b_part = tl.load(
            b + k[:, None] * b_k + j[None, :] * b_j, mask=has_k[:, None] & has_j[None, :], other=0.0
        )
        total = tl.dot(a_part, b_part, total, input_precision=PRECISION)
    kind: tl.constexpr = out.dtype.element_ty
    at = out + i[:, None] * out_i + j[None, :] * out_j
    tl.store(at, total.to(kind), mask=has_i[:, None] & has_j[None, :])
