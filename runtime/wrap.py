"""From a model and a policy to an engine that trains it: what the trainer talks to."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ..conf.schema import Backend, Precision
from ..policies.comm import CommPolicy, Placement
from ..policies.mesh import Mesh
from .collectives import backend_of, build_collectives
from .dispatch import activate
from .groups import Groups
from .interpreter import Interpreter
from .ledger import Ledger
from .micro_batches import MicroBatches
from .optim.norms import Holders
from .overlap import CommThread
from .overlap_check import check_overlap

WIRE_DTYPE = {
    Precision.bf16: torch.bfloat16,
    Precision.fp16: torch.float16,
    Precision.fp32: torch.float32,
}


@runtime_checkable
class HasUnits(Protocol):
    """A model that knows the units in which its weights move."""

    def units(self) -> Mapping[str, nn.Module]:
        """ "root" (the model itself) first, then the blocks in the order of forward."""
        ...


class CommEngine(Protocol):
    """Trains a model under a policy. A step is:

    run_step; then, as wanted, clip_gradients and check_finite; the optimizer's step over `parameters`;
    after_optimizer_step; zero_grad.
    """

    def run_step(self, batches: MicroBatches) -> torch.Tensor:
        """Forward and backward of all micro-batches: gradients of `parameters` are complete then, and in fp32.

        Returns:
            [batches.count], the losses of this rank's replica of the model; on all its ranks.
        """
        ...

    def take_sequences(self, count: int) -> None:
        """From the next step on a micro-batch of this replica has so many sequences; in a validation as ever."""
        ...

    @property
    def place(self) -> str:
        """Where this rank stands on the axes that cut the model, such as "pipeline1"; "" if none does."""
        ...

    def evaluate(self, batches: MicroBatches) -> torch.Tensor:
        """Forward without gradients. Summed over all ranks: [sum of the losses, answers told right], fp32."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: fp32, this rank's part. Empty where another rank owns the weights."""
        ...

    def clip_gradients(self, max_norm: float) -> float | None:
        """Scale gradients so that their global L2 norm is at most `max_norm`.

        Returns:
            The norm before, of the whole model. None where another rank owns the weights.
        """
        ...

    def check_finite(self) -> None:
        """Raise RuntimeError naming a parameter whose gradient holds Inf or NaN here. Sends nothing."""
        ...

    def after_optimizer_step(self) -> None:
        """The weights have changed (or all ranks skipped the step): publish them where needed."""
        ...

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """The fp32 weights this rank owns and the buffers, by name, for torch.distributed.checkpoint.

        The tensors are the engine's own, so loading in place fills them; then call `load_state_dict`.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On all ranks: take these weights, and bring them to where they are computed with."""
        ...

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter by name, whole, fp32; on all ranks that own weights. A collective for tests."""
        ...

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """As full_parameters, of the gradients; those that are None are left out."""
        ...

    def secondary_bytes(self) -> int:
        """What this rank holds for hpZ."""
        ...

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """`parameters` by name, in their order."""
        ...

    def local_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of what lies like the parameter of that name, before replicas shard it."""
        ...

    def holders(self) -> Holders | None:
        """Who holds the parts of `parameters`, where these do not say it themselves."""
        ...

    def sum_norms(self, norms: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Add up, over the ranks that hold parts of the same parameters, what an optimizer asks for."""
        ...

    def close(self) -> None:
        """Let go of threads and hooks."""
        ...


class PassEngine(CommEngine, Protocol):
    """One that has the whole model, or one part of it, and runs a pass at a time.

    For each micro-batch begin_micro_batch, forward through `model` and backward; after the last one
    finish_gradients. `begin_micro_batch` is about the backward that comes next: of several forwards that are under
    way it is to be called before each one's backward.
    """

    @property
    def model(self) -> nn.Module:
        """To be called in place of the model that was given."""
        ...

    def begin_micro_batch(self, index: int, count: int) -> None:
        """Before the backward of micro-batch `index` of `count` of this step, or before its forward."""
        ...

    def end_micro_batch(self) -> None:
        """After its backward, where passes of other parts may come next: what was decided of it is logged."""
        ...

    def finish_gradients(self) -> None:
        """After the last backward of a step: gradients of `parameters` are complete, and in fp32."""
        ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, this rank's parts of the gradients of `parameters`; those that are None are left out."""
        ...


def build_interpreter(mesh: Mesh, ledger: Ledger, *, device: torch.device) -> Interpreter:
    """The interpreter of this rank; to be called on all ranks at once, with the default group initialised.

    The ledger is made the one that is told of collectives.
    """
    activate(ledger)
    return Interpreter(Groups(mesh), ledger, build_collectives(backend_of(device)))


def wrap_model(
    model: nn.Module,
    *,
    policy: CommPolicy,
    interpreter: Interpreter,
    precision: Precision,
    device: torch.device,
    overlap: bool = False,
    micro_batches: int = 1,
    host_memory: CPUOffloadPolicy | None = None,
) -> PassEngine:
    """Give `model` to the policy.

    Args:
        model: In fp32 on `device`, with `units()`; the same weights on all ranks. It is changed in place.
        interpreter: From `build_interpreter`.
        precision: Weights are gathered and gradients reduced in it; what the optimizer steps stays fp32.
        overlap: On gloo, communicate on a thread of its own. NCCL overlaps by itself.
        micro_batches: Of a step.
        host_memory: FSDP2 keeps weights, gradients and what the optimizer steps in the host's memory.

    Raises:
        ValueError: If overlap would give wrong sums, or whole weights are to lie in host memory, naming the keys.
    """
    from .replicated import ReplicatedEngine
    from .sharded_engine import ShardedEngine

    if not isinstance(model, HasUnits):
        raise ValueError(
            f"{type(model).__name__} has no units(): name the modules whose weights move together"
        )
    units = dict(model.units())
    thread: CommThread | None = None
    if overlap and backend_of(device) is Backend.gloo:
        check_overlap(policy, tuple(units), precision=precision, micro_batches=micro_batches)
        thread = CommThread(interpreter.ledger)
    common: dict[str, Any] = {
        "policy": policy,
        "interpreter": interpreter,
        "precision": precision,
        "wire_dtype": WIRE_DTYPE[precision],
        "device": device,
        "thread": thread,
    }
    if policy.placement is Placement.sharded:
        return ShardedEngine(model, units, host_memory=host_memory, **common)
    if host_memory is not None:
        raise ValueError(f"offload=cpu needs sharded weights, and policy {policy.name!r} replicates them")
    return ReplicatedEngine(model, units, **common)
