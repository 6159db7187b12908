"""A policy's plans inside FSDP2: custom all-gather and reduce-scatter hooks on every unit.

What FSDP2 decides (when a unit is gathered or reduced) stays its own; what is then sent is the plan's. The
hooks work on any model under `fully_shard`, so `attach` uses them in loops that know nothing of this package.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ..policies.comm import (
    CommPolicy,
    GradientsReady,
    Phase,
    WeightsChanged,
    WeightsNeeded,
    check_copy,
    check_reduced,
)
from ..policies.partition import shard_segments
from ..policies.plan import LoadCopy, Plan
from .dispatch import activate
from .interpreter import Interpreter
from .ledger import SETUP
from .overlap import CommThread
from .secondary import SecondaryShard, WeightsWatch

ROOT = "root"


class ShardedHooks:
    """Puts a policy into a model under FSDP2.

    Weights that changed are noticed by any optimizer's step and by any load_state_dict; `weights_changed`
    says it for other ways. Then no secondary copy is used any more, and units that a forward without
    gradients has left gathered are resharded before the next forward (without that they would compute with
    old weights).

    Args:
        units: Every FSDP module by its name, "root" for the model itself.
        policy: Asked for each gather and reduction.
        interpreter: Runs what it answers.
        thread: Overlap; None: hooks block.
        wire_dtype: What gradients are cast to before they are sent; None: they come in it.
        counts_steps: Nobody else tells the ledger of iterations: each forward after a step begins one.
    """

    def __init__(
        self,
        units: Mapping[str, FSDPModule],
        *,
        policy: CommPolicy,
        interpreter: Interpreter,
        thread: CommThread | None = None,
        wire_dtype: torch.dtype | None = None,
        counts_steps: bool = False,
    ) -> None:
        self.policy = policy
        self.interpreter = interpreter
        self.ledger = interpreter.ledger
        self.thread = thread
        self.units = units
        self.phase = Phase.forward
        self._counts_steps = counts_steps
        self._changed = False  # since the last forward
        self._stepped = False  # since the last forward with gradients
        self._evaluated = False
        self._training = True  # the last forward was one with gradients
        self._micro_batch, self._num_micro_batches = 0, 1
        self._plans: dict[str, Plan | None] = {}  # of this micro-batch's gradients; empty: not asked yet
        self._reduced: set[str] = set()  # units of which a micro-batch of this step reduces gradients
        self._said: dict[str, tuple[bool, bool]] = {}  # (reduce, reshard) as FSDP2 was last told
        self._unsaid: list[GradientsReady] = []  # decisions to move nothing, to be logged in their turn
        self._hooks = [_UnitHooks(self, name, module, wire_dtype) for name, module in units.items()]
        # Units of which there is something to move: a pipeline's middle has a root without parameters, and of a
        # layout's single replica nothing moves
        alone = interpreter.mesh.num_ranks == 1
        self._moving = {h.name for h in self._hooks if h.has_parameters} if not alone else set()
        root = units[ROOT]
        assert isinstance(root, nn.Module)
        modules = [module for module in units.values() if isinstance(module, nn.Module)]
        self._watch = WeightsWatch(modules, self.weights_changed)
        self._handles = [
            # Before FSDP2's own hook, which gathers the root.
            root.register_forward_pre_hook(self._forward_begins, prepend=True),
            root.register_forward_hook(self._forward_ends),
        ]

    def begin_micro_batch(self, index: int, count: int) -> None:
        """Tell FSDP2 what the policy wants done with the gradients of micro-batch `index` of `count`."""
        self._say_unsaid()
        self._micro_batch, self._num_micro_batches = index, count
        last = index == count - 1
        if index == 0:
            self._reduced.clear()
        reshard = last or self.policy.reshard_after_forward
        for name in self._backward_order():
            event = GradientsReady(name, index, count)
            plan = self._plans[name] = self.policy.decide(event)
            if plan is not None:
                self._reduced.add(name)
            said = (plan is not None, reshard)
            if self._said.get(name) != said:
                self._said[name] = said
                self.units[name].set_requires_gradient_sync(said[0], recurse=False)
                self.units[name].set_reshard_after_backward(said[1], recurse=False)
            if plan is None and name in self._moving:
                self._unsaid.append(event)
        if last:
            check_reduced(self.policy, list(self.units), self._reduced)
        self.units[ROOT].set_is_last_backward(last)

    def end_micro_batch(self) -> None:
        """After its backward."""
        self._say_unsaid()

    def finish_gradients(self) -> None:
        """After the last backward of a step: all reductions are done."""
        self._say_unsaid()
        if self.thread is not None:
            self.thread.drain()

    def weights_changed(self) -> None:
        """No copy of the weights is good any more."""
        self._changed = self._stepped = True
        for hooks in self._hooks:
            hooks.copy.invalidate()

    def ask_to_publish(self) -> None:
        """After an optimizer step: a sharded placement has nothing to publish, and logs that it was asked."""
        for name in self.units:
            event = WeightsChanged(name)
            plan = self.policy.decide(event)
            self.ledger.decided(event, plan)
            if plan is not None:
                raise ValueError(
                    f"policy {self.policy.name!r} publishes {name} by '{plan.describe()}': only a "
                    "replicated or "
                    "server placement can, a sharded one gathers what it needs"
                )

    @property
    def secondary_bytes(self) -> int:
        return sum(hooks.copy.nbytes for hooks in self._hooks)

    def remove(self) -> None:
        """Stop watching; FSDP2 keeps the hooks in the units."""
        for handle in self._handles:
            handle.remove()
        self._watch.remove()

    def reads_shard(self, name: str) -> bool:
        """Whether the gather that comes next reads this rank's shard, or a copy made from an earlier gather.

        To be asked once before a gather, where shards lie elsewhere.
        """
        (hooks,) = (hooks for hooks in self._hooks if hooks.name == name)
        hooks.asked = self._ask(hooks)
        return not any(isinstance(step, LoadCopy) for step in hooks.asked.steps)

    # ---- what FSDP2 calls

    def gather(
        self, hooks: "_UnitHooks", output: Tensor, shard: Tensor, *, async_op: bool
    ) -> dist.Work | None:
        copy = hooks.copy
        plan, hooks.asked = hooks.asked or self._ask(hooks), None
        task = partial(
            self.interpreter.gather,
            plan,
            unit=hooks.name,
            shard=shard,
            out=output,
            segments=hooks.segments(shard.numel()),
            copies=copy,
        )
        if self.thread is None:
            task()
            return None
        work = self.thread.submit(task, hooks.name)
        if async_op:
            return work
        work.wait()
        return None

    def _ask(self, hooks: "_UnitHooks") -> Plan:
        """The plan of the gather that comes next, which is logged."""
        activate(self.ledger)
        event = WeightsNeeded(hooks.name, self.phase, hooks.copy.valid)
        plan = self.policy.decide(event)
        self.ledger.decided(event, plan)
        if plan is None:
            raise ValueError(
                f"policy {self.policy.name!r} gathers nothing for {event}: a sharded unit cannot do without"
            )
        check_copy(self.policy, event, plan)
        outlives = self.policy.copy_outlives_micro_batch
        hooks.copy.issued(plan, self.phase, outlives_micro_batch=outlives, training=self._training)
        return plan

    def reduce(self, hooks: "_UnitHooks", output: Tensor, slices: Tensor, *, mean: bool) -> None:
        activate(self.ledger)
        event = GradientsReady(hooks.name, self._micro_batch, self._num_micro_batches)
        plan = self._plans[hooks.name] if hooks.name in self._plans else self.policy.decide(event)
        self.ledger.decided(event, plan)
        if plan is None:
            raise RuntimeError(
                f"policy {self.policy.name!r} leaves the gradients of {hooks.name} on this rank at "
                f"{event}, but "
                "FSDP2 reduces them; call begin_micro_batch before each forward"
            )
        segments = hooks.segments(output.numel())

        def task() -> None:
            x, out = slices, output
            if hooks.wire_dtype is not None and x.dtype != hooks.wire_dtype:
                x, out = x.to(hooks.wire_dtype), torch.empty_like(output, dtype=hooks.wire_dtype)
            self.interpreter.reduce(plan, unit=hooks.name, slices=x, out=out, segments=segments, mean=mean)
            if out is not output:
                output.copy_(out)

        if self.thread is None:
            task()
        else:
            self.thread.submit(task, hooks.name)

    def _forward_begins(self, module: nn.Module, args: object) -> None:
        activate(self.ledger)  # there may be other models in this process
        training = self._training = torch.is_grad_enabled()
        if self._changed or (training and self._evaluated):
            for unit in self.units.values():
                unit.reshard()
            self._changed = self._evaluated = False
        if not training:
            self._evaluated = True
        elif self._stepped:
            self._stepped = False
            if self._counts_steps:
                self.ledger.at(iteration=self.ledger.labels.iteration + 1)
        self.phase = Phase.forward
        self._label("forward" if training else "eval")

    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        self.phase = Phase.backward
        if torch.is_grad_enabled():
            self._label("backward")

    def _label(self, phase: str) -> None:
        if self.ledger.labels.phase != SETUP:
            self.ledger.at(phase=phase)

    def _backward_order(self) -> list[str]:
        return [*reversed([name for name in self.units if name != ROOT]), ROOT]

    def _say_unsaid(self) -> None:
        for event in self._unsaid:
            self.ledger.decided(event, None)
        self._unsaid.clear()


class _UnitHooks:
    """The two hooks of one unit, and its copy."""

    def __init__(
        self, owner: ShardedHooks, name: str, module: FSDPModule, wire_dtype: torch.dtype | None
    ) -> None:
        self.name = name
        self.wire_dtype = wire_dtype
        self.copy = SecondaryShard(name)
        self.asked: Plan | None = None  # of the gather that comes next, where it was asked for ahead
        self._module = module
        self._world = owner.interpreter.mesh.num_ranks
        self._segments: dict[int, tuple[int, ...]] = {}
        module.set_custom_all_gather(_Gather(owner, self))
        module.set_custom_reduce_scatter(_Reduce(owner, self))

    @property
    def has_parameters(self) -> bool:
        return bool(self._shapes(trainable=False))

    def segments(self, numel: int) -> tuple[int, ...]:
        """Lengths of the parameters in a slice of `numel` elements.

        FSDP2 gathers all parameters of the unit, but reduces only those that got a gradient. A slice that
        fits neither all nor all trainable ones is taken as one range.
        """
        known = self._segments.get(numel)
        if known is None:
            choices = [
                shard_segments(self._shapes(trainable=trainable), self._world) for trainable in (False, True)
            ]
            known = next((choice for choice in choices if sum(choice) == numel), (numel,))
            self._segments[numel] = known
        return known

    def _shapes(self, *, trainable: bool) -> list[tuple[int, ...]]:
        """Whole parameters, in the order in which FSDP2 lays their shards side by side."""
        return [
            tuple(parameter._orig_size)
            for group in self._module._get_fsdp_state()._fsdp_param_groups
            for parameter in group.fsdp_params
            if parameter.sharded_param.requires_grad or not trainable
        ]

    def check(self, group: dist.ProcessGroup) -> None:
        if group.size() != self._world:
            raise RuntimeError(
                f"{self.name} is sharded over {group.size()} ranks, but the policy's mesh has "
                f"{self._world}: it "
                "must be sharded over the whole world"
            )


class _Allocates:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates, AllGather):
    def __init__(self, owner: ShardedHooks, unit: _UnitHooks) -> None:
        self._owner = owner
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._unit.check(group)
        return self._owner.gather(self._unit, output_tensor, input_tensor, async_op=async_op)


class _Reduce(_Allocates, ReduceScatter):
    def __init__(self, owner: ShardedHooks, unit: _UnitHooks) -> None:
        self._owner = owner
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._unit.check(group)
        # Under fp16 FSDP2 divides by itself, before and after. With a divide factor of the user's it passes a
        # third operator, which would be taken for a plain sum.
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                f"{self._unit.name}: FSDP2 asks for {op}; only AVG and SUM are served, so leave "
                "set_gradient_divide_factor alone"
            )
        self._owner.reduce(self._unit, output_tensor, input_tensor, mean=op == dist.ReduceOp.AVG)
        return None
