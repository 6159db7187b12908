"""LAMB: Adam whose steps are as long as the weights, parameter by parameter (You et al. 2020, Algorithm 2)."""

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .norms import AllReduce, Holders, all_reduce
from .trust import Parameters, Part, TrustRatioOptimizer, check_argument, check_bounds

Correction = Literal["moments", "rate"]
CORRECTIONS: Final = ("moments", "rate")


class Lamb(TrustRatioOptimizer):
    """LAMB (Large Batch Optimization for Deep Learning, arXiv 1904.00962), for each parameter w with gradient g:

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        u = m^ / (sqrt(v^) + eps) + weight_decay w;  m^ = m / (1 - b1^t), v^ = v / (1 - b2^t)
        w <- w - lr r u;  r = phi(|w|) / |u|, and 1 where either norm is 0

    Variants in use, by their arguments:

    * the paper, apex's FusedLAMB (`use_nvlamb`), timm (`always_adapt`): the defaults;
    * DeepSpeed's FusedLamb: `correction="rate", max_coeff=10, min_coeff=0.01, exclude_1d=False`;
    * Colossal-AI's Lamb: `bias_correction=False` (its default), or `correction="rate"`; `exclude_1d=False`;
    * pytorch-lamb: `bias_correction=False, max_norm=10, exclude_1d=False`;
    * timm's `decoupled_decay`: `decay_in_ratio=False`.

    Args:
        params: Tensors or DTensors, or groups of them.
        lr: Learning rate.
        betas: b1 and b2.
        eps: Added to the root of the second moment.
        weight_decay: As above: a part of the direction.
        bias_correction: Off: m^ = m and v^ = v, as in the paper's third version.
        correction: With bias_correction. "moments": as above. "rate": moments as they are, and lr times
            sqrt(1 - b2^t) / (1 - b1^t); decay then warms up as well, and the ratio does not undo it.
        min_coeff: The least that r may be where both norms are positive.
        max_coeff: The most; None: no bound.
        min_norm: phi(|w|) = |w| within these bounds (the paper's gamma_l and gamma_u).
        max_norm: None: no upper one.
        decay_in_ratio: False: weights shrink by lr weight_decay first, as in AdamW, and u has no decay.
        exclude_1d: Biases and the weights of norms have no decay and r = 1.
        all_reduce: Sums the norms over a group, in place of torch.distributed.all_reduce.
        holders: As `norms.WholeNorms`.

    Raises:
        ValueError: If an argument is out of range, naming it.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        *,
        correction: Correction = "moments",
        min_coeff: float = 0.0,
        max_coeff: float | None = None,
        min_norm: float = 0.0,
        max_norm: float | None = None,
        decay_in_ratio: bool = True,
        exclude_1d: bool = True,
        all_reduce: AllReduce = all_reduce,
        holders: Holders | None = None,
    ) -> None:
        check_argument(0 <= lr < math.inf, "lr", lr, ">= 0 and finite")
        check_argument(
            len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", betas, "two numbers in [0, 1)"
        )
        check_argument(eps >= 0, "eps", eps, ">= 0")
        check_argument(0 <= weight_decay < math.inf, "weight_decay", weight_decay, ">= 0 and finite")
        check_argument(correction in CORRECTIONS, "correction", correction, f"one of {list(CORRECTIONS)}")
        check_bounds(min_coeff, max_coeff, names=("min_coeff", "max_coeff"))
        check_bounds(min_norm, max_norm, names=("min_norm", "max_norm"))
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "correction": correction,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "min_norm": min_norm,
            "max_norm": max_norm,
            "decay_in_ratio": decay_in_ratio,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults, all_reduce, holders)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32),  # on the host, as only the host reads it
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def _directions(self, part: Part) -> list[Tensor]:
        group, decay = part.group, part.group["weight_decay"]
        beta1, beta2 = group["betas"]
        for parameter in part.parameters:
            self._state_of(group, parameter)["step"] += 1
        moments, squares = self._states(part, "exp_avg"), self._states(part, "exp_avg_sq")
        torch._foreach_lerp_(moments, part.gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, part.gradients, part.gradients, value=1 - beta2)

        # m^ / (sqrt(v^) + eps), with both corrections in the denominator
        below = list(torch._foreach_sqrt(squares))
        if group["bias_correction"] and group["correction"] == "moments":
            first, second = self._corrections(part)
            torch._foreach_mul_(below, [a / math.sqrt(b) for a, b in zip(first, second, strict=True)])
            torch._foreach_add_(below, [group["eps"] * a for a in first])
        else:
            torch._foreach_add_(below, group["eps"])
        directions = list(torch._foreach_div(moments, below))

        decayed = [i for i, adapted in enumerate(part.adapted) if adapted and decay]
        if decayed:
            weights = [part.weights[i] for i in decayed]
            if group["decay_in_ratio"]:
                torch._foreach_add_([directions[i] for i in decayed], weights, alpha=decay)
            else:
                torch._foreach_mul_(weights, 1 - group["lr"] * decay)
        return directions

    def _ratios(self, group: dict[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        phi = weights.clamp(group["min_norm"], group["max_norm"])
        return (phi / directions).clamp(group["min_coeff"], group["max_coeff"])

    def _move(self, part: Part, directions: list[Tensor], ratios: list[float]) -> None:
        group = part.group
        rates = [group["lr"] * ratio for ratio in ratios]
        if group["bias_correction"] and group["correction"] == "rate":
            both = zip(*self._corrections(part), strict=True)
            rates = [rate * math.sqrt(b) / a for rate, (a, b) in zip(rates, both, strict=True)]
        torch._foreach_mul_(directions, rates)
        torch._foreach_sub_(part.weights, directions)

    def _corrections(self, part: Part) -> tuple[list[float], list[float]]:
        """1 - b1^t and 1 - b2^t of each parameter."""
        steps = [float(self.state[parameter]["step"]) for parameter in part.parameters]
        first, second = ([1 - beta**step for step in steps] for beta in part.group["betas"])
        return first, second
