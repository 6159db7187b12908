"""Training under FSDP2 (ZeRO 1-3, ZeRO++): each rank owns a part of every weight."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..conf.schema import Precision
from ..policies.comm import CommPolicy
from .gradients import bad_place, clip_factor, is_finite
from .interpreter import Interpreter
from .ledger import LIBRARY_STREAM
from .micro_batches import MicroBatches, evaluate_in_turn, num_right, train_in_turn
from .optim.norms import Holders
from .overlap import CommThread
from .sharded import ROOT, ShardedHooks

# A `with` block in which the named unit's shards can be read
Near = Callable[[str], AbstractContextManager[object]]


class ShardedEngine:
    """A `wrap.CommEngine`. All units, the root too, are resharded as the policy says.

    Gradients are reduced in the wire's dtype. With overlap FSDP2 reduces in fp32 and the hook casts: a cast
    of FSDP2's own would read the sum before it is there.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        *,
        policy: CommPolicy,
        interpreter: Interpreter,
        precision: Precision,
        wire_dtype: torch.dtype,
        device: torch.device,
        thread: CommThread | None,
        host_memory: CPUOffloadPolicy | None = None,
    ) -> None:
        self._model = model
        self._thread = thread
        self._ledger = interpreter.ledger
        self._rank, self._world = interpreter.groups.world_rank, interpreter.mesh.num_ranks
        options: dict[str, Any] = {
            "mesh": interpreter.groups.device_mesh(device),
            "reshard_after_forward": policy.reshard_after_forward,
        }
        if precision is not Precision.fp32:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=wire_dtype, reduce_dtype=wire_dtype if thread is None else torch.float32
            )
        if host_memory is not None:
            options["offload_policy"] = host_memory
        blocks = [module for name, module in units.items() if name != ROOT]
        for module in (*blocks, model):
            fully_shard(module, **options)
        fsdp_units = {name: _sharded(module) for name, module in units.items()}
        if thread is not None:
            _prefetch(fsdp_units)
        self.units: Mapping[str, FSDPModule] = fsdp_units
        self._hooks = ShardedHooks(
            fsdp_units,
            policy=policy,
            interpreter=interpreter,
            thread=thread,
            wire_dtype=wire_dtype if thread is not None else None,
        )
        self._parameters = dict(model.named_parameters())
        self._near: Near = lambda _: nullcontext()
        inside = {id(p): n for n, block in units.items() if n != ROOT for p in block.parameters()}
        self._unit_of = {name: inside.get(id(p), ROOT) for name, p in self._parameters.items()}

    @property
    def model(self) -> nn.Module:
        return self._model

    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def run_step(self, batches: MicroBatches) -> torch.Tensor:
        return train_in_turn(self, self._ledger, batches)

    def evaluate(self, batches: MicroBatches) -> torch.Tensor:
        return evaluate_in_turn(self._model, batches, partial(num_right, self._model))

    def take_sequences(self, count: int) -> None:
        """Nothing here is of the size of a micro-batch."""

    @property
    def place(self) -> str:
        return ""

    def begin_micro_batch(self, index: int, count: int) -> None:
        self._hooks.begin_micro_batch(index, count)

    def end_micro_batch(self) -> None:
        self._hooks.end_micro_batch()

    def finish_gradients(self) -> None:
        self._hooks.finish_gradients()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: _local(p.grad) for n, p in self._parameters.items() if p.grad is not None}

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> float | None:
        gradients = list(self.gradients().values())
        # Not clip_grad_norm_: on DTensors it sends the norms of all parameters, where one number does.
        square = get_total_norm(gradients).float().square()
        if self._world > 1:
            with self._ledger.span(LIBRARY_STREAM, "all_reduce"):
                dist.all_reduce(square)
        norm = float(square.sqrt())
        factor = clip_factor(norm, max_norm)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
        return norm

    def holders(self) -> Holders | None:
        return None

    def sum_norms(self, norms: torch.Tensor, group: dist.ProcessGroup) -> None:
        with self._ledger.span(LIBRARY_STREAM, "all_reduce of norms"):
            dist.all_reduce(norms, group=group)

    def check_finite(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not is_finite(_local(parameter.grad)):
                raise RuntimeError(
                    f"the gradient of {name} holds Inf or NaN in the part of rank {self._rank}, "
                    f"{bad_place(_local(parameter.grad))}"
                )

    def after_optimizer_step(self) -> None:
        self._hooks.weights_changed()
        self._hooks.ask_to_publish()

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._model.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state)
        self._hooks.weights_changed()

    def reads_shard(self, unit: str) -> bool:
        """As `ShardedHooks.reads_shard`."""
        return self._hooks.reads_shard(unit)

    def look_with(self, near: Near) -> None:
        """Have `near` around each look at a unit's shards, which else lie elsewhere."""
        self._near = near

    def full_parameters(self) -> dict[str, torch.Tensor]:
        found = {}
        with self._ledger.set_up():
            for name, parameter in self._parameters.items():
                with self._near(self._unit_of[name]):
                    found[name] = _whole(parameter.detach()).clone()
        return found

    def full_gradients(self) -> dict[str, torch.Tensor]:
        with self._ledger.set_up():
            return {name: _whole(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def local_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def secondary_bytes(self) -> int:
        return self._hooks.secondary_bytes

    def close(self) -> None:
        self._hooks.remove()
        if self._thread is not None:
            self._thread.close()


def _prefetch(units: Mapping[str, FSDPModule]) -> None:
    """Let each unit ask for the next one's weights before it computes, and wait only for its own."""
    for module, following in itertools.pairwise(units.values()):
        module.set_modules_to_forward_prefetch([following])
    units[ROOT]._set_unshard_async_op(True)


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.float()
