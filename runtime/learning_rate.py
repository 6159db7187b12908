"""The learning rate of each step: a linear warm-up, then constant, linear or cosine."""

import math

from ..conf.schema import TrainConf


def learning_rate(step: int, *, peak: float, steps: int, conf: TrainConf) -> float:
    """The rate that optimizer step `step` (from 0) uses.

    Warm-up over w steps: peak (step + 1) / w. After it, with x = (step - w) / (steps - w): the schedule falls
    from peak at x = 0 to `lr_min_fraction` of it at x = 1, which is the end of the run.
    """
    warmup = conf.warmup_lr_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    x = min(1.0, (step - warmup) / max(1, steps - warmup))
    low = conf.lr_min_fraction
    match conf.lr_schedule:
        case "linear":
            return peak * (1 - (1 - low) * x)
        case "cosine":
            return peak * (low + (1 - low) * (1 + math.cos(math.pi * x)) / 2)
        case _:
            return peak
