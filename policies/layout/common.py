"""Plans of the layers that follow from the borders around them, whatever the mode: norms, positions, losses.

An activation is cut by features over some axes, and by tokens (or sequences) over others. What a layer needs of all
features of a token is summed over the former; gradients of a parameter that all hold alike are summed over the
latter, for each rank has seen some tokens only.
"""

from collections.abc import Sequence

from ..plan import AllReduce, Apply, Plan, ReduceOp, Slice, Step
from .border import Axes
from .layers import Kind, LayerRuns
from .policy import Direction

LAYER_STREAM = "layer"  # what a layer's plan is carried out on
BATCH, TOKENS, FEATURES = 0, 1, -1  # dimensions of an activation


def layer_plan(steps: Sequence[Step]) -> Plan | None:
    """None: nothing to do that others take part in, or that is not plain computation."""
    return Plan.of_operands(steps, LAYER_STREAM) if steps else None


def sums(operand: str, axes: Axes, op: ReduceOp = ReduceOp.sum) -> tuple[Step, ...]:
    """All-reduce an operand in place over each axis."""
    return tuple(AllReduce(axis=axis, op=op, reads=(operand,), writes=(operand,)) for axis in axes)


def norm(event: LayerRuns) -> Plan | None:
    """A layer norm or root-mean-square norm.

    Features that are cut: the sum and the sum of squares of each token's features are summed over those who hold them,
    forward and backward (Xu et al. 2021, section 3.2.2). The gradients of weight and bias, side by side, are summed
    over those who have seen other tokens.
    """
    features, others = event.input.features, event.input.positions
    if not event.input.axes:
        return None
    kind, number = event.kind.value, event.number
    own = ("x", "weight", "bias") if event.bias else ("x", "weight")
    if event.direction is not Direction.backward:
        return layer_plan(
            (
                Apply(function=f"{kind}_sums", reads=("x",), writes=("sums",)),
                *sums("sums", features),
                Apply(function=kind, number=number, reads=(*own, "sums"), writes=("y",)),
            )
        )
    made = ("dx", "dweight", "dbias") if event.bias else ("dx", "dweight")
    steps: list[Step] = [
        Apply(
            function=f"{kind}_gradient_sums",
            number=number,
            reads=("dy", "x", "weight", "sums"),
            writes=("dsums",),
        ),
        *sums("dsums", features),
        Apply(
            function=f"{kind}_gradient",
            number=number,
            reads=("dy", "x", "weight", "sums", "dsums"),
            writes=("dx", "dparameters"),
        ),
        *sums("dparameters", others),
        Apply(function="rows_apart", reads=("dparameters",), writes=made[1:]),
    ]
    return layer_plan(steps)


def positions(event: LayerRuns, *, beside: Axes = ()) -> Plan | None:
    """A table's rows are added: the gradient of the table is summed over those who have seen other sequences."""
    if not event.input.axes and not beside:
        return None
    if event.direction is not Direction.backward:
        return layer_plan((Apply(function="add_rows", reads=("x", "weight"), writes=("y",)),))
    return layer_plan(
        (
            Apply(function="add_rows_gradient", reads=("dy", "weight"), writes=("dx", "dweight")),
            *sums("dweight", event.input.positions),
        )
    )


def patches(event: LayerRuns) -> Plan | None:
    """Each rank makes its features of the patches of its images; `input` is the border after it."""
    border = event.input
    if not border.axes:
        return None
    cuts, images = cut_batch("images", border.batch)
    if event.direction is not Direction.backward:
        return layer_plan((*cuts, Apply(function="patches", reads=(images, "weight", "bias"), writes=("y",))))
    return layer_plan(
        (
            Apply(
                function="patches_gradient",
                reads=("dy", images, "weight"),
                writes=("dweight", "dbias"),
            ),
            *sums("dweight", border.batch),
            *sums("dbias", border.batch),
        )
    )


def first_token(event: LayerRuns) -> Plan | None:
    """A learned token before all others: its gradient is summed over those who have other sequences."""
    if not event.input.axes:
        return None
    if event.direction is not Direction.backward:
        return layer_plan((Apply(function="prepend", reads=("x", "weight"), writes=("y",)),))
    return layer_plan(
        (
            Apply(function="prepend_gradient", reads=("dy", "weight"), writes=("dx", "dweight")),
            *sums("dweight", event.input.batch),
        )
    )


def cut_batch(operand: str, axes: Axes) -> tuple[tuple[Step, ...], str]:
    """This rank's sequences of what all hold alike, and the operand that they are."""
    cuts: list[Step] = []
    for axis in axes:
        made = f"{operand}_{axis}"
        cuts.append(Slice(axis=axis, dim=BATCH, reads=(operand,), writes=(made,)))
        operand = made
    return tuple(cuts), operand


def loss(event: LayerRuns, *, beside: Axes = (), copies: int = 1) -> Plan | None:
    """Cross-entropy of logits whose classes are cut (Shoeybi et al. 2019, section 3).

    The largest logit of a token, then the sum of exponentials and the right class's logit, are brought together over
    those who hold its classes; the sum of losses and the number of labelled tokens over those who have other tokens,
    so that the mean is over all tokens, and not a mean of means.

    Args:
        beside: Axes over which ranks have other tokens of the same sequences, outside the mode.
        copies: Ranks of them: gradients are averaged over these, so that each gives as many times its own.
    """
    if not event.input.axes and not beside:
        return None
    features, others = event.input.features, (*event.input.positions, *beside)
    cuts, local = cut_batch("targets", event.input.batch)
    if event.direction is not Direction.backward:
        return layer_plan(
            (
                *cuts,
                Apply(
                    function="largest",
                    reads=("logits",),
                    writes=("largest",),
                    number=event.number,
                    axes=features,
                ),
                *sums("largest", features, ReduceOp.max),
                Apply(
                    function="exponentials",
                    reads=("logits", local, "largest"),
                    writes=("exponentials",),
                    number=event.number,
                    axes=features,
                ),
                *sums("exponentials", features),
                Apply(function="losses", reads=("exponentials", "largest", local), writes=("total",)),
                *sums("total", others),
                Apply(function="mean_loss", reads=("total",), writes=("loss",)),
            )
        )
    return layer_plan(
        (
            Apply(function="scale", number=copies, reads=("dloss",), writes=("dtotal",)),
            Apply(
                function="loss_gradient",
                number=event.number,
                axes=features,
                reads=("dtotal", "logits", local, "largest", "exponentials", "total"),
                writes=("dlogits",),
            ),
        )
    )


def common_plan(event: LayerRuns, *, beside: Axes = (), copies: int = 1) -> Plan | None:
    """The plan of a layer that is the same in every mode; None: each rank computes with what it holds.

    Args:
        beside, copies: As of `loss`.

    Raises:
        ValueError: If the kind depends on the mode.
    """
    match event.kind:
        case Kind.layer_norm | Kind.rms_norm:
            return norm(event)
        case Kind.positions:
            return positions(event, beside=beside)
        case Kind.patches:
            return patches(event)
        case Kind.first_token:
            return first_token(event)
        case Kind.loss:
            return loss(event, beside=beside, copies=copies)
        case Kind.local | Kind.attention:
            return None
        case _:
            raise ValueError(f"the plan of a layer of kind {event.kind.value!r} is its mode's")
