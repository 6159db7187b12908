"""Runs on each rank for test_products.py: products of dimensions, each through the engine that a training uses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import CommConf, ParallelConf, Precision
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import build_parallel
from twinbed.policies.mesh import Mesh
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.layout import token_index
from twinbed.runtime.layout.build import build_layout_engine
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.micro_batches import MicroBatches
from twinbed.runtime.stack import Stack, build_model

from ranks_layout import BERT, GPT, LLAMA, VIT, relative
from ranks_run import run_cases

MICRO, TOKENS, COUNT = 4, 16, 4  # sequences, tokens, micro-batches
SMALL: Mapping[str, Any] = {"layers": 4, "hidden": 32, "ffn": 64}
SPECS = {
    "gpt": replace(GPT, **SMALL),
    "gpt tied": replace(GPT, **SMALL, tied_embeddings=True),
    "llama": replace(LLAMA, **SMALL),
    "bert": replace(BERT, **SMALL),
    "vit": replace(VIT, **SMALL),
}
COMM: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "ps": {"zero_stage": 0, "parameter_server": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {},
    "zeropp": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": None,
        "zero_quantized_gradients": True,
        # Finer than the defaults, which would fill up parameters as small as these to blocks many times their size
        "weight_block": 64,
        "gradient_block": 64,
        "gradient_bits": [8, 8],
    },
}
RING, ULYSSES = {"sequence_mode": "ring"}, {"sequence_mode": "ulysses"}
SQUARE = {"tensor": 4, "tensor_mode": "2d"}
# stages lie beside each other on a node, replicas on both nodes
FIRST = {"order": ["pipeline", "tensor", "sequence", "data"]}
EVERY, SOME = ("gpt", "gpt tied", "llama", "bert", "vit"), ("gpt", "bert")
Product = tuple[dict[str, Any], str, tuple[str, ...]]  # parallel, comm, models
OF_FOUR: dict[str, Product] = {
    "data, 1d, zero3": ({"tensor": 2}, "zero3", EVERY),
    "data, 1d, ps": ({"tensor": 2}, "ps", ("gpt tied",)),
    "data, 1d sequence, zero2": ({"tensor": 2, "sequence": 2}, "zero2", ("llama", "bert")),
    "data, ring, zero3": ({"sequence": 2, **RING}, "zero3", ("gpt tied", "bert")),
    "data, ulysses, ddp": ({"sequence": 2, **ULYSSES}, "ddp", ("llama", "bert")),
    "data, pipeline, ps": ({"pipeline": 2}, "ps", ("gpt tied", "vit")),
    "ring, 1d": ({"sequence": 2, "tensor": 2, **RING}, "zero3", EVERY),
    "ulysses, 1d": ({"sequence": 2, "tensor": 2, **ULYSSES}, "zero1", SOME),
    "ring, pipeline": ({"sequence": 2, "pipeline": 2, **RING}, "zero3", EVERY),
    "1d sequence, pipeline": ({"tensor": 2, "sequence": 2, "pipeline": 2}, "zero3", ("gpt tied", "bert")),
    "1d, interleaved": (
        {"tensor": 2, "pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2},
        "ddp",
        EVERY,
    ),
    "pipeline first, 1d": ({"tensor": 2, "pipeline": 2, **FIRST}, "ddp", ("gpt tied", "vit")),
}
OF_EIGHT: dict[str, Product] = {
    "data, pipeline, 1d, zeropp": ({"tensor": 2, "pipeline": 2, **FIRST}, "zeropp", ("gpt", "llama", "vit")),
    "data, pipeline, 1d, zero3": ({"tensor": 2, "pipeline": 2, **FIRST}, "zero3", ("gpt", "llama", "vit")),
    "ring, 2d": ({**SQUARE, "sequence": 2, **RING}, "zero3", ("gpt tied", "bert")),
    "ulysses, 2d": ({**SQUARE, "sequence": 2, **ULYSSES}, "ddp", ("llama",)),
    "data, 2d, zero3": (SQUARE, "zero3", ("vit",)),
    "2d, pipeline": ({**SQUARE, "pipeline": 2}, "zero3", ("gpt tied", "bert", "vit")),
    "data, ring, pipeline": ({"sequence": 2, "pipeline": 2, **RING}, "zero3", ("gpt", "bert")),
    "ring, 1d, pipeline": ({"sequence": 2, "tensor": 2, "pipeline": 2, **RING}, "zero1", ("llama", "bert")),
    "1d sequence, pipeline, data": ({"tensor": 2, "sequence": 2, "pipeline": 2}, "zero2", ("gpt tied",)),
    "1d, gpipe of four": ({"tensor": 2, "pipeline": 4, "pipeline_schedule": "gpipe"}, "ddp", ("bert",)),
}


def model_of(spec: ModelSpec) -> Stack:
    """No parameter is 0 or 1, as biases and norms are at first."""
    model = build_model(spec, seed=3)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=random)
    return model


def data_of(spec: ModelSpec, micro_batch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Of one micro-batch, whole sequences or images; of words many are not to be told, more in some places."""
    random = torch.Generator().manual_seed(100 * micro_batch + replica)
    if spec.family == "vit":
        images = torch.randn(MICRO, spec.channels, *spec.image, generator=random)
        return images, torch.randint(0, spec.classes, (MICRO,), generator=random)
    tokens, targets = torch.randint(0, spec.vocab, (2, MICRO, TOKENS), generator=random)
    targets[0, 3 + micro_batch :] = -100
    targets[1, : 11 - replica] = -100
    targets[2, ::2] = -100
    return tokens, targets


