"""What the functions of `policies.layout.functions` do with tensors.

Sums are "wide": fp32, or fp64 where the operand is. None writes to its operands; a result may be an operand, or a part
of one.

Shapes: B sequences, T tokens, D features that are here, V classes that are here, S rows of a table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...policies.layout.border import Axes, num_parts, part_index
from ...policies.layout.ring import BLOCK_GRADIENTS, BLOCKS
from ...policies.layout.tokens import Seen, seen
from ...policies.mesh import Mesh
from ...policies.plan import Apply
from ..balance.columns import PrunedColumns
from .attention import (
    accumulate,
    add,
    attention,
    attention_block,
    attention_block_gradient,
    attention_gradient,
    merge,
    merge_last,
)

IGNORED = -100  # a target without a label


def first_rows(x_BTD: Tensor) -> Tensor:
    """The rows of tokens that stand at 0 to T - 1."""
    return torch.arange(x_BTD.shape[1], device=x_BTD.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a function knows beside its operands.

    Args:
        mesh, rank: Tell which part of an operand is here.
        eps: Of a norm.
        rows: From an activation [B, T, D] to [T] int64, the rows of a table that are added to its tokens.
        over_all: The loss is divided by the number of all targets, so that ignored ones count as 0.
        pruned: Of a product that can be pruned.
    """

    mesh: Mesh
    rank: int
    eps: float = 0.0
    rows: Callable[[Tensor], Tensor] = field(default=first_rows)
    over_all: bool = False
    pruned: PrunedColumns | None = None

    def first(self, axes: Axes, size: int) -> int:
        """Where the part that is here begins in the whole, parts being of `size`."""
        return part_index(self.mesh, axes, self.rank) * size if num_parts(self.mesh, axes) > 1 else 0


Function = Callable[[Apply, Context, Sequence[Tensor]], tuple[Tensor, ...]]


