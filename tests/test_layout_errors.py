"""Layouts that cannot be: one error with keys, values and what is legal, on every target, before a process starts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module

from twinbed import run
from twinbed.conf.compose import CONFIG_NAME, compose, register_schema
from twinbed.conf.importers.command import main as import_files
from twinbed.runtime import launcher

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("sim", "runtime", "both")
TWELVE = ("cluster.nodes=3", "cluster.devices_per_node=4")
EIGHT = ("cluster.nodes=2", "cluster.devices_per_node=4")

QWEN2_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr(launcher, "launch_local", started)


def refused(folder: Path, target: str, overrides: Sequence[str]) -> str:
    """The error of what `twinbed target=... overrides` does, which is also that of each record left behind."""
    register_schema()
    with initialize_config_module("twinbed.conf", version_base="1.3"):
        given = [f"target={target}", "comm=zero3", "data=synthetic", *overrides]
        config = hydra_compose(CONFIG_NAME, overrides=given)
    with pytest.raises(run.ExperimentError) as err:
        run.run_experiment(config, folder)
    sides = {"sim": folder / "sim", "runtime": folder / "runtime"} if target == "both" else {target: folder}
    for side, record in sides.items():
        result = json.loads((record / "result.json").read_text(encoding="utf-8"))
        assert (result["status"], result["target"], result["error"]) == ("failed", side, str(err.value))
        assert (record / "decisions.jsonl").read_text(encoding="utf-8") == ""
        assert len((record / "ledger.csv").read_text(encoding="utf-8").splitlines()) == 1  # its head
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left == {"result.json", "ledger.csv", "decisions.jsonl", "timeline.json"}
    return str(err.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["parallel.tensor=2", "parallel.tensor_mode='2d'"],
            ["parallel.tensor=2", "tensor_mode=2d", "square", "[1, 4, 9, 16, "],
        ),
        ([*EIGHT, "parallel.tensor=8", "parallel.tensor_mode='2d'"], ["parallel.tensor=8", "[1, 4, 9, 16, "]),
        (
            [*TWELVE, "parallel.tensor=12", "parallel.tensor_mode='2.5d'", "parallel.depth=2"],
            ["parallel.tensor=12", "parallel.depth=2", "12/2", "[3, 12]"],
        ),
        (["parallel.tensor=4", "parallel.tensor_mode='3d'"], ["parallel.tensor=4", "cube", "[1, 8, 27, "]),
        (
            ["parallel.tensor=4", "parallel.tensor_mode='2d'", "batch.micro=1"],
            ["batch.micro=1 in 2 parts", "batch.micro can be a multiple of 2"],
        ),
        (
            [*EIGHT, "parallel.tensor=8", "parallel.tensor_mode='3d'", "batch.micro=2"],
            ["batch.micro=2 in 4 parts", "batch.micro can be a multiple of 4"],
        ),
        (
            [
                *EIGHT,
                "parallel.tensor=8",
                "parallel.tensor_mode='3d'",
                "batch.micro=4",
                "model.hidden=130",
                "model.heads=2",
            ],
            ["model.hidden=130 in 4 parts", "parallel.tensor can be one of [1]"],
        ),
        (["parallel.tensor=4", "model.heads=2"], ["model.heads=2 in 4 parts", "[1, 2]"]),
        (["parallel.tensor=4", "model.ffn=510"], ["model.ffn=510 in 4 parts", "[1, 2]"]),
        (
            [
                "parallel.pipeline=2",
                "parallel.virtual_stages=2",
                "parallel.pipeline_schedule=interleaved",
                "batch.accumulation=3",
            ],
            ["batch.accumulation=3", "parallel.pipeline=2", "2 or 4", "torch", "in 1 round of 3"],
        ),
        (
            [
                "parallel.pipeline=2",
                "parallel.virtual_stages=2",
                "parallel.pipeline_schedule=interleaved",
                "batch.accumulation=5",
            ],
            ["batch.accumulation=5", "4 or 6", "torch", "refuses them too"],
        ),
        (
            ["parallel.data=3", "parallel.tensor=2"],
            ["parallel.data=3 times parallel.tensor=2 times parallel.pipeline=1 is 6", "4 (", "-1 or 2"],
        ),
        (
            [
                "parallel.tensor=2",
                "parallel.pipeline=2",
                "parallel.sequence=2",
                "parallel.sequence_mode=ring",
            ],
            ["parallel.tensor=2", "parallel.sequence=2", "the product is 8", "4 (", "[1, 2, 4]"],
        ),
        (
            ["parallel.sequence=4", "parallel.sequence_mode=ring", "batch.sequence=36"],
            ["parallel.sequence=4", "batch.sequence=36", "8 does not divide it", "[1, 2, 3, 6, 9, 18]"],
        ),
        (["parallel.sequence=2"], ["parallel.sequence=2", "parallel.tensor=1", "ring or ulysses"]),
        (
            ["parallel.pipeline=4", "batch.accumulation=2"],
            ["batch.accumulation=2", "parallel.pipeline=4"],
        ),
        (
            ["parallel.pipeline=3", "cluster.nodes=3", "batch.accumulation=3"],
            ["parallel.pipeline=3", "model.layers=4", "[1, 2, 4]"],
        ),
        (["parallel.tensor=2", "offload=disk"], ["offload=disk", "none"]),
        (["parallel.tensor=2", "recompute=selective_op"], ["recompute=selective_op", "['none', 'full']"]),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_cannot_be_laid_out_is_refused(
    overrides: list[str], words: list[str], target: str, tmp_path: Path
) -> None:
    told = refused(tmp_path / "out", target, overrides)
    for word in words:
        assert word in told


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("degree", [3, 7, 8, 14, 28])
def test_qwen2_7b_allows_1_2_4(degree: int, target: str, tmp_path: Path) -> None:
    """28 heads and 4 key heads: what divides 28 alone will not do."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN2_7B))
    model = ["model=hf", f"model.config_json={path}", "batch.sequence=128"]
    told = refused(
        tmp_path / "out",
        target,
        [*model, "cluster.nodes=1", f"cluster.devices_per_node={degree}", f"parallel.tensor={degree}"],
    )
    which = "heads=28" if 28 % degree else "kv_heads=4"
    assert (
        f"parallel.tensor={degree} with parallel.tensor_mode=1d cuts model.{which} in {degree} parts" in told
    )
    assert "[1, 2, 4]" in told


