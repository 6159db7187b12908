"""What a policy for slow tensor-parallel ranks is told, and what it answers. A policy decides; engines carry out.

Ranks are numbered within their tensor group. All ranks of a group are told the same, so all answer alike. Replicas and
stages have words of their own (`shares`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from .shares import ReplicasMeasured, ShareBlocks, ShareSequences, StagesMeasured


class Half(Enum):
    """Of a block: what lies between two all-reduces, at each of which all ranks wait for the slowest."""

    attention = "attention"  # qkv and out; its units are key heads, each with the heads that share it
    ffn = "ffn"  # fc1 and fc2; its units are hidden features


class Leg(Enum):
    """A part of what ways by columns move for a half of a block, in the order of a step (`columns.leg_plans`)."""

    weights = "weights"  # forward of the first product: lent columns of its weights go out
    outputs = "outputs"  # and what helpers make of them comes back
    operands = "operands"  # forward of the second: lent columns of its weights and of its input go out
    gradients = "gradients"  # backward of the second: gradients of both come back
    output_gradients = "output_gradients"  # backward of the first: the gradient of its output goes out
    weight_gradients = "weight_gradients"  # and those of lent weights come back


# ---- events


@dataclass(frozen=True, slots=True)
class MovementTimed:
    """Before the first step units of one rank went to the others and as much came back, twice: few, then many.

    Args:
        units: Of one rank, in all, each time.
        time_ns: Until the last rank had all, out and back; the slowest of all groups that moved at once.
        together_ns: The same while several ranks lent many each; 0: there are too few ranks for that.
        lenders: How many.
    """

    half: Half
    units: tuple[int, int]
    time_ns: tuple[int, int]
    together_ns: int = 0
    lenders: int = 1


@dataclass(frozen=True, slots=True)
class ColumnsTimed:
    """Before the first step all that lent columns of one rank make ranks send was sent, without the products, twice:
    for few units, then for many.

    Args:
        units: Of one rank, in all, each time.
        few_ns, many_ns: [legs] in the order of `Leg`, each until the last rank had all; the slowest of all groups that
            moved at once.
        together_ns: [legs] while several ranks lent many each; 0: there are too few ranks for that.
        lenders: How many.
    """

    half: Half
    units: tuple[int, int]
    few_ns: tuple[int, ...]
    many_ns: tuple[int, ...]
    together_ns: tuple[int, ...]
    lenders: int = 1


@dataclass(frozen=True, slots=True)
class ProductsTimed:
    """Before the first step each rank computed products of a half of one block, forward and backward: of several
    numbers of units, and of its own units with several shares of their columns.

    Args:
        units: [sizes], ascending, those that a rank holds among them.
        units_ns: [sizes][ranks].
        kept: [shares], ascending, < 1; (): nothing is pruned.
        kept_ns: [shares][ranks].
        few_kept_ns: [ranks], of the fewest units, with half of their columns; (): not timed.
    """

    half: Half
    units: tuple[int, ...]
    units_ns: tuple[tuple[int, ...], ...]
    kept: tuple[float, ...] = ()
    kept_ns: tuple[tuple[int, ...], ...] = ()
    few_kept_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupMeasured:
    """A period has ended.

    Args:
        step: Optimizer steps that are done.
        attention_ns, ffn_ns: [ranks], what the products of that half of all blocks took, of one step, mean over the
            period; waiting left out.
        free_bytes: [ranks], of memory.
        attention_between_ns, ffn_between_ns: [ranks], what a rank did between the two products of that half, such as
            attention itself or the activation: it goes with units, whatever columns are left out. (): not measured.
        around_ns: [ranks], what it did around them, both halves together, such as norms: it goes with nothing.
    """

    step: int
    attention_ns: tuple[int, ...]
    ffn_ns: tuple[int, ...]
    free_bytes: tuple[int, ...]
    attention_between_ns: tuple[int, ...] = ()
    ffn_between_ns: tuple[int, ...] = ()
    around_ns: tuple[int, ...] = ()

    def time_ns(self, half: Half) -> tuple[int, ...]:
        return self.attention_ns if half is Half.attention else self.ffn_ns

    def between_ns(self, half: Half) -> tuple[int, ...]:
        return self.attention_between_ns if half is Half.attention else self.ffn_between_ns


@dataclass(frozen=True, slots=True)
class ChangesMeasured:
    """How much weights have changed since the last refresh.

    Args:
        step: Optimizer steps that are done.
        changes: [ranks][products of all blocks of the stage, in the order of forward], mean over a product's columns of
            the sum of |dW|, relative to the mean |W| of a column; rounded to three digits.
    """

    step: int
    changes: tuple[tuple[float, ...], ...]


BalanceEvent = (
    MovementTimed
    | ColumnsTimed
    | ProductsTimed
    | GroupMeasured
    | ChangesMeasured
    | ReplicasMeasured
    | StagesMeasured
)

# ---- actions


@dataclass(frozen=True, slots=True)
class Prune:
    """A rank leaves this share of the columns of its products out, in forward and backward.

    Args:
        product: Of one product alone, such as "block.0.fc1", blocks counted within the stage; "": of all that no other
            action names.
    """

    rank: int
    ratio: float
    product: str = ""


@dataclass(frozen=True, slots=True)
class Migrate:
    """In every block `dst` computes what `units` of the units that `src` holds would."""

    src: int
    dst: int
    half: Half
    units: int


BalanceAction = Prune | Migrate | ShareSequences | ShareBlocks


class BalancePolicy(Protocol):
    """One for each tensor group, or one for all replicas or stages. It has a memory: same events in the same order,
    same answers, on every rank.

    No clock, no I/O, no torch, no simpy, no randomness. A record also has `predicted_speedup`, where a policy has it:
    the predicted time with nothing done over that with what is in force.
    """

    @property
    def name(self) -> str: ...

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        """All actions that are in force from the next step on; None: those that are stay. (): none is."""
        ...


# ---- words for a log

_EVENTS = (
    "MovementTimed",
    "ColumnsTimed",
    "ProductsTimed",
    "GroupMeasured",
    "ChangesMeasured",
    "ReplicasMeasured",
    "StagesMeasured",
)


def describe_balance_event(event: BalanceEvent) -> str:
    """One line, the same for equal events: what `decisions.jsonl` holds."""
    shown = []
    for f in fields(event):
        value = getattr(event, f.name)
        if value == () and f.default == ():
            continue
        if isinstance(value, Half):
            value = value.value
        elif isinstance(value, tuple):
            value = "/".join(_numbers(each) for each in value)
        shown.append(f"{f.name}={value}")
    return f"{type(event).__name__}({', '.join(shown)})"


def describe_balance_actions(actions: Sequence[BalanceAction] | None) -> str:
    """Such as "prune rank 0 by 0.5, migrate 1 attention from 0 to 3"; "keep", or "nothing" is in force."""
    if actions is None:
        return "keep"
    return ", ".join(_describe(action) for action in actions) or "nothing"


def is_balance_event(text: str) -> bool:
    """Whether `describe_balance_event` wrote it: a run's log holds what other policies were asked too."""
    return text.partition("(")[0] in _EVENTS


