"""Attention of some queries over a block of keys, and what a ring makes of such blocks.

Shape letters: B sequences, H heads, K heads of keys and values (K divides H), T queries, S keys, E features of a head.
"log_sums" [B, H, T] are the logarithms of each query's sum of exponentials, fp32 (fp64 where the queries are).

Kernels are those beneath `scaled_dot_product_attention`, which return these sums and whose backward takes them from
outside: so does backward of a block of keys, given the sums and the output over all keys (Dao et al. 2022, section
3.1). Where torch has no such kernel (a GPU in fp32, odd head sizes), `reference` and `reference_gradient` stand in.
"""

import math

import torch
from torch import Tensor

from ...policies.layout.tokens import Seen

_CPU, _GPU = "cpu", "cuda"
_MAX_GPU_FEATURES = 256  # of a head, in torch's flash attention


def attention(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(output as the queries, log_sums). `causal`: as many keys as queries, each sees those up to its own."""
    k, v = _for_heads(k_BKSE, q_BHTE), _for_heads(v_BKSE, q_BHTE)
    if q_BHTE.device.type == _CPU:
        y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHTE, k, v, 0.0, causal)
        return y, log_sums
    if _on_gpu_kernel(q_BHTE):
        y, log_sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BHTE, k, v, 0.0, causal)
        return y, log_sums
    return reference(q_BHTE, k, v, causal=causal)


def attention_gradient(
    dy_BHTE: Tensor,
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    y_BHTE: Tensor,
    log_sums_BHT: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, and of these keys and values. `y` and `log_sums` are over all keys, here or not."""
    k, v = _for_heads(k_BKSE, q_BHTE), _for_heads(v_BKSE, q_BHTE)
    if q_BHTE.device.type == _CPU:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(dy_BHTE, q_BHTE, k, v, y_BHTE, log_sums_BHT.to(_wide(q_BHTE)), 0.0, causal)
    elif _on_gpu_kernel(q_BHTE):
        unused = torch.empty(0, dtype=torch.int64, device=q_BHTE.device)  # no dropout: no seed is read
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(dy_BHTE.contiguous(), q_BHTE, k, v, y_BHTE.contiguous(), log_sums_BHT.contiguous()),
            *(None, None, q_BHTE.shape[2], k.shape[2], 0.0, causal, unused, unused),
        )
    else:
        dq, dk, dv = reference_gradient(dy_BHTE, q_BHTE, k, v, y_BHTE, log_sums_BHT, causal=causal)
    return dq, _of_key_heads(dk, k_BKSE), _of_key_heads(dv, v_BKSE)


def attention_block(q_BHTE: Tensor, kv_2BKTE: Tensor, part: Seen) -> tuple[Tensor, Tensor]:
    """(output, log_sums) over the keys of a block, of which only `part` is computed.

    Queries that see none of them have 0 and -inf.
    """
    if part == _NOTHING:
        return torch.zeros_like(q_BHTE), q_BHTE.new_full(q_BHTE.shape[:3], -torch.inf, dtype=_wide(q_BHTE))
    rows, columns = _halves(part, q_BHTE.shape[2])
    y, log_sums = attention(
        q_BHTE[:, :, rows:], *(x[:, :, :columns] for x in kv_2BKTE.unbind()), causal=part.diagonal
    )
    if not rows:
        return y, log_sums
    whole = torch.zeros_like(q_BHTE)
    whole[:, :, rows:] = y
    all_sums = log_sums.new_full(q_BHTE.shape[:3], -torch.inf)
    all_sums[:, :, rows:] = log_sums
    return whole, all_sums


def attention_block_gradient(
    dy_BHTE: Tensor,
    q_BHTE: Tensor,
    kv_2BKTE: Tensor,
    y_BHTE: Tensor,
    log_sums_BHT: Tensor,
    part: Seen,
) -> tuple[Tensor, Tensor]:
    """(gradient of the queries, of these keys and values [2, B, K, T, E]) by the block; as `attention_block`."""
    if part == _NOTHING:
        return torch.zeros_like(q_BHTE), torch.zeros_like(kv_2BKTE)
    rows, columns = _halves(part, q_BHTE.shape[2])
    dq, dk, dv = attention_gradient(
        *(x[:, :, rows:] for x in (dy_BHTE, q_BHTE)),
        *(x[:, :, :columns] for x in kv_2BKTE.unbind()),
        *(x[:, :, rows:] for x in (y_BHTE, log_sums_BHT)),
        causal=part.diagonal,
    )
    if columns == kv_2BKTE.shape[3]:
        dkv = torch.stack((dk, dv))
    else:
        dkv = torch.zeros_like(kv_2BKTE)
        for whole, seen_part in zip(dkv.unbind(), (dk, dv), strict=True):
            whole[:, :, :columns] = seen_part
    if rows:
        all_dq = torch.zeros_like(q_BHTE)
        all_dq[:, :, rows:] = dq
        dq = all_dq
    return dq, dkv


