"""Learning rate and loss scale against their closed forms."""

import math

import pytest

from twinbed.conf.compose import compose
from twinbed.conf.schema import TrainConf
from twinbed.runtime.learning_rate import learning_rate
from twinbed.runtime.loss_scale import GROWTH_STEPS, START_SCALE, LossScale, build_loss_scale


def rates(steps=10, **conf):
    return [learning_rate(s, peak=2.0, steps=steps, conf=TrainConf(**conf)) for s in range(steps + 1)]


def test_warm_up_rises_by_equal_steps_to_the_peak():
    assert rates(warmup_lr_steps=4)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates() == [2.0] * 11


def test_linear_and_cosine_end_at_the_smallest_rate():
    assert rates(lr_schedule="linear", lr_min_fraction=0.0) == pytest.approx([2 - 0.2 * s for s in range(11)])
    cosine = rates(lr_schedule="cosine", lr_min_fraction=0.1, warmup_lr_steps=2)
    assert cosine[2] == 2.0
    assert cosine[6] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half-way
    assert cosine[4] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert cosine[10] == pytest.approx(0.2)
    assert learning_rate(99, peak=2.0, steps=10, conf=TrainConf(lr_schedule="cosine")) == pytest.approx(0.2)


def test_an_overflow_halves_the_scale_and_good_steps_double_it():
    scale = LossScale(scale=1024.0, dynamic=True)
    scale.update(overflow=True)
    assert (scale.scale, scale.skipped_steps) == (512.0, 1)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(overflow=False)
    assert scale.scale == 512.0
    again = LossScale(scale=1.0, dynamic=True)
    again.load(scale.state())
    again.update(overflow=False)
    assert (again.scale, again.good_steps) == (1024.0, 0)


def test_a_fixed_scale_stays_and_one_that_never_helps_is_an_error():
    fixed = LossScale(scale=8.0, dynamic=False)
    fixed.update(overflow=True)
    assert (fixed.scale, fixed.skipped_steps) == (8.0, 1)
    hopeless = LossScale(scale=1.0, dynamic=True)
    for _ in range(14):
        hopeless.update(overflow=True)
    with pytest.raises(ValueError, match="at every loss scale"):
        hopeless.update(overflow=True)


def test_only_fp16_is_scaled():
    assert build_loss_scale(compose(["target=runtime", "precision=bf16"]).experiment) is None
    dynamic = build_loss_scale(compose(["target=runtime", "precision=fp16"]).experiment)
    assert dynamic == LossScale(scale=START_SCALE, dynamic=True)
    fixed = build_loss_scale(compose(["target=runtime", "precision=fp16", "train.loss_scale=128"]).experiment)
    assert fixed == LossScale(scale=128.0, dynamic=False)
