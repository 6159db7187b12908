"""Uneven stages: gradients of one process, whatever the split; and a checkpoint that another split goes on with."""

import json
from pathlib import Path

import pytest
import torch

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.checkpoint import check_resume
from twinbed.runtime.launcher import launch_local

KIND = f"{Path(__file__).with_name('share_cases.py')}:train"
SMALL = (
    "target=runtime",
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "data=synthetic",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "precision=fp32",
    "warmup_steps=0",
    "batch.accumulation=3",
    "train.gradient_clipping=1.0",
    "train.dropout=0.1",
    "optimizer.lr=0.003",
    "steps=6",
)
MODELS = {
    "gpt": ("model=gpt", "model.vocab=61", "model.sequence=12", "model.tied_embeddings=true"),
    "vit": ("model=vit_tiny", "model.extra.patch=7"),
}
# name: (ranks, keys)
LAYOUTS = {
    "three": (3, ("parallel.pipeline=3", "comm=ddp", "batch.micro=2", "parallel.stage_layers=[1,2,1]")),
    "gpipe": (
        4,
        (
            "parallel.pipeline=2",
            "comm=zero3",
            "batch.micro=1",
            "parallel.pipeline_schedule=gpipe",
            "parallel.stage_layers=[1,3]",
        ),
    ),
    "1d": (4, ("parallel.pipeline=2", "parallel.tensor=2", "batch.micro=2", "parallel.stage_layers=[3,1]")),
}
CASES = [("gpt", "three"), ("gpt", "gpipe"), ("gpt", "1d"), ("vit", "three")]
RESUMED = [("ddp", "adamw"), ("zero3", "lamb"), ("ps", "adamw")]

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]


def launch(folder, cases):
    cluster = cases[0][1].experiment.cluster
    outcome = launch_local(
        folder,
        cluster=cluster,
        cases=[
            Case(name=name, folder=name, experiment=c.resolved, kind=kind, options=options)
            for name, c, kind, options in cases
        ],
        timeout_s=240,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    for ranks in (3, 4):
        cases = []
        for model, layout in CASES:
            count, keys = LAYOUTS[layout]
            if count == ranks:
                composed = compose([*MODELS[model], *SMALL, *keys, f"cluster.devices_per_node={ranks}"])
                cases.append((f"{model} {layout}", composed, KIND, {"gradients": True}))
        launch(folder / str(ranks), cases)
    whole = [
        (
            model,
            compose([*keys, *SMALL, "batch.micro=2", "comm=ddp", "cluster.devices_per_node=1"]),
            KIND,
            {"gradients": True},
        )
        for model, keys in MODELS.items()
    ]
    launch(folder / "1", whole)
    return folder


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gradients_and_losses_are_those_of_one_process(folder, model, layout):
    (ranks, _), name = LAYOUTS[layout], f"{model} {layout}"
    record, one = read_record(folder / str(ranks) / name), read_record(folder / "1" / model)
    assert record.result["loss"] == pytest.approx(one.result["loss"], rel=3e-5)
    wanted = torch.load(folder / "1" / model / "gradients.0.pt")
    found = [torch.load(folder / str(ranks) / name / f"gradients.{rank}.pt") for rank in range(ranks)]
    for step in range(3):
        together = {}
        for of_rank in found:
            together |= of_rank[step]
        assert set(together) == set(wanted[step])
        whole = sum(float(g.square().sum()) for g in wanted[step].values())
        apart = sum(float((together[key] - g).square().sum()) for key, g in wanted[step].items())
        assert (apart / whole) ** 0.5 < 1e-5, f"step {step}"


def test_another_split_goes_on_from_a_checkpoint(tmp_path):
    four = ("cluster.devices_per_node=4", "parallel.pipeline=2", "batch.micro=2", "steps=6")
    cases = []
    for comm, optimizer in RESUMED:
        keys = (*MODELS["gpt"], *SMALL, *four, f"comm={comm}", f"optimizer={optimizer}")
        first = compose([*keys, "train.save_every=3", "parallel.stage_layers=[3,1]"])
        again = compose([*keys, "parallel.stage_layers=[1,3]"])
        name = f"{comm} {optimizer}"
        again.resolved["train"]["resume_from"] = str(tmp_path / name / "checkpoints/step_00000003")
        cases += [(name, first, "train", {}), (f"{name} again", again, "train", {})]
    launch(tmp_path, cases)
    for comm, optimizer in RESUMED:
        name = f"{comm} {optimizer}"
        whole, again = (read_record(tmp_path / each).result["loss"] for each in (name, f"{name} again"))
        assert again == pytest.approx(whole[3:], rel=1e-6), name
    checkpoint = tmp_path / "ddp adamw/checkpoints/step_00000003"
    manifest = json.loads((checkpoint / "twinbed.json").read_text())
    assert manifest["parallel"] == {"pipeline": 2, "stage_layers": [3, 1]}
    resumed = f"train.resume_from={checkpoint}"
    check_resume(compose([*MODELS["gpt"], *SMALL, *four, "comm=ddp", resumed, "balance=layers"]).experiment)


def test_a_slow_stage_holds_fewer_blocks(tmp_path):
    """Its rank is made slow from the first step on, and is so when blocks are timed."""
    keys = (
        *MODELS["gpt"],
        *SMALL,
        "cluster.devices_per_node=2",
        "parallel.pipeline=2",
        "batch.micro=2",
        "steps=1",
        "comm=ddp",
        "balance=layers",
        "cluster.emulated_flops_per_s=3e7",
    )
    slow = {
        by: compose([*keys, "cluster.slowdown={1: 4.0}", f"cluster.slowdown_by={by}"])
        for by in ("device", "sleep")
    }
    launch(
        tmp_path, [("equal", compose(keys), "train", {}), *((by, c, "train", {}) for by, c in slow.items())]
    )
    answers = {
        name: next(
            d.action for d in read_record(tmp_path / name).decisions if d.event.startswith("StagesMeasured")
        )
        for name in ("equal", *slow)
    }
    assert answers == {"equal": "share blocks 2/2", "device": "share blocks 3/1", "sleep": "share blocks 3/1"}