def merge(y_BHTE: Tensor, log_sums_BHT: Tensor, sum_BHTE: Tensor, sums_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """A block's output and log_sums, merged into those of the blocks before it: `sum` and `sums`, in fp32 or fp64.

    Each query must have seen something of the blocks before it.
    """
    total = torch.logaddexp(sums_BHT, log_sums_BHT)
    wide = sum_BHTE.to(_wide(y_BHTE)) * (sums_BHT - total).exp_()[..., None]
    wide.addcmul_(y_BHTE, (log_sums_BHT - total).exp_()[..., None])
    return wide, total


def merge_last(
    y_BHTE: Tensor, log_sums_BHT: Tensor, sum_BHTE: Tensor, sums_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge`, with the output in the dtype of the block's."""
    wide, total = merge(y_BHTE, log_sums_BHT, sum_BHTE, sums_BHT)
    return wide.to(y_BHTE.dtype), total


def accumulate(part: Tensor, total: Tensor) -> Tensor:
    """The sum in fp32 or fp64."""
    return torch.add(total.to(_wide(part)), part)


def add(part: Tensor, other: Tensor) -> Tensor:
    """The sum, in the dtype of `part`."""
    return torch.add(part, other).to(part.dtype)


# ---- plain torch, for tests and where there is no kernel


def reference(q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """As `attention`, with as many key heads as heads; keeps all scores while it computes."""
    scores_BHTS = _scores(q_BHTE, k_BHSE, causal)
    log_sums = scores_BHTS.logsumexp(-1)
    weights = (scores_BHTS - log_sums[..., None]).exp_()
    return (weights @ v_BHSE.to(weights.dtype)).to(q_BHTE.dtype), log_sums


def reference_gradient(
    dy_BHTE: Tensor,
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    y_BHTE: Tensor,
    log_sums_BHT: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention_gradient`, with as many key heads as heads."""
    wide = _wide(q_BHTE)
    dy, q, k, v, y = (x.to(wide) for x in (dy_BHTE, q_BHTE, k_BHSE, v_BHSE, y_BHTE))
    weights_BHTS = (_scores(q_BHTE, k_BHSE, causal) - log_sums_BHT[..., None]).exp_()
    dscores_BHTS = weights_BHTS * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    made = (dscores_BHTS @ k, dscores_BHTS.mT @ q, weights_BHTS.mT @ dy)
    dq, dk, dv = (x.to(q_BHTE.dtype) for x in made)
    return dq, dk, dv


def _scores(q_BHTE: Tensor, k_BHSE: Tensor, causal: bool) -> Tensor:
    wide = _wide(q_BHTE)
    scores_BHTS = q_BHTE.to(wide) @ k_BHSE.to(wide).mT / math.sqrt(q_BHTE.shape[-1])
    if causal:
        later = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).triu_(1)
        scores_BHTS.masked_fill_(later, -torch.inf)
    return scores_BHTS


# ----

_NOTHING = Seen(2, 2)


def _halves(part: Seen, tokens: int) -> tuple[int, int]:
    """(first row, columns) of the part of a block."""
    return part.first_query * tokens // 2, part.keys * tokens // 2


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _on_gpu_kernel(q_BHTE: Tensor) -> bool:
    features = q_BHTE.shape[-1]
    fits = features % 8 == 0 and features <= _MAX_GPU_FEATURES
    return q_BHTE.device.type == _GPU and q_BHTE.dtype in (torch.bfloat16, torch.float16) and fits


def _for_heads(x_BKSE: Tensor, q_BHTE: Tensor) -> Tensor:
    """Each key head once for each of its query heads, as grouped-query attention has it: [B, H, S, E]."""
    heads, key_heads = q_BHTE.shape[1], x_BKSE.shape[1]
    return x_BKSE if heads == key_heads else x_BKSE.repeat_interleave(heads // key_heads, dim=1)


def _of_key_heads(dx_BHSE: Tensor, x_BKSE: Tensor) -> Tensor:
    key_heads = x_BKSE.shape[1]
    if dx_BHSE.shape[1] == key_heads:
        return dx_BHSE
    batch, _, *rest = dx_BHSE.shape
    return dx_BHSE.reshape(batch, key_heads, -1, *rest).sum(2)
