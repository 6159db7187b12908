"""The layers of a model as a layout sees them: of which kind, with which sizes, between which borders."""

from dataclasses import dataclass, field, fields
from enum import Enum

from .border import Border
from .policy import Direction


class Kind(Enum):
    """What a layer does. Operands of its plans are in brackets; backward reads "d" and the output's name."""

    linear = "linear"  # [x, weight, bias -> y]
    tied = "tied"  # a product with the table of an embedding, transposed [x, weight, bias -> y]
    embedding = "embedding"  # rows of a table by ids [ids, weight -> y]
    positions = "positions"  # rows of a table are added [x, weight -> y]
    layer_norm = "layer_norm"  # [x, weight, bias -> y]
    rms_norm = "rms_norm"  # [x, weight -> y]
    attention = "attention"  # of heads over tokens [q, k, v -> y]
    patches = "patches"  # of images, each by one matrix [images, weight, bias -> y]
    first_token = "first_token"  # a learned token is put before all others [x, weight -> y]
    loss = "loss"  # cross-entropy of cut logits [logits, targets -> loss]
    local = "local"  # whatever each rank does with what it holds


class Role(Enum):
    """What a product does to the features, in pairs: the first of a pair spreads them, the second brings them back."""

    columns = "columns"
    rows = "rows"
    whole = "whole"  # stands alone: what follows needs the border that it began with


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """A layer runs on this rank: `input` is the border before it.

    `number`: of a loss, the classes that are not padding; of a norm, the features of the whole; of attention, 1 if a
    token sees only those before it.
    """

    kind: Kind
    direction: Direction
    input: Border
    role: Role = Role.columns
    bias: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a model.

    Args:
        path: Within its unit, as torch names the module; "" is the unit's own loss or the like.
        features_in, features_out: Of the whole; of an embedding, rows of its table and features; of attention, heads
            times head size of the queries and of the keys.
        sections: Of an output whose parts lie side by side in one matrix, such as queries, keys and values: features of
            each, which are cut each by itself.
        others: Further modules with the same input, whose matrices are taken with this one in one product.
        shares: Which earlier layer's parameter it uses, by path; its own if empty.
        number: As of `LayerRuns`.
    """

    path: str
    kind: Kind
    role: Role = Role.columns
    features_in: int = 0
    features_out: int = 0
    bias: bool = False
    number: int = 0
    sections: tuple[int, ...] = ()
    others: tuple["Layer", ...] = ()
    shares: str = ""
    input: Border = field(default_factory=Border)
    output: Border = field(default_factory=Border)

    def runs(self, direction: Direction) -> LayerRuns:
        return LayerRuns(self.kind, direction, self.input, self.role, self.bias, self.number)


def describe_layer_event(event: LayerRuns) -> str:
    """One line, the same for equal events: what `decisions.jsonl` holds."""
    shown = []
    for f in fields(event):
        value = getattr(event, f.name)
        shown.append(f"{f.name}={value.value if isinstance(value, Enum) else value}")
    return f"LayerRuns({', '.join(shown)})"


def is_layer_event(text: str) -> bool:
    """Whether `describe_layer_event` wrote it."""
    return text.startswith("LayerRuns(")


def parse_layer_event(text: str) -> LayerRuns:
    """The event that `describe_layer_event` wrote, for replaying a log.

    Raises:
        ValueError: If `text` names no such event.
    """
    name, _, rest = text.partition("(")
    if name != "LayerRuns":
        raise ValueError(f"{text!r} is no event of a layer")
    values = dict(part.split("=", 1) for part in rest.rstrip(")").split(", "))
    return LayerRuns(
        Kind(values["kind"]),
        Direction(values["direction"]),
        Border.parse(values["input"]),
        Role(values["role"]),
        values["bias"] == "True",
        int(values["number"]),
    )
