"""How much pruning a budget of accuracy allows."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from ...conf.schema import BalanceConf

HALVINGS = 20  # of an interval, when the largest ratio within a budget is looked for
DIGITS = 1e4  # ratios are cut after four digits: what the log of decisions shows


class AccuracyBudget:
    """Points that stragglers of a group may cost together, and what each costs by its ratio.

    Between the ratios of `balance.loss_points` costs lie on straight lines, and beyond the last on that before it. What
    several ranks cost adds up.
    """

    def __init__(self, points: Sequence[tuple[float, float]], budget: float | None, max_ratio: float) -> None:
        """`points`: (ratio, what it costs), in the order of ratios."""
        self._ratios = [0.0, *(ratio for ratio, _ in points)]
        self._points = [0.0, *(cost for _, cost in points)]
        self._budget = math.inf if budget is None else budget
        self._max_ratio = max_ratio

    @classmethod
    def of(cls, conf: BalanceConf, ranks: int) -> Self:
        """Of a group of so many ranks."""
        return cls(conf.points(ranks), conf.accuracy_budget, conf.max_ratio)

    def points(self, ratio: float) -> float:
        """That pruning one rank by `ratio` throughout costs."""
        right = min(max(1, bisect.bisect_left(self._ratios, ratio)), len(self._ratios) - 1)
        low, high = self._ratios[right - 1], self._ratios[right]
        slope = (self._points[right] - self._points[right - 1]) / (high - low)
        return self._points[right - 1] + slope * (ratio - low)

    def allows(self, ratios: Iterable[float]) -> bool:
        return sum(self.points(ratio) for ratio in ratios if ratio) <= self._budget + 1e-9

    def to_level(
        self, times_ns: Mapping[int, float], goal_ns: float, beside_ns: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """Ratios that bring ranks to `goal_ns`, or to the earliest common time that the budget allows.

        gamma = clip((T - T*) / M, 0, max_ratio); M is products, and T has what is beside them too.

        Args:
            times_ns: Of the products of each rank in question, nothing pruned.
            beside_ns: What each does beside; None: nothing.
        """
        beside = dict.fromkeys(times_ns, 0.0) if beside_ns is None else beside_ns
        slowest = max((time_ns + beside[rank] for rank, time_ns in times_ns.items()), default=0.0)
        if goal_ns >= slowest:
            return dict.fromkeys(times_ns, 0.0)

        def ratios(level_ns: float) -> dict[int, float]:
            return {
                rank: cut_ratio(min(self._max_ratio, max(0.0, 1 - (level_ns - beside[rank]) / time_ns)))
                for rank, time_ns in times_ns.items()
            }

        low, high = max(0.0, goal_ns), slowest
        if self.allows(ratios(low).values()):
            return ratios(low)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.allows(ratios(middle).values()) else (middle, high)
        return ratios(high)

    def of_all(self, ranks: Sequence[int], ratio: float) -> dict[int, float]:
        """The same ratio for each: `ratio`, or the largest below that the budget allows."""
        high = min(ratio, self._max_ratio)
        if self.allows([high] * len(ranks)):
            return dict.fromkeys(ranks, cut_ratio(high))
        low = 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.allows([middle] * len(ranks)) else (low, middle)
        return dict.fromkeys(ranks, cut_ratio(low))


def cut_ratio(ratio: float) -> float:
    """To the digits that a log shows, never up; what is a rounding error below a digit is that digit."""
    return math.floor(ratio * DIGITS + 1e-5) / DIGITS
