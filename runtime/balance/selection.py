"""Which columns a rank leaves out of a product (SEMI, section 2.4 of what could be established of its code).

* random: drawn anew at each refresh, and where their number changes.
* contiguous: the window of as many neighbours whose weights changed least, so that what is kept are two slices.
* priority: the columns whose weights changed least. A column's score is the sum over its rows of |W_now - W_before|,
  between two refreshes; columns that were left out all the while keep their older score, so that one whose score was
  larger than what trained ones have come down to is taken up again. The released code refreshes the scores of listed
  columns alone, also while all are trained; here all that were trained get theirs. There all are trained in the first
  epoch; here a rank may be slow from the first step on, so a column that was never trained has no score, and comes
  first.
* differentiated: as priority; ratios differ by product.

A kept copy of the weight is compared with, which this rank has whole only while it computes: it is looked at in a
forward. Columns of units that are lent to this rank have no score and are kept as long as others can be left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...conf.schema import Selection


class Columns:
    """Of one product on one rank.

    Args:
        total: Columns of this rank's own part.
        seed: Of random selections; another one for each product and rank.
    """

    def __init__(self, how: Selection, total: int, *, seed: int) -> None:
        self._how, self._total = how, total
        self._random = torch.Generator().manual_seed(seed)
        self._scores = torch.full((total,), torch.inf)
        self._trained = torch.zeros(total, dtype=torch.bool)  # since the last refresh
        self._before: list[Tensor] = []
        self._kept: tuple[int, ...] | None = None
        self._left_out: tuple[int, ...] = ()
        self._chosen_for = (0, 0)  # (columns, kept) of `_kept`
        self._masked: Sequence[int] | None = None  # what `_mask` says was left out
        self._mask = self._trained
        self.change = 0.0  # mean of a column at the last refresh, relative to its mean |W|

    @property
    def scores(self) -> Tensor:
        """[total]."""
        return self._scores

    @property
    def is_observed(self) -> bool:
        """Whether scores are worked out from weights."""
        return self._how is not Selection.random

    @torch.no_grad()
    def observe(self, weights: Sequence[Tensor]) -> None:
        """Compare with the copies that are kept, and keep these.

        Args:
            weights: [rows, total] of each matrix that shares these columns.
        """
        now = [weight.detach().float() for weight in weights]
        if self._before:
            changed, size = torch.zeros(self._total), torch.zeros(self._total)
            for new, old in zip(now, self._before, strict=True):
                changed += (new - old).abs().sum(0).cpu()
                size += new.abs().sum(0).cpu()
            self._scores = torch.where(self._trained, changed, self._scores)
            self.change = float(changed.sum() / size.sum().clamp(min=torch.finfo(torch.float32).tiny))
            for old, new in zip(self._before, now, strict=True):
                old.copy_(new)
        else:
            self._before = [x.clone() for x in now]
        self._trained.zero_()

    def refresh(self) -> None:
        """The next choice is a new one."""
        self._kept = None

    def trained(self, left_out: Sequence[int]) -> None:
        """A step is over, in which these columns were left out."""
        if not self.is_observed:
            return
        if left_out is not self._masked:
            self._masked, self._mask = left_out, torch.ones(self._total, dtype=torch.bool)
            self._mask[[column for column in left_out if column < self._total]] = False
        self._trained |= self._mask

    def choose(self, columns: int, kept: int) -> tuple[int, ...]:
        """The columns that are computed, ascending.

        Args:
            columns: That the rank computes if none is left out: the first of its own, or all and then lent ones.
        """
        if self._kept is None or self._chosen_for != (columns, kept):
            self._kept, self._chosen_for = self._choose(columns, kept), (columns, kept)
            self._left_out = tuple(sorted(set(range(columns)) - set(self._kept)))
        return self._kept

    @property
    def left_out(self) -> tuple[int, ...]:
        """The others of the last choice, ascending."""
        return self._left_out

    def _choose(self, columns: int, kept: int) -> tuple[int, ...]:
        if kept >= columns:
            return tuple(range(columns))
        if self._how is Selection.random:
            drawn = torch.randperm(columns, generator=self._random)[:kept]
            return tuple(sorted(drawn.tolist()))
        own = self._scores[:columns]
        scores = torch.cat([own, own.new_full((columns - len(own),), torch.inf)])
        if self._how is Selection.contiguous:
            left = columns - kept
            known = own[own.isfinite()].double()
            finite = scores.double().clamp(max=float(known.sum()) + 1)  # more than any window of known ones
            sums = torch.cat([finite.new_zeros(1), finite.cumsum(0)])
            begin = int((sums[left:] - sums[:-left]).argmin())  # ties: the first window
            return (*range(begin), *range(begin + left, columns))
        order = torch.argsort(scores, descending=True, stable=True)  # ties: the first columns are kept
        return tuple(sorted(order[:kept].tolist()))
