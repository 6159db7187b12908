"""LAMB and LARS a second time: one parameter, one step, numpy in double precision, straight from the formulas."""

import numpy as np


def lamb(
    w,
    g,
    state,
    *,
    lr,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.0,
    bias_correction=True,
    correction="moments",
    min_coeff=0.0,
    max_coeff=np.inf,
    min_norm=0.0,
    max_norm=np.inf,
    decay_in_ratio=True,
    exclude_1d=True,
):
    """The new weights; `state` is a dict that the first step finds empty."""
    adapts = w.ndim > 1 or not exclude_1d
    decay = weight_decay if adapts else 0.0
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g * g
    corrections = [1 - beta**t if bias_correction else 1.0 for beta in betas]
    if correction == "moments":
        m, v = m / corrections[0], v / corrections[1]
    else:
        lr_now = lr * np.sqrt(corrections[1]) / corrections[0]
    u = m / (np.sqrt(v) + eps)
    if decay_in_ratio:
        u = u + decay * w
    else:
        w = w - lr * decay * w
    norm_w, norm_u = np.linalg.norm(w), np.linalg.norm(u)
    ratio = 1.0
    if adapts and norm_w > 0 and norm_u > 0:
        ratio = np.clip(np.clip(norm_w, min_norm, max_norm) / norm_u, min_coeff, max_coeff)
    return w - (lr if correction == "moments" else lr_now) * ratio * u


def lars(
    w,
    g,
    state,
    *,
    lr,
    momentum=0.9,
    weight_decay=0.0,
    eeta=1e-3,
    eps=0.0,
    clip=False,
    momentum_order="after_rate",
    min_coeff=0.0,
    max_coeff=np.inf,
    exclude_1d=True,
):
    """As `lamb`."""
    adapts = w.ndim > 1 or not exclude_1d
    decay = weight_decay if adapts else 0.0
    norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
    ratio = 1.0
    if adapts and norm_w > 0 and norm_g > 0:
        ratio = eeta * norm_w / (norm_g + decay * norm_w + eps)
        if clip:
            ratio = min(ratio / lr, 1.0)
        ratio = np.clip(ratio, min_coeff, max_coeff)
    d = g + decay * w
    inner = {"after_rate": lr * ratio, "after_ratio": ratio, "before_rate": 1.0}[momentum_order]
    outer = {"after_rate": 1.0, "after_ratio": lr, "before_rate": lr * ratio}[momentum_order]
    buffer = state["buffer"] = momentum * state.get("buffer", 0) + inner * d
    return w - outer * buffer
