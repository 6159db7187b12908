"""Runs on each rank for test_layout.py."""

import faulthandler
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import Backend, ParallelConf
from twinbed.policies.layout import ParallelLayout, build_parallel
from twinbed.policies.mesh import Mesh
from twinbed.runtime.collectives import build_collectives
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.layout import LaidOut, lay_out
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.stack import Stack, build_model

MICRO, TOKENS, VOCAB = 4, 16, 61  # the vocabulary is padded in every mode
COLLECTIVES = build_collectives(Backend.gloo)

GPT = ModelSpec(
    name="test",
    family="gpt",
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=8,
    ffn=256,
    vocab=VOCAB,
    sequence=TOKENS,
    tied_embeddings=False,
    head="lm",
)
LLAMA = replace(GPT, family="llama", kv_heads=4, qkv_bias=False, out_bias=False, mlp_bias=False)
BERT = replace(GPT, family="bert", head="masked_lm", tied_embeddings=True, token_types=2)
VIT = replace(
    GPT,
    family="vit",
    head="classifier",
    vocab=0,
    sequence=7,
    image=(9, 13),
    patch=(4, 4),
    channels=3,
    classes=11,
)


def model_of(spec: ModelSpec, dtype: torch.dtype) -> Stack:
    """No parameter is 0 or 1, as biases and norms are at first."""
    model = build_model(spec, seed=3).to(dtype)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=random)
    return model


def data_of(spec: ModelSpec, *, micro: int, ignored: bool) -> tuple[Tensor, Tensor]:
    """Whole sequences (or images); with `ignored` many labels are lacking, in some sequences more than in others."""
    random = torch.Generator().manual_seed(5)
    if spec.family == "vit":
        images = torch.randn(micro, spec.channels, *spec.image, generator=random, dtype=torch.float64)
        return images, torch.randint(0, spec.classes, (micro,), generator=random)
    tokens, targets = torch.randint(0, spec.vocab, (2, micro, TOKENS), generator=random)
    if ignored:
        targets[0, 3:] = -100
        targets[1, :11] = -100
        targets[2, ::2] = -100
    return tokens, targets


def layout_of(conf: ParallelConf, spec: ModelSpec, micro: int) -> tuple[ParallelLayout, Groups, Ledger]:
    world = dist.get_world_size()
    layout = build_parallel(conf, spec, num_ranks=world, micro=micro, micro_batches=1, sequence=spec.sequence)
    mesh = Mesh(world, world, dims=layout.dims)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    return layout, Groups(mesh), ledger


def laid_out(
    spec: ModelSpec, conf: ParallelConf, dtype: torch.dtype = torch.float32, *, micro: int = MICRO
) -> tuple[Stack, LaidOut, Ledger]:
    layout, groups, ledger = layout_of(conf, spec, micro)
    model = model_of(spec, dtype)
    laid = lay_out(
        model,
        layout,
        groups=groups,
        ledger=ledger,
        collectives=COLLECTIVES,
        micro=micro,
        sequence=spec.sequence,
    )
    return model, laid, ledger


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """L2. What is smaller than `least` in truth is measured by that: a key's bias, which every score of a token has
    alike, has a gradient of 0 but for rounding.
    """
    return float((found.double() - expected.double()).norm()) / max(float(expected.double().norm()), least)


