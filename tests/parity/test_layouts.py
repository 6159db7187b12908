"""Every way to lay a model out, and products of them: both targets' ledgers and decisions are equal."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

SMALL = (
    "model.layers=4",
    "model.hidden=32",
    "model.heads=8",
    "model.sequence=16",
    "data=synthetic",
    "cluster.shaped=false",
    "precision=fp32",
    "steps=2",
    "warmup_steps=0",
    "train.gradient_clipping=1.0",
)
GPT = ("model=gpt", "model.vocab=61")
LLAMA = ("model=llama_tiny", "model.kv_heads=4", "model.ffn=64", "model.vocab=64")
BERT = ("model=bert_tiny", "model.vocab=61")
VIT = ("model=vit_tiny", "model.extra.patch=4")
TIED = ("model.tied_embeddings=true",)
VALIDATED = ("train.eval_every=1", "train.eval_batches=2")
HPZ = ("comm=zero3", "comm.zero_hpz_partition_size=null")


def keys(**parallel: object) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={value}" for key, value in parallel.items())


MODES_OF_FOUR: Mapping[str, tuple[str, ...]] = {
    "1d": keys(tensor=4),
    "1d, sequence": keys(tensor=4, sequence=4),
    "2d": keys(tensor=4, tensor_mode="2d"),
    "ring": keys(sequence=4, sequence_mode="ring"),
    "ulysses": keys(sequence=4, sequence_mode="ulysses"),
    "pipeline": keys(pipeline=4),
}
PRODUCTS_OF_FOUR: Mapping[str, tuple[str, ...]] = {
    "data, 1d, zeropp": (*keys(tensor=2), "comm=zeropp"),
    "data, ring, zero3": (*keys(sequence=2, sequence_mode="ring"), "comm=zero3"),
    "ring, ddp": (
        *keys(sequence=4, sequence_mode="ring"),
        "comm=ddp",
    ),  # no rank lacks gradients: no sum of norms
    "ring, pipeline": keys(sequence=2, sequence_mode="ring", pipeline=2),
    "1d, pipeline, gpipe": keys(tensor=2, pipeline=2, pipeline_schedule="gpipe"),
    "ulysses, 1d": keys(sequence=2, sequence_mode="ulysses", tensor=2),
    "data, interleaved": (*keys(pipeline=2, virtual_stages=2, pipeline_schedule="interleaved"), "comm=zero3"),
    "pipeline first": (*keys(tensor=2, pipeline=2), "parallel.order=[pipeline,tensor,sequence,data]"),
}
OF_EIGHT: Mapping[str, tuple[str, ...]] = {
    "2.5d": keys(tensor=8, tensor_mode="2.5d", depth=2),
    "3d": keys(tensor=8, tensor_mode="3d"),
    "data, pipeline, 1d, zeropp": (*keys(tensor=2, pipeline=2), "comm=zeropp"),
    "ring, 2d": keys(sequence=2, sequence_mode="ring", tensor=4, tensor_mode="2d"),
    "data, 2d, zero3": (*keys(tensor=4, tensor_mode="2d"), "comm=zero3"),
    "2d, pipeline": keys(tensor=4, tensor_mode="2d", pipeline=2),
    "data, ring, pipeline": (*keys(sequence=2, sequence_mode="ring", pipeline=2), "comm=zero1"),
}


INTERLEAVED = keys(pipeline=2, virtual_stages=2, pipeline_schedule="interleaved")
RING = keys(sequence=2, sequence_mode="ring")
# Other families, and what a training does beside its passes
MORE_OF_FOUR: Mapping[str, tuple[str, ...]] = {
    "llama: 2d, tied, recompute, bf16": (
        *LLAMA,
        *TIED,
        *keys(tensor=4, tensor_mode="2d"),
        "recompute=full",
        "precision=bf16",
    ),
    "llama: interleaved, zero1, lamb, validation": (
        *LLAMA,
        *INTERLEAVED,
        *VALIDATED,
        "comm=zero1",
        "optimizer=lamb",
    ),
    "llama: ulysses, 1d, hpz": (*LLAMA, *keys(sequence=2, sequence_mode="ulysses", tensor=2), *HPZ),
    "bert: 1d sequence, pipeline": (*BERT, *keys(tensor=2, sequence=2, pipeline=2), "optimizer=lamb"),
    "bert: ring, hpz, recompute, validation": (
        *BERT,
        *keys(sequence=4, sequence_mode="ring"),
        *HPZ,
        *VALIDATED,
        "recompute=full",
    ),
    "bert: interleaved, 1d, ddp": (*BERT, *INTERLEAVED, *keys(tensor=2), "comm=ddp"),
    "vit: 2d, dropout, validation": (
        *VIT,
        *keys(tensor=4, tensor_mode="2d"),
        *VALIDATED,
        "train.dropout=0.1",
        "comm=ddp",
    ),
    "vit: data, pipeline, ps": (*VIT, *keys(pipeline=2), "comm=ps"),
    "vit: gpipe, 1d, zero1, lars": (
        *VIT,
        *keys(pipeline=2, tensor=2, pipeline_schedule="gpipe"),
        "comm=zero1",
        "optimizer=lars",
    ),
    "gpt: 1d, heads of 6": (*GPT, *keys(tensor=4), "model.heads=4", "model.hidden=24"),
    "gpt: 2d, heads of 3": (*GPT, *keys(tensor=4, tensor_mode="2d"), "model.heads=4", "model.hidden=12"),
    # of one tensor rank all modes are 1d's
    "gpt: ring, pipeline, 3d of one": (*GPT, *RING, *keys(pipeline=2, tensor_mode="3d")),
    "gpt: data, pipeline, ps, tied": (*GPT, *TIED, *keys(pipeline=2), "comm=ps", "optimizer=lamb"),
    "gpt: contiguous ring, 1d, order": (
        *GPT,
        *TIED,
        *RING,
        *keys(tensor=2, zigzag="false"),
        "parallel.order=[sequence,data,pipeline,tensor]",
        "comm=zero2",
    ),
    "gpt: data, pipeline, ddp, lars": (*GPT, *keys(pipeline=2), "comm=ddp", "optimizer=lars"),
}
# the others are of `make test-long`
SOME_OF_FOUR = (
    "llama: ulysses, 1d, hpz",
    "bert: 1d sequence, pipeline",
    "vit: 2d, dropout, validation",
    "gpt: contiguous ring, 1d, order",
    "gpt: data, pipeline, ddp, lars",
)

MORE_OF_EIGHT: Mapping[str, tuple[str, ...]] = {
    "gpt: 2d, pipeline, tied": (*GPT, *TIED, *keys(tensor=4, tensor_mode="2d", pipeline=2), "comm=ddp"),
    "llama: data, pipeline, 1d, hpz": (*LLAMA, *TIED, *keys(tensor=2, pipeline=2), *HPZ, "precision=bf16"),
    "bert: ring, 1d, pipeline": (*BERT, *RING, *keys(tensor=2, pipeline=2), *VALIDATED, "comm=zero3"),
    "vit: 3d": (*VIT, *keys(tensor=8, tensor_mode="3d"), "optimizer=lamb"),
}


def cases(per_node: int, layouts: Mapping[str, tuple[str, ...]], *models: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for model in models:
        for name, layout in layouts.items():
            label = f"{model[0].removeprefix('model=')}: {name}"
            found[label] = (
                *model,
                *SMALL,
                "cluster.nodes=2",
                f"cluster.devices_per_node={per_node}",
                "batch.micro=4",
                "batch.accumulation=4",
                *layout,
            )
    return found


def more_cases(per_node: int, table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """As `cases`; each brings its model, and its keys come last."""
    batch = (
        "cluster.nodes=2",
        f"cluster.devices_per_node={per_node}",
        "batch.micro=4",
        "batch.accumulation=2",
    )
    found = {}
    for name, over in table.items():
        small = SMALL if over[0] != VIT[0] else [key for key in SMALL if not key.startswith("model.sequence")]
        found[name] = (over[0], *small, *batch, *over[1:])
    return found


def check(found: Mapping[str, Any], same_ledger: Callable[..., Any]) -> None:
    differences = []
    for name, (composed, real) in found.items():
        try:
            same_ledger(composed, real)
        except (AssertionError, ValueError) as err:
            differences.append(f"{name}: {err}")
    assert not differences, "\n".join(differences)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ledgers_of_four_ranks_are_equal(
    run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    everything = {**MODES_OF_FOUR, **PRODUCTS_OF_FOUR}
    some = {name: over for name, over in MORE_OF_FOUR.items() if name in SOME_OF_FOUR}
    assert len(some) == len(SOME_OF_FOUR)
    check(run_cases(cases(2, everything, GPT) | more_cases(2, some)), same_ledger)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ledgers_of_more_of_four_ranks_are_equal(
    run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    rest = {name: over for name, over in MORE_OF_FOUR.items() if name not in SOME_OF_FOUR}
    check(run_cases(more_cases(2, rest)), same_ledger)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ledgers_of_eight_ranks_are_equal(
    run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    check(run_cases(cases(4, OF_EIGHT, GPT) | more_cases(4, MORE_OF_EIGHT)), same_ledger)
