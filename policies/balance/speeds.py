"""How fast the ranks of a group are, from times that noise makes uncertain, and which of them are stragglers.

Logarithms are compared, for a rank is slow by a factor. One window of measurements holds for the whole group, from the
last change of any rank on: what slows all ranks alike then changes no ratio.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .assignment import Assignment, kept_columns
from .policy import GroupMeasured, Half
from .work import BlockWork, Product

HALVES = tuple(Half)
WINDOW = 16  # measurements that are averaged
PRIOR_NOISE = 0.1  # of one measurement, before there is any to tell
PRIOR_WEIGHT = 8.0  # in measurements of one rank
FORGET = 0.9  # a period's share in the estimate of noise, once the next is there
LEAST_NOISE = 0.02
# Means of so many last measurements are compared with those before; so many standard deviations are a change. Of 8
# ranks in 200 periods with nothing but noise, the first then sees one change in ten such runs, the others a few a run,
# which cost no more than a shorter window.
CHANGES = ((1, 4.0), (2, 3.0), (4, 3.0))
ENTER_DEVIATIONS = 3.0  # beyond the slack, for a rank to be taken for a straggler
LEAVE_DEVIATIONS = 1.0  # beyond half of the slack, for a straggler to stay one
CLIP = 2.0  # deviations beyond it count as it in the estimate of noise, so that a change is no noise
CLIPPED_VARIANCE = 0.92  # of a normal variable of variance 1, cut off there

Logs = NDArray[np.float64]  # [halves, ranks], logarithm of ns per unit


@dataclass(frozen=True, slots=True)
class Speeds:
    """What is known after a measurement.

    Args:
        unit_ns: [ranks] for each half: what a unit of all blocks takes in one step, nothing pruned. Ranks that are no
            stragglers have the same.
        stragglers: Ascending.
        error: Standard error of the ratio of a straggler's time to that of the others.
        fresh: Whether nothing but the last measurement is known: something has just changed.
    """

    unit_ns: Mapping[Half, tuple[float, ...]]
    stragglers: tuple[int, ...]
    error: float
    fresh: bool

    def even_ns(self, work: BlockWork) -> tuple[float, ...]:
        """[ranks], of one step, with what an even split without pruning gives each."""
        return tuple(
            sum(work.units[half] * self.unit_ns[half][rank] for half in HALVES) for rank in range(work.ranks)
        )


class SpeedTracker:
    """Averages measurements as long as nothing changes, and begins anew when a rank's speed does.

    A rank is a straggler if it takes longer than those that are as fast as the fastest, by more than the slack. The
    median will not do as a reference: with half of the ranks slow, or one of two, it is itself a slow rank's. The
    fastest alone is the lowest of several noisy numbers; so the mean of all that cannot be told from it stands for it.
    """

    def __init__(self, work: BlockWork, slack: float) -> None:
        self._work = work
        flop = [work.units[half] * work.unit_flop[half] for half in HALVES]
        self._weights = np.array(flop) / sum(flop)  # [halves]
        self._slack = math.log1p(slack)
        self._window: list[Logs] = []
        self._unsettled: tuple[int, ...] = ()  # ranks whose last measurement may hold steps from before a change
        self._stragglers: frozenset[int] = frozenset()
        self._squares, self._weight = PRIOR_WEIGHT * PRIOR_NOISE**2, PRIOR_WEIGHT

    def observe(self, event: GroupMeasured, assignment: Assignment) -> Speeds:
        """Takes a measurement in.

        Args:
            assignment: That was in force when it was made.

        Raises:
            ValueError: If it is not of as many ranks as the group has.
        """
        self._take(self._logs(event, assignment))
        mean = self._mean()
        # of a log ratio of one rank to one other, of what is averaged
        error = self._noise / math.sqrt(len(self._window))
        group = self._fast(self._pooled(mean), error)
        self._stragglers = frozenset(range(self._work.ranks)) - frozenset(group)
        common = np.exp(mean[:, group].mean(axis=1))
        single = np.exp(mean)
        unit_ns = {
            half: tuple(
                float(single[i, rank] if rank in self._stragglers else common[i])
                for rank in range(self._work.ranks)
            )
            for i, half in enumerate(HALVES)
        }
        return Speeds(
            unit_ns,
            tuple(sorted(self._stragglers)),
            error * math.sqrt(1 + 1 / len(group)),
            fresh=len(self._window) == 1,
        )

    # ---- what is measured

    def _logs(self, event: GroupMeasured, assignment: Assignment) -> Logs:
        ranks = self._work.ranks
        logs = np.full((len(HALVES), ranks), np.nan)
        for i, half in enumerate(HALVES):
            times = event.time_ns(half)
            if len(times) != ranks:
                raise ValueError(
                    f"{half.value}_ns of step {event.step} has {len(times)} times: must have {ranks}, one for each rank"
                )
            for rank, time_ns in enumerate(times):
                work = assignment.computed(half, rank) * kept_share(assignment, half, rank)
                if work > 0:
                    logs[i, rank] = math.log(max(1, time_ns) / work)
        return self._filled(logs)

    def _filled(self, logs: Logs) -> Logs:
        """Without gaps: a rank that computed nothing of a half is as slow there as in the other."""
        gaps = np.isnan(logs)
        if not gaps.any():
            return logs
        whole = ~gaps.any(axis=0)
        between = float(np.mean(logs[1, whole] - logs[0, whole])) if whole.any() else 0.0
        other = np.array([logs[1] - between, logs[0] + between])
        filled = np.where(gaps, other, logs)
        if np.isnan(filled).any():  # a rank that computed nothing at all is as slow as it was
            before = self._mean() if self._window else np.nanmean(logs, axis=1, keepdims=True)
            filled = np.where(np.isnan(filled), before, filled)
        return filled

    # ---- what is averaged

    @property
    def _noise(self) -> float:
        """Standard deviation of the logarithm of one measurement of one rank."""
        return max(LEAST_NOISE, math.sqrt(self._squares / self._weight))

    def _mean(self) -> Logs:
        return np.mean(self._window, axis=0)

    def _pooled(self, logs: Logs) -> list[float]:
        """[ranks], over both halves by their work: a rank is slow in both."""
        pooled: list[float] = (self._weights @ logs).tolist()
        return pooled

    def _take(self, logs: Logs) -> None:
        if not self._window:
            self._window, self._unsettled = [logs], tuple(range(self._work.ranks))
            return
        noise = self._noise * math.sqrt(1 + 1 / max(1, self._work.ranks - 1))  # a rank against the others
        unlike = self._against_others(self._pooled(logs - self._mean()))
        window = [*self._window, logs]
        changed = self._changed(window, noise)
        self._learn_noise(unlike, noise * math.sqrt(1 + 1 / len(self._window)))
        if changed is not None:
            last, ranks = changed
            self._window = window[-last:]
            self._unsettled = ranks if last == 1 else ()
        elif any(abs(unlike[rank]) > noise * math.sqrt(2) for rank in self._unsettled):
            self._window, self._unsettled = [logs], ()
        else:
            self._window, self._unsettled = window[-WINDOW:], ()

    def _changed(self, window: Sequence[Logs], noise: float) -> tuple[int, tuple[int, ...]] | None:
        """How many last measurements show a change, and of which ranks; None: nothing has changed."""
        for last, deviations in CHANGES:
            before = len(window) - last
            if before < 1:
                return None
            step = np.mean(window[-last:], axis=0) - np.mean(window[:-last], axis=0)
            bound = max(deviations * noise * math.sqrt(1 / last + 1 / before), self._slack / 2)
            unlike = self._against_others(self._pooled(step))
            ranks = tuple(rank for rank, by in enumerate(unlike) if abs(by) > bound)
            if ranks:
                return last, ranks
        return None

    def _learn_noise(self, unlike: Sequence[float], expected: float) -> None:
        scale = self._noise / expected  # to one measurement's
        clipped = [min(abs(by) * scale, CLIP * self._noise) for by in unlike]
        self._squares = FORGET * self._squares + sum(by**2 for by in clipped) / CLIPPED_VARIANCE
        self._weight = FORGET * self._weight + len(clipped)

    @staticmethod
    def _against_others(values: Sequence[float]) -> list[float]:
        """Less the median of all others, so that what befalls all ranks does not show."""
        if len(values) == 1:
            return [0.0]
        return [
            value - median([*values[:rank], *values[rank + 1 :]]) for rank, value in enumerate(values)
        ]

    # ---- who is slow

    def _fast(self, pooled: Sequence[float], error: float) -> list[int]:
        """Ranks that are as fast as the fastest, ascending."""
        order = sorted(range(len(pooled)), key=lambda rank: (pooled[rank], rank))
        group = order[:1]
        for rank in order[1:]:
            mean = sum(pooled[member] for member in group) / len(group)
            known = error * math.sqrt(1 + 1 / len(group))
            if rank in self._stragglers:
                bound = self._slack / 2 + LEAVE_DEVIATIONS * known
            else:
                bound = self._slack + ENTER_DEVIATIONS * known
            if pooled[rank] - mean <= bound:
                group.append(rank)
        return sorted(group)


def kept_share(assignment: Assignment, half: Half, rank: int) -> float:
    """Of the work of the units that a rank computes of a half, what is left when columns are pruned; mean of blocks."""
    if not assignment.prunes(rank):
        return 1.0
    work = assignment.work
    units = assignment.computed(half, rank)
    first = work.first_share(half)
    # (columns of all, share of the half's work) of its two products
    sizes = {
        product: (work.columns(product, units), first if product.is_first else 1 - first)
        for product in Product
        if product.half is half
    }
    total = 0.0
    for name, product in work.products():
        if product in sizes:
            columns, share = sizes[product]
            kept = kept_columns(columns, assignment.ratio(rank, name))
            total += share * (kept / columns if columns else 1.0)
    return total / work.blocks
