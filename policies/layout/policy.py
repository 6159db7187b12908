"""What a layout policy is asked, and what it answers. A policy decides; engines carry out."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from ..plan import Plan
from .schedule import Pass


class Part(Enum):
    """A piece of the model whose local work a plan names. A plan's value at its borders is in brackets."""

    embedding = "embedding"  # words and positions [from ids to activations]
    block = "block"  # attention and MLP [activations to activations]
    head = "head"  # last norm and logits [activations to logits]
    loss = "loss"  # cross entropy [one fp32 number a token]


class Direction(Enum):
    forward = "forward"
    recompute = "recompute"  # what backward repeats of the forward pass before it begins
    backward = "backward"


@dataclass(frozen=True, slots=True)
class PartRuns:
    """A part of the model runs on this rank for one micro-batch."""

    part: Part
    direction: Direction


@dataclass(frozen=True, slots=True)
class PassEnded:
    """A stage has run one chunk of layers. The plan sends its activations, or their gradient."""

    stage: int
    chunk: int
    backward: bool


@dataclass(frozen=True, slots=True)
class StepGradientsReady:
    """All backward passes of a step have ended on this stage; the gradients of its own ranks are complete.

    The value of the plan is the named gradient: "embedding" of a tied matrix that two stages hold, or
    "replicated", all that each rank of a tensor group holds whole and has seen some tokens only.
    """

    stage: int
    what: str


LayoutEvent = PartRuns | PassEnded | StepGradientsReady


class LayoutPolicy(Protocol):
    """How a model is cut over ranks. Same events, same plans, on every rank.

    Plans name local work too: the order of collectives and computation, and what may run beside what, is the
    policy's. No clock, no I/O, no torch, no simpy, no randomness.
    """

    @property
    def name(self) -> str: ...

    @property
    def tensor(self) -> int:
        """Ranks that share each matrix."""
        ...

    @property
    def stages(self) -> int: ...

    @property
    def chunks(self) -> int:
        """Parts of the model that one stage holds."""
        ...

    def layers(self, stage: int, chunk: int) -> range:
        """Blocks that a chunk of a stage holds."""
        ...

    def passes(self, stage: int) -> tuple[Pass, ...]:
        """What a stage runs in one step, in order."""
        ...

    def decide(self, event: LayoutEvent) -> Plan | None:
        """The plan that answers `event`, or None if there is nothing to do."""
        ...


def describe_layout_event(event: LayoutEvent) -> str:
    """One line, the same for equal events: what `decisions.jsonl` holds."""
    shown = []
    for f in fields(event):
        value = getattr(event, f.name)
        shown.append(f"{f.name}={value.value if isinstance(value, Enum) else value}")
    return f"{type(event).__name__}({', '.join(shown)})"


def parse_layout_event(text: str) -> LayoutEvent:
    """The event that `describe_layout_event` wrote, for replaying a log.

    Raises:
        ValueError: If `text` names no event.
    """
    name, _, rest = text.partition("(")
    values = dict(part.split("=", 1) for part in rest.rstrip(")").split(", "))
    if name == "PartRuns":
        return PartRuns(Part(values["part"]), Direction(values["direction"]))
    if name == "PassEnded":
        return PassEnded(int(values["stage"]), int(values["chunk"]), values["backward"] == "True")
    if name == "StepGradientsReady":
        return StepGradientsReady(int(values["stage"]), values["what"])
    raise ValueError(f"{text!r} is no layout event")
