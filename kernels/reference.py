"""The codec in plain torch: what the native code must equal bit for bit, and what runs where it cannot.

Shapes: R rows (messages), n elements a row, B blocks, K codes a block. Works on any device.

Every float operation is a single fp32 one, in the native code's order; formats are in layout.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import QMAX, Layout, code_bytes, num_blocks, padded_numel, wire_bytes

# Below, qmax / absmax would overflow: such a block is scaled up first, by a power of two, hence exactly.
TINY, LIFT = 2.0**-60, 2.0**64
# Largest magnitude that a scale is taken from, so that qmax * scale stays finite: FLT_MAX (1 - 2^-22).
LARGEST = float.fromhex("0x1.fffff8p127")
FLOAT16_MAX = 65504.0


def quantize(x_Rn: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Codes as uint8 [R, code_bytes] and scales fp32 [R, B] of R rows, each quantized by itself."""
    R, n = x_Rn.shape
    if x_Rn.numel() == 0:
        codes_Rc = x_Rn.new_empty(R, code_bytes(n, bits=bits, block=block), dtype=torch.uint8)
        return codes_Rc, x_Rn.new_empty(R, num_blocks(n, block=block), dtype=torch.float32)
    padded = padded_numel(n, block=block)
    B = num_blocks(n, block=block)
    x_RBK = torch.zeros(R, padded, dtype=torch.float32, device=x_Rn.device)
    x_RBK[:, :n] = x_Rn
    x_RBK = x_RBK.view(R, B, block or padded)
    qmax = QMAX[bits]
    absmax_RB = x_RBK.abs().amax(-1)  # NaN wins
    # As a tensor: with a plain number torch may multiply by a reciprocal, which rounds twice.
    qmax_RB = torch.full_like(absmax_RB, qmax)
    scales_RB = absmax_RB.clamp(max=LARGEST) / qmax_RB
    lift_RB = torch.where(absmax_RB < TINY, LIFT, 1.0)
    inverse_RB = qmax_RB / (absmax_RB * lift_RB)
    poisoned_RB = ~absmax_RB.isfinite()
    scales_RB = scales_RB.masked_fill(poisoned_RB, torch.nan)
    inverse_RB = inverse_RB.masked_fill(~inverse_RB.isfinite(), 0.0)  # a block of zeros
    # round() takes ties to even. Nothing exceeds qmax but a poisoned block, whose codes do not matter.
    codes_RBK = (x_RBK * lift_RB[..., None] * inverse_RB[..., None]).round().clamp(-qmax, qmax)
    codes_RBK = codes_RBK.masked_fill(poisoned_RB[..., None], 0.0).to(torch.int8)
    return _pack(codes_RBK, bits)[:, : code_bytes(n, bits=bits, block=block)], scales_RB


def dequantize(codes_Rc: Tensor, scales_RB: Tensor, *, bits: int, block: int, numel: int) -> Tensor:
    """The inverse: fp32 [R, numel] from uint8 codes and fp32 scales."""
    if codes_Rc.numel() == 0:
        return scales_RB.new_empty(len(codes_Rc), numel)
    padded = padded_numel(numel, block=block)
    codes_RBK = _unpack(codes_Rc, bits, scales_RB.shape[1], block or padded)
    return (codes_RBK.float() * scales_RB[..., None]).reshape(len(codes_Rc), -1)[:, :numel]


def encode(x_Rn: Tensor, layout: Layout, out_Rw: Tensor) -> None:
    """Write each row's message, segment after segment, into `out_Rw` (uint8)."""
    start = 0
    for length, offset in zip(layout.segments, layout.offsets_bytes, strict=True):
        codes, scales = quantize(x_Rn[:, start : start + length], bits=layout.bits, block=layout.block)
        middle = offset + codes.shape[1]
        end = offset + wire_bytes(length, bits=layout.bits, block=layout.block)
        out_Rw[:, offset:middle] = codes
        out_Rw[:, middle:end] = scales.contiguous().view(torch.uint8)
        start += length