def apply_function(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results, in the order of `step.writes`.

    Raises:
        ValueError: If there is no such function.
    """
    if step.function not in _FUNCTIONS:
        raise ValueError(f"Apply(function={step.function!r}): must be one of {sorted(_FUNCTIONS)}")
    return _FUNCTIONS[step.function](step, context, operands)


def register(name: str, function: Function) -> None:
    """Add a function of a mode of one's own; its shapes are `policies.layout.functions.register_function`'s.

    Raises:
        ValueError: If the name is taken.
    """
    if name in _FUNCTIONS:
        raise ValueError(f"function {name!r} is there already; the names taken are {sorted(_FUNCTIONS)}")
    _FUNCTIONS[name] = function


def wide(x: Tensor) -> Tensor:
    """In the precision of sums."""
    return x if x.dtype == torch.float64 else x.float()


# ---- products


def _add_bias(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    y, bias = operands
    return (y + bias,)


def _sum_tokens(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (dy,) = operands
    return (dy.flatten(0, -2).sum(0),)


def _scale(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (operands[0] * step.number,)


# ---- words and positions


def _local_ids(step: Apply, context: Context, ids: Tensor, rows: int) -> Tensor:
    """Rows of the table that is here; `rows` for what lies elsewhere."""
    local = ids - context.first(step.axes, rows)
    return torch.where((local >= 0) & (local < rows), local, rows)


def _look_up(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ids, table_SD = operands
    local = _local_ids(step, context, ids, len(table_SD))
    elsewhere = local == len(table_SD)
    return (
        functional.embedding(local.masked_fill(elsewhere, 0), table_SD).masked_fill_(
            elsewhere[..., None], 0.0
        ),
    )


def _look_up_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ids, dy, table_SD = operands
    rows = len(table_SD)
    local = _local_ids(step, context, ids, rows)
    # One row more than there are takes what belongs to others.
    gradient = torch.ops.aten.embedding_dense_backward(dy.contiguous(), local, rows + 1, -1, False)
    return (gradient[:rows].to(table_SD.dtype),)


def _add_rows(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x_BTD, table = operands
    return (x_BTD + functional.embedding(context.rows(x_BTD), table.flatten(0, -2)),)


def _add_rows_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy_BTD, table = operands
    gradient = torch.zeros_like(table)
    gradient.flatten(0, -2).index_add_(0, context.rows(dy_BTD), dy_BTD.sum(0).to(table.dtype))
    return dy_BTD, gradient


def _patches(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    images, weight, bias = operands
    made = functional.conv2d(images.to(weight.dtype), weight, bias, stride=weight.shape[2:])
    return (made.flatten(2).transpose(1, 2).contiguous(),)


def _patches_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy_BPD, images, weight = operands
    size = (weight.shape[2], weight.shape[3])
    pixels_BXP = functional.unfold(images.to(weight.dtype), size, stride=size)
    gradient = torch.einsum("bpd,bxp->dx", dy_BPD, pixels_BXP)
    return gradient.reshape(weight.shape), dy_BPD.sum((0, 1))


def _prepend(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x_BTD, token_11D = operands
    return (torch.cat([token_11D.expand(len(x_BTD), -1, -1), x_BTD], 1),)


def _prepend_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy_BTD, token_11D = operands
    return dy_BTD[:, 1:], dy_BTD[:, :1].sum(0, keepdim=True).view(token_11D.shape)


# ---- norms. sums: of a token's features [and of their squares]; dsums: of dy weight [and of dy weight x_hat]


def _layer_norm_sums(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x = wide(operands[0])
    return (torch.stack([x.sum(-1), x.square().sum(-1)]),)


def _standardized(step: Apply, context: Context, x: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """(x_hat, 1 / deviation), wide; one row of sums is of squares, two are of values and squares."""
    if len(sums) == 1:
        inverse = (sums[0, ..., None] / step.number + context.eps).rsqrt()
        return wide(x) * inverse, inverse
    mean = sums[0, ..., None] / step.number
    variance = (sums[1, ..., None] / step.number - mean.square()).clamp_min(0.0)
    inverse = (variance + context.eps).rsqrt()
    return (wide(x) - mean) * inverse, inverse


def _norm(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, weight, *bias, sums = operands
    made = _standardized(step, context, x, sums)[0] * weight
    return ((made + bias[0] if bias else made).to(x.dtype),)


def _layer_norm_gradient_sums(
    step: Apply, context: Context, operands: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    dy, x, weight, sums = operands
    weighted = wide(dy) * weight
    x_hat, _ = _standardized(step, context, x, sums)
    return (torch.stack([weighted.sum(-1), (weighted * x_hat).sum(-1)]),)


def _layer_norm_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy, x, weight, sums, dsums = operands
    x_hat, inverse = _standardized(step, context, x, sums)
    mean, slope = dsums[0, ..., None] / step.number, dsums[1, ..., None] / step.number
    dx = (wide(dy) * weight - mean - x_hat * slope) * inverse
    weights = (wide(dy) * x_hat).flatten(0, -2).sum(0)
    return dx.to(x.dtype), torch.stack([weights, wide(dy).flatten(0, -2).sum(0)])


def _rms_norm_sums(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (wide(operands[0]).square().sum(-1)[None],)


def _rms_norm_gradient_sums(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy, x, weight, sums = operands
    x_hat, _ = _standardized(step, context, x, sums)
    return ((wide(dy) * weight * x_hat).sum(-1)[None],)


def _rms_norm_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy, x, weight, sums, dsums = operands
    x_hat, inverse = _standardized(step, context, x, sums)
    dx = (wide(dy) * weight - x_hat * (dsums[0, ..., None] / step.number)) * inverse
    return dx.to(x.dtype), (wide(dy) * x_hat).flatten(0, -2).sum(0)[None]


def _rows_apart(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return operands[0].unbind()


# ---- losses. Columns from `number` on are padding


def _real(step: Apply, context: Context, logits: Tensor) -> Tensor:
    """Logits of the classes that are no padding, wide."""
    here = logits.shape[-1]
    return wide(logits[..., : max(0, min(here, step.number - context.first(step.axes, here)))])


def _largest(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    logits = _real(step, context, operands[0])
    if not logits.shape[-1]:
        return (logits.new_full(logits.shape[:-1], -torch.inf),)
    return (logits.amax(-1),)


def _right(step: Apply, context: Context, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(column of the right class, whether it is here) of each token."""
    here = logits.shape[-1]
    column = targets - context.first(step.axes, here)
    is_here = (targets >= 0) & (column >= 0) & (column < here)
    return column.masked_fill(~is_here, 0), is_here


def _exponentials(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[2, B, T]: the sum of exponentials of logits less the largest, and the right class's logit less it."""
    logits, targets, largest = operands
    column, is_here = _right(step, context, targets, logits)
    right = wide(logits.gather(-1, column[..., None])[..., 0]) - largest
    total = (_real(step, context, logits) - largest[..., None]).exp_().sum(-1)
    return (torch.stack([total, right.masked_fill(~is_here, 0.0)]),)


def _losses(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[2]: the sum of the labelled tokens' losses, and their number."""
    (total, right), _, targets = operands
    labelled = targets != IGNORED
    count = labelled.new_ones(()) * labelled.numel() if context.over_all else labelled.sum()
    loss = (total.log() - right).masked_fill(~labelled, 0.0).sum()
    return (torch.stack([loss, count.to(loss.dtype)]),)


def _mean_loss(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss, count = operands[0]
    return (loss / count,)


def _loss_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dloss, logits, targets, largest, exponentials, total = operands
    real = _real(step, context, logits)
    gradient = torch.zeros(logits.shape, dtype=real.dtype, device=logits.device)
    inner = gradient[..., : real.shape[-1]]
    torch.exp(real - largest[..., None], out=inner) if inner.numel() else None
    gradient /= exponentials[0][..., None]
    column, is_here = _right(step, context, targets, logits)
    gradient.scatter_add_(-1, column[..., None], -is_here[..., None].to(gradient.dtype))
    weight = (targets != IGNORED).to(gradient.dtype) * (dloss / total[1])
    return ((gradient * weight[..., None]).to(logits.dtype),)


# ---- attention


def _attention(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, k, v = operands
    return attention(q, k, v, causal=bool(step.number))


def _attention_gradient(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dy, q, k, v, y, log_sums = operands
    return attention_gradient(dy, q, k, v, y, log_sums, causal=bool(step.number))


def _seen(step: Apply, context: Context, masks: tuple[bool, bool]) -> Seen:
    """What this rank's queries see of a block that goes round."""
    causal, zigzag = masks
    size, rank = num_parts(context.mesh, step.axes), part_index(context.mesh, step.axes, context.rank)
    return seen(size=size, zigzag=zigzag, causal=causal, rank=rank, step=step.number)


def _attention_block(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, kv = operands
    return attention_block(q, kv, _seen(step, context, BLOCKS[step.function]))


def _attention_block_gradient(
    step: Apply, context: Context, operands: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    dy, q, kv, y, log_sums = operands
    part = _seen(step, context, BLOCK_GRADIENTS[step.function])
    return attention_block_gradient(dy, q, kv, y, log_sums, part)


def _stack(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.stack(list(operands)),)


def _merge(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    y, log_sums, y_sum, sums = operands
    return (merge_last if step.function == "merge_last" else merge)(y, log_sums, y_sum, sums)


def _accumulate(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    part, total = operands
    return (accumulate(part, total),)


def _add(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    part, other = operands
    return (add(part, other),)


def _zeros(step: Apply, context: Context, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.zeros_like(operands[0]),)


_FUNCTIONS: dict[str, Function] = {
    "add_bias": _add_bias,
    "sum_tokens": _sum_tokens,
    "look_up": _look_up,
    "look_up_gradient": _look_up_gradient,
    "layer_norm_sums": _layer_norm_sums,
    "layer_norm": _norm,
    "layer_norm_gradient_sums": _layer_norm_gradient_sums,
    "layer_norm_gradient": _layer_norm_gradient,
    "rms_norm_sums": _rms_norm_sums,
    "rms_norm": _norm,
    "rms_norm_gradient_sums": _rms_norm_gradient_sums,
    "rms_norm_gradient": _rms_norm_gradient,
    "rows_apart": _rows_apart,
    "add_rows": _add_rows,
    "add_rows_gradient": _add_rows_gradient,
    "patches": _patches,
    "patches_gradient": _patches_gradient,
    "prepend": _prepend,
    "prepend_gradient": _prepend_gradient,
    "largest": _largest,
    "exponentials": _exponentials,
    "losses": _losses,
    "mean_loss": _mean_loss,
    "scale": _scale,
    "loss_gradient": _loss_gradient,
    "attention": _attention,
    "attention_gradient": _attention_gradient,
    **dict.fromkeys(BLOCKS, _attention_block),
    **dict.fromkeys(BLOCK_GRADIENTS, _attention_block_gradient),
    "stack": _stack,
    "merge": _merge,
    "merge_last": _merge,
    "accumulate": _accumulate,
    "add": _add,
    "zeros": _zeros,
}
