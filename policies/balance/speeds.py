"""How fast the ranks of a group are, from times that noise makes uncertain, and which of them are stragglers.

Logarithms are compared, for a rank is slow by a factor. What slows all ranks alike (the median of all) is taken off,
for no ratio changes by it; then each rank is averaged from its own last change on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .assignment import Assignment, kept_columns
from .beside import NOTHING, Beside, BesideTracker
from .policy import GroupMeasured, Half
from .product_cost import ProductCost, Products, product_cost
from .work import BlockWork, Product

HALVES = tuple(Half)
WINDOW = 16  # measurements that are averaged
PRIOR_NOISE = 0.1  # of one measurement, before there is any to tell
PRIOR_WEIGHT = 4.0  # in measurements of one rank
FORGET = 0.9  # a period's share in the estimate of noise, once the next is there
LEAST_NOISE = 0.02
# Means of so many last measurements are compared with those before; so many standard deviations are a change. One alone
# must be far beyond noise; the second that shows a change is enough for all others. What noise alone makes of the
# latter costs no more than a shorter average.
CHANGES = ((1, 5.5), (2, 3.0), (4, 3.0))
# Beyond the slack, for a rank to be taken for a straggler: after one measurement, which has just made a stir, and after
# several.
ENTER_DEVIATIONS = (3.0, 2.5)
LOWEST_DEVIATIONS = 4.0  # the same against one rank alone, which is the lowest of several noisy numbers
LEAVE_DEVIATIONS = 1.5  # beyond half of the slack, for a straggler to stay one
# A straggler that has just become faster is let go if it seems slower by no more than so many times the slack: what it
# would take of even work is known from a few timed sizes, no better. One period of even work tells.
LET_GO = 2.0
SETTLED_DEVIATIONS = 1.5  # beyond which a second measurement after a change replaces the first
# What a rank that prunes takes beyond its share of columns, which are gathered and scattered: of the time of all of its
# own units, be they lent or not, for its input has the same size. A guess (a simulated V100 takes 0.034), and how far
# off it may be, until ranks that begin to prune show it.
OVERHEAD, OVERHEAD_DOUBT = 0.04, 0.1
TIMED_DOUBT = 0.02  # where pruning was timed before the first step, and what it took is taken off already
LIKELY_OVERHEAD = 0.3  # what is above it is rather a change of speed
# By so much more noise a rank tells of it whose last measurement may hold steps from before a change: at the start, and
# later, when it nearly always does.
UNSETTLED_DEVIATIONS = (2.0, 6.0)
LEAST_STEP = 0.05  # of the columns that are kept, to learn from
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
        overhead: What a rank that prunes takes beyond its share of columns, by the time of its own units unpruned;
            without what `ProductCost.pruning` has of it.
        error: Standard error of the ratio of a straggler's time to that of the others; the largest.
        fresh: Whether of some rank nothing but the last measurement is known: its speed has just changed.
        beside: What ranks do beside products.
    """

    unit_ns: Mapping[Half, tuple[float, ...]]
    stragglers: tuple[int, ...]
    overhead: float
    error: float
    fresh: bool
    beside: Beside = NOTHING

    def even_ns(self, work: BlockWork) -> tuple[float, ...]:
        """[ranks], of one step, of the products that an even split without pruning gives each."""
        return tuple(
            sum(work.units[half] * self.unit_ns[half][rank] for half in HALVES) for rank in range(work.ranks)
        )


@dataclass(frozen=True, slots=True)
class Done:
    """What ranks did when they were measured.

    Args:
        share: [halves, ranks], of what a rank's own units take, nothing pruned; with what pruning is known to add.
        kept: [halves, ranks], of the columns; 1: nothing was pruned.
    """

    share: Logs
    kept: Logs

    def log_work(self, overhead: float) -> Logs:
        """NaN of a rank that did nothing."""
        work = self.share + np.where(self.kept < 1, overhead, 0.0)
        return np.log(np.where(work > 0, work, np.nan))

    def log_change(self, was: float, overhead: float) -> Logs:
        """What speeds change by where another overhead is taken off: 0 but of ranks that prune."""
        pruned = self.kept < 1
        shares = np.where(pruned, self.share, 1.0)
        return np.where(pruned, np.log((shares + was) / (shares + overhead)), 0.0)


