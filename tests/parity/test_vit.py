"""A ViT on pictures: both ledgers are equal entry by entry, and the numbers are those of a single process."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from twinbed.analysis.record import Record, read_record
from twinbed.conf.compose import Composed, compose
from twinbed.runtime.case import Case
from twinbed.runtime.data import build_batches
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.stack import build_model
from twinbed.runtime.vit import ViT

# Nothing divides: a class token and positions whose first size is 1, 3 channels less than the 4 ranks, 10 classes
ODD_VIT = (
    "model=vit_fashion",
    "model.layers=3",
    "model.hidden=36",
    "model.heads=3",
    "model.extra.patch=9",
    "cluster.shaped=false",
    "warmup_steps=0",
)
KEYS: dict[str, Sequence[str]] = {
    **{comm: (f"comm={comm}",) for comm in ("ddp", "ps", "zero1", "zero2", "zero3", "hpz", "zeropp")},
    "zeropp-accumulated": ("comm=zeropp", "batch.accumulation=3"),
    "zeropp-overlap": ("comm=zeropp", "comm.overlap=true"),
    "zeropp-chunks": ("comm=zeropp", "comm.gradient_chunks=3"),
    "zero3-recompute": ("comm=zero3", "recompute=full"),
    "zero3-fp16": ("comm=zero3", "precision=fp16"),
    "zero3-lamb": ("comm=zero3", "optimizer=lamb"),
    "zero3-lars": ("comm=zero3", "optimizer=lars", "optimizer.exclude_1d=false"),
    "ddp-lamb": ("comm=ddp", "optimizer=lamb"),
}


def pictures(folder: Path) -> tuple[str, ...]:
    return ("data=fashion_mnist", f"data.path={folder}", "data.num_train=40", "data.num_test=21")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ledgers_are_equal_under_every_policy(
    picture_folder: Callable[..., Path], run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    common = (*ODD_VIT, *pictures(picture_folder()), "batch.micro=2", "steps=2", "train.eval_every=1")
    differences = []
    for name, (composed, real) in run_cases({n: (*common, *keys) for n, keys in KEYS.items()}).items():
        assert composed.experiment.train.eval_batches == 3  # 21 pictures, 2 at once on 4 ranks
        try:
            sim = same_ledger(composed, real)
        except AssertionError as err:
            differences.append(f"{name}: {err}")
            continue
        figures = [row for row in sim.ledger if row.phase == "eval" and row.op == "all_reduce"]
        assert {row.payload_bytes for row in figures} == {8}, name  # loss and how many were right
    assert not differences, "\n".join(differences)


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_ranks_train_and_validate_as_a_single_process_does(
    picture_folder: Callable[..., Path],
    tmp_path: Path,
    run_cases: Callable[..., Any],
    same_ledger: Callable[..., Any],
) -> None:
    """Losses, validation losses and accuracy; zeropp, which quantizes, follows them."""
    steps = 12
    common = (
        *ODD_VIT,
        *pictures(picture_folder()),
        "precision=fp32",
        f"steps={steps}",
        "train.eval_every=4",
        "optimizer.lr=3e-3",
    )
    runs = run_cases(
        {
            "zero3": (*common, "comm=zero3", "batch.micro=2"),
            "zero3-accumulated": (*common, "comm=zero3", "batch.global_sequences=8"),
            "ddp": (*common, "comm=ddp", "batch.micro=2"),
            "zeropp": (*common, "comm=zeropp", "batch.micro=2"),
        }
    )
    for composed, real in runs.values():
        same_ledger(composed, real)
    losses, validations = single_process(runs["zero3"][0], steps)
    assert len({accuracy for _, accuracy in validations}) > 1, "accuracy never changed: nothing is compared"
    for name in ("zero3", "zero3-accumulated", "ddp"):
        result = runs[name][1].result
        assert result["loss"] == pytest.approx(losses, rel=2e-5), name
        assert [loss for _, loss in result["validation_loss"]] == pytest.approx(
            [loss for loss, _ in validations], rel=2e-5
        ), name
        assert [step for step, _ in result["validation_accuracy"]] == [3, 7, 11], name
        assert [share for _, share in result["validation_accuracy"]] == pytest.approx(
            [accuracy for _, accuracy in validations]
        ), name
    assert runs["zeropp"][1].result["loss"] == pytest.approx(losses, rel=0.05)
    with (tmp_path / "zero3" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = [float(row["validation_accuracy"]) for row in rows if row["validation_accuracy"]]
    assert told == pytest.approx([accuracy for _, accuracy in validations])


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_layouts_train_and_validate_as_a_single_process_does(
    picture_folder: Callable[..., Path], run_cases: Callable[..., Any]
) -> None:
    steps = 8
    common = (
        *ODD_VIT,
        "model.layers=2",
        "model.hidden=32",
        "model.heads=4",
        *pictures(picture_folder()),
        "precision=fp32",
        "comm=ddp",
        f"steps={steps}",
        "train.eval_every=4",
        "optimizer.lr=3e-3",
    )
    layouts = {
        "tensor": ("parallel.tensor=4", "batch.micro=8"),
        "tensor-data": ("parallel.tensor=2", "batch.micro=4"),
        "2d": ("parallel.tensor=4", "parallel.tensor_mode=2d", "batch.micro=8"),
        "pipeline": ("parallel.pipeline=2", "parallel.tensor=2", "batch.micro=4", "batch.accumulation=2"),
    }
    runs = run_cases({name: (*common, *keys) for name, keys in layouts.items()})
    losses, validations = single_process(runs["tensor"][0], steps)
    for name, (_, real) in runs.items():
        result = real.result
        assert result["loss"] == pytest.approx(losses, rel=2e-5), name
        found = [loss for _, loss in result["validation_loss"]]
        assert found == pytest.approx([loss for loss, _ in validations], rel=2e-5), name
        shares = [share for _, share in result["validation_accuracy"]]
        assert shares == pytest.approx([accuracy for _, accuracy in validations]), name


def single_process(composed: Composed, steps: int) -> tuple[list[float], list[tuple[float, float]]]:
    """The same training in plain torch, 8 pictures at once; (loss, accuracy) of each validation, over 21 at once."""
    experiment, spec = composed.experiment, composed.spec
    experiment.batch.micro = 8
    batches = build_batches(experiment, spec, rank=0, num_ranks=1)
    experiment.batch.micro = 21
    tests = build_batches(experiment, spec, rank=0, num_ranks=1)
    model = build_model(spec, seed=experiment.seed)
    assert isinstance(model, ViT)
    conf = experiment.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=conf.lr,
        betas=(conf.betas[0], conf.betas[1]),
        eps=conf.eps,
        weight_decay=conf.weight_decay,
    )
    losses, validations = [], []
    for step in range(steps):
        images, labels = map(torch.from_numpy, batches.train(step, 0))
        loss = model(images, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), experiment.train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 4 == 0:
            with torch.no_grad():
                loss = model(*map(torch.from_numpy, tests.validation(0)))
            validations.append((loss.item(), model.num_right.item() / 21))
    return losses, validations


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_epochs_end_where_the_pictures_do_on_one_rank(
    picture_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """5 epochs of 40 pictures by 16: 12.5 steps, so 13; the run learns them by heart."""
    keys = (
        "target=runtime",
        *ODD_VIT,
        *pictures(picture_folder()),
        "cluster.nodes=1",
        "cluster.devices_per_node=1",
        "comm=ddp",
        "precision=fp32",
        "batch.micro=16",
        "train.epochs=5",
        "train.eval_every=13",
        "optimizer.lr=3e-3",
    )
    composed = compose(keys)
    cases = [Case(name="one", folder="one", experiment=composed.resolved)]
    outcome = launch_local(
        tmp_path, cluster=composed.experiment.cluster, cases=cases, timeout_s=100, show_progress=False
    )
    assert outcome.status == "ok", outcome.error
    record: Record = read_record(tmp_path / "one")
    assert len(record.result["loss"]) == 13
    assert record.result["loss"][-1] < 0.8 * math.log(10)
    assert record.result["validation_accuracy"][0][1] > 0.2
    assert not record.ledger  # one rank sends nothing
