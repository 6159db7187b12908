"""Ratios for each product around the same mean: what changes less in training is left out more.

A slow rank then does as much less work as with one ratio, but not in every half of every block, and others wait for it
at each: it gains less time than one ratio for all does. `costs.predicted_ns` counts that.
"""

from collections.abc import Mapping, Sequence

from .assignment import Assignment
from .budget import cut_ratio
from .policy import Prune
from .work import BlockWork, Product

LEAST_CHANGE = 1e-3  # of the mean: what changes less counts as this


def prunes(
    assignment: Assignment,
    ratios: Mapping[int, float],
    changes: Sequence[Sequence[float]] | None,
    *,
    max_ratio: float,
) -> tuple[Prune, ...]:
    """Actions by which ranks leave these shares out, ascending.

    Args:
        assignment: Who computes which units.
        changes: [ranks][products of the stage, in the order of forward]; None: all of a rank's have its ratio.

    Raises:
        ValueError: If `changes` has not a number for each product of each rank.
    """
    actions: list[Prune] = []
    work = assignment.work
    names = [name for name, _ in work.products()]
    for rank, ratio in sorted(ratios.items()):
        if not ratio:
            continue
        if changes is None:
            actions.append(Prune(rank, ratio))
            continue
        if len(changes) != work.ranks or len(changes[rank]) != len(names):
            raise ValueError(
                f"changes of weights are of {[len(each) for each in changes]} products by ranks: must be of "
                f"{len(names)}, for each of {work.ranks} ranks"
            )
        weights = [product_flop(assignment, rank, product) for _, product in work.products()]
        each = differentiated(ratio, changes[rank], weights, max_ratio)
        actions += [
            Prune(rank, mine, name) for name, mine in zip(names, map(cut_ratio, each), strict=True) if mine
        ]
    return tuple(actions)


def differentiated(
    ratio: float, changes: Sequence[float], weights: Sequence[float], max_ratio: float
) -> list[float]:
    """Ratios in inverse proportion to changes, whose mean by weights is `ratio` as far as the limit allows."""
    mean = sum(changes) / len(changes)
    if not mean:
        return [min(ratio, max_ratio)] * len(changes)
    scores = [1 / max(change / mean, LEAST_CHANGE) for change in changes]
    found = [0.0] * len(changes)
    open_products = [i for i, weight in enumerate(weights) if weight]
    left = ratio * sum(weights)
    while open_products:
        scale = left / sum(scores[i] * weights[i] for i in open_products)
        over = [i for i in open_products if scale * scores[i] >= max_ratio]
        if not over:
            for i in open_products:
                found[i] = scale * scores[i]
            break
        for i in over:
            found[i] = max_ratio
            left = max(0.0, left - max_ratio * weights[i])
        open_products = [i for i in open_products if i not in over]
    return found


def product_flop(assignment: Assignment, rank: int, product: Product) -> float:
    """Of a product of one block on a rank, forward, nothing pruned."""
    work: BlockWork = assignment.work
    first = work.first_share(product.half)
    share = first if product.is_first else 1 - first
    return share * work.unit_flop[product.half] * assignment.computed(product.half, rank)
