"""Small questions about gradients, the same under every placement."""

import math

import torch

from ..kernels import first_bad_block

_BLOCK = 256  # qgZ's default: what one bad value poisons


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this global norm are multiplied with, as torch.nn.utils.clip_grad_norm_ does; at most
    1.

    A norm that is not finite gives 1: zeros times Inf would spread NaN, and hide where it came from.
    """
    if not math.isfinite(norm) or math.isinf(max_norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def is_finite(x: torch.Tensor) -> bool:
    """Whether `x` holds neither Inf nor NaN: its sum tells, unless finite values overflow it."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def bad_place(x: torch.Tensor) -> str:
    """Where the first Inf or NaN of `x` stands, for a message."""
    return f"first in block {first_bad_block(x, block=_BLOCK)} of {_BLOCK} elements"
