"""What ranks do of a half of a block beside its products: attention and activations go with units, norms with nothing.

Pruning takes nothing off either, and lending only off the former. Where all of a rank is slow, and not its products
alone, it has to lend for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .assignment import Assignment
from .policy import GroupMeasured, Half
from .work import BlockWork

HALVES = tuple(Half)
# Of its own units, that a rank must compute for its time to tell what a unit takes: with few it is a kernel's start
LEAST_UNITS = 0.5

Rows = NDArray[np.float64]  # [between attention's products, between the FFN's, around], ranks


class Extra(NamedTuple):
    """Of one rank and half, of all blocks in a step, in ns.

    Attributes:
        unit_ns: By unit that it computes.
        fixed_ns: However many these are.
    """

    unit_ns: float = 0.0
    fixed_ns: float = 0.0

    def ns(self, units: int) -> float:
        return self.unit_ns * units + self.fixed_ns


@dataclass(frozen=True, slots=True)
class Beside:
    """Of a group; nothing where nothing was measured.

    Args:
        extras: [ranks] for each half.
    """

    extras: Mapping[Half, tuple[Extra, ...]] = field(default_factory=dict)

    def of(self, half: Half, work: BlockWork) -> tuple[Extra, ...]:
        """[ranks]"""
        return self.extras.get(half) or (Extra(),) * work.ranks

    def even_ns(self, work: BlockWork) -> tuple[float, ...]:
        """[ranks], of one step, both halves, with an even split."""
        return tuple(
            sum(self.of(half, work)[rank].ns(work.units[half]) for half in HALVES)
            for rank in range(work.ranks)
        )


NOTHING = Beside()


class BesideTracker:
    """Averages as long as a rank's speed does not change; ranks that are no stragglers are taken for equal."""

    def __init__(self, work: BlockWork, window: int) -> None:
        self._work, self._window = work, window
        self._rows: list[Rows] = []

    def observe(
        self,
        event: GroupMeasured,
        assignment: Assignment,
        *,
        counts: Sequence[int],
        fast: Sequence[int],
    ) -> Beside:
        """Takes a measurement in.

        Args:
            assignment: That was in force when it was made.
            counts: [ranks], measurements since a rank's speed has changed.
            fast: Ranks that are no stragglers. One that computes few units is as slow between products as around them.

        Raises:
            ValueError: If it is not of as many ranks as the group has.
        """
        if not event.around_ns:
            self._rows.clear()
            return NOTHING
        self._rows = [*self._rows, self._row(event, assignment)][-self._window :]
        stacked = np.array(self._rows)  # [measurements, 3, ranks]
        means = np.stack([_mean(stacked[-count:, :, rank]) for rank, count in enumerate(counts)], axis=1)
        means[:, list(fast)] = _mean(means[:, list(fast)].T)[:, None]
        extras = {}
        for i, half in enumerate(HALVES):
            slowness = means[-1] / max(1.0, means[-1, fast[0]])
            filled = np.where(np.isnan(means[i]), slowness * means[i, fast[0]], means[i])
            extras[half] = tuple(
                Extra(float(unit), float(around) / len(HALVES))
                for unit, around in zip(np.nan_to_num(filled), means[-1], strict=True)
            )
        return Beside(extras)

    def _row(self, event: GroupMeasured, assignment: Assignment) -> Rows:
        ranks = range(self._work.ranks)
        lists = (*(event.between_ns(half) for half in HALVES), event.around_ns)
        if any(len(times) != len(ranks) for times in lists):
            raise ValueError(f"{event}: must have {len(ranks)} times of what ranks did beside products")
        row: Rows = np.array(lists, dtype=np.float64)
        for i, half in enumerate(HALVES):
            units = np.array([assignment.computed(half, rank) for rank in ranks], dtype=np.float64)
            least = max(1.0, LEAST_UNITS * self._work.units[half])
            row[i] = np.where(units >= least, row[i] / np.maximum(units, 1), np.nan)
        return row


def _mean(rows: Rows) -> Rows:
    """Over the first axis, without what is not known; NaN of nothing."""
    known = ~np.isnan(rows)
    counts = known.sum(axis=0)
    sums = np.where(known, rows, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
