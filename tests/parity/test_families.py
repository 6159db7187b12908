"""Llama, Qwen2 and BERT, and dropout: ledgers are equal entry by entry, and the numbers are a single process's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from twinbed.conf.compose import Composed
from twinbed.conf.schema import Precision
from twinbed.runtime.data import build_batches
from twinbed.runtime.stack import build_model

SIZES = ("model.layers=3", "model.sequence=12", "cluster.shaped=false", "steps=4", "warmup_steps=0")
# Nothing divides: 1-D parameters, vocabularies of 257 and 259, widths of 36 over 4 ranks
FAMILIES: dict[str, Sequence[str]] = {
    "llama": (
        "model=llama_tiny",
        "model.hidden=36",
        "model.heads=6",
        "model.kv_heads=2",
        "model.ffn=50",
        "model.vocab=257",
    ),
    "bert": ("model=bert_tiny", "model.hidden=36", "model.heads=3", "model.vocab=259"),
    "gpt": ("model=gpt", "model.hidden=36", "model.heads=3", "model.vocab=257"),
}
LLAMA, BERT, GPT = FAMILIES.values()
EVAL = ("train.eval_every=2", "train.eval_batches=2")
CASES: dict[str, Sequence[str]] = {
    "llama-zero3": (*LLAMA, "comm=zero3", "batch.micro=2"),
    "llama-zeropp": (*LLAMA, "comm=zeropp", *EVAL),
    "llama-tied": (*LLAMA, "comm=zero3", "model.tied_embeddings=true", "data=synthetic"),
    "qwen2-zeropp": (*LLAMA, "comm=zeropp", "model.family=qwen2", "recompute=full"),
    "bert-zero3": (*BERT, "comm=zero3", "batch.micro=2", *EVAL),
    "bert-zeropp": (*BERT, "comm=zeropp", "batch.accumulation=2"),
    "bert-ddp": (*BERT, "comm=ddp", "batch.micro=2", "recompute=full"),
    "dropout-zero3": (*GPT, "comm=zero3", "train.dropout=0.1", "batch.micro=2", *EVAL),
    "dropout-ddp": (*GPT, "comm=ddp", "train.dropout=0.1", "batch.accumulation=2"),
    "dropout-recompute": (*LLAMA, "comm=zero3", "train.dropout=0.1", "batch.micro=2", "recompute=full"),
    "dropout-bert": (*BERT, "comm=zero3", "train.dropout=0.1", "batch.micro=2"),
    "bf16-ddp": (*LLAMA, "comm=ddp", "batch.micro=2", "precision=bf16"),
    "fp16-bert": (*BERT, "comm=zero3", "batch.micro=2", "precision=fp16"),
    "bf16": (*LLAMA, "comm=zero3", "train.dropout=0.1", "batch.micro=2", "precision=bf16"),
}


# of `make test-long`
MORE = {"llama-tied", "bert-zeropp", "bert-ddp", "dropout-ddp", "dropout-recompute", "bf16-ddp"}


@pytest.mark.distributed
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "names", [sorted(CASES.keys() - MORE), pytest.param(sorted(MORE), marks=pytest.mark.long)]
)
def test_ledgers_are_equal_and_numbers_are_a_single_process_s(
    names: Sequence[str], run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    runs = run_cases({name: (*SIZES, "precision=fp32", *CASES[name]) for name in names})
    differences = []
    for name, (composed, real) in runs.items():
        try:
            same_ledger(composed, real)
        except AssertionError as err:
            differences.append(f"{name}: {err}")
            continue
        losses, validations = single_process(composed)
        exact = composed.experiment.comm.name != "zeropp" and composed.experiment.precision is Precision.fp32
        assert real.result["loss"] == pytest.approx(losses, rel=2e-5 if exact else 0.02), name
        found = [loss for _, loss in real.result.get("validation_loss", ())]
        assert found == pytest.approx(validations, rel=2e-5 if exact else 0.02), name
    assert not differences, "\n".join(differences)
    for name in {"dropout-zero3", "dropout-bert"} & runs.keys():
        composed, real = runs[name]
        composed.experiment.train.dropout = 0.0
        without, _ = single_process(composed)
        assert real.result["loss"][0] != pytest.approx(without[0], rel=1e-4), name


def single_process(composed: Composed) -> tuple[list[float], list[float]]:
    """The same training in plain torch, all sequences of a step at once: losses, validation losses."""
    experiment, spec = composed.experiment, composed.spec
    batch, train = experiment.batch, experiment.train
    ranks, micro, accumulation = experiment.cluster.num_ranks, batch.micro, batch.accumulation
    batch.micro, batch.accumulation = micro * ranks * accumulation, 1
    batches = build_batches(experiment, spec, rank=0, num_ranks=1)
    batch.micro = micro * ranks
    tests = build_batches(experiment, spec, rank=0, num_ranks=1)
    batch.micro, batch.accumulation = micro, accumulation
    model = build_model(spec, seed=experiment.seed, dropout=train.dropout)
    conf = experiment.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=conf.lr,
        betas=(conf.betas[0], conf.betas[1]),
        eps=conf.eps,
        weight_decay=conf.weight_decay,
    )
    losses, validations = [], []
    for step in range(experiment.steps):
        model.dropout_clock.at(step=step, first_sequence=0)
        loss = model(*map(torch.from_numpy, batches.train(step, 0)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if train.eval_every and (step + 1) % train.eval_every == 0:
            with torch.no_grad():
                model.eval()
                found = [
                    model(*map(torch.from_numpy, tests.validation(i))) for i in range(train.eval_batches)
                ]
                model.train()
            validations.append(torch.stack(found).mean().item())
    return losses, validations
