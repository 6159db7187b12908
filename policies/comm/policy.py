"""What a communication policy is asked, and what it answers. A policy decides; engines carry out."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from ..plan import LoadCopy, Plan


class Phase(Enum):
    forward = "forward"
    backward = "backward"


class Placement(Enum):
    """Where weights live between steps."""

    replicated = "replicated"  # on every rank, optimizer states too
    server = "server"  # rank 0 owns them; the others hold a copy for computing
    sharded = "sharded"  # each rank owns a part and gathers the rest


@dataclass(frozen=True, slots=True)
class WeightsNeeded:
    """A unit's weights are needed on this rank and are not there."""

    unit: str
    phase: Phase
    copy_valid: bool  # a secondary shard of this unit exists and its weights have not changed since


@dataclass(frozen=True, slots=True)
class GradientsReady:
    """A unit's gradients of one micro-batch are complete on this rank."""

    unit: str
    micro_batch: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """The optimizer has stepped on the ranks that own the unit's weights."""

    unit: str


CommEvent = WeightsNeeded | GradientsReady | WeightsChanged


class CommPolicy(Protocol):
    """Which collectives move weights and gradients. Same events, same plans, on every rank.

    No clock, no I/O, no torch, no simpy, no randomness.
    """

    @property
    def name(self) -> str: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered weights are dropped after forward, so that backward needs them again."""
        ...

    @property
    def hpz_size(self) -> int:
        """Ranks that hold one secondary copy of the weights together; 1: there is none."""
        ...

    @property
    def copy_outlives_micro_batch(self) -> bool:
        """Whether the secondary copy serves until the optimizer step, and not just one backward."""
        ...

    def decide(self, event: CommEvent) -> Plan | None:
        """The plan that answers `event`, or None if nothing is to be moved."""
        ...


def check_copy(policy: CommPolicy, event: WeightsNeeded, plan: Plan) -> None:
    """Refuse to start from a secondary shard that is not there, or holds old weights.

    Raises:
        ValueError: Naming the policy, the event and the plan.
    """
    if not event.copy_valid and any(isinstance(step, LoadCopy) for step in plan.steps):
        raise ValueError(
            f"policy {policy.name!r} answers {describe_event(event)} by '{plan.describe()}', but there is no copy "
            "to load: use LoadCopy only where copy_valid is True"
        )


def check_reduced(policy: CommPolicy, units: Collection[str], reduced: Collection[str]) -> None:
    """Refuse a step that would train on gradients of this rank alone.

    Args:
        units: Whose gradients a step has.
        reduced: Those for which a plan answered GradientsReady in at least one of its micro-batches.

    Raises:
        ValueError: Naming the policy and the unit.
    """
    never = [unit for unit in units if unit not in reduced]
    if never:
        which = "any unit" if len(never) == len(units) else repr(never[0])
        raise ValueError(
            f"policy {policy.name!r} never reduces the gradients of {which}: it answers None to GradientsReady in "
            "every micro-batch of a step; answer one of them, at the latest the last, with a plan"
        )


_FIELDS: dict[type, tuple[str, ...]] = {}  # dataclasses.fields takes longer than all else in the description


def describe_event(event: CommEvent) -> str:
    """One line, the same for equal events: what `decisions.jsonl` holds."""
    kind = type(event)
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(f.name for f in fields(event))
    shown = []
    for name in names:
        value = getattr(event, name)
        shown.append(f"{name}={value.value if isinstance(value, Enum) else value}")
    return f"{kind.__name__}({', '.join(shown)})"


def describe_action(plan: Plan | None) -> str:
    return plan.describe() if plan is not None else "nothing"


def parse_event(text: str) -> CommEvent:
    """The event that `describe_event` wrote, for replaying a log.

    Raises:
        ValueError: If `text` names no event.
    """
    name, _, rest = text.partition("(")
    values = dict(part.split("=", 1) for part in rest.rstrip(")").split(", "))
    if name == "WeightsNeeded":
        return WeightsNeeded(values["unit"], Phase(values["phase"]), values["copy_valid"] == "True")
    if name == "GradientsReady":
        return GradientsReady(values["unit"], int(values["micro_batch"]), int(values["num_micro_batches"]))
    if name == "WeightsChanged":
        return WeightsChanged(values["unit"])
    raise ValueError(f"{text!r} is no communication event")
