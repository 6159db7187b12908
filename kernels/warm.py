"""Pays the first calls' cost on a GPU at the start, as `native.prepare` does on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from .codec import decode_segments, encode_segments
from .gpu import load_triton
from .native import Prepared
from .reduce import dequantize_reduce, dequantize_reduce_quantize


def prepare_gpu(device: torch.device) -> Prepared:
    """Compile now what a training calls first: the default formats, from fp32 and bf16.

    Triton keeps the result on disk, so that the next process only loads it.
    """
    start = time.perf_counter()
    if load_triton("triton_codec") is None:
        return Prepared("reference", "triton cannot be imported", time.perf_counter() - start)
    for bits, block in ((8, 2048), (4, 256)):
        for dtype in (torch.float32, torch.bfloat16):
            options: dict[str, Any] = {"segments": (2 * block,), "bits": bits, "block": block}
            x = torch.zeros(2, 2 * block, dtype=dtype, device=device)
            messages = encode_segments(x, **options, order=(1, 0))
            encode_segments(x, **options)
            decode_segments(messages, **options, dtype=dtype)
            for own in (None, x[0]):
                dequantize_reduce(messages, own, **options)
                dequantize_reduce_quantize(messages, own, **options)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Prepared("triton", f"compiled or cached for {device}", time.perf_counter() - start)