@pytest.mark.parametrize("target", ["sim", "runtime"])
def test_an_imported_model_is_refused_as_the_file_is(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN2_7B))
    assert import_files(["qwen.json", "--name", "qwen"]) == 0
    keys = [*EIGHT, "model=qwen", "batch.sequence=128", "parallel.tensor=8"]
    found = f"hydra.searchpath=[file://{tmp_path}/imported]"
    assert "model.heads=28 in 8 parts" in refused(tmp_path / "out", target, [*keys, found])


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("sim", ["model=gpt2_xl", "batch.sequence=128"]),
        (
            "runtime",
            ["model=gpt", "model.layers=4", "model.heads=25", "model.hidden=1600", "model.vocab=257"],
        ),
    ],
)
def test_gpt2_xl_allows_1_5_25(target: str, model: list[str], tmp_path: Path) -> None:
    told = refused(tmp_path / "out", target, [*model, "parallel.tensor=2"])
    assert "model.heads=25 in 2 parts" in told
    assert "[1, 5, 25]" in told


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=gpt2_small", "batch.sequence=128"], ["family gpt2", "target=runtime", "target=sim"]),
        (
            ["parallel.tensor=1", "parallel.pipeline=2", "batch.accumulation=2", "comm.overlap=true"],
            ["comm.overlap=true", "parallel.pipeline=2", "comm.overlap=false"],
        ),
        (
            ["comm=ps", "optimizer=lamb"],
            ["optimizer=lamb", "comm.parameter_server=true", "parallel.tensor=2"],
        ),
    ],
)
def test_what_the_runtime_has_not_is_refused_by_name(
    overrides: list[str], words: list[str], tmp_path: Path
) -> None:
    told = refused(tmp_path / "out", "runtime", ["parallel.tensor=2", *overrides])
    for word in words:
        assert word in told