def alone(spec: ModelSpec, replicas: int) -> tuple[Stack, list[float]]:
    """One process with the batches of all replicas: its gradients are in the model; losses of each micro-batch."""
    model = model_of(spec)
    means = []
    for index in range(COUNT):
        losses = [model(*data_of(spec, index, replica)) for replica in range(replicas)]
        mean = torch.stack(losses).mean()
        (mean / COUNT).backward()
        means.append(float(mean.detach()))
    return model, means


def compare(spec: ModelSpec, keys: Mapping[str, Any], comm: str) -> dict[str, Any]:
    """Errors of this rank's gradients, of all of them together, of the losses, of the norm; and rows of the step."""
    world = dist.get_world_size()
    per_node = world // 2
    layout = build_parallel(
        ParallelConf(**keys),
        spec,
        num_ranks=world,
        micro=MICRO,
        micro_batches=COUNT,
        sequence=spec.sequence,
    )
    seen = Mesh(world, per_node, 1, layout.dims).of_replicas()
    policy = build_comm(
        CommConf(name=comm, **COMM[comm]), num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node
    )[0]
    mesh = Mesh(world, per_node, policy.hpz_size, layout.dims)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    engine = build_layout_engine(
        lambda: model_of(spec),
        layout=layout,
        policy=policy,
        groups=Groups(mesh),
        ledger=ledger,
        precision=Precision.fp32,
        device=torch.device("cpu"),
        micro=MICRO,
        tokens=spec.sequence,
    )
    replica = mesh.index("data", dist.get_rank())
    here = token_index(layout, mesh, dist.get_rank(), spec.sequence)

    def read(index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data_of(spec, index, replica)
        return (inputs[:, here], targets[:, here]) if layout.sequence > 1 else (inputs, targets)

    losses = engine.run_step(MicroBatches(count=COUNT, read=read, factor=1 / COUNT)).double()
    dist.all_reduce(losses)
    expected, means = alone(spec, mesh.data)
    truths = {name: parameter.grad for name, parameter in expected.named_parameters()}
    found = engine.full_gradients()
    own = [truths[name] for name in found]
    largest = max(float(truth.norm()) for truth in own) if own else 0.0
    errors = {}
    for name in found:
        # a key's bias has a gradient of 0 but for what is left of sums that cancel
        cancels = name.endswith(("k_proj.bias", "key.bias"))
        errors[name] = relative(found[name], truths[name], least=(1 if cancels else 1e-4) * largest)
    everything = [
        torch.cat([x.flatten() for x in each] or [torch.zeros(1)]) for each in (found.values(), own)
    ]
    norm = engine.clip_gradients(float("inf"))
    assert norm is not None
    whole = torch.stack([truth.norm() for truth in truths.values()]).norm()
    rows = {(row.phase, row.stream, row.op, row.axis, row.group_size) for row in ledger.rows}
    engine.close()
    return {
        "errors": errors,
        "together": relative(everything[0], everything[1], least=1e-12),
        "losses": relative(losses / world, torch.tensor(means)),
        "norm": abs(norm / float(whole) - 1),
        "names": set(truths),
        "rows": rows,
    }


def all_of(products: Mapping[str, Product]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (keys, comm, models) in products.items():
        for model in models:
            if model == "vit" and keys.get("sequence", 1) > 1:
                continue  # its loss is of one token
            found[f"{model}: {name}"] = compare(SPECS[model], keys, comm)
    return found


if __name__ == "__main__":
    run_cases({"four": lambda: all_of(OF_FOUR), "eight": lambda: all_of(OF_EIGHT)})
