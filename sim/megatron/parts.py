"""What a layout's plan comes to on one rank: local work on a device, and collectives with their sizes.

This is the simulator's interpreter of layout plans. The value between two steps is the activation at the
border of two parts of the model, [tokens, hidden], whole or cut; the loss moves one fp32 number a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

from ...conf.model_flop import Matmul as Product
from ...conf.model_flop import block_matmuls, root_matmuls
from ...conf.model_spec import ModelSpec
from ...policies.layout import Direction, LayoutPolicy, Part
from ...policies.plan import (
    AllGather,
    AllReduce,
    Collective,
    Compute,
    Cut,
    Gradient,
    Matmul,
    Plan,
    ReduceScatter,
    SendRecv,
    Slice,
    Step,
)
from ..device import Device, Tally, transposed
from ..interpreter import Transfer
from ..layers import (
    ATTENTION,
    BlockWork,
    Kernels,
    Module,
    block_modules,
    block_work,
    recomputed_modules,
)
from ..root_layers import embed_work, head_work

FLOAT_BYTES = 4
GRADIENT_BYTES = 2 * FLOAT_BYTES  # a weight's gradient is added to one in fp32: read and written


@dataclass(frozen=True, slots=True)
class LayoutStep:
    """One step of a plan: work on the device, or a collective of `size` > 1 ranks."""

    name: str
    what: Tally | Transfer
    stream: str
    after: tuple[int, ...]  # positions of the steps that must end first


@dataclass(frozen=True, slots=True)
class Sent:
    """A message from one stage to another, its receipt, and what the receiver's tensor group does with it."""

    send: Transfer
    receipt: Transfer
    behind: tuple[Transfer, ...]


