"""Runs on each rank for test_layout.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.analysis.record import LedgerRow
from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import Backend, CommConf, ParallelConf, Precision
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import ParallelLayout, build_parallel
from twinbed.policies.mesh import Mesh
from twinbed.runtime.collectives import build_collectives
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.images import NO_CLASS
from twinbed.runtime.interpreter import Interpreter
from twinbed.runtime.layout import LaidOut, lay_out
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.stack import Stack, build_model
from twinbed.runtime.wrap import wrap_model

from ranks_run import run_cases

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
    spec: ModelSpec,
    conf: ParallelConf,
    dtype: torch.dtype = torch.float32,
    *,
    micro: int = MICRO,
    library: bool = True,
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
        library=library,
    )
    return model, laid, ledger


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """L2. What is smaller than `least` in truth is measured by that: a key's bias, which every score of a token has
    alike, has a gradient of 0 but for rounding.
    """
    return float((found.double() - expected.double()).norm()) / max(float(expected.double().norm()), least)


def errors(
    spec: ModelSpec,
    conf: ParallelConf,
    dtype: torch.dtype,
    *,
    ignored: bool = False,
    micro: int = MICRO,
    library: bool = True,
) -> dict[str, float]:
    """Relative L2 error of the loss and of each parameter's gradient against this process alone."""
    tokens, targets = data_of(spec, micro=micro, ignored=ignored)
    alone = model_of(spec, dtype)
    expected = alone(tokens, targets)
    expected.backward()
    model, laid, _ = laid_out(spec, conf, dtype, micro=micro, library=library)
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


def right_answers(*modes: str) -> dict[str, tuple[int, int, float]]:
    """Of an evaluation: (images told right, by all ranks together; by one process; the loss' error)."""
    found = {}
    images, labels = data_of(VIT, micro=MICRO, ignored=False)
    alone = model_of(VIT, torch.float64)
    with torch.no_grad():
        kept: list[Tensor] = []
        handle = alone.classifier.register_forward_hook(lambda _, __, out: kept.append(out))
        alone(images, labels)
        handle.remove()
        # Two labels are what the model says, of which one is then taken away
        labels = torch.where(
            torch.arange(MICRO) < 2, kept[0].argmax(-1), (kept[0].argmax(-1) + 1) % VIT.classes
        )
        labels[0] = NO_CLASS
        expected = alone(images, labels)
        for mode in modes:
            model, _, _ = laid_out(VIT, ParallelConf(**MODES[mode]), torch.float64)
            loss = model(images, labels)
            total = model.num_right.clone()
            dist.all_reduce(total)
            found[mode] = (int(total), int(alone.num_right), relative(loss, expected))
    return found


def volume(spec: ModelSpec, conf: ParallelConf, layer: str, *, micro: int = MICRO) -> tuple[float, int]:
    """(elements that this rank sends for the layers whose names begin so, forward and backward; rows)."""
    tokens, targets = data_of(spec, micro=micro, ignored=False)
    model, _, ledger = laid_out(spec, conf, micro=micro)
    ledger.at(phase="forward")
    model(tokens, targets).backward()
    rows = [row for row in ledger.rows if row.layer.startswith(layer)]
    return sum(row.wire_bytes for row in rows) / 4, len(rows)


def rows(spec: ModelSpec, conf: ParallelConf, dtype: torch.dtype, *, library: bool) -> list[LedgerRow]:
    """Of two steps, the second with the blocks recomputed in backward."""
    tokens, targets = data_of(spec, micro=MICRO, ignored=False)
    model, _, ledger = laid_out(spec, conf, dtype, library=library)
    for model.recompute in (False, True):
        ledger.at(phase="forward")
        loss = model(tokens, targets)
        ledger.at(phase="backward")
        loss.backward()
    return ledger.rows


