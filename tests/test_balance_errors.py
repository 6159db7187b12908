"""Balancing that cannot be: one error with keys, values and what is legal, on every target, before a process starts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module

from twinbed import run
from twinbed.conf.compose import CONFIG_NAME, compose, register_schema
from twinbed.runtime import launcher

TARGETS = ("sim", "runtime", "both")
TENSOR = ("parallel.tensor=2",)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr(launcher, "launch_local", started)


def refused(folder: Path, target: str, overrides: Sequence[str]) -> str:
    register_schema()
    with initialize_config_module("twinbed.conf", version_base="1.3"):
        given = [f"target={target}", "comm=zero3", "data=synthetic", *overrides]
        config = hydra_compose(CONFIG_NAME, overrides=given)
    with pytest.raises(run.ExperimentError) as err:
        run.run_experiment(config, folder)
    sides = {"sim": folder / "sim", "runtime": folder / "runtime"} if target == "both" else {target: folder}
    for record in sides.values():
        result = json.loads((record / "result.json").read_text(encoding="utf-8"))
        assert (result["status"], result["error"]) == ("failed", str(err.value))
    return str(err.value)


CASES = [
    (["balance=resize", "parallel.tensor=2", "balance.ratio=1.0"], ["balance.ratio", "1.0", "[0, 1)"]),
    (["balance=resize", "parallel.tensor=2", "balance.ratio=-0.1"], ["balance.ratio", "-0.1", "[0, 1)"]),
    (["balance=semi", "parallel.tensor=2", "balance.max_ratio=1"], ["balance.max_ratio", "[0, 1)"]),
    (["balance=semi"], ["parallel.tensor=1 with balance=semi", "must be > 1", "balance=batch"]),
    (["balance=migrate", "parallel.pipeline=2"], ["parallel.tensor=1 with balance=migrate"]),
    (["balance=batch", "parallel.tensor=4"], ["balance=batch", "parallel.data > 1", "balance=resize"]),
    (["balance=batch"], ["batch.micro=1 with balance=batch", "must be > 1"]),
    (["balance=layers"], ["parallel.pipeline=1 with balance=layers", "must be > 1"]),
    (
        [
            "balance=layers",
            "parallel.pipeline=2",
            "parallel.virtual_stages=2",
            "parallel.pipeline_schedule=interleaved",
            "batch.accumulation=2",
        ],
        ["parallel.virtual_stages=2 with balance=layers", "must be 1"],
    ),
    ([*TENSOR, "cluster.slowdown={0:0.5}"], ["cluster.slowdown[0].factor=0.5", "must be >= 1"]),
    ([*TENSOR, "cluster.slowdown={7:2}"], ["cluster.slowdown[0].rank=7", "[0, 4)"]),
    (
        [*TENSOR, "cluster.slowdown=[{rank:0,factor:2,from_step:3,from_s:1.0}]"],
        ["cluster.slowdown[0]", "from_step", "from_s", "by steps or by seconds"],
    ),
    (
        [*TENSOR, "cluster.slowdown=[{rank:0,factor:2,from_step:3,until_step:3}]"],
        ["cluster.slowdown[0].until_step=3", "later than from_step=3"],
    ),
    (
        ["balance=semi", "parallel.tensor=4", "parallel.tensor_mode='2d'", "batch.micro=2"],
        ["parallel.tensor_mode=2d with balance=semi", "must be 1d"],
    ),
    (
        ["balance=resize", "parallel.tensor=2", "parallel.sequence=2"],
        ["parallel.sequence=2", "parallel.sequence_mode=megatron", "must be 1"],
    ),
    (
        ["balance=migrate", "parallel.tensor=2", "recompute=full"],
        ["recompute=full with balance=migrate", "must be none"],
    ),
    (
        ["balance=resize", "parallel.tensor=2", "balance.pruned_state=frozen"],
        ["balance.pruned_state=frozen with 2 replicas", "must be moving"],
    ),
    (
        ["balance=semi", "parallel.tensor=2", "balance.loss_points=[[0.5,1.0],[0.75,0.5]]"],
        ["balance.loss_points", "do not fall"],
    ),
    (
        ["balance=semi", "parallel.tensor=2", "balance.loss_points=[[0.25,0.3],[0.25,0.4]]"],
        ["balance.loss_points", "each ratio once; [0.25] stands twice"],
    ),
    (["balance=semi", "parallel.tensor=2", "balance.loss_points=3"], ["balance.loss_points=3", "pairs"]),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("overrides", "words"), CASES, ids=[" ".join(case[0])[:70] for case in CASES])
def test_it_is_refused(tmp_path: Path, target: str, overrides: list[str], words: list[str]) -> None:
    error = refused(tmp_path, target, overrides)
    for word in words:
        assert word in error, error


def test_an_engine_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="balance=semi needs engine=fsdp2, got engine=megatron"):
        compose(["target=sim", "engine=megatron", "balance=semi", "parallel.tensor=2"])


def test_columns_that_cannot_move_are_said() -> None:
    keys = ["target=sim", "parallel.tensor=2", "model.hidden=64", "balance=semi", "balance.way=scatter"]
    said = "have 64, 32 and 31 columns, which have no divisor in common"
    assert any(said in each for each in compose([*keys, "model.ffn=62"]).warnings)
    for more in (["model.ffn=64"], ["model.ffn=62", "balance.way=paired"]):
        assert not any("divisor" in each for each in compose([*keys, *more]).warnings)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["balance=migrate", "balance.imputation=same"],
            "balance.imputation=same has no effect with balance=migrate",
        ),
        (
            ["balance=resize", "balance.loss_points=[[0.5,1]]"],
            "balance.loss_points=[[0.5, 1]] has no effect without balance.accuracy_budget",
        ),
        (
            ["balance=resize", "balance.ratio=0.5", "balance.goal=mean"],
            "balance.goal=mean has no effect with balance.ratio=0.5",
        ),
        (
            ["balance=semi", "balance.period=12", "steps=12"],
            "balance.period=12 with steps=12: nothing is decided",
        ),
    ],
)
def test_a_key_without_effect_is_said(keys: list[str], said: str) -> None:
    found = compose(["target=sim", "parallel.tensor=2", *keys])
    assert any(said in each for each in found.warnings), found.warnings


def test_key_heads_that_cannot_be_split_are_said() -> None:
    """28 heads that share 4 key heads, on 4 ranks (Qwen2-7B)."""
    found = compose(
        [
            "target=sim",
            "model=gpt",
            "model.layers=4",
            "model.hidden=1792",
            "model.heads=28",
            "model.kv_heads=4",
            "model.vocab=512",
            "model.sequence=128",
            "parallel.tensor=4",
            "balance=migrate",
        ]
    )
    assert any("one key head, which its 7 heads share" in each for each in found.warnings)