class Parts:
    """Steps of every part of one model on one device.

    Args:
        sequence_parallel: Whether ranks of a tensor group keep some tokens each between the cut matrices.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        layout: LayoutPolicy,
        *,
        sequence: int,
        micro: int,
        sequence_parallel: bool,
        recompute: str,
        kernels: Kernels,
    ) -> None:
        self._spec = spec
        self._device = device
        self._layout = layout
        self._sequence, self._micro = sequence, micro
        self._sequence_parallel = sequence_parallel
        self._recompute = recompute
        self._kernels = kernels
        self.tokens = sequence * micro

    @property
    def activation_bytes(self) -> int:
        """The whole border activation of a micro-batch."""
        return self.tokens * self._spec.hidden * self._device.element_bytes

    def steps(self, plan: Plan, part: Part, direction: Direction) -> tuple[LayoutStep, ...]:
        """All steps of a plan, in order."""
        steps = []
        for i, step in enumerate(plan.steps):
            name, what = self._step(step, part, direction)
            steps.append(LayoutStep(name, what, plan.stream_of(i), plan.dependencies(i)))
        return tuple(steps)

    def transfer(self, step: Collective, part: Part | None = None) -> Transfer:
        """A collective over the tensor group of a border activation; of the loss, of a number a token."""
        element = self._device.element_bytes
        numel = self.tokens * self._spec.hidden
        if part is Part.loss:
            numel, element = self.tokens, FLOAT_BYTES
        size, nbytes = self._layout.tensor, numel * element
        match step:
            case AllGather():
                return Transfer("all_gather", step.axis, size, nbytes, nbytes // size)
            case ReduceScatter():
                return Transfer("reduce_scatter", step.axis, size, nbytes, nbytes // size)
            case AllReduce():
                return Transfer("all_reduce", step.axis, size, nbytes, nbytes, numel, element)
        raise ValueError(f"the simulator does not know {type(step).__name__} in a layout's plan")

    def send(self, plan: Plan) -> Sent:
        """What a plan between stages comes to."""
        size = self._layout.tensor
        nbytes = self.activation_bytes // (size if self._sequence_parallel else 1)
        sent: Transfer | None = None
        behind: list[Transfer] = []
        for step in plan.steps:
            match step:
                case Slice():
                    nbytes //= size
                case SendRecv():
                    group = self._layout.stages
                    sent = Transfer("send", step.axis, group, nbytes, nbytes, peer=step.shift)
                case Collective() if sent is not None:
                    behind.append(self.transfer(step))
                case _:
                    raise ValueError(
                        f"plan '{plan.describe()}': {type(step).__name__} cannot stand between stages"
                    )
        if sent is None:
            raise ValueError(f"plan '{plan.describe()}' sends nothing to the next stage")
        receipt = Transfer("recv", sent.axis, sent.group_size, nbytes, nbytes, peer=-sent.peer)
        return Sent(sent, receipt, tuple(behind))

    # ---- local work

    def _step(self, step: Step, part: Part, direction: Direction) -> tuple[str, Tally | Transfer]:
        match step:
            case Matmul():
                name = (
                    f"{step.product}.{step.gradient.value}" if step.gradient.value != "none" else step.product
                )
                return name, self._matmul(step)
            case Compute():
                return step.name, self._compute(step, part, direction)
            case Collective():
                transfer = self.transfer(step, part)
                return transfer.op, transfer
        raise ValueError(f"the simulator does not know {type(step).__name__} in a layout's plan")

    def _matmul(self, step: Matmul) -> Tally:
        expected = Cut.rows if step.product.endswith("_out") else Cut.columns
        if step.cut is not expected:
            raise ValueError(
                f"{step.product} cut by {step.cut.value}: the simulator knows it cut by {expected.value} only, as "
                "1D tensor parallelism has it"
            )
        if step.product == "logits":
            forward, into_input, into_weight = self._logits
        else:
            forward, into_input, into_weight = self._linears[step.product]
        return {Gradient.none: forward, Gradient.input: into_input, Gradient.weight: into_weight}[
            step.gradient
        ]

    def _compute(self, step: Compute, part: Part, direction: Direction) -> Tally:
        if part is not Part.block:
            forward, backward = self._outside[step.name]
            return backward if step.backward else forward
        modules = self._others[step.name]
        if direction is Direction.recompute and self._recompute == "selective":
            again = recomputed_modules(self._modules, "selective", self._kernels)
            modules = tuple(m for m in modules if m in again)
        return _sum(m.backward if step.backward else m.forward for m in modules)

    @cached_property
    def _modules(self) -> tuple[Module, ...]:
        return block_modules(
            self._spec,
            self._device,
            sequence=self._sequence,
            micro=self._micro,
            tensor=self._layout.tensor,
            sequence_parallel=self._sequence_parallel,
            kernels=self._kernels,
        )

    @cached_property
    def _others(self) -> dict[str, tuple[Module, ...]]:
        """The modules behind each `Compute` of a block."""
        found: dict[str, list[Module]] = {}
        for module in self._modules:
            if module.linear:
                continue
            if module.name.startswith("norm"):
                kind = "norm"
            elif module.name.startswith("residual"):
                kind = "residual"
            else:
                kind = "activation"
            where = "attention" if module.sublayer == ATTENTION else "mlp"
            name = f"{where}_{kind}"
            found.setdefault("attention" if name == "attention_activation" else name, []).append(module)
        return {name: tuple(modules) for name, modules in found.items()}

    @cached_property
    def _linears(self) -> dict[str, tuple[Tally, Tally, Tally]]:
        """Forward, the input's and the weight's gradient of each cut matrix of a block."""
        products = {p.kind: p for p in block_matmuls(self._spec, sequence=self._sequence, micro=self._micro)}
        found: dict[str, tuple[Tally, Tally, Tally]] = {}
        for module in self._modules:
            if not module.linear:
                continue
            rows = module.name in ("out", "fc2", "down")
            where = "attention" if module.sublayer == ATTENTION else "mlp"
            name = f"{where}_{'out' if rows else 'in'}"
            whole, t = products[module.name], self._layout.tensor
            cut = Product(
                module.name, whole.m, whole.n if rows else whole.n // t, whole.k // t if rows else whole.k
            )
            own = self._three(cut, module.forward, module.backward)
            before = found.get(name, (Tally(), Tally(), Tally()))
            found[name] = (before[0] + own[0], before[1] + own[1], before[2] + own[2])
        return found

    def _three(self, cut: Product, forward: Tally, backward: Tally) -> tuple[Tally, Tally, Tally]:
        """`backward` in two: what of it is the input's gradient, and the rest (the weight's and the bias')."""
        into_input, _ = self._device.linear(transposed(cut)[0])
        return forward, into_input, _minus(backward, into_input)

    @cached_property
    def _logits(self) -> tuple[Tally, Tally, Tally]:
        product = next(
            p
            for p in root_matmuls(self._spec, sequence=self._sequence, micro=self._micro)
            if p.kind == "logits"
        )
        cut = Product("logits", product.m, -(-product.n // self._layout.tensor), product.k)
        forward, backward = self._device.linear(cut, gradient_bytes=GRADIENT_BYTES)
        return self._three(cut, forward, backward)

    @cached_property
    def _outside(self) -> dict[str, tuple[Tally, Tally]]:
        """Everything outside the blocks but the logits' product: the norm stands for all of the head."""
        keys = {
            "sequence": self._sequence,
            "micro": self._micro,
            "tensor": self._layout.tensor,
        }
        shared = self._sequence_parallel
        embed = embed_work(self._spec, self._device, sequence_parallel=shared, kernels=self._kernels, **keys)
        head = head_work(self._spec, self._device, sequence_parallel=shared, kernels=self._kernels, **keys)
        logits = self._logits
        return {
            "embedding": embed,
            "embedding_dropout": (Tally(), Tally()),  # counted with the embedding
            "head_norm": (Tally(), Tally()),  # counted with the loss
            "loss": (_minus(head[0], logits[0]), _minus(head[1], logits[1] + logits[2])),
        }

    # ---- what is kept

    def block(self) -> BlockWork:
        """One block as a whole: its activations, and its operations as published figures count them."""
        return block_work(
            self._spec,
            self._device,
            sequence=self._sequence,
            micro=self._micro,
            tensor=self._layout.tensor,
            sequence_parallel=self._sequence_parallel,
            recompute=self._recompute,
            kernels=self._kernels,
        )


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total += tally
    return total


def _minus(whole: Tally, part: Tally) -> Tally:
    return Tally(**{f.name: getattr(whole, f.name) - getattr(part, f.name) for f in fields(Tally)})
