"""Attention of the heads and tokens that are here, with the logarithms of its rows' sums, and its gradient from them.

On CPUs torch's fused kernels; elsewhere the products themselves, with the score matrix in memory.

Shapes: B sequences, H heads, K key heads, T tokens, E head size.
"""

import math

import torch
from torch import Tensor


def attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(y [B, H, T, E], logarithms of the sums of exponentials [B, H, T], fp32 or fp64)."""
    k, v = (_for_each_head(x, q_BHTE) for x in (k_BKTE, v_BKTE))
    if q_BHTE.device.type == "cpu":
        y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHTE, k, v, 0.0, causal)
        return y.contiguous(), log_sums.contiguous()
    scores = _scores(q_BHTE, k, causal=causal)
    log_sums = scores.logsumexp(-1)
    return (scores - log_sums[..., None]).exp().to(v.dtype) @ v, log_sums


def attention_gradient(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sums: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v."""
    every_k, every_v = (_for_each_head(x, q) for x in (k, v))
    if q.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, every_k, every_v, y, log_sums, 0.0, causal
        )
    else:
        p = (_scores(q, every_k, causal=causal) - log_sums[..., None]).exp()
        through = (dy @ every_v.transpose(-2, -1)).to(p.dtype)
        row = (dy * y).sum(-1, dtype=p.dtype)[..., None]
        ds = (p * (through - row) / math.sqrt(q.shape[-1])).to(q.dtype)
        dq, dk = ds @ every_k, ds.transpose(-2, -1) @ q
        dv = p.to(dy.dtype).transpose(-2, -1) @ dy
    return dq, _sum_of_heads(dk, k), _sum_of_heads(dv, v)


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill(later, -torch.inf)


def _for_each_head(x_BKTE: Tensor, q_BHTE: Tensor) -> Tensor:
    """The key head of each query head; several in a row have the same one."""
    times = q_BHTE.shape[1] // x_BKTE.shape[1]
    return x_BKTE if times == 1 else x_BKTE.repeat_interleave(times, 1)


def _sum_of_heads(dx_BHTE: Tensor, x_BKTE: Tensor) -> Tensor:
    if dx_BHTE.shape == x_BKTE.shape:
        return dx_BHTE
    return torch.unflatten(dx_BHTE, 1, (x_BKTE.shape[1], -1)).sum(2)
