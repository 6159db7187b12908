"""What ranks hold: bytes of parameters, and of what autograd keeps unit by unit, are the simulator's, to the byte."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from twinbed.analysis.parity import compare_records
from twinbed.sim.simulate import simulate

SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=8",
    "data=synthetic",
    "cluster.shaped=false",
    "cluster.nodes=1",
    "train.gradient_clipping=1.0",
    "batch.micro=4",
    "steps=1",
    "warmup_steps=1",
)
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt": ("model=gpt", "model.vocab=61", "model.sequence=16"),
    "llama": (
        "model=llama_tiny",
        "model.kv_heads=4",
        "model.ffn=64",
        "model.vocab=64",
        "model.sequence=16",
    ),
    "bert": ("model=bert_tiny", "model.vocab=61", "model.sequence=16"),
    "vit": ("model=vit_tiny",),
}


def keys(**parallel: object) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={value}" for key, value in parallel.items())


MODES_OF_FOUR: Mapping[str, tuple[str, ...]] = {
    "data": (),
    "1d": keys(tensor=4),
    "1d, sequence": keys(tensor=4, sequence=4),
    "2d": keys(tensor=4, tensor_mode="2d"),
    "ring": keys(sequence=4, sequence_mode="ring"),
    "ulysses": keys(sequence=4, sequence_mode="ulysses"),
    "rsa": keys(sequence=4, sequence_mode="rsa"),
    "pipeline": (*keys(pipeline=2), "batch.accumulation=4"),
}
MODES_OF_EIGHT: Mapping[str, tuple[str, ...]] = {
    "2.5d": keys(tensor=8, tensor_mode="2.5d", depth=2),
    "3d": keys(tensor=8, tensor_mode="3d"),
}
FP32, BF16 = "precision=fp32", "precision=bf16"


def cases(ranks: int, modes: Mapping[str, tuple[str, ...]], *models: str) -> dict[str, tuple[str, ...]]:
    """fp32 with whole weights, and bf16 with shards."""
    found = {}
    for model in models:
        for name, layout in modes.items():
            if model == "vit" and ("sequence" in name or name in ("ring", "ulysses", "rsa")):
                continue
            if name == "rsa" and model != "bert":  # causal
                continue
            for precision, comm in ((FP32, "ddp"), (BF16, "zero3")):
                label = f"{model}, {name}, {precision.removeprefix('precision=')}, {comm}"
                each = (*MODELS[model], *SMALL, f"cluster.devices_per_node={ranks}")
                found[label] = (*each, precision, f"comm={comm}", *layout)
    return found


def differences(found: Mapping[str, Any]) -> dict[str, Any]:
    """(measured, simulated) of what is not the same."""
    wrong: dict[str, Any] = {}
    for name, (composed, real) in found.items():
        sim = simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)
        parity = compare_records(sim, real)
        if not parity["ledger_equal"]:
            wrong[f"{name}: ledger"] = parity["first_difference"]
        measured, simulated = (each.result["saved_bytes"] for each in (real, sim))
        assert measured, name
        bytes_of = [each.result["memory_bytes"] for each in (real, sim)]
        pairs = {
            **{unit: (measured.get(unit), simulated.get(unit)) for unit in {*measured, *simulated}},
            **{key: tuple(each[key] for each in bytes_of) for key in ("parameters", "activations")},
        }
        wrong |= {f"{name}: {key}": pair for key, pair in pairs.items() if pair[0] != pair[1]}
    return wrong


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("models", [("gpt", "bert"), pytest.param(("llama", "vit"), marks=pytest.mark.long)])
def test_what_four_ranks_hold(models: tuple[str, ...], run_cases: Callable[..., Any]) -> None:
    assert differences(run_cases(cases(4, MODES_OF_FOUR, *models))) == {}


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_eight_ranks_hold(run_cases: Callable[..., Any]) -> None:
    assert differences(run_cases(cases(8, MODES_OF_EIGHT, *MODELS))) == {}
