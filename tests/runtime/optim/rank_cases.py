"""What ranks do in the tests of this folder: functions that a case names as its kind."""

import copy
import json

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from twinbed.runtime.optim import Lamb, Lars

STEPS = 20
OPTIMIZERS = {
    "lamb": lambda p, **keys: Lamb(p, lr=0.02, weight_decay=0.01, **keys),
    "lamb uncorrected": lambda p, **keys: Lamb(p, lr=0.02, bias_correction=False, exclude_1d=False, **keys),
    "lamb deepspeed": lambda p, **keys: Lamb(
        p, lr=0.02, correction="rate", max_coeff=10.0, min_coeff=0.01, weight_decay=0.01, **keys
    ),
    "lars": lambda p, **keys: Lars(p, lr=1.0, eeta=0.02, weight_decay=1e-3, **keys),
    "lars before": lambda p, **keys: Lars(
        p, lr=1.0, eeta=0.02, momentum_order="before_rate", exclude_1d=False, **keys
    ),
    "lars ratio": lambda p, **keys: Lars(
        p, lr=1.0, eeta=0.02, momentum_order="after_ratio", clip=True, **keys
    ),
    "lars no momentum": lambda p, **keys: Lars(p, lr=1.0, eeta=0.02, momentum=0.0, **keys),
}


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def whole(parameter):
    return parameter.detach().full_tensor()


def save(case, context, values):
    if context.rank == 0:
        (context.case_folder(case) / "values.json").write_text(json.dumps(values))


def given_gradients(case, context):
    """Parameters cut in several ways, gradients that are the same everywhere: what is left is the optimizer."""
    context.beat(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flat = init_device_mesh("cpu", (4,))
    random = np.random.default_rng(0)
    layouts = [
        ((7, 5), flat, [Shard(0)]),
        ((3, 5), flat, [Shard(0)]),  # nothing is left for the last rank
        ((13,), flat, [Shard(0)]),
        ((1,), flat, [Shard(0)]),
        ((5, 9), flat, [Shard(1)]),
        ((5, 3), flat, [Replicate()]),
        ((7, 3), mesh, [Replicate(), Shard(0)]),
        ((7, 11), mesh, [Shard(1), Shard(0)]),
    ]
    start = [torch.tensor(random.normal(size=shape), dtype=torch.float32) for shape, _, _ in layouts]
    found = {}
    for name, make in OPTIMIZERS.items():
        sums = []

        def count(values, group, sums=sums):
            sums.append((dist.get_process_group_ranks(group), list(values.shape)))
            dist.all_reduce(values, group=group)

        plain = [nn.Parameter(tensor.clone()) for tensor in start]
        cut = [
            nn.Parameter(distribute_tensor(tensor.clone(), mesh_, placements))
            for tensor, (_, mesh_, placements) in zip(start, layouts, strict=True)
        ]
        reference, optimizer = make(plain), make(cut, all_reduce=count)
        gradients = np.random.default_rng(1)
        for _ in range(STEPS):
            for a, b, (shape, mesh_, placements) in zip(plain, cut, layouts, strict=True):
                a.grad = torch.tensor(gradients.normal(size=shape), dtype=torch.float32)
                b.grad = distribute_tensor(a.grad, mesh_, placements)
            reference.step()
            optimizer.step()
        found[name] = {
            "errors": [relative(whole(b), a.detach()) for a, b in zip(plain, cut, strict=True)],
            "moved": [relative(a.detach(), b) for a, b in zip(plain, start, strict=True)],
            "sums": sums[: len(sums) // STEPS],
            "num_sums": len(sums),
        }
    partial = nn.Parameter(DTensor.from_local(start[0], flat, [Partial()]))
    partial.grad = DTensor.from_local(start[0], flat, [Partial()])
    try:
        Lamb([partial]).step()
    except ValueError as err:
        found["partial"] = str(err)
    save(case, context, found)


class Odd(nn.Module):
    """Sizes that nothing divides; the shift is smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 10)
        self.shift = nn.Parameter(torch.zeros(1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 10)) for _ in range(3)
        )
        self.head = nn.Linear(10, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x + self.shift)[:-1], tokens[1:])


def fully_sharded(case, context):
    """Train under fully_shard on all ranks, each with its own data; and once more in one process with all of it."""
    context.beat(0)
    found = {}
    for name, make in OPTIMIZERS.items():
        sums = []

        def count(values, group, sums=sums):
            sums.append(values.numel())
            dist.all_reduce(values, group=group)

        # Doubles: the first steps of LAMB are the signs of gradients, and rounding decides those that are almost 0
        model = Odd().double()
        reference = copy.deepcopy(model)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = make(model.parameters(), all_reduce=count)
        other = make(reference.parameters())
        losses = []
        for step in range(STEPS):
            random = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 11, (context.num_ranks, 9), generator=random)
            model(tokens[context.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = sum(reference(row) for row in tokens) / context.num_ranks
            loss.backward()
            other.step()
            other.zero_grad()
            losses.append(float(loss.detach()))
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        found[name] = {
            "error": max(relative(whole(a), b.detach()) for a, b in pairs),
            "numel": sums,
            "adapted": sum(
                p.ndim > 1 or not optimizer.defaults["exclude_1d"] for p in reference.parameters()
            ),
            "ratios": relative(torch.tensor(optimizer.trust_ratios), torch.tensor(other.trust_ratios)),
        }
    save(case, context, found)
