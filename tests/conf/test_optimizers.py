"""Keys of `optimizer`: what is refused, what is said to have no effect, and what a DeepSpeed JSON brings."""

import json
from pathlib import Path

import pytest

from twinbed.conf.compose import compose
from twinbed.conf.schema import LambCorrection


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.name=lion"],
            r"optimizer.name='lion': must be one of \['adamw', 'sgd', 'lamb', 'lars'\]",
        ),
        (
            ["optimizer=lamb", "optimizer.min_coeff=2", "optimizer.max_coeff=1"],
            "optimizer.min_coeff=2.0: must be <= optimizer.max_coeff=1.0",
        ),
        (
            ["optimizer=lamb", "optimizer.min_norm=2", "optimizer.max_norm=1"],
            "optimizer.min_norm=2.0: must be <= optimizer.max_norm=1.0",
        ),
        (["optimizer=lamb", "optimizer.max_coeff=0"], "optimizer.max_coeff=0.0: must be > 0 or null"),
        (["optimizer=lamb", "optimizer.min_coeff=-1"], "optimizer.min_coeff=-1.0: must be >= 0"),
        (["optimizer=lamb", "optimizer.betas=[0.9]"], r"optimizer.betas=\[0.9\]: must be two numbers"),
        (["optimizer=lamb", "optimizer.correction=no"], "optimizer.correction"),
        (["optimizer=lars", "optimizer.eeta=0"], "optimizer.eeta=0.0: must be > 0"),
        (["optimizer=lars", "optimizer.momentum_order=first"], "after_rate, after_ratio, before_rate"),
        (
            ["optimizer=lamb", "engine=deepspeed", "target=sim", "cluster=dgx_a100", "comm=zero3"],
            "optimizer=lamb needs engine=fsdp2, got engine=deepspeed",
        ),
    ],
)
def test_bad_keys_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.max_coeff=3"], "optimizer.max_coeff=3.0 has no effect without optimizer=lamb or lars"),
        (
            ["optimizer=lars", "optimizer.bias_correction=false"],
            "optimizer.bias_correction=False has no effect",
        ),
        (["optimizer=lamb", "optimizer.eeta=0.1"], "optimizer.eeta=0.1 has no effect without optimizer=lars"),
        (["optimizer=lamb", "optimizer.momentum=0.1"], "optimizer.momentum=0.1 has no effect"),
        (
            ["optimizer=lamb", "optimizer.bias_correction=false", "optimizer.correction=rate"],
            "optimizer.correction=rate has no effect without optimizer=lamb and optimizer.bias_correction",
        ),
        (
            ["optimizer=lars", "optimizer.momentum=0", "optimizer.momentum_order=before_rate"],
            "optimizer.momentum_order=before_rate has no effect without optimizer=lars and optimizer.momentum",
        ),
    ],
)
def test_keys_without_effect_are_said(overrides: list[str], message: str) -> None:
    assert any(warning.startswith(message) for warning in compose(overrides).warnings)


@pytest.mark.parametrize("choice", ["adamw", "sgd", "lamb", "lars"])
def test_a_choice_sets_nothing_that_it_does_not_read(choice: str) -> None:
    assert not compose([f"optimizer={choice}"]).warnings


def test_a_lamb_of_deepspeed_is_its_fused_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    params = {"lr": "auto", "weight_decay": 0.01, "max_coeff": 0.3, "betas": [0.8, 0.99]}
    path.write_text(
        json.dumps(
            {
                "optimizer": {"type": "Lamb", "params": params},
                "zero_optimization": {"stage": 2},
                "fp16": {"enabled": True},
            }
        )
    )
    composed = compose(["comm=deepspeed", f"comm.config_json={path}", "optimizer.lr=0.5"])
    optimizer = composed.experiment.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("lamb", 0.5, [0.8, 0.99])
    assert (optimizer.correction, optimizer.bias_correction) == (LambCorrection.rate, True)
    assert (optimizer.max_coeff, optimizer.min_coeff, optimizer.exclude_1d) == (0.3, 0.01, False)
    said = [warning for warning in composed.warnings if "as DeepSpeed's FusedLamb has it" in warning]
    assert any("optimizer.correction=rate in place of moments" in warning for warning in said)
    assert not any("optimizer.lr" in warning for warning in said)
