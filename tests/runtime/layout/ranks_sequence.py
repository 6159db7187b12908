"""Runs on each rank for test_sequence.py: models whose sequences lie over two or four ranks."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import ParallelConf
from twinbed.policies.mesh import SEQUENCE
from twinbed.runtime.layout import token_index

from ranks_layout import (
    BERT,
    COLLECTIVES,
    GPT,
    LLAMA,
    data_of,
    laid_out,
    layout_of,
    model_of,
    relative,
)
from ranks_run import run_cases

MICRO = 4


def compare(spec: ModelSpec, dtype: torch.dtype, **keys: Any) -> dict[str, Any]:
    """With one process, on this rank.

    labels: of this rank's tokens. errors: relative L2 of the loss and of each parameter's gradient, averaged over the
    ranks of the sequence. sent: (phase, stream, op, elements on the wire) of each row of the first block's attention.
    """
    tokens, targets = data_of(spec, micro=MICRO, ignored=True)
    alone = model_of(spec, dtype)
    expected = alone(tokens, targets)
    expected.backward()
    conf = ParallelConf(**keys)
    model, laid, ledger = laid_out(spec, conf, dtype, micro=MICRO)
    layout, groups = layout_of(conf, spec, MICRO)[:2]
    here = token_index(layout, groups.mesh, groups.rank, spec.sequence)
    ledger.at(phase="forward")
    loss = model(tokens[:, here], targets[:, here])
    ledger.at(phase="backward")
    loss.backward()
    ledger.at(phase="after")
    found = {"loss": relative(loss.detach(), expected.detach())}
    gradients = laid.gather_gradients()
    truths = {name: parameter.grad for name, parameter in alone.named_parameters()}
    largest = max(float(truth.norm()) for truth in truths.values() if truth is not None)
    for name, truth in truths.items():
        assert truth is not None
        gradient = gradients[name].contiguous()
        COLLECTIVES.all_reduce(groups[SEQUENCE], gradient.view(-1))
        found[name] = relative(gradient / layout.sequence, truth, least=1e-4 * largest)
    rows = [row for row in ledger.rows if row.layer.startswith("block.0.") and row.axis == SEQUENCE]
    sent = [(row.phase, row.stream, row.op, row.wire_bytes / dtype.itemsize) for row in rows]
    return {"labels": int((targets[:, here] != -100).sum()), "errors": found, "sent": sent}


# name: (model, keys)
EVERYWHERE: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "ring": (GPT, {"sequence_mode": "ring"}),
    "ring contiguous": (GPT, {"sequence_mode": "ring", "zigzag": False}),
    "ring grouped": (LLAMA, {"sequence_mode": "ring"}),
    "ring bert": (BERT, {"sequence_mode": "ring"}),
    "rsa bert": (BERT, {"sequence_mode": "rsa"}),
    "ulysses": (GPT, {"sequence_mode": "ulysses"}),
    "ulysses grouped": (LLAMA, {"sequence_mode": "ulysses"}),
}


def whole_world() -> dict[str, Any]:
    """The sequence over all ranks."""
    size = dist.get_world_size()
    found = {}
    for name, (spec, keys) in EVERYWHERE.items():
        dtypes = (torch.float32, torch.float64) if spec is GPT else (torch.float64,)
        for dtype in dtypes:
            found[f"{name} {str(dtype)[6:]}"] = compare(spec, dtype, sequence=size, **keys)
    return found


def four() -> dict[str, Any]:
    """And over two of four, beside the two that share each matrix."""
    found = whole_world()
    for mode in ("ring", "ulysses"):
        spec = replace(GPT, tied_embeddings=True)
        found[f"{mode} 1d float64"] = compare(spec, torch.float64, sequence=2, tensor=2, sequence_mode=mode)
    return found


if __name__ == "__main__":
    run_cases({"two": whole_world, "four": four})
