"""Twenty steps of training under every mode and some products: the losses of one process that has the whole batch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

SMALL = (
    "target=runtime",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "precision=fp32",
    "steps=20",
    "warmup_steps=0",
    "train.gradient_clipping=1",
    "optimizer.lr=1e-2",
)
TEXT = ("model.vocab=257", "model.sequence=16", "data=text")
GPT = ("model=gpt", *TEXT)
FAMILIES = {
    "llama": ("model=llama_tiny", "model.kv_heads=4", "model.ffn=64", *TEXT),
    "bert": ("model=bert_tiny", *TEXT),
    "vit": ("model=vit_tiny", "data=synthetic"),
}
# Four sequences a step, in one process or shared out: 4 at once, or one by one through a pipeline
WHOLE = ("batch.micro=4", "batch.accumulation=1", "comm=ddp")
PIECES = ("batch.micro=1", "batch.accumulation=4", "comm=ddp")
HALVES = ("batch.micro=1", "batch.accumulation=2", "comm=zero3")
PAIRS = ("batch.micro=2", "batch.accumulation=2", "comm=ddp")
REFERENCES = {
    "adamw": (),
    "deep": ("model.layers=4",),
    "heads of 6": ("model.hidden=24",),  # no multiple of the ranks
    "lamb": ("optimizer=lamb",),
    "lars": ("optimizer=lars", "optimizer.lr=1"),
    "dropout": ("train.dropout=0.1", "recompute=full", "train.eval_every=10", "train.eval_batches=2"),
}
LIMIT = 3e-5  # fp32: what is summed up in another order, over 20 steps


def keys(**parallel: object) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={value}" for key, value in parallel.items())


ONE_D = keys(tensor=4)
TWO_D = keys(tensor=4, tensor_mode="2d")
RING = keys(sequence=4, sequence_mode="ring")
HALF_PIPELINE = keys(pipeline=2)
# name: (what it must equal, its keys)
OF_FOUR: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "1d": ("adamw", (*WHOLE, *ONE_D)),
    "1d, sequence": ("adamw", (*WHOLE, *keys(tensor=4, sequence=4))),
    "1d, heads of 6": ("heads of 6", (*WHOLE, *ONE_D)),
    "2d": ("adamw", (*WHOLE, *TWO_D)),
    "ring": ("adamw", (*WHOLE, *RING, "comm=zero3")),
    "ulysses": ("adamw", (*WHOLE, *keys(sequence=4, sequence_mode="ulysses"), "comm=zero1")),
    "pipeline": ("deep", (*PIECES, *keys(pipeline=4))),
    "data, pipeline": ("adamw", (*HALVES, *HALF_PIPELINE)),
    "1d, lamb": ("lamb", (*WHOLE, *ONE_D)),
    "2d, lamb": ("lamb", (*WHOLE, *TWO_D)),
    "data, pipeline, lamb": ("lamb", (*HALVES, *HALF_PIPELINE)),
    "1d, lars": ("lars", (*WHOLE, *ONE_D)),
    "2d, lars": ("lars", (*WHOLE, *TWO_D)),
    "data, pipeline, lars": ("lars", (*HALVES, *HALF_PIPELINE)),
    "2d, dropout": ("dropout", (*WHOLE, *TWO_D)),
    "ring, dropout": ("dropout", (*WHOLE, *RING)),
    "pipeline, 1d, dropout": ("dropout", (*PAIRS, *keys(pipeline=2, tensor=2), "train.eval_batches=4")),
}
# of `make test-long`
MORE = {
    *("1d, heads of 6", "1d, lamb", "2d, lamb", "data, pipeline, lamb", "1d, lars", "2d, lars"),
    *("2d, dropout", "ring, dropout"),
}
OF_EIGHT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "2.5d": ("adamw", (*WHOLE, *keys(tensor=8, tensor_mode="2.5d", depth=2))),
    "3d": ("adamw", (*WHOLE, *keys(tensor=8, tensor_mode="3d"))),
    "data, pipeline, 1d": ("adamw", (*HALVES, *keys(pipeline=2, tensor=2))),
    "ring, pipeline, 1d": ("adamw", (*PIECES, *keys(sequence=2, sequence_mode="ring", pipeline=2, tensor=2))),
    "data, pipeline, 1d, lamb": ("lamb", (*HALVES, *keys(pipeline=2, tensor=2))),
}


def train(folder: Path, ranks: int, cases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """result.json of each case."""
    composed = {
        name: compose([*SMALL, f"cluster.devices_per_node={ranks}", *_model(more), *more])
        for name, more in cases.items()
    }
    outcome = launch_local(
        folder,
        cluster=next(iter(composed.values())).experiment.cluster,
        cases=[
            Case(name=name, folder=f"case{i}", experiment=each.resolved)
            for i, (name, each) in enumerate(composed.items())
        ],
        timeout_s=240,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error
    return {
        name: json.loads((folder / f"case{i}" / "result.json").read_text()) for i, name in enumerate(composed)
    }


def _model(more: Sequence[str]) -> tuple[str, ...]:
    """A GPT, where a case brings no model."""
    return () if any(key.startswith("model=") for key in more) else GPT


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process for each reference."""
    cases = {name: (*WHOLE, *more) for name, more in REFERENCES.items()}
    return train(tmp_path_factory.mktemp("alone"), 1, cases)


