"""What an offload policy is asked, and what it answers: chunks of model states between near and far memory.

Near is the memory that computes, far what lies outside it: the host's, or a disk. A policy answers events by
actions; an engine carries these out in order, and a fetch begins when the evictions before it have freed their
memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol


class Kind(Enum):
    """What a chunk holds."""

    parameters = "parameters"
    gradients = "gradients"
    optimizer = "optimizer"  # moments, and the fp32 master copy where there is one


class Place(Enum):
    near = "near"
    far = "far"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of moves: a unit's tensors of one kind on this rank, or a part of them."""

    name: str  # "parameters/block.0", its parts "parameters/block.0/0", "parameters/block.0/1", ...
    kind: Kind
    unit: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class IterationBegins:
    """What follows has the order of the last iteration of this kind: "train", "eval", "generate", ..."""

    kind: str


@dataclass(frozen=True, slots=True)
class ChunkNeeded:
    """The chunk is computed with next: after the actions it is near, until it is released."""

    chunk: str


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """The optimizer steps this chunk of its states next. Answered with a `Step`, whose place tells where."""

    chunk: str


@dataclass(frozen=True, slots=True)
class ChunkReleased:
    """One use has ended that `ChunkNeeded`, or `ChunkStep` with a step near, began."""

    chunk: str
    changed: bool  # it has to be written back before its memory is given away


@dataclass(frozen=True, slots=True)
class ChunkOutdated:
    """A step in far memory has changed the chunk there; what may lie near is old."""

    chunk: str


OffloadEvent = IterationBegins | ChunkNeeded | ChunkStep | ChunkReleased | ChunkOutdated


@dataclass(frozen=True, slots=True)
class Evict:
    """Give the chunk's near memory away, after writing it to far memory if it has changed."""

    chunk: str
    write_back: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy the chunk near and wait for it."""

    chunk: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to copy the chunk near. `ChunkNeeded` does not name it again: the engine waits for it there."""

    chunk: str


@dataclass(frozen=True, slots=True)
class Step:
    """Step the chunk where it lies: near, or in far memory by the host's cores."""

    chunk: str
    where: Place


OffloadAction = Evict | Fetch | Prefetch | Step


class OffloadPolicy(Protocol):
    """No clock, no I/O, no torch, no randomness. It has a memory: same events in the same order, same actions."""

    @property
    def name(self) -> str: ...

    @property
    def chunks(self) -> Mapping[str, Chunk]: ...

    @property
    def near_bytes(self) -> int:
        """Of all chunks that are near now, or on their way."""
        ...

    def place(self, chunk: str) -> Place:
        """Where the chunk lies; before the first event: where it begins."""
        ...

    def stays(self, chunk: str) -> bool:
        """Whether the chunk always lies near."""
        ...

    @property
    def changed(self) -> tuple[str, ...]:
        """Chunks that are newer near than far; a checkpoint has to take these from near memory."""
        ...

    def state(self) -> tuple[object, ...]:
        """What decides all answers to come: policies made alike and in equal states answer alike."""
        ...

    def decide(self, event: OffloadEvent) -> tuple[OffloadAction, ...]:
        """What answers `event`, to be carried out in this order.

        Raises:
            ValueError: If what is in use at once does not fit; or the event names no chunk.
            RuntimeError: If a chunk is released that is not in use.
        """
        ...


_EVENTS: dict[str, type[ChunkNeeded | ChunkStep | ChunkOutdated]] = {
    "ChunkNeeded": ChunkNeeded,
    "ChunkStep": ChunkStep,
    "ChunkOutdated": ChunkOutdated,
}


def describe_offload_event(event: OffloadEvent) -> str:
    """One line, the same for equal events: what `decisions.jsonl` holds."""
    shown = ", ".join(f"{f.name}={getattr(event, f.name)}" for f in fields(event))
    return f"{type(event).__name__}({shown})"


def describe_offload_actions(actions: Sequence[OffloadAction]) -> str:
    """Such as "evict parameters/block.0, fetch parameters/block.5"."""
    return ", ".join(_describe(action) for action in actions) or "nothing"


def _describe(action: OffloadAction) -> str:
    match action:
        case Evict():
            return f"{'write back' if action.write_back else 'evict'} {action.chunk}"
        case Step():
            return f"step {action.chunk} {action.where.value}"
    return f"{type(action).__name__.lower()} {action.chunk}"


def is_offload_event(text: str) -> bool:
    """Whether `describe_offload_event` wrote it: a run's log holds what other policies were asked too."""
    return text.partition("(")[0] in ("IterationBegins", "ChunkReleased", *_EVENTS)


def parse_offload_event(text: str) -> OffloadEvent:
    """The event that `describe_offload_event` wrote, for replaying a log.

    Raises:
        ValueError: If `text` names no event.
    """
    name, _, rest = text.partition("(")
    values = dict(part.split("=", 1) for part in rest.rstrip(")").split(", "))
    if name == "IterationBegins":
        return IterationBegins(values["kind"])
    if name == "ChunkReleased":
        return ChunkReleased(values["chunk"], values["changed"] == "True")
    if name in _EVENTS:
        return _EVENTS[name](values["chunk"])
    raise ValueError(f"{text!r} is no offload event")
