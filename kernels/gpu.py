"""Chooses the Triton kernels for tensors on a GPU. Triton is imported when the first of them comes."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import ModuleType

from torch import Tensor

from .tiles import MAX_BLOCK

TRITON_BITS = (8, 4)


def codec_for(x: Tensor, *, bits: int, block: int) -> ModuleType | None:
    """`triton_codec`, if it serves blocks like these where `x` lies; else plain torch does."""
    if not _wanted(x) or bits not in TRITON_BITS or not 0 < block <= MAX_BLOCK:
        return None
    return load_triton("triton_codec")


def matmul_for(x: Tensor) -> ModuleType | None:
    """`triton_matmul`, if it serves where `x` lies."""
    return load_triton("triton_matmul") if _wanted(x) else None


def _wanted(x: Tensor) -> bool:
    return x.device.type == "cuda" or (x.device.type == "cpu" and _interpreting())


@cache
def _interpreting() -> bool:
    """Triton runs its kernels on CPU tensors where this is set before its import: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def load_triton(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError as err:
        warnings.warn(
            f"twinbed.kernels runs its slow plain-torch reference on the GPU: {err}. Install Triton: "
            'pip install "twinbed[gpu]".',
            RuntimeWarning,
            stacklevel=3,
        )
        return None
