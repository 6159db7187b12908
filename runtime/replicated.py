"""Training with whole weights on every rank: plain data parallelism and the parameter server.

Not torch's DistributedDataParallel: it sums gradients in buckets that cut across units, so a plan could not
be given for one unit nor a byte be laid to one, and it has no word for a server. Here a unit's weights and
gradients are one flat tensor each, of which the parameters are views; when the last gradient of a unit is
there, its plan runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..conf.schema import Precision
from ..policies.comm import CommPolicy, GradientsReady, Placement, WeightsChanged, check_reduced
from ..policies.plan import Plan
from .gradients import bad_place, clip_factor, is_finite
from .interpreter import Interpreter
from .ledger import SETUP
from .micro_batches import MicroBatches, evaluate_in_turn, num_right, train_in_turn
from .optim.norms import Holders
from .overlap import CommThread

ROOT = "root"
SERVER = 0


@dataclass(slots=True)
class _Unit:
    """One unit's tensors, flat; `weights` and `gradients` are of the wire's dtype."""

    name: str
    parameters: dict[str, nn.Parameter]  # by qualified name
    weights: Tensor
    gradients: Tensor
    masters: Tensor | None  # fp32; the weights themselves under fp32, None on a rank that owns none
    owned: dict[str, nn.Parameter] = field(default_factory=dict)  # what the optimizer steps
    missing: int = 0  # gradients that this micro-batch still owes
    reduced: bool = False

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(parameter.numel() for parameter in self.parameters.values())


class ReplicatedEngine:
    """A `wrap.CommEngine`.

    Weights are computed with in the wire's dtype; the optimizer steps fp32 masters, on every rank or on the
    server. All ranks must begin with the same weights.
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
    ) -> None:
        self._model = model
        self._policy = policy
        self._interpreter = interpreter
        self._ledger = interpreter.ledger
        self._thread = thread
        self._rank = interpreter.groups.rank
        self._precision = precision
        self._owner = policy.placement is not Placement.server or self._rank == SERVER
        # Reductions beside the backward pass, on GPUs.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._micro_batch, self._num_micro_batches = 0, 1
        self._moved: set[str] = set()  # units of which a micro-batch of this step has reduced gradients
        self._handles: list[Any] = []
        inside = {id(p): name for name, module in units.items() if name != ROOT for p in module.parameters()}
        self._units = [
            self._flatten(
                name,
                {n: p for n, p in model.named_parameters() if inside.get(id(p), ROOT) == name},
                wire_dtype,
            )
            for name in (ROOT, *(name for name in units if name != ROOT))
        ]
        self._handles.append(model.register_forward_pre_hook(self._forward_begins, prepend=True))
        self._handles.append(model.register_forward_hook(self._forward_ends))
        self.begin_micro_batch(0, 1)

    @property
    def model(self) -> nn.Module:
        return self._model

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for unit in self._units for name, p in unit.owned.items()}

    def run_step(self, batches: MicroBatches) -> Tensor:
        return train_in_turn(self, self._ledger, batches)

    def evaluate(self, batches: MicroBatches) -> Tensor:
        return evaluate_in_turn(self._model, batches, partial(num_right, self._model))

    def take_sequences(self, count: int) -> None:
        """Nothing here is of the size of a micro-batch."""

    @property
    def place(self) -> str:
        return ""

    def begin_micro_batch(self, index: int, count: int) -> None:
        self._micro_batch, self._num_micro_batches = index, count
        if index == 0:
            self._moved.clear()
        for unit in self._units:
            unit.missing = sum(p.requires_grad for p in unit.parameters.values())
            unit.reduced = False

    def end_micro_batch(self) -> None:
        """What is decided of a unit is logged when its last gradient is there."""

    @torch.no_grad()
    def finish_gradients(self) -> None:
        for unit in reversed(self._units[1:]):
            self._finish(unit)
        self._finish(self._units[0])
        check_reduced(self._policy, [unit.name for unit in self._units], self._moved)
        if self._thread is not None:
            self._thread.drain()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for unit in self._units:
            if unit.masters is None or unit.masters is unit.weights:
                continue
            whole = unit.gradients.float()
            for (name, owned), gradient in zip(
                unit.owned.items(), torch.split(whole, list(unit.segments)), strict=True
            ):
                if unit.parameters[name].requires_grad:
                    owned.grad = gradient.view_as(owned)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for unit in self._units for n, p in unit.owned.items() if p.grad is not None}

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> float | None:
        if not self._owner:
            return None
        gradients = list(self.gradients().values())
        norm = float(get_total_norm(gradients))
        factor = clip_factor(norm, max_norm)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
        return norm

    def holders(self) -> Holders | None:
        return None

    def sum_norms(self, norms: Tensor, group: dist.ProcessGroup) -> None:
        raise RuntimeError("every rank that owns weights has them whole, so their norms need no sum")

    def check_finite(self) -> None:
        for unit in self._units:
            for name, parameter in unit.owned.items():
                if parameter.grad is not None and not is_finite(parameter.grad):
                    rank = self._interpreter.groups.world_rank
                    raise RuntimeError(
                        f"the gradient of {name} holds Inf or NaN on rank {rank}, {bad_place(parameter.grad)}"
                    )

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        for unit in self._units:
            if unit.masters is not None and unit.masters is not unit.weights:
                unit.weights.copy_(unit.masters)
        for unit in self._units:
            event = WeightsChanged(unit.name)
            plan = self._policy.decide(event)
            self._ledger.decided(event, plan)
            if plan is not None:
                self._publish(unit, plan)

    def zero_grad(self) -> None:
        for unit in self._units:
            unit.gradients.zero_()
            for name, parameter in unit.owned.items():
                if parameter is not unit.parameters[name]:
                    parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        state = {name: p.detach() for unit in self._units for name, p in unit.owned.items()}
        if self._owner:
            kept = self._model.state_dict()
            state |= {name: buffer for name, buffer in self._model.named_buffers() if name in kept}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()
        unknown, lacking = sorted(state.keys() - own.keys()), sorted(own.keys() - state.keys())
        if unknown or lacking:
            raise ValueError(f"the state dict lacks {lacking} and holds unknown {unknown}")
        for name, tensor in own.items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
        for unit in self._units:
            if unit.masters is not None and unit.masters is not unit.weights:
                unit.weights.copy_(unit.masters)
        with self._ledger.set_up():
            for unit in self._units:
                plan = self._policy.decide(WeightsChanged(unit.name))
                if plan is not None:
                    self._publish(unit, plan)

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for unit in self._units for name, p in unit.owned.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: gradient.clone() for name, gradient in self.gradients().items()}

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def secondary_bytes(self) -> int:
        return 0

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._thread is not None:
            self._thread.close()

    # ---- one unit

    @torch.no_grad()
    def _flatten(self, name: str, parameters: dict[str, nn.Parameter], wire_dtype: torch.dtype) -> _Unit:
        """Make the parameters views of one flat tensor, and their gradients views of another."""
        values = [p.detach().float().reshape(-1) for p in parameters.values()]
        whole = torch.cat(values) if values else torch.empty(0)
        weights = whole.to(wire_dtype)
        masters = whole if self._owner else None
        if wire_dtype == torch.float32:
            weights = whole
        unit = _Unit(name, parameters, weights, torch.zeros_like(weights), masters)
        splits = list(unit.segments)
        flats = zip(torch.split(weights, splits), torch.split(unit.gradients, splits), strict=True)
        for parameter, (weight, gradient) in zip(parameters.values(), flats, strict=True):
            parameter.data = weight.view_as(parameter)
            if parameter.requires_grad:
                parameter.grad = gradient.view_as(parameter)
                hook = partial(self._gradient_ready, unit)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        if masters is weights:
            unit.owned = dict(parameters)
        elif masters is not None:
            unit.owned = {
                n: nn.Parameter(master.view_as(p), requires_grad=p.requires_grad)
                for (n, p), master in zip(parameters.items(), torch.split(masters, splits), strict=True)
            }
        return unit

    def _gradient_ready(self, unit: _Unit, parameter: Tensor) -> None:
        unit.missing -= 1
        if unit.missing == 0:
            self._reduce(unit)

    def _finish(self, unit: _Unit) -> None:
        """Reduce a unit of which some parameters took no part in the loss."""
        if not unit.reduced:
            if unit.parameters:  # a pipeline's middle has a root without any
                self._reduce(unit)
            else:
                self._moved.add(unit.name)

    @torch.no_grad()
    def _reduce(self, unit: _Unit) -> None:
        unit.reduced = True
        event = GradientsReady(unit.name, self._micro_batch, self._num_micro_batches)
        plan = self._policy.decide(event)
        self._ledger.decided(event, plan)
        if plan is None:
            return
        self._moved.add(unit.name)
        if self._thread is not None:
            self._thread.submit(partial(self._run, unit, plan), unit.name)
        elif self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._run(unit, plan)
        else:
            self._run(unit, plan)

    def _run(self, unit: _Unit, plan: Plan) -> None:
        fp16 = self._precision is Precision.fp16
        if fp16:  # a sum over many ranks would leave the range of fp16
            unit.gradients.div_(self._interpreter.mesh.num_ranks)
        self._interpreter.whole(
            plan, unit=unit.name, flat=unit.gradients, segments=unit.segments, mean=not fp16
        )

    def _publish(self, unit: _Unit, plan: Plan) -> None:
        self._interpreter.whole(plan, unit=unit.name, flat=unit.weights, segments=unit.segments)

    # ---- phases

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._label("forward" if torch.is_grad_enabled() else "eval")
        if self._precision is Precision.fp32:
            return args
        dtype = self._units[0].weights.dtype  # as FSDP2 casts what goes into the root
        return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        if torch.is_grad_enabled():
            self._label("backward")

    def _label(self, phase: str) -> None:
        if self._ledger.labels.phase != SETUP:
            self._ledger.at(phase=phase)
