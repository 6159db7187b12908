"""Products of several sizes that are timed before the first step: what a policy is told of how time goes with units.

Set-up: it leaves no rows. To be called on all ranks of a tensor group at once.
"""

from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...kernels.pruned import pruned_matmul
from ...policies.balance import FEW_KEPT, KEPT, Half, Product, ProductsTimed, kept_columns, sizes_of
from ...policies.mesh import TENSOR
from ..layout.pace import Rate
from .balanced import Balanced

REPEATS = 3  # of each size, behind one that is not timed
SMALL = 0.01  # of made-up numbers


def time_products(balanced: Balanced, *, device: torch.device) -> list[ProductsTimed]:
    """One event for each half of which there is a unit."""
    conf, work, rate = balanced.conf, balanced.work, balanced.rate
    assert rate is not None, "products that are balanced are timed"
    found = []
    with balanced.ledger.set_up():
        for half in Half:
            sizes = sizes_of(work, half)
            if not sizes:
                continue
            if not conf.moves:
                sizes = (work.units[half],)
            kept = KEPT if conf.prunes else ()
            dist.barrier()
            own = [_half_ns(balanced, rate, half, units, 1.0, device) for units in sizes]
            own += [_half_ns(balanced, rate, half, work.units[half], share, device) for share in kept]
            if kept and conf.moves:
                own.append(_half_ns(balanced, rate, half, sizes[0], FEW_KEPT, device))
            told = _of_all(balanced, torch.tensor(own, device=device))
            whole, pruned = told[: len(sizes)], told[len(sizes) :]
            found.append(ProductsTimed(half, sizes, whole, kept, pruned[: len(kept)], *pruned[len(kept) :]))
    return found


def _of_all(balanced: Balanced, own: Tensor) -> tuple[tuple[int, ...], ...]:
    """[sizes][ranks]."""
    group = balanced.groups[TENSOR]
    out = own.new_empty(group.size, len(own))
    balanced.collectives.all_gather(group, own, out.view(-1))
    return tuple(tuple(times) for times in out.t().tolist())


def _half_ns(
    balanced: Balanced, rate: Rate, half: Half, units: int, share: float, device: torch.device
) -> int:
    """Of both products, forward and backward, as the stopwatch of training takes it; with a share of their columns."""
    assert rate.stopwatch is not None, "products that are balanced are timed"
    operands = [_operands(balanced, product, units, device) for product in Product if product.half is half]
    times = []
    for _ in range(1 + REPEATS):
        rate.stopwatch.read()
        for x, weight in operands:
            _multiply(rate, half, x, weight, share)
        times.append(rate.stopwatch.read().products[half])
    return int(median(times[1:]))


def _operands(
    balanced: Balanced, product: Product, units: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[tokens, columns] and [rows, columns] of a rank with so many units; a first product's matrices are one."""
    work = balanced.work
    columns = work.columns(product, units)
    rows = work.rows(product)
    if product.is_first:
        rows = rows * units // work.units[product.half]
    like = torch.empty(0, dtype=balanced.dtype, device=device)
    return (
        like.new_full((work.tokens, columns), SMALL).requires_grad_(),
        like.new_full((rows, columns), SMALL).requires_grad_(),
    )


def _multiply(rate: Rate, half: Half, x: Tensor, weight: Tensor, share: float) -> None:
    columns = x.shape[-1]
    count = kept_columns(columns, 1 - share)
    kept = tuple(range(count)) if count < columns else None

    def call(x: Tensor) -> Tensor:
        return functional.linear(x, weight) if kept is None else pruned_matmul(x, weight.t(), kept)

    def flop(_: Sequence[Tensor], y: Tensor) -> int:
        return 2 * y.numel() * count

    with torch.enable_grad():
        y = rate.around(call, flop, half)(x)
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    x.grad = weight.grad = None