def parse_balance_event(text: str) -> BalanceEvent:
    """The event that `describe_balance_event` wrote, for replaying a log.

    Raises:
        ValueError: If `text` names no event.
    """
    name, _, rest = text.partition("(")
    if not is_balance_event(text):
        raise ValueError(f"{text!r} is no event of a balancing policy")
    values = dict(part.split("=", 1) for part in rest.rstrip(")").split(", "))
    if name == "MovementTimed":
        few, many = _ints(values["units"])
        short_ns, long_ns = _ints(values["time_ns"])
        together_ns, lenders = int(values.get("together_ns", 0)), int(values.get("lenders", 1))
        return MovementTimed(Half(values["half"]), (few, many), (short_ns, long_ns), together_ns, lenders)
    if name == "ColumnsTimed":
        few, many = _ints(values["units"])
        return ColumnsTimed(
            Half(values["half"]),
            (few, many),
            _ints(values["few_ns"]),
            _ints(values["many_ns"]),
            _ints(values["together_ns"]),
            int(values["lenders"]),
        )
    if name == "ProductsTimed":
        kept = values.get("kept")
        return ProductsTimed(
            Half(values["half"]),
            _ints(values["units"]),
            _times(values["units_ns"]),
            tuple(float(share) for share in kept.split("/")) if kept else (),
            _times(values["kept_ns"]) if kept else (),
            _ints(values["few_kept_ns"]) if "few_kept_ns" in values else (),
        )
    if name == "StagesMeasured":
        first_ns, last_ns = _ints(values["ends_ns"])
        return StagesMeasured(_ints(values["block_ns"]), (first_ns, last_ns))
    step = int(values["step"])
    if name == "ReplicasMeasured":
        return ReplicasMeasured(step, _ints(values["compute_ns"]), _ints(values["room"]))
    if name == "GroupMeasured":
        lists = (_ints(values[f.name]) if f.name in values else () for f in fields(GroupMeasured)[1:])
        return GroupMeasured(step, *lists)
    changes = tuple(
        tuple(float(number) for number in each.split(":")) for each in values["changes"].split("/")
    )
    return ChangesMeasured(step, changes)


def _numbers(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ":".join(str(number) if isinstance(number, int) else f"{number:.3g}" for number in value)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("/"))


def _times(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(number) for number in each.split(":")) for each in text.split("/"))


def _describe(action: BalanceAction) -> str:
    if isinstance(action, Prune):
        what = f" in {action.product}" if action.product else ""
        return f"prune rank {action.rank} by {action.ratio:.4g}{what}"
    if isinstance(action, ShareSequences):
        return f"share sequences {'/'.join(map(str, action.counts))}"
    if isinstance(action, ShareBlocks):
        return f"share blocks {'/'.join(map(str, action.counts))}"
    return f"migrate {action.units} {action.half.value} from {action.src} to {action.dst}"
