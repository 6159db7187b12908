"""Ranks that hold the same part of a model, in a loop of one's own: their weights and gradients, as a policy says."""

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ...policies.comm import CommPolicy, GradientsReady, Placement, check_reduced
from ...policies.mesh import Mesh
from ..groups import Groups
from ..interpreter import Interpreter
from ..sharded import ROOT, ShardedHooks


class Replicas(Protocol):
    """Each backward ends with gradients that are the mean over the replicas, so that several may be added up.

    Or each step does, where a pipeline says when a micro-batch begins and when a step's last backward is over: then
    `begin_micro_batch` and `finish_gradients` are called in place of `backward_begins`.
    """

    def forward_begins(self) -> None:
        """A forward of the model is next."""
        ...

    def backward_begins(self) -> None:
        """Within the backward pass, before the model's."""
        ...

    def begin_micro_batch(self, index: int, count: int) -> None:
        """The backward of micro-batch `index` of `count` of a step is next."""
        ...

    def finish_gradients(self) -> None:
        """The last backward of a step is over."""
        ...


class Alone:
    """There is one replica."""

    def forward_begins(self) -> None: ...

    def backward_begins(self) -> None: ...

    def begin_micro_batch(self, index: int, count: int) -> None: ...

    def finish_gradients(self) -> None: ...


class Sharded:
    """Under FSDP2: parameters are DTensors over the replicas, gathered and reduced as the policy says."""

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        *,
        policy: CommPolicy,
        interpreter: Interpreter,
        over: DeviceMesh,
    ) -> None:
        for module in (*(module for name, module in units.items() if name != ROOT), model):
            fully_shard(module, mesh=over, reshard_after_forward=policy.reshard_after_forward)
        self._hooks = ShardedHooks(
            {name: cast(FSDPModule, module) for name, module in units.items()},
            policy=policy,
            interpreter=interpreter,
        )

    def forward_begins(self) -> None: ...

    def backward_begins(self) -> None: ...

    def begin_micro_batch(self, index: int, count: int) -> None:
        self._hooks.begin_micro_batch(index, count)

    def finish_gradients(self) -> None:
        self._hooks.finish_gradients()


class Whole:
    """Each has all its weights; when a backward is over, gradients are averaged unit by unit, the last block's first.

    What a backward adds to is already the mean of earlier ones, and the same on all: the mean leaves it as it is.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        *,
        policy: CommPolicy,
        interpreter: Interpreter,
    ) -> None:
        self._policy, self._interpreter = policy, interpreter
        inside = {id(p): name for name, unit in units.items() if name != ROOT for p in unit.parameters()}
        root = units[ROOT]
        self._parameters: dict[str, list[nn.Parameter]] = {name: [] for name in reversed([*units])}
        for parameter in root.parameters():
            self._parameters[inside.get(id(parameter), ROOT)].append(parameter)
        self._queued = False

    def forward_begins(self) -> None:
        self._queued = False  # a backward that failed may have left it

    def backward_begins(self) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def begin_micro_batch(self, index: int, count: int) -> None: ...

    def finish_gradients(self) -> None:
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        self._queued = False
        reduced = set()
        for unit, parameters in self._parameters.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            event = GradientsReady(unit, 0, 1)
            plan = self._policy.decide(event)
            self._interpreter.ledger.decided(event, plan)
            if plan is None or not gradients:
                continue
            reduced.add(unit)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            segments = [gradient.numel() for gradient in gradients]
            self._interpreter.whole(plan, unit=unit, flat=flat, segments=segments, mean=True)
            for gradient, mean in zip(gradients, torch.split(flat, segments), strict=True):
                gradient.copy_(mean.view_as(gradient))
        check_reduced(self._policy, [u for u, ps in self._parameters.items() if _has_gradients(ps)], reduced)


def join_replicas(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    *,
    mesh: Mesh,
    groups: Groups,
    policy: CommPolicy,
    interpreter: Interpreter,
    device: torch.device,
) -> Replicas:
    """Put the policy into a model whose parameters are what its layout leaves of them.

    Args:
        policy, interpreter: As the mesh of replicas has them.

    Raises:
        ValueError: If the policy wants a server.
    """
    if mesh.num_replicas == 1:
        return Alone()
    match policy.placement:
        case Placement.sharded:
            return Sharded(
                model,
                units,
                policy=policy,
                interpreter=interpreter,
                over=groups.of_replicas().device_mesh(device),
            )
        case Placement.replicated:
            return Whole(units, policy=policy, interpreter=interpreter)
    raise ValueError(
        f"comm={policy.name!r} keeps the weights on rank 0, whose optimizer alone steps them; a loop of your own steps "
        "on every rank: use ddp, zero1, zero2, zero3 or a policy of ZeRO++"
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of what FSDP2 may have cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of_replicas(tensor: Tensor) -> Tensor:
    """What the replicas hold together; a collective if FSDP2 has cut it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _has_gradients(parameters: list[nn.Parameter]) -> bool:
    return any(p.grad is not None for p in parameters)
