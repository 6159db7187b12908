"""The program of one pipeline stage: FSDP2's order within each pass, and torch's messages between passes."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...policies.comm import WeightsChanged
from ...policies.layout import Kind, Pass, StepGradientsReady
from ...policies.mesh import PIPELINE, STAGE
from ...policies.plan import SendRecv
from ..engine import ROOT, Engine, Stretch, Weights
from ..interpreter import FP32_BYTES, Transfer, Work
from ..program import MAIN, Program
from ..rules import Blocking
from .model import LaidModel
from .order import Act, Action, part_of
from .shapes import BEHIND

SENDS = ("send_forward", "send_backward")  # workers: sends go on beside computation
_RECEIPTS = ("recv_forward", "recv_backward")
REDUCE_STREAM = "reduce"


class CopiesInFlight(dict[str, str]):
    """Secondary copies of units, each good for as many backwards as there were forwards that stored it."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: dict[str, int] = {}

    def __setitem__(self, unit: str, axis: str) -> None:
        super().__setitem__(unit, axis)
        self._readers[unit] = self._readers.get(unit, 0) + 1

    def pop(self, unit: str, *default: object) -> str | None:  # type: ignore[override]
        """One backward has read it."""
        axis = self.get(unit)
        self._readers[unit] = self._readers.get(unit, 0) - 1
        if axis is not None and self._readers[unit] <= 0:
            del self[unit]
        return axis

    def clear(self) -> None:
        super().clear()
        self._readers.clear()


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one stage does after its passes: numbers of a trust ratio, and its parameters to be stepped."""

    num_norms: int
    elements: int


class StageEngine(Engine):
    """Writes the programs of stages.

    Args:
        keys: As of `Engine`; `units` are the first stage's.
    """

    def __init__(self, model: LaidModel, **keys: Any) -> None:
        super().__init__(**keys)
        self._model = model

    def stage_step(
        self,
        rules: Blocking,
        weights: Weights,
        stage: int,
        actions: Sequence[Action],
        step: StepWork,
        *,
        tied_rows: int,
    ) -> Program:
        """One optimizer step of a stage.

        Args:
            tied_rows: Of a matrix that the first and last stage hold, those whose gradient this rank has; 0: none.
        """
        stretches = [self._model.stretch(stage, chunk) for chunk in range(self._model.layout.chunks)]
        self._reduced.clear()
        self._passes(rules, weights, stage, stretches, actions, None)
        weights.gathered.clear()
        self._check_reduced([unit for stretch in stretches for unit in stretch.units])
        rules.drain()
        self._tied_gradient(rules, stage, tied_rows)
        if self._clip:
            self._all_reduce(rules, "step", 1, tag=("clip",))
        if step.num_norms:
            self._all_reduce(rules, "step", step.num_norms, axis=STAGE, tag=("norms", stage))
        self._step(rules, Work("step", "stage", 0, step.elements))
        rules.drain()
        weights.copies.clear()
        for stretch in stretches:
            if stretch.root is None:  # it is asked for, and has no parameters here
                self._decisions.decide(WeightsChanged(ROOT))
            self._publish(rules, stretch.units)
        return rules.writer.program

    def stage_validation(
        self, rules: Blocking, weights: Weights, stage: int, actions: Sequence[Action]
    ) -> Program:
        """Forward passes of a stage without gradients."""
        stretches = [self._model.stretch(stage, chunk) for chunk in range(self._model.layout.chunks)]
        self._passes(rules, weights, stage, stretches, actions, "eval")
        weights.gathered.clear()
        rules.drain()
        self._all_reduce(rules, "eval", self._num_figures, tag=("figures",))
        return rules.writer.program

    def _passes(
        self,
        rules: Blocking,
        weights: Weights,
        stage: int,
        stretches: Sequence[Stretch],
        actions: Sequence[Action],
        only: str | None,
    ) -> None:
        """Args:
        only: The phase of all passes and messages; None: that of each pass.
        """
        begun: dict[tuple[Act, Pass], int] = {}
        for action in actions:
            this, act = action.of, action.act
            phase = only or _phase(this)
            match act:
                case Act.run if this.backward:
                    self._backward(rules, weights, this.micro_batch, stretches[this.chunk])
                    rules.backward_done((*SENDS, *_RECEIPTS))
                case Act.run:
                    self._forward(rules, weights, phase, stretches[this.chunk])
                case Act.send:
                    begun[act, this] = self._message(
                        rules, phase, stage, this, SENDS[this.backward], sends=True
                    )
                case Act.post:
                    worker = _RECEIPTS[this.backward]
                    begun[act, this] = self._message(rules, phase, stage, this, worker, sends=False)
                case Act.receive if (Act.post, this) in begun:
                    rules.wait((begun[Act.post, this],))
                case Act.receive:
                    self._message(rules, phase, stage, this, None, sends=False)
                case Act.settle:
                    rules.wait((begun[Act.send, this],))

    def _message(
        self, rules: Blocking, phase: str, stage: int, this: Pass, worker: str | None, *, sends: bool
    ) -> int:
        """To or from another part: activations, or their gradient. `worker`: None, the main one."""
        layout = self._model.layout
        part, ahead = part_of(layout, stage, this.chunk), -1 if this.backward else 1
        nbytes = self._model.input_bytes()
        sender = part if sends else part - ahead
        op, peer = ("send", ahead) if sends else ("recv", -ahead)
        transfer = Transfer(op, PIPELINE, layout.stages, nbytes, nbytes, peer=peer, listed=sends)
        tag: Hashable = ("message", this.backward, this.micro_batch, sender)
        return rules.message(phase, f"stage.{sender}", transfer, tag=tag, worker=worker or MAIN)

    def _tied_gradient(self, rules: Blocking, stage: int, rows: int) -> None:
        """First and last stage exchange what they have of one matrix's gradient, and add it up."""
        plan = self._model.layout.decide(StepGradientsReady(stage, "embedding"))
        if plan is None or not rows:
            return
        head = next(layer for layer in self._model.shapes.parts[BEHIND] if layer.kind is Kind.tied)
        shape = self._model.shapes.operands_of_parameters(head)["weight"].shape
        nbytes = rows * prod(shape[1:]) * FP32_BYTES
        stages = self._model.layout.stages
        for step in plan.steps:
            if not isinstance(step, SendRecv):
                continue
            ends = []
            for op, sender, worker in (
                ("send", stage, SENDS[True]),
                ("recv", stages - 1 - stage, _RECEIPTS[True]),
            ):
                transfer = Transfer(
                    op, step.axis, stages, nbytes, nbytes, peer=step.shift, listed=op == "send"
                )
                ends.append(
                    rules.message(
                        "backward",
                        f"root.{head.shares}",
                        transfer,
                        tag=("tied", sender),
                        worker=worker,
                        stream=REDUCE_STREAM,
                    )
                )
            rules.wait(tuple(ends))
        work = Work("traffic", "reduce", 0, 3 * nbytes)  # two read, one written
        rules.local("backward", "root", "add tied gradients", work)


def _phase(this: Pass) -> str:
    return "backward" if this.backward else "forward"
