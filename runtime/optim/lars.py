"""LARS: SGD whose steps are as long as the weights, parameter by parameter (You, Gitman and Ginsburg 2017)."""

from math import inf
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .norms import AllReduce, Holders, all_reduce
from .trust import Parameters, Part, TrustRatioOptimizer, check_argument, check_bounds

MomentumOrder = Literal["after_rate", "after_ratio", "before_rate"]
MOMENTUM_ORDERS: Final = ("after_rate", "after_ratio", "before_rate")


class Lars(TrustRatioOptimizer):
    """LARS (Large Batch Training of Convolutional Networks, arXiv 1708.03888), for each parameter w with gradient g:

        r = eeta |w| / (|g| + weight_decay |w| + eps), and 1 where either norm is 0
        v <- momentum v + lr r (g + weight_decay w);  w <- w - v

    Variants in use, by their arguments:

    * the paper (Algorithm 1) and MLPerf: the defaults;
    * timm, lightning-bolts: `momentum_order="after_ratio"`, and apex's LARC with `clip=True` as well;
    * Colossal-AI's Lars: `momentum_order="before_rate", max_coeff=50, exclude_1d=False`, without its bound of 10
      on each element.

    Args:
        params: Tensors or DTensors, or groups of them.
        lr: Learning rate.
        momentum: 0: none, and no state.
        weight_decay: As above.
        eeta: Trust coefficient.
        eps: As above.
        clip: r is divided by lr and at most 1, so that the local rate eeta |w| / (...) bounds the rate and does not
            multiply it (LARC); lr is then the most. `min_coeff` and `max_coeff` bound what comes out.
        momentum_order: What v sums up. "after_rate": steps, as above. "after_ratio": r (g + weight_decay w), and
            w <- w - lr v: another lr changes earlier gradients as well. "before_rate": g + weight_decay w, and
            w <- w - lr r v: so does another r.
        min_coeff: The least that r may be where both norms are positive.
        max_coeff: The most; None: no bound.
        exclude_1d: Biases and the weights of norms have no decay and r = 1.
        all_reduce: Sums the norms over a group, in place of torch.distributed.all_reduce.
        holders: As `norms.WholeNorms`.

    Raises:
        ValueError: If an argument is out of range, naming it.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eeta: float = 1e-3,
        *,
        eps: float = 0.0,
        clip: bool = False,
        momentum_order: MomentumOrder = "after_rate",
        min_coeff: float = 0.0,
        max_coeff: float | None = None,
        exclude_1d: bool = True,
        all_reduce: AllReduce = all_reduce,
        holders: Holders | None = None,
    ) -> None:
        check_argument(0 <= lr < inf, "lr", lr, ">= 0 and finite")
        check_argument(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        check_argument(0 <= weight_decay < inf, "weight_decay", weight_decay, ">= 0 and finite")
        check_argument(eeta > 0, "eeta", eeta, "> 0")
        check_argument(eps >= 0, "eps", eps, ">= 0")
        known = momentum_order in MOMENTUM_ORDERS
        check_argument(known, "momentum_order", momentum_order, f"one of {list(MOMENTUM_ORDERS)}")
        check_bounds(min_coeff, max_coeff, names=("min_coeff", "max_coeff"))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eeta": eeta,
            "eps": eps,
            "clip": clip,
            "momentum_order": momentum_order,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults, all_reduce, holders)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def _directions(self, part: Part) -> list[Tensor]:
        return part.gradients

    def _ratios(self, group: dict[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        below = directions.add(weights, alpha=group["weight_decay"]).add(group["eps"])
        ratios = weights.mul(group["eeta"]).div(below)
        if group["clip"]:
            ratios = (ratios / group["lr"]).clamp(max=1.0)
        return ratios.clamp(group["min_coeff"], group["max_coeff"])

    def _move(self, part: Part, directions: list[Tensor], ratios: list[float]) -> None:
        group, lr, order = part.group, part.group["lr"], part.group["momentum_order"]
        decays = [group["weight_decay"] if adapted else 0.0 for adapted in part.adapted]
        moves = list(torch._foreach_mul(part.weights, decays))
        torch._foreach_add_(moves, directions)
        if order != "before_rate":
            torch._foreach_mul_(moves, [lr * r for r in ratios] if order == "after_rate" else ratios)
        if group["momentum"]:
            buffers = self._states(part, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, moves)
            moves = buffers
        if order == "before_rate":
            moves = list(torch._foreach_mul(moves, [lr * r for r in ratios]))
        torch._foreach_add_(part.weights, moves, alpha=-lr if order == "after_ratio" else -1.0)
