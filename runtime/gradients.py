"""Small questions about gradients, the same under every placement."""

import math

import torch


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
