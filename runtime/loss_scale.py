"""The factor that keeps small fp16 gradients from vanishing."""

from dataclasses import dataclass
from typing import Final

from ..conf.schema import ExperimentConf, Precision

START_SCALE: Final = 65536.0
GROWTH_STEPS: Final = 2000
_MIN_SCALE: Final = 2.0**-14


@dataclass(slots=True)
class LossScale:
    """Halved after a step whose gradients overflowed, doubled after `GROWTH_STEPS` good ones in a row.

    The rule of torch.amp.GradScaler. `dynamic` false: the scale stays, overflowing steps are skipped all the
    same.
    """

    scale: float
    dynamic: bool
    good_steps: int = 0
    skipped_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Say how the last step went.

        Raises:
            ValueError: The scale would fall below 2^-14: gradients are not finite at any scale.
        """
        if overflow:
            self.skipped_steps += 1
            self.good_steps = 0
            if self.dynamic:
                self.scale /= 2
            if self.scale < _MIN_SCALE:
                raise ValueError(
                    f"gradients overflow fp16 at every loss scale down to {self.scale * 2:g}; lower "
                    "optimizer.lr, or use precision=bf16"
                )
            return
        self.good_steps += 1
        if self.dynamic and self.good_steps == GROWTH_STEPS:
            self.scale *= 2
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load(self, state: dict[str, float]) -> None:
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])
        if self.dynamic:
            self.scale = float(state["scale"])


def build_loss_scale(experiment: ExperimentConf) -> LossScale | None:
    """None where the precision needs no scale."""
    if experiment.precision is not Precision.fp16:
        return None
    fixed = experiment.train.loss_scale
    return LossScale(scale=fixed or START_SCALE, dynamic=not fixed)
