"""What the scripts of this folder share: a model of odd sizes, policies by name."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinbed.conf.schema import CommConf, GradientPath, HpzLifetime, Precision
from twinbed.policies.comm import CommPolicy, build_comm
from twinbed.policies.mesh import Mesh
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.wrap import CommEngine, build_interpreter, wrap_model

WIDTH, HIDDEN, VOCAB = 10, 7, 11  # nothing divides by 4
CPU = torch.device("cpu")

POLICIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "ps": {"zero_stage": 0, "parameter_server": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {},
    "qwz": {"zero_quantized_weights": True},
    "hpz": {"zero_hpz_partition_size": None},
    "hpz_step": {"zero_hpz_partition_size": None, "hpz_lifetime": HpzLifetime.step},
    "qgz": {"zero_quantized_gradients": True},
    "one_hop": {"zero_quantized_gradients": True, "gradient_path": GradientPath.one_hop},
    "ring": {"zero_quantized_gradients": True, "gradient_path": GradientPath.ring},
    "zeropp": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": None,
        "zero_quantized_gradients": True,
    },
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.poisoned = False  # the gradient of down.weight becomes NaN

    def forward(self, x_BD: Tensor) -> Tensor:
        weight_DH = self.down.weight
        if self.poisoned:
            weight_DH = weight_DH * 1.0
            weight_DH.register_hook(lambda gradient: gradient * torch.nan)
        return x_BD + nn.functional.linear(torch.tanh(self.up(x_BD * self.scale)), weight_DH)


class Tiny(nn.Module):
    """Embedding, blocks, head; the shift is a 1-D parameter smaller than the world."""

    def __init__(self, *, seed: int = 0, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shift = nn.Parameter(torch.zeros(1))
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_B: Tensor) -> Tensor:
        x_BD = self.embedding(tokens_B)
        for block in self.blocks:
            x_BD = block(x_BD)
        logits_BV = self.head(x_BD + self.shift)
        return nn.functional.cross_entropy(logits_BV[:-1].float(), tokens_B[1:])

    def units(self) -> Mapping[str, nn.Module]:
        return {"root": self} | {f"block.{i}": block for i, block in enumerate(self.blocks)}


def policy_of(name: str, *, world: int, ranks_per_node: int) -> CommPolicy:
    conf = CommConf(name=name, **POLICIES[name])
    return build_comm(conf, num_ranks=world, ranks_per_node=ranks_per_node)[0]


def mesh_of(policy: CommPolicy, *, ranks_per_node: int) -> Mesh:
    return Mesh(dist.get_world_size(), ranks_per_node, policy.hpz_size)


def engine_of(
    policy: CommPolicy,
    *,
    ranks_per_node: int,
    precision: Precision = Precision.fp32,
    overlap: bool = False,
    micro_batches: int = 1,
    model: nn.Module | None = None,
) -> tuple[CommEngine, Ledger]:
    mesh = mesh_of(policy, ranks_per_node=ranks_per_node)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    engine = wrap_model(
        Tiny() if model is None else model,
        policy=policy,
        interpreter=build_interpreter(mesh, ledger, device=CPU),
        precision=precision,
        device=CPU,
        overlap=overlap,
        micro_batches=micro_batches,
    )
    return engine, ledger


def batch(*, step: int, micro_batch: int, rank: int) -> Tensor:
    """A rank's tokens, the same wherever they are asked for."""
    random = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + rank)
    return torch.randint(0, VOCAB, (9,), generator=random)


def train_step(
    engine: CommEngine, ledger: Ledger, *, step: int, micro_batches: int, same_data: bool = False
) -> float:
    """Forward and backward of all micro-batches, to complete gradients. This rank's mean loss."""
    rank = 0 if same_data else dist.get_rank()
    total = 0.0
    ledger.at(iteration=step, phase="forward")
    for micro_batch in range(micro_batches):
        engine.begin_micro_batch(micro_batch, micro_batches)
        loss = engine.model(batch(step=step, micro_batch=micro_batch, rank=rank))
        (loss / micro_batches).backward()
        total += float(loss.detach()) / micro_batches
    engine.finish_gradients()
    ledger.at(phase="step")
    return total


def optimize(engine: CommEngine, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()
    engine.after_optimizer_step()
    engine.zero_grad()


def sgd(engine: CommEngine, lr: float = 0.1) -> torch.optim.Optimizer | None:
    parameters = engine.parameters()
    return torch.optim.SGD(parameters, lr=lr) if parameters else None


def reference_gradients(
    model: nn.Module, *, step: int, micro_batches: int, world: int, same_data: bool = False
) -> dict[str, Tensor]:
    """Mean over all ranks and micro-batches, in one process."""
    for rank in range(world):
        for micro_batch in range(micro_batches):
            loss = model(batch(step=step, micro_batch=micro_batch, rank=0 if same_data else rank))
            (loss / (world * micro_batches)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