def planned() -> dict[str, Any]:
    """1D by our own function throughout; and the rows of both ways."""
    conf = ParallelConf(tensor=4)
    found: dict[str, Any] = {"errors": {}, "rows": {}}
    for spec in (replace(GPT, tied_embeddings=True), LLAMA, BERT, VIT):
        name = f"{spec.family} float64"
        found["errors"][name] = errors(spec, conf, torch.float64, ignored=True, library=False)
        for dtype in (torch.float32, torch.bfloat16):
            both = [rows(spec, conf, dtype, library=library) for library in (True, False)]
            found["rows"][f"{spec.family} {dtype}"] = both
    return found


def engines(settings: Sequence[tuple[str, ParallelConf, CommConf]]) -> dict[str, Any]:
    """Two replicas under communication policies: gradients are the mean of those of their micro-batches."""
    found: dict[str, Any] = {"errors": {}, "axes": {}}
    spec = replace(GPT, tied_embeddings=True)
    alone = model_of(spec, torch.float32)
    whole, labels = data_of(spec, micro=2 * MICRO, ignored=False)
    (alone(whole[:MICRO], labels[:MICRO]) + alone(whole[MICRO:], labels[MICRO:])).div(2).backward()
    for name, conf, comm in settings:
        layout, groups, ledger = layout_of(conf, spec, MICRO)
        model = model_of(spec, torch.float32)
        laid = lay_out(
            model,
            layout,
            groups=groups,
            ledger=ledger,
            collectives=COLLECTIVES,
            micro=MICRO,
            sequence=TOKENS,
        )
        view = groups.of_replicas()
        engine = wrap_model(
            model,
            policy=build_comm(comm, num_ranks=2, ranks_per_node=view.mesh.ranks_per_node)[0],
            interpreter=Interpreter(view, ledger, COLLECTIVES),
            precision=Precision.fp32,
            device=torch.device("cpu"),
        )
        ledger.at(phase="forward")
        engine.begin_micro_batch(0, 1)
        mine = slice(view.rank * MICRO, (view.rank + 1) * MICRO)
        engine.model(whole[mine], labels[mine]).backward()
        engine.finish_gradients()
        ledger.at(phase="setup")
        gradients = laid.wholes(engine.full_gradients())
        found["errors"][f"{name} float32"] = {
            key: relative(gradients[key], parameter.grad)
            for key, parameter in alone.named_parameters()
            if parameter.grad is not None
        }
        found["axes"][name] = sorted({(row.stream, row.axis, row.group_size) for row in ledger.rows})
        engine.close()
    return found


_APART = ["data", "sequence", "tensor", "pipeline"]
PAIRS = (
    ("1d zero3", ParallelConf(tensor=2), CommConf()),
    ("1d ddp", ParallelConf(tensor=2), CommConf(zero_stage=0)),
    ("1d sequence zero3", ParallelConf(tensor=2, sequence=2), CommConf()),
    ("data before tensor", ParallelConf(tensor=2, order=_APART), CommConf()),
)
SQUARES = (
    ("2d zero3", ParallelConf(tensor=4, tensor_mode="2d"), CommConf()),
    ("2d zero1", ParallelConf(tensor=4, tensor_mode="2d"), CommConf(zero_stage=1)),
)


def four() -> dict[str, Any]:
    found: dict[str, Any] = {
        "errors": gradients("1d", "1d sequence", "2d") | families("1d", "1d sequence", "2d")
    }
    found["right"] = right_answers("1d", "2d")
    found["1d"] = volume(GPT, ParallelConf(tensor=4), "block.0.")
    found["1d sequence"] = volume(LLAMA, ParallelConf(tensor=4, sequence=4), "block.0.mlp.down_proj")
    found["2d"] = volume(LLAMA, ParallelConf(tensor=4, tensor_mode="2d"), "block.0.mlp.down_proj")
    return found


def eight() -> dict[str, Any]:
    replicas = engines(SQUARES)
    found: dict[str, Any] = {"errors": gradients("2.5d", "3d") | families("2.5d", "3d") | replicas["errors"]}
    found["axes"] = replicas["axes"]
    found["right"] = right_answers("2.5d", "3d")
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


if __name__ == "__main__":
    run_cases(
        {"four": four, "eight": eight, "nine": nine, "planned": planned, "pairs": lambda: engines(PAIRS)}
    )
