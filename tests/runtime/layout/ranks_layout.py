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
from torch import Tensor, nn

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


def model_of(spec: ModelSpec, dtype: torch.dtype) -> Stack:
    """No parameter is 0 or 1, as biases and norms are at first."""
    model = build_model(spec, seed=3).to(dtype)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=random)
    return model


def data_of(spec: ModelSpec, *, ignored: bool) -> tuple[Tensor, Tensor]:
    """Whole sequences; with `ignored` many labels are lacking, in some sequences more than in others."""
    random = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, spec.vocab, (2, MICRO, TOKENS), generator=random)
    if ignored:
        targets[0, 3:] = -100
        targets[1, :11] = -100
        targets[2, ::2] = -100
    return tokens, targets


def layout_of(conf: ParallelConf, spec: ModelSpec) -> tuple[ParallelLayout, Groups, Ledger]:
    world = dist.get_world_size()
    layout = build_parallel(conf, spec, num_ranks=world, micro=MICRO, micro_batches=1, sequence=TOKENS)
    mesh = Mesh(world, world, dims=layout.dims)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    return layout, Groups(mesh), ledger


def laid_out(
    spec: ModelSpec, conf: ParallelConf, dtype: torch.dtype = torch.float32
) -> tuple[Stack, LaidOut, Ledger]:
    layout, groups, ledger = layout_of(conf, spec)
    model = model_of(spec, dtype)
    laid = lay_out(
        model,
        layout,
        groups=groups,
        ledger=ledger,
        collectives=COLLECTIVES,
        micro=MICRO,
        sequence=TOKENS,
    )
    return model, laid, ledger


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def errors(spec: ModelSpec, conf: ParallelConf, dtype: torch.dtype, *, ignored: bool) -> dict[str, float]:
    """Relative L2 error of the loss and of each parameter's gradient against this process alone."""
    tokens, targets = data_of(spec, ignored=ignored)
    alone = model_of(spec, dtype)
    expected = alone(tokens, targets)
    expected.backward()
    model, laid, _ = laid_out(spec, conf, dtype)
    names = [name for name, _ in alone.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    loss = model(tokens, targets)
    loss.backward()
    found = {"loss": relative(loss.detach(), expected.detach())}
    gradients = laid.gather_gradients()
    wholes = laid.gather_parameters()
    for name, parameter in alone.named_parameters():
        assert torch.equal(wholes[name], parameter), name
        assert parameter.grad is not None
        found[name] = relative(gradients[name], parameter.grad)
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


CASES: dict[str, Callable[[], Any]] = {
    "four": lambda: gradients("1d", "1d sequence", "2d"),
    "eight": lambda: gradients("2.5d", "3d"),
}


def main() -> None:
    """`script.py case rank world folder`."""
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
    torch.save(CASES[case](), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
