"""Small questions about gradients, the same under every placement."""

import torch


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this global norm are multiplied with, as torch.nn.utils.clip_grad_norm_ does; at most 1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm != float("inf") else 1.0


def is_finite(x: torch.Tensor) -> bool:
    """Whether `x` holds neither Inf nor NaN: its sum tells, unless finite values overflow it."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())