def off(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) > 0
    return max(abs(x / y - 1) for x, y in zip(found, expected, strict=True))


def check(
    folder: Path,
    ranks: int,
    cases: Mapping[str, tuple[str, tuple[str, ...]]],
    alone: Mapping[str, dict[str, Any]],
) -> None:
    overrides = {name: (*REFERENCES[reference], *more) for name, (reference, more) in cases.items()}
    worst = {}
    for name, found in train(folder, ranks, overrides).items():
        reference = cases[name][0]
        expected = alone[reference]
        assert len(found["loss"]) == 20
        worst[name] = off(found["loss"], expected["loss"])
        if reference == "dropout":
            losses = [[loss for _, loss in each["validation_loss"]] for each in (found, expected)]
            worst[name] = max(worst[name], off(*losses))
    assert {name: error for name, error in worst.items() if not error <= LIMIT} == {}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_references_differ_and_learn(alone: dict[str, dict[str, Any]]) -> None:
    losses = {name: each["loss"] for name, each in alone.items()}
    assert len({round(each[-1], 3) for each in losses.values()}) == len(losses)
    for name, each in losses.items():
        assert each[-1] < 0.95 * each[0], name


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [OF_FOUR.keys() - MORE, pytest.param(MORE, marks=pytest.mark.long)])
def test_losses_on_four_ranks(names: set[str], tmp_path: Path, alone: dict[str, dict[str, Any]]) -> None:
    check(tmp_path, 4, {name: case for name, case in OF_FOUR.items() if name in names}, alone)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_on_eight_ranks(tmp_path: Path, alone: dict[str, dict[str, Any]]) -> None:
    check(tmp_path, 8, OF_EIGHT, alone)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_of_other_families(tmp_path: Path) -> None:
    """A Llama, a BERT and a ViT; the ViT's labels are noise, and its losses need not fall."""
    layouts = {
        "1d": (*WHOLE, *ONE_D),
        "2d": (*WHOLE, *TWO_D),
        "ring": (*WHOLE, *RING),
        "pipeline, 1d": (*PIECES, *HALF_PIPELINE, "parallel.tensor=2"),
    }
    cases = {
        (family, layout): (*model, *more)
        for family, model in FAMILIES.items()
        for layout, more in layouts.items()
        if (family, layout) != ("vit", "ring")
    }
    names = {key: ", ".join(key) for key in cases}
    one = train(tmp_path / "1", 1, {family: (*model, *WHOLE) for family, model in FAMILIES.items()})
    four = train(tmp_path / "4", 4, {names[key]: keys_ for key, keys_ in cases.items()})
    assert len(four) == 11
    worst = {key: off(four[names[key]]["loss"], one[key[0]]["loss"]) for key in cases}
    assert {key: error for key, error in worst.items() if not error <= LIMIT} == {}
    assert all(one[family]["loss"][-1] < 0.95 * one[family]["loss"][0] for family in ("llama", "bert"))