def errors(
    spec: ModelSpec, conf: ParallelConf, dtype: torch.dtype, *, ignored: bool = False, micro: int = MICRO
) -> dict[str, float]:
    """Relative L2 error of the loss and of each parameter's gradient against this process alone."""
    tokens, targets = data_of(spec, micro=micro, ignored=ignored)
    alone = model_of(spec, dtype)
    expected = alone(tokens, targets)
    expected.backward()
    model, laid, _ = laid_out(spec, conf, dtype, micro=micro)
    names = [name for name, _ in alone.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    loss = model(tokens, targets)
    loss.backward()
    found = {"loss": relative(loss.detach(), expected.detach())}
    gradients = laid.gather_gradients()
    wholes = laid.gather_parameters()
    truths = {name: parameter.grad for name, parameter in alone.named_parameters()}
    largest = max(float(truth.norm()) for truth in truths.values() if truth is not None)
    for name, parameter in alone.named_parameters():
        truth = truths[name]
        assert torch.equal(wholes[name], parameter), name
        assert truth is not None
        found[name] = relative(gradients[name], truth, least=1e-4 * largest)
    return found


MODES: dict[str, dict[str, Any]] = {
    "1d": {"tensor": 4},
    "1d sequence": {"tensor": 4, "sequence": 4},
    "2d": {"tensor": 4, "tensor_mode": "2d"},
    "2.5d": {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
    "3d": {"tensor": 8, "tensor_mode": "3d"},
}


def gradients(*modes: str) -> dict[str, dict[str, float]]:
    """The errors of each mode and variant."""
    found = {}
    for mode in modes:
        conf = ParallelConf(**MODES[mode])
        for tied in (False, True):
            for dtype in (torch.float32, torch.float64):
                ignored = tied == (dtype == torch.float32)  # each of both with and without
                name = f"{mode} {'tied' if tied else 'untied'} {str(dtype)[6:]}"
                found[name] = errors(replace(GPT, tied_embeddings=tied), conf, dtype, ignored=ignored)
    return found


def families(*modes: str) -> dict[str, dict[str, float]]:
    """The errors of the other models."""
    found = {}
    for mode in modes:
        for spec in (LLAMA, BERT, VIT):
            if spec is VIT and "sequence" in mode:
                continue
            conf = ParallelConf(**MODES[mode])
            found[f"{mode} {spec.family} float64"] = errors(spec, conf, torch.float64, ignored=True)
    return found


def volume(spec: ModelSpec, conf: ParallelConf, layer: str, *, micro: int = MICRO) -> tuple[float, int]:
    """(elements that this rank sends for the layers whose names begin so, forward and backward; rows)."""
    tokens, targets = data_of(spec, micro=micro, ignored=False)
    model, _, ledger = laid_out(spec, conf, micro=micro)
    ledger.at(phase="forward")
    model(tokens, targets).backward()
    rows = [row for row in ledger.rows if row.layer.startswith(layer)]
    return sum(row.wire_bytes for row in rows) / 4, len(rows)


def four() -> dict[str, Any]:
    found: dict[str, Any] = {
        "errors": gradients("1d", "1d sequence", "2d") | families("1d", "1d sequence", "2d")
    }
    found["1d"] = volume(GPT, ParallelConf(tensor=4), "block.0.")
    found["1d sequence"] = volume(LLAMA, ParallelConf(tensor=4, sequence=4), "block.0.mlp.down_proj")
    found["2d"] = volume(LLAMA, ParallelConf(tensor=4, tensor_mode="2d"), "block.0.mlp.down_proj")
    return found


def eight() -> dict[str, Any]:
    found: dict[str, Any] = {"errors": gradients("2.5d", "3d") | families("2.5d", "3d")}
    for mode in ("2.5d", "3d"):
        found[mode] = volume(LLAMA, ParallelConf(**MODES[mode]), "block.0.mlp.down_proj")
    return found


def nine() -> dict[str, Any]:
    """Trees of three ranks, and a broadcast that comes two steps later."""
    conf = ParallelConf(tensor=9, tensor_mode="2d")
    wide = {"hidden": 72, "heads": 6, "kv_heads": 6, "ffn": 144}
    found: dict[str, Any] = {
        "errors": {"2d float64": errors(replace(GPT, **wide), conf, torch.float64, micro=3, ignored=True)}
    }
    found["2d"] = volume(replace(LLAMA, **wide), conf, "block.0.mlp.down_proj", micro=3)
    return found


def run_case(cases: dict[str, Callable[[], Any]]) -> None:
    """`script.py case rank world folder`: join the others, run the case, save what it returns."""
    case, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    faulthandler.dump_traceback_later(280, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    torch.save(cases[case](), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_case({"four": four, "eight": eight, "nine": nine})
