"""What products of a half take, by the units that a rank computes and the columns that it keeps: lines between timed
sizes.

Kernels are not proportional to their work: a product is dealt out in waves of tiles, and each has a start. So a rank
with few units takes longer for each, and is not slow for that.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .policy import Half, ProductsTimed
from .work import BlockWork

# Of a rank's own units, that are timed, and one unit: a straggler may keep no more, whose kernels are as short as they
# get; if they were taken for shorter, it would seem slow for ever
SIZES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 5 / 4, 3 / 2)
KEPT = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of columns
FEW_KEPT = 1 / 2  # of the fewest units
LEAST_SLOPE = 0.1  # of a rank's time at even work that a unit more adds, by the time of a unit then
LEAST_LEFT = 0.5  # of the time with the fewest columns, that is left without any, at the least


@dataclass(frozen=True, slots=True)
class ProductCost:
    """Of one half, in units of an even split: what a rank's own units take is their number.

    Args:
        own: Units of a rank.
        units, efforts: [sizes], ascending; () takes time for proportional to units.
        kept, left: [kept], ascending: of products with so many of their columns, share of the whole ones' time.
        flat: What of the cost of pruning is there however few of its units a rank computes: of inputs columns are
            gathered and scattered that all units share.
    """

    own: int
    units: tuple[int, ...] = ()
    efforts: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    left: tuple[float, ...] = ()
    flat: float = 0.0

    def effort(self, units: int) -> float:
        """Of products of so many units, whole."""
        if len(self.units) < 2 or not units:
            return float(units)
        if units > self.units[-1]:
            return self.efforts[-1] + self.slope * (units - self.units[-1])
        if units < self.units[0]:
            # of the smallest kernels each takes its start, or reads an input that all units share: there is a floor
            step = (self.efforts[1] - self.efforts[0]) / (self.units[1] - self.units[0])
            return max(self.efforts[0] / 2, self.efforts[0] - step * (self.units[0] - units))
        return _between(self.units, self.efforts, units)

    @property
    def slope(self) -> float:
        """Of the straight line through (own, own) that is nearest to all `SIZES`."""
        sizes = zip(self.units, self.efforts, strict=True)
        timed = [(units, effort) for units, effort in sizes if units >= SIZES[0] * self.own]
        squares = sum((units - self.own) ** 2 for units, _ in timed)
        if not squares:
            return 1.0
        both = sum((units - self.own) * (effort - self.own) for units, effort in timed)
        return min(1.0, max(LEAST_SLOPE, both / squares))

    @property
    def fixed(self) -> float:
        """What that line is where there are no units: the part of a rank's time that does not go with them."""
        return (1 - self.slope) * self.own

    def pruning(self, kept: float) -> float:
        """What a rank that keeps a share of its columns takes beyond it, by the time of its own units unpruned."""
        if kept >= 1 or not self.kept:
            return 0.0
        at, left = (0.0, *self.kept), (self._left_without_any, *self.left)
        if kept <= self.kept[-1]:
            return max(0.0, _between(at, left, kept) - kept)
        # not to the time of whole products: columns are gathered and scattered however many are left
        slope = (left[-1] - left[-2]) / (at[-1] - at[-2])
        return max(0.0, left[-1] + slope * (kept - at[-1]) - kept)

    @property
    def _left_without_any(self) -> float:
        if len(self.kept) < 2:
            return self.left[0] * LEAST_LEFT
        slope = (self.left[1] - self.left[0]) / (self.kept[1] - self.kept[0])
        return max(self.left[0] * LEAST_LEFT, self.left[0] - slope * self.kept[0])

    def left_of(self, kept: float) -> float:
        """Of the time of whole products of any units, what those with a share of their columns take."""
        return kept + (1 - self.flat) * self.pruning(kept)

    def flat_of(self, kept: float) -> float:
        """What comes to that, by the time of a rank's own units unpruned."""
        return self.flat * self.pruning(kept)


Products = Mapping[Half, ProductCost]  # what is not in it is proportional


def product_cost(products: Products, work: BlockWork, half: Half) -> ProductCost:
    return products.get(half) or ProductCost(work.units[half])


def sizes_of(work: BlockWork, half: Half) -> tuple[int, ...]:
    """Units whose products are timed before the first step, ascending; a rank's own are among them. (): it has none."""
    own = work.units[half]
    return tuple(sorted({1, *(max(1, round(own * size)) for size in SIZES)})) if own else ()


def fit_products(timed: ProductsTimed, work: BlockWork) -> ProductCost:
    """Ratios to a rank's own time at even work, in which its slowness cancels; the median of ranks. More units take no
    less time.

    Raises:
        ValueError: If times are not of each size and rank, or a rank's own units are not among the sizes.
    """
    own = work.units[timed.half]
    sizes = ((timed.units, timed.units_ns), (timed.kept, timed.kept_ns))
    few = (timed.few_kept_ns,) if timed.few_kept_ns else ()
    if own not in timed.units or any(
        len(each) != len(times) or any(len(ranks) != work.ranks for ranks in (*times, *few))
        for each, times in sizes
    ):
        raise ValueError(
            f"{timed}: must have {work.ranks} times for each size, and {own} units among the sizes"
        )
    even_ns = [max(1, time_ns) for time_ns in timed.units_ns[timed.units.index(own)]]
    cost = ProductCost(
        own,
        timed.units,
        _rising([own * _ratio(times, even_ns) for times in timed.units_ns]),
        timed.kept,
        _rising([_ratio(times, even_ns) for times in timed.kept_ns]),
    )
    return replace(cost, flat=_flat(cost, timed, even_ns))


def _flat(cost: ProductCost, timed: ProductsTimed, even_ns: Sequence[int]) -> float:
    """From what pruning costs with few units and with a rank's own."""
    few, of_own = timed.units[0] / cost.own, cost.pruning(FEW_KEPT)
    if not timed.few_kept_ns or few >= 1 or of_own <= 0:
        return 0.0
    of_few = _ratio(timed.few_kept_ns, even_ns) - FEW_KEPT * cost.effort(timed.units[0]) / cost.own
    return min(1.0, max(0.0, (of_few / of_own - few) / (1 - few)))


def _ratio(times_ns: Sequence[int], even_ns: Sequence[int]) -> float:
    return median(time_ns / whole_ns for time_ns, whole_ns in zip(times_ns, even_ns, strict=True))


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    highest, found = 0.0, []
    for value in values:
        highest = max(highest, value)
        found.append(highest)
    return tuple(found)


def _between(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """On the line between the two neighbours of `x`, which lies within."""
    right = max(1, bisect_left(at, x))
    share = (x - at[right - 1]) / (at[right] - at[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