@pytest.mark.parametrize("file", ["mixtral", "opt"])
def test_families_that_are_not_laid_out_are_refused(file: str, tmp_path: Path) -> None:
    config = QWEN2_7B | {"model_type": file, "ffn_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    path = tmp_path / f"{file}.json"
    path.write_text(json.dumps(config))
    told = refused(
        tmp_path / "out",
        "sim",
        ["model=hf", f"model.config_json={path}", "batch.sequence=128", "parallel.tensor=2"],
    )
    assert ("mixture of experts" if file == "mixtral" else "model.family='opt' is not laid out") in told


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["parallel.tensor_mode='2d'"], "parallel.tensor_mode=2d has no effect without parallel.tensor > 1"),
        (
            ["parallel.tensor=4", "parallel.tensor_mode='2.5d'", "batch.micro=2"],
            "parallel.tensor_mode=2.5d has no effect without parallel.depth > 1: it is 2d",
        ),
        (["parallel.pipeline_schedule=gpipe"], "parallel.pipeline_schedule=gpipe has no effect"),
        (
            ["parallel.virtual_stages=2", "parallel.pipeline_schedule=interleaved"],
            "parallel.virtual_stages=2 has no effect",
        ),
        (["parallel.sequence_mode=ring"], "parallel.sequence_mode=ring has no effect"),
        (
            ["parallel.sequence=2", "parallel.sequence_mode=ulysses", "parallel.zigzag=false"],
            "parallel.zigzag=False has no effect",
        ),
        (
            [
                "model=bert_tiny",
                "parallel.sequence=2",
                "parallel.sequence_mode=ring",
                "parallel.zigzag=false",
            ],
            "parallel.zigzag=False has no effect",
        ),
        (
            ["parallel.tensor=2", "parallel.tensor_overlap=false"],
            "parallel.tensor_overlap=False has no effect",
        ),
        (["parallel.order=[data,sequence,tensor,pipeline]"], "has no effect without two axes"),
        # tensor groups fill the cluster, so nothing else has an order
        (
            ["parallel.tensor=4", "parallel.order=[pipeline,data,sequence,tensor]"],
            "has no effect without two axes",
        ),
    ],
)
def test_keys_without_effect_are_warned_of(overrides: list[str], warning: str) -> None:
    warnings = compose(["target=sim", "comm=zero3", *overrides]).warnings
    assert any(warning in told for told in warnings), warnings


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tensor=2", "parallel.order=[data,sequence,tensor,pipeline]"],
        ["parallel.sequence=2", "parallel.sequence_mode=ring", "parallel.zigzag=false"],
        ["parallel.tensor=2", "parallel.sequence=2"],
        ["engine=megatron", "parallel.tensor=2", "parallel.tensor_overlap=false"],
        [
            "parallel.pipeline=2",
            "parallel.virtual_stages=2",
            "parallel.pipeline_schedule=interleaved",
            "batch.accumulation=2",
        ],
        [*EIGHT, "parallel.tensor=8", "parallel.tensor_mode='2.5d'", "parallel.depth=2", "batch.micro=4"],
    ],
)
def test_keys_with_an_effect_are_not(overrides: list[str]) -> None:
    warnings = compose(["target=sim", "comm=zero3", *overrides]).warnings
    assert not [told for told in warnings if "parallel." in told]


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_says_it_in_one_line(target: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "run.py"),
            f"target={target}",
            "parallel.tensor=2",
            "parallel.tensor_mode='2d'",
            f"hydra.run.dir={tmp_path}/out",
        ],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("twinbed: parallel.tensor=2 with parallel.tensor_mode=2d must be a square")
    assert not list(tmp_path.glob("out/**/rank*.log"))
