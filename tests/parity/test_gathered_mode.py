"""The mode of examples/gathered_mode.py, which no engine knows: both targets' ledgers are equal, and it learns what
data parallelism learns from the same sequences.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gathered_mode.py"
MODELS = {
    "gpt": ("model=gpt", "model.vocab=61", "model.tied_embeddings=true"),
    "llama": ("model=llama_tiny", "model.kv_heads=4", "model.ffn=64", "model.vocab=64"),
}
SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=8",
    "model.sequence=16",
    "data=synthetic",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.shaped=false",
    "precision=fp32",
    "steps=3",
    "warmup_steps=0",
    "batch.accumulation=2",
    "train.gradient_clipping=1",
)
# Four sequences a micro-batch, on all four ranks together
PLAIN = ("batch.micro=1", "comm=ddp")
MODE = (f"parallel.tensor_mode={EXAMPLE}:Gathered",)
LAYOUTS = {
    "alone": (*MODE, "parallel.tensor=4", "batch.micro=4", "comm=ddp"),
    "data": (*MODE, "parallel.tensor=2", "batch.micro=2", "comm=zero3"),
    "pipeline": (*MODE, "parallel.tensor=2", "parallel.pipeline=2", "batch.micro=4", "comm=ddp"),
    "ring": (
        *MODE,
        "parallel.tensor=2",
        "parallel.sequence=2",
        "parallel.sequence_mode=ring",
        "batch.micro=4",
        "comm=zero1",
        "recompute=full",
    ),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mode_of_ones_own_has_equal_ledgers_and_right_losses(
    run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    cases = {
        f"{model}, {name}": (*keys, *SMALL, *layout)
        for model, keys in MODELS.items()
        for name, layout in {"plain": PLAIN, **LAYOUTS}.items()
    }
    found = run_cases(cases)
    for model in MODELS:
        expected = found[f"{model}, plain"][1].result["loss"]
        for name in LAYOUTS:
            composed, real = found[f"{model}, {name}"]
            same_ledger(composed, real)
            assert any(row.axis == "share" and row.op == "all_gather" for row in real.ledger), name
            assert real.result["loss"] == pytest.approx(expected, rel=1e-5), name