def encode_corrected(x_Rn: Tensor, layout: Layout, out_Rw: Tensor, errors_Rn: Tensor, beta: float) -> None:
    """`encode` of x + errors; errors become beta * errors + (1 - beta) * what was lost, 0 in a poisoned block."""
    total_Rn = x_Rn.float() + errors_Rn.float()
    encode(total_Rn, layout, out_Rw)
    decoded = decode(out_Rw, layout)
    moved = beta * errors_Rn.float() + (1.0 - beta) * (total_Rn - decoded)
    moved = moved.masked_fill(decoded.isnan(), 0.0)
    # An error that does not fit must not become Inf, which never goes away
    if errors_Rn.dtype == torch.float16:
        moved = moved.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    errors_Rn.copy_(moved)


def decode(messages_Rw: Tensor, layout: Layout) -> Tensor:
    """The messages' values, fp32 [R, n]."""
    parts = [torch.empty(len(messages_Rw), 0, device=messages_Rw.device)]
    for length, offset in zip(layout.segments, layout.offsets_bytes, strict=True):
        middle = offset + code_bytes(length, bits=layout.bits, block=layout.block)
        end = offset + wire_bytes(length, bits=layout.bits, block=layout.block)
        scales = messages_Rw[:, middle:end].flatten().clone()  # a copy, for fp32 needs an aligned start
        scales = scales.view(torch.float32).view(len(messages_Rw), num_blocks(length, block=layout.block))
        codes = messages_Rw[:, offset:middle]
        parts.append(dequantize(codes, scales, bits=layout.bits, block=layout.block, numel=length))
    return torch.cat(parts, dim=1)


def reduce(messages_Kw: Tensor, own_n: Tensor | None, layout: Layout) -> Tensor:
    """Own part plus the messages' values, added in order, fp32 [n]."""
    total = torch.zeros(layout.numel, device=messages_Kw.device) if own_n is None else own_n.float()
    for message_w in messages_Kw:
        total = total + decode(message_w[None], layout)[0]
    return total


def _pack(codes_RBK: Tensor, bits: int) -> Tensor:
    R, B, K = codes_RBK.shape
    if bits == 8:
        return codes_RBK.reshape(R, B * K).view(torch.uint8)
    if bits == 4:
        low, high = (codes_RBK & 15).view(torch.uint8).chunk(2, dim=-1)
        return (low | high << 4).reshape(R, -1)
    wide = codes_RBK.reshape(R, B * K).int() & (1 << bits) - 1
    wide = torch.nn.functional.pad(wide, (0, -(B * K) % 4)).view(R, -1, 4)  # four codes end on a whole byte
    word = sum((wide[..., i] << bits * i for i in range(1, 4)), start=wide[..., 0])
    return torch.stack([word >> 8 * i & 255 for i in range(bits // 2)], dim=-1).reshape(R, -1).byte()


def _unpack(codes_Rc: Tensor, bits: int, B: int, K: int) -> Tensor:
    R = len(codes_Rc)
    if bits == 8:
        return codes_Rc.contiguous().view(torch.int8).view(R, B, K)
    if bits == 4:
        both = codes_Rc.reshape(R, B, K // 2)
        return _signed(torch.cat([both & 15, both >> 4], dim=-1), bits)
    word_bytes = bits // 2
    padded = torch.nn.functional.pad(codes_Rc, (0, -codes_Rc.shape[1] % word_bytes))
    by_word = padded.view(R, -1, word_bytes).int()
    word = sum((by_word[..., i] << 8 * i for i in range(1, word_bytes)), start=by_word[..., 0])
    codes = torch.stack([word >> bits * i for i in range(4)], dim=-1).reshape(R, -1)[:, : B * K]
    return _signed(codes & (1 << bits) - 1, bits).view(R, B, K)


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Two's complement of `bits` bits to int8."""
    sign = 1 << bits - 1
    return ((codes.to(torch.int8) ^ sign) - sign).to(torch.int8)
