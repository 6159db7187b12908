"""The functions that a layer's plan applies to operands: what each makes of which shapes.

The runtime has one implementation of each (`runtime.layout.functions`), the simulator these shapes and the bytes that
they move. Results of kind "wide" are fp32 (fp64 where all is), those of kind "same" of the first operand's dtype, those
of kind "parameter" of the last one's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .ring import BLOCK_GRADIENTS, BLOCKS

Shape = tuple[int, ...]

SAME, WIDE, PARAMETER = "same", "wide", "parameter"


@dataclass(frozen=True, slots=True)
class Made:
    """One result."""

    shape: Shape
    kind: str = SAME


Rule = Callable[[Sequence[Shape]], tuple[Made, ...]]


def results(function: str, operands: Sequence[Shape]) -> tuple[Made, ...]:
    """What `function` makes of operands of these shapes, in the order of `Apply.writes`.

    Raises:
        ValueError: If there is no such function.
    """
    if function not in _RULES:
        raise ValueError(f"Apply(function={function!r}): must be one of {sorted(_RULES)}")
    return _RULES[function](operands)


def register_function(name: str, rule: Rule) -> None:
    """Add a function of a mode of one's own; the runtime's side is `runtime.layout.functions.register`.

    Raises:
        ValueError: If the name is taken.
    """
    if name in _RULES:
        raise ValueError(f"function {name!r} is there already; the names taken are {sorted(_RULES)}")
    _RULES[name] = rule


def _first(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[0]),)


def _last_dim(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[0][-1:]),)


def _of_parameter(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[-1], PARAMETER),)


def _rows_of_table(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    ids, table = shapes
    return (Made((*ids, table[-1]), PARAMETER),)


def _numbers_a_token(count: int) -> Rule:
    return lambda shapes: (Made((count, *shapes[0][:-1]), WIDE),)


def _norm_gradient(rows: int) -> Rule:
    return lambda shapes: (Made(shapes[0]), Made((rows, shapes[0][-1]), WIDE))


def _apart(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    rows, *rest = shapes[0]
    return tuple(Made(tuple(rest)) for _ in range(rows))


def _first_and_parameter(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[0]), Made(shapes[-1], PARAMETER))


def _patches(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    (batch, _, height, width), weight, _ = shapes
    out, _, rows, columns = weight
    return (Made((batch, (height // rows) * (width // columns), out), PARAMETER),)


def _patches_gradient(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[2], PARAMETER), Made(shapes[2][:1], PARAMETER))


def _prepend(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    batch, tokens, features = shapes[0]
    return (Made((batch, tokens + 1, features)),)


def _prepend_gradient(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    batch, tokens, features = shapes[0]
    return (Made((batch, tokens - 1, features)), Made(shapes[1], PARAMETER))


def _attention(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[0]), Made(shapes[0][:-1], WIDE))


def _attention_gradient(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return tuple(Made(shape) for shape in shapes[1:4])


def _stack(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made((len(shapes), *shapes[0])),)


def _merge(kind: str) -> Rule:
    return lambda shapes: (Made(shapes[0], kind), Made(shapes[1], WIDE))


def _attention_block_gradient(shapes: Sequence[Shape]) -> tuple[Made, ...]:
    return (Made(shapes[1]), Made(shapes[2]))


_RULES: dict[str, Rule] = {
    "add_bias": _first,
    "sum_tokens": _last_dim,
    "look_up": _rows_of_table,
    "look_up_gradient": _of_parameter,
    "layer_norm_sums": _numbers_a_token(2),
    "layer_norm": _first,
    "layer_norm_gradient_sums": _numbers_a_token(2),
    "layer_norm_gradient": _norm_gradient(2),
    "rms_norm_sums": _numbers_a_token(1),
    "rms_norm": _first,
    "rms_norm_gradient_sums": _numbers_a_token(1),
    "rms_norm_gradient": _norm_gradient(1),
    "rows_apart": _apart,
    "add_rows": _first,
    "add_rows_gradient": _first_and_parameter,
    "patches": _patches,
    "patches_gradient": _patches_gradient,
    "prepend": _prepend,
    "prepend_gradient": _prepend_gradient,
    "largest": lambda shapes: (Made(shapes[0][:-1], WIDE),),
    "exponentials": _numbers_a_token(2),
    "losses": lambda shapes: (Made((2,), WIDE),),
    "mean_loss": lambda shapes: (Made((), WIDE),),
    "scale": _first,
    "loss_gradient": lambda shapes: (Made(shapes[1]),),
    "attention": _attention,  # and the logarithm of each row's sum
    "attention_gradient": _attention_gradient,
    "stack": _stack,
    **dict.fromkeys(BLOCKS, _attention),
    **dict.fromkeys(BLOCK_GRADIENTS, _attention_block_gradient),
    "merge": _merge(WIDE),
    "merge_last": _merge(SAME),
    "accumulate": lambda shapes: (Made(shapes[0], WIDE),),
    "add": _first,
    "zeros": _first,
}
