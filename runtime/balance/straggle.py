"""Ranks that are made slow: `cluster.slowdown`, by `cluster.slowdown_by`.

* device, sleep: each product and each attention takes `factor` times as long (of the emulated rate, where there is one,
  else of what it took); without a layout each unit does. What a rank leaves out or lends is not slept for.
* repeat: the products of tensor-parallel blocks are done `factor` - 1 more times and thrown away, on the operands that
  balancing leaves (SEMI's released code); of a fraction, on as many of the rows. At an emulated rate they count as
  work.
* quota: the process gets 1 / `factor` of the time, in turns (`quota`).

Seconds count from the first step, and are looked at whenever work ends; of a quota, at the start of each step.
"""

import time
from collections.abc import Callable, Sequence
from math import prod

from ...conf.conditions import Slowdown, rank_slowdowns
from ...conf.schema import ClusterConf, SlowdownBy
from .quota import Quota


class Straggler:
    """Of one rank.

    Args:
        slowdowns: Of this rank. Where several hold at a time their factors are multiplied.
        quota: Where the process is to be stopped in turns.
        now_ns: A clock.
    """

    def __init__(
        self,
        slowdowns: Sequence[Slowdown],
        by: SlowdownBy,
        *,
        quota: Quota | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._slowdowns, self._by, self._quota, self._now_ns = tuple(slowdowns), by, quota, now_ns
        self._step = 0
        self._began_ns: int | None = None

    def measuring_begins(self) -> None:
        """Before the first step, while seconds do not count yet, be as slow as at its begin."""
        if self._quota is not None:
            self._quota.set(1 / self.factor)

    def step_begins(self, step: int) -> None:
        self._step = step
        if self._began_ns is None:
            self._began_ns = self._now_ns()
        if self._quota is not None:
            self._quota.set(1 / self.factor)

    @property
    def factor(self) -> float:
        """How many times as long this rank takes now."""
        since_ns = 0 if self._began_ns is None else self._now_ns() - self._began_ns
        return prod(slow.factor for slow in self._slowdowns if slow.holds_at(self._step, since_ns))

    @property
    def stretch(self) -> float:
        """To how many times its length work is stretched by sleeping."""
        return self.factor if self._by in (SlowdownBy.device, SlowdownBy.sleep) else 1.0

    @property
    def repeats(self) -> float:
        """How many more times a product of a block is done."""
        return self.factor - 1 if self._by is SlowdownBy.repeat else 0.0

    def close(self) -> None:
        if self._quota is not None:
            self._quota.close()


def build_straggler(cluster: ClusterConf, rank: int) -> Straggler | None:
    """None: the rank is never slow."""
    own = [slow for slow in rank_slowdowns(cluster.slowdown, cluster.num_ranks) if slow.where == rank]
    if not own:
        return None
    by = cluster.slowdown_by
    return Straggler(own, by, quota=Quota() if by is SlowdownBy.quota else None)