class SpeedTracker:
    """Averages a rank's measurements as long as its speed does not change, and begins anew when it does.

    A rank is a straggler if it takes longer than those that are as fast as the fastest, by more than the slack. The
    median will not do as a reference: with half of the ranks slow, or one of two, it is itself a slow rank's. The
    fastest alone is the lowest of several noisy numbers; so the mean of all that cannot be told from it stands for it.
    """

    def __init__(self, work: BlockWork, slack: float, products: Products | None = None) -> None:
        """`products`: what they take by their size; looked at when a measurement is taken in."""
        self._work = work
        self._products: Products = {} if products is None else products
        flop = [work.units[half] * work.unit_flop[half] for half in HALVES]
        self._weights = np.array(flop) / sum(flop)  # [halves]
        self._slack = math.log1p(slack)
        self._rows: list[Logs] = []  # what befell all ranks taken off; NaN where a rank has changed since
        self._done: list[Done] = []  # of each row
        self._overhead = OVERHEAD
        self._common = 0.0  # what was taken off the last
        self._unsettled: frozenset[int] = (
            frozenset()
        )  # whose last measurement may hold steps from before a change
        self._faster: frozenset[int] = frozenset()  # at the last measurement
        self._stragglers: frozenset[int] = frozenset()
        self._squares, self._weight = PRIOR_WEIGHT * PRIOR_NOISE**2, PRIOR_WEIGHT
        self._beside = BesideTracker(work, WINDOW)

    def observe(self, event: GroupMeasured, assignment: Assignment) -> Speeds:
        """Takes a measurement in.

        Args:
            assignment: That was in force when it was made.

        Raises:
            ValueError: If it is not of as many ranks as the group has.
        """
        ranks = range(self._work.ranks)
        if not self._rows and self._pruning_timed:
            self._overhead = 0.0
        self._take(*self._measured(event, assignment))
        mean, counts = _mean(self._rows), _counts(self._rows)
        errors = [self._noise / math.sqrt(count) for count in counts]
        group = self._fast(self._believed(self._pooled(mean)), errors, counts)
        self._stragglers = frozenset(ranks) - frozenset(group)
        times = np.exp(mean + self._common)
        # taken for equal: each of their measurements counts alike
        common = np.exp(np.average(mean[:, group], axis=1, weights=[counts[rank] for rank in group]))
        common *= math.exp(self._common)
        unit_ns = {
            half: tuple(float(times[i, rank] if rank in self._stragglers else common[i]) for rank in ranks)
            for i, half in enumerate(HALVES)
        }
        of_group = self._noise / math.sqrt(sum(counts[rank] for rank in group))
        error = max((math.hypot(errors[rank], of_group) for rank in self._stragglers), default=of_group)
        stragglers = tuple(sorted(self._stragglers))
        beside = self._beside.observe(event, assignment, counts=counts, fast=group)
        return Speeds(unit_ns, stragglers, self._overhead, error, fresh=min(counts) == 1, beside=beside)

    # ---- what is measured

    def _measured(self, event: GroupMeasured, assignment: Assignment) -> tuple[Logs, "Done"]:
        work = self._work
        ranks = range(work.ranks)
        for half in HALVES:
            if len(times := event.time_ns(half)) != work.ranks:
                raise ValueError(
                    f"{half.value}_ns of step {event.step} has {len(times)} times: must have {work.ranks}, one "
                    "for each rank"
                )
        products = {half: product_cost(self._products, work, half) for half in HALVES}
        computed = np.array(
            [
                [products[half].effort(assignment.computed(half, rank)) / work.units[half] for rank in ranks]
                for half in HALVES
            ]
        )
        kept = np.array([[kept_share(assignment, half, rank) for rank in ranks] for half in HALVES])
        kept = np.where(computed > 0, kept, 1.0)
        left, flat = (
            np.array([[of(products[half], share) for share in kept[i]] for i, half in enumerate(HALVES)])
            for of in (ProductCost.left_of, ProductCost.flat_of)
        )
        done = Done(computed * left + np.where(computed > 0, flat, 0.0), kept)
        units = np.array([[work.units[half]] for half in HALVES])
        times_ns = np.maximum(np.array([event.time_ns(half) for half in HALVES], dtype=np.float64), 1.0)
        return self._filled(np.log(times_ns / units) - done.log_work(self._overhead)), done

    def _filled(self, logs: Logs) -> Logs:
        """Without gaps: a rank that computed nothing of a half is as slow there as in the other."""
        gaps = np.isnan(logs)
        if not gaps.any():
            return logs
        whole = ~gaps.any(axis=0)
        between = float(np.mean(logs[1, whole] - logs[0, whole])) if whole.any() else 0.0
        filled = np.where(gaps, np.array([logs[1] - between, logs[0] + between]), logs)
        if np.isnan(filled).any():  # a rank that computed nothing at all is as slow as it was
            before = _mean(self._rows) + self._common if self._rows else np.nanmean(filled, axis=1)[:, None]
            filled = np.where(np.isnan(filled), before, filled)
        return filled

    # ---- what is averaged

    @property
    def _pruning_timed(self) -> bool:
        return any(product.kept for product in self._products.values())

    @property
    def _noise(self) -> float:
        """Standard deviation of the logarithm of one measurement of one rank."""
        return max(LEAST_NOISE, math.sqrt(self._squares / self._weight))

    def _pooled(self, logs: Logs) -> list[float]:
        """[ranks], over both halves by their work: a rank is slow in both."""
        pooled: list[float] = (self._weights @ logs).tolist()
        return pooled

    def _take(self, logs: Logs, done: Done) -> None:
        everyone = frozenset(range(self._work.ranks))
        if not self._rows:
            self._rows, self._done, self._unsettled = [logs], [done], everyone
            return
        logs = self._learn_overhead(logs, done)
        mean = _mean(self._rows)
        self._common = median(self._pooled(logs - mean))
        row = logs - self._common
        unlike = self._pooled(row - mean)
        rows = [*self._rows, row]
        changed = self._changed(rows)
        noise = self._noise * self._relative
        self._learn_noise(unlike, _counts(self._rows))
        for rank in self._unsettled - changed.keys():
            if abs(unlike[rank]) > SETTLED_DEVIATIONS * math.sqrt(2) * noise:
                changed[rank] = 1
        # where nothing was timed, times are taken to be in proportion, and for exact
        self._faster = frozenset(rank for rank in changed if unlike[rank] < 0 and self._products)
        unsettled = {rank for rank, last in changed.items() if last == 1 and rank not in self._unsettled}
        self._rows = _without(rows, changed)[-WINDOW:]
        self._done = [*self._done, done][-WINDOW:]
        self._unsettled = frozenset(unsettled)

    @property
    def _relative(self) -> float:
        """Noise of a rank against the common, by that of a rank alone."""
        return math.sqrt(1 - 1 / self._work.ranks) if self._work.ranks > 1 else 1.0

    def _changed(self, rows: Sequence[Logs]) -> dict[int, int]:
        """Ranks whose speeds have changed, and how many last measurements show it."""
        changed: dict[int, int] = {}
        for last, deviations in CHANGES:
            if len(rows) <= last:
                break
            before = _counts(rows[:-last])
            after = _counts(rows[-last:])
            step = self._pooled(_mean(rows[-last:]) - _mean(rows[:-last]))
            for rank, by in enumerate(step):
                if rank in changed or not before[rank] or after[rank] < last:
                    continue
                noise = deviations * self._noise * math.sqrt(1 / last + 1 / before[rank])
                if abs(by) > max(noise, self._slack / 2) * self._relative:
                    changed[rank] = last
        return changed

    def _learn_overhead(self, logs: Logs, done: Done) -> Logs:
        """Of ranks that prune otherwise than before, or did so for the first time at the last measurement, which may
        have held steps from before a change: they are as fast as they were.

        Returns:
            The measurement as it is with what was learned; so are the rows.
        """
        pooled_share = [self._pooled(each.share) for each in (*self._done, done)]
        pooled_kept = [self._pooled(each.kept) for each in (*self._done, done)]
        known = [~np.isnan(row[0]) for row in self._rows]
        ranks = range(self._work.ranks)
        # by rank that prunes otherwise: the last measurement before, and all at which it did as then
        before: dict[int, tuple[int, list[int]]] = {}
        for rank in ranks:
            at = self._before_pruning(rank, pooled_kept, known)
            if at is not None:
                alike = [
                    place
                    for place in range(at + 1)
                    if known[place][rank]
                    and abs(pooled_kept[place][rank] - pooled_kept[at][rank]) <= LEAST_STEP
                ]
                before[rank] = (at, alike)
        if not before:
            return logs
        mean = _mean(self._rows)
        for rank, (_, alike) in before.items():
            mean[:, rank] = np.mean([self._rows[place][:, rank] for place in alike], axis=0)
        unlike = self._pooled(logs - mean)
        common = median([by for rank, by in enumerate(unlike) if rank not in before] or unlike)
        precision = (TIMED_DOUBT if self._pruning_timed else OVERHEAD_DOUBT) ** -2
        total = self._overhead * precision
        doubts = UNSETTLED_DEVIATIONS[len(self._rows) > 1]
        for rank, (at, alike) in before.items():
            # a rank of which little is known may have changed its speed as well
            unsettled = rank in self._unsettled
            noise = doubts * max(self._noise, PRIOR_NOISE) if unsettled else self._noise
            since = [self._pooled(row - mean)[rank] for row in self._rows[at + 1 :]] + [unlike[rank] - common]
            noise *= math.sqrt(1 / len(since) + 1 / len(alike))
            first, second = pooled_share[at][rank], pooled_share[-1][rank]
            pruned = [pooled_kept[place][rank] < 1 for place in (at, -1)]
            spent = [share + self._overhead * was for share, was in zip((first, second), pruned, strict=True)]
            if not min(spent):
                continue
            expected = spent[1] / spent[0]
            ratio = math.exp(sum(since) / len(since)) * expected  # of the times of both
            if not pruned[1]:
                found, doubt = second / ratio - first, noise * second / ratio
            elif not pruned[0]:
                found, doubt = ratio * first - second, noise * ratio * first
            elif abs(expected - 1) > LEAST_STEP and abs(first - second) > LEAST_STEP:
                # (second - ratio first) / (ratio - 1) near what is expected: of a noisy ratio it would be far off
                slope = (first - second) / (expected - 1) ** 2
                found, doubt = self._overhead + slope * (ratio - expected), abs(slope) * noise * expected
            else:
                continue
            if unsettled or all(pruned) or len(since) > 1:
                found = min(found, LIKELY_OVERHEAD)
            precision += doubt**-2
            total += found * doubt**-2
        was, self._overhead = self._overhead, max(0.0, total / precision)
        self._rows = [
            row + each.log_change(was, self._overhead)
            for row, each in zip(self._rows, self._done, strict=True)
        ]
        return logs + done.log_change(was, self._overhead)

    @staticmethod
    def _before_pruning(
        rank: int, kept: Sequence[Sequence[float]], known: Sequence[NDArray[np.bool_]]
    ) -> int | None:
        """The last of a rank's measurements at which it pruned otherwise than now; None: it did not, or more than two
        measurements ago.
        """
        for at in range(len(known) - 1, max(-1, len(known) - 3), -1):
            if not known[at][rank]:
                return None
            if abs(kept[at][rank] - kept[-1][rank]) > LEAST_STEP:
                return at
        return None

    def _learn_noise(self, unlike: Sequence[float], counts: Sequence[int]) -> None:
        limit = CLIP * self._noise
        squares = 0.0
        for by, count in zip(unlike, counts, strict=True):
            alone = abs(by) / (self._relative * math.sqrt(1 + 1 / count))  # one measurement's share in it
            squares += min(alone, limit) ** 2
        self._squares = FORGET * self._squares + squares / CLIPPED_VARIANCE
        self._weight = FORGET * self._weight + len(counts)

    # ---- who is slow

    def _believed(self, pooled: Sequence[float]) -> list[float]:
        """The same, where a straggler that has just become faster is no faster than the others: it rather did little,
        which takes less than was thought, than that all others have become slow.
        """
        others = [by for rank, by in enumerate(pooled) if rank not in self._stragglers]
        doubted = self._stragglers & self._faster if others else frozenset()
        return [max(by, min(others)) if rank in doubted else by for rank, by in enumerate(pooled)]

    def _fast(self, pooled: Sequence[float], errors: Sequence[float], counts: Sequence[int]) -> list[int]:
        """Ranks that are as fast as the fastest, ascending."""
        order = sorted(range(len(pooled)), key=lambda rank: (pooled[rank], rank))
        group = order[:1]
        for rank in order[1:]:
            mean = sum(pooled[member] for member in group) / len(group)
            of_group = math.sqrt(sum(errors[member] ** 2 for member in group)) / len(group)
            error = math.hypot(errors[rank], of_group)
            if rank in self._stragglers:
                bound = self._slack / 2 + LEAVE_DEVIATIONS * error
                if rank in self._faster:
                    bound = max(bound, LET_GO * self._slack)
            else:
                deviations = ENTER_DEVIATIONS[counts[rank] > 1]
                if len(group) == 1 and len(order) > 2:
                    deviations = LOWEST_DEVIATIONS
                bound = self._slack + deviations * error
            if pooled[rank] - mean <= bound:
                group.append(rank)
        return sorted(group)


