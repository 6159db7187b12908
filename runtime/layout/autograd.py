"""A layer's plans as a function that torch can differentiate: forward runs one plan, backward the other."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...policies.balance import Half
from ...policies.plan import Plan
from .functions import Context
from .interpreter import LayerInterpreter


@dataclass(frozen=True, kw_only=True)
class Program:
    """How one layer is computed.

    Several tensors may make one operand: matrices that share their input, one below the other; and several
    outputs may be made of one operand. Where a plan gathers rows of such a matrix (3D), they come in `runs`, each of
    which has its share of every part.

    Args:
        label: Of rows in the ledger.
        inputs: The operand of each tensor that the layer is given. The parts of one operand lie beside each other.
        output: The operand that comes out.
        widths: Features of each part of the output; () is one part.
        runs: Runs of the output's features that each hold as large a share of every part.
        bias_in_runs: Biases come in them too, as they are cut like the matrix; else they lie as the output does.
        half: Of a block whose products are measured.
    """

    interpreter: LayerInterpreter
    forward: Plan
    backward: Plan
    label: str
    context: Context
    inputs: tuple[str, ...]
    output: str = "y"
    widths: tuple[int, ...] = ()
    runs: int = 1
    bias_in_runs: bool = False
    half: Half | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The parts of the output."""
        made: tuple[Tensor, ...] = _Planned.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return made

    def evaluate(self, operands: Mapping[str, Tensor], keep: Collection[str]) -> dict[str, Tensor]:
        """Operands of forward's plan, without gradients."""
        return self.interpreter.run(self.forward, operands, label=self.label, context=self.context, keep=keep)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """What backward reads of what forward was given or made.

        Raises:
            ValueError: If backward reads something else, too.
        """
        there = {*self.inputs, *(name for step in self.forward.steps for name in step.writes)}
        given = f"d{self.output}"
        lacking = [name for name in self.backward.operands if name not in there and name != given]
        if lacking:
            raise ValueError(
                f"{self.label}: backward's plan reads {lacking}, which are neither {given!r} nor of forward's plan: "
                f"{sorted(there)}"
            )
        return tuple(name for name in self.backward.operands if name != given)

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """One operand from its parts."""
        if name != "bias" or self.runs == 1 or self.bias_in_runs:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if len(parts) == 1:
            parts = torch.split(parts[0], list(self.widths))
        return _interleave(parts, self.runs)

    def split(self, name: str, gradient: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
        """The gradient of each part, of so many rows, from that of the operand; undoes `join`."""
        if name != "bias" or self.runs == 1 or self.bias_in_runs:
            return (gradient,) if len(rows) == 1 else torch.split(gradient, list(rows))
        apart = _apart(gradient, self.widths, self.runs)
        return (torch.cat(list(apart)),) if len(rows) == 1 else apart

    def outputs(self, y: Tensor, count: int) -> tuple[Tensor, ...]:
        """`count` outputs: one, or one a width."""
        if self.runs == 1:
            return (y,) if count == 1 else torch.split(y, list(self.widths), -1)
        apart = _apart(y, self.widths, self.runs)
        return (torch.cat(list(apart), -1),) if count == 1 else tuple(apart)

    def output_gradient(self, gradients: Sequence[Tensor]) -> Tensor:
        """Undoes `outputs`."""
        if self.runs == 1:
            return gradients[0] if len(gradients) == 1 else torch.cat(list(gradients), -1)
        if len(gradients) == 1:
            gradients = torch.split(gradients[0], list(self.widths), -1)
        return _interleave(gradients, self.runs)

    @property
    def num_outputs(self) -> int:
        """One for each matrix."""
        return max(1, self.inputs.count("weight"))

    def grouped(self, tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """The parts of each operand."""
        found: dict[str, list[Tensor]] = {}
        for name, tensor in zip(self.inputs, tensors, strict=True):
            found.setdefault(name, []).append(tensor)
        return found


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = program.grouped(tensors)
        operands = {name: program.join(name, some) for name, some in parts.items()}
        made = program.interpreter.run(
            program.forward,
            operands,
            label=program.label,
            context=program.context,
            keep={program.output, *program.saved},
            half=program.half,
        )
        # What was given is kept as it was given: a parameter's memory may be let go until backward.
        kept = {
            name: parts[name] if name in operands and made[name] is operands[name] else None
            for name in program.saved
        }
        ctx.program = program
        ctx.counts = {name: None if some is None else len(some) for name, some in kept.items()}
        ctx.parts = {name: [(len(part), part.dtype) for part in some] for name, some in parts.items()}
        ctx.save_for_backward(
            *(one for name, some in kept.items() for one in ([made[name]] if some is None else some))
        )
        return program.outputs(made[program.output], program.num_outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        program: Program = ctx.program
        saved = iter(ctx.saved_tensors)
        operands: dict[str, Tensor] = {}
        for name, count in ctx.counts.items():
            some = [next(saved) for _ in range(count or 1)]
            operands[name] = some[0] if count is None else program.join(name, some)
        operands[f"d{program.output}"] = program.output_gradient(gradients)
        made = program.interpreter.run(
            program.backward,
            operands,
            label=program.label,
            context=program.context,
            keep={f"d{name}" for name in ctx.parts},
            half=program.half,
        )
        found: list[Tensor | None] = [None]  # of `program`
        for name, some in ctx.parts.items():
            gradient = made.get(f"d{name}")
            if gradient is None:
                found += [None] * len(some)
                continue
            split = program.split(name, gradient, [rows for rows, _ in some])
            found += [one.to(dtype) for one, (_, dtype) in zip(split, some, strict=True)]
        return tuple(found)


def _interleave(parts: Sequence[Tensor], runs: int) -> Tensor:
    """[..., D] of runs that each have a share of every part, side by side."""
    return torch.cat([torch.unflatten(part, -1, (runs, -1)) for part in parts], -1).flatten(-2)


def _apart(whole: Tensor, widths: Sequence[int], runs: int) -> tuple[Tensor, ...]:
    """Undoes `_interleave`."""
    pieces = torch.split(torch.unflatten(whole, -1, (runs, -1)), [width // runs for width in widths], -1)
    return tuple(piece.flatten(-2) for piece in pieces)