def _counts(rows: Sequence[Logs]) -> list[int]:
    """[ranks], measurements that are averaged."""
    counts: list[int] = (~np.isnan(np.array(rows)[:, 0])).sum(axis=0).tolist()
    return counts


def _mean(rows: Sequence[Logs]) -> Logs:
    """[halves, ranks]; NaN of a rank without any."""
    stacked = np.array(rows)
    known = ~np.isnan(stacked)
    counts = known.sum(axis=0)
    sums = np.where(known, stacked, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _without(rows: Sequence[Logs], changed: Mapping[int, int]) -> list[Logs]:
    """Of ranks that have changed only so many last rows are left."""
    left = [row.copy() for row in rows] if changed else list(rows)
    for rank, last in changed.items():
        for row in left[:-last]:
            row[:, rank] = np.nan
    return left


def kept_share(assignment: Assignment, half: Half, rank: int) -> float:
    """Of the work of the units that a rank computes of a half, what is left when columns are pruned; mean of blocks."""
    shares = kept_shares(assignment, half, rank)
    return sum(shares) / len(shares)


def kept_shares(assignment: Assignment, half: Half, rank: int) -> list[float]:
    """Of each block; of all in one where no ratio is of one product alone."""
    if not assignment.prunes(rank):
        return [1.0]
    work = assignment.work
    units = assignment.computed(half, rank)
    first = work.first_share(half)
    # (columns of all, share of the half's work) of its two products
    sizes = {
        product: (work.columns(product, units), first if product.is_first else 1 - first)
        for product in Product
        if product.half is half
    }
    shares = [0.0] * (work.blocks if assignment.names_products(rank) else 1)
    for place, (name, product) in enumerate(work.products(len(shares))):
        if product in sizes:
            columns, share = sizes[product]
            kept = kept_columns(columns, assignment.ratio(rank, name))
            shares[place // len(Product)] += share * (kept / columns if columns else 1.0)
    return shares
