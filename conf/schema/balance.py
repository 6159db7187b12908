"""What happens when ranks that share work are not equally fast."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .limits import require

# Measured by benchmarks/balance_accuracy.py: a small ViT on pictures of clothes, one of two ranks pruned throughout. Of
# any other training it is a guess.
LOSS_POINTS = ((0.25, 1.1), (0.5, 2.5), (0.75, 3.5))
LOSS_RANKS = 2
BALANCES = ("none", "resize", "migrate", "semi", "batch", "layers")


class Way(Enum):
    """How work of a slow tensor-parallel rank reaches the others."""

    # whole heads and hidden units: only weights move, results join the layer's own all-reduces
    paired = "paired"
    # columns of each matrix, sent to all; results are reduced to their owner (SEMI, section 2.6 of the released code)
    broadcast = "broadcast"
    # columns of each matrix, to each helper its own; what it makes of them comes back in pieces
    scatter = "scatter"


class Goal(Enum):
    """To which time pruning brings a slow rank."""

    fastest = "fastest"  # that of the fastest rank
    mean = "mean"  # the mean of all ranks, before balancing


class Selection(Enum):
    """Which columns a pruned product leaves out."""

    random = "random"  # drawn anew at each refresh
    contiguous = "contiguous"  # the window whose weights changed least
    priority = "priority"  # those whose weights changed least since the last refresh
    differentiated = "differentiated"  # as priority, more in layers whose weights change less


class Imputation(Enum):
    """What stands for gradients that a pruned product does not compute."""

    zero = "zero"
    average = "average"  # the mean of those that it does compute, of each row
    same = "same"  # what was computed there last


class PrunedState(Enum):
    """What the optimizer does to columns that were left out of a whole step."""

    moving = "moving"  # steps them by the imputed gradients: weight decay and old momentum move them
    frozen = "frozen"  # leaves weights and states as they were


@dataclass(kw_only=True)
class BalanceConf:
    """Which policy answers to slow ranks, and its settings."""

    # none; resize, migrate or semi (ranks of a tensor group); batch (replicas) or layers (stages of a pipeline)
    name: str = "none"
    policy: str | None = None  # file.py:Class or package.module:Class of your own, in place of name's
    period: int = 5  # optimizer steps between two measurements, each of which can change what ranks do
    # ranks whose speeds differ by less are taken for equal, and what is in force stays until a change promises more
    slack: float = 0.15
    ratio: float | None = None  # resize: share of columns that slow ranks leave out; null: by measured times
    goal: Goal = Goal.fastest  # resize: the time that slow ranks are brought to
    max_ratio: float = 0.9  # resize, semi: the most that is left out
    selection: Selection = Selection.priority  # resize, semi
    # resize, semi: optimizer steps between two selections of columns; the paper's epoch loses more accuracy
    refresh: int = 5
    imputation: Imputation = Imputation.zero  # resize, semi
    pruned_state: PrunedState = PrunedState.moving  # resize, semi
    # resize, semi: points of accuracy that pruning may cost; null: no bound but max_ratio
    accuracy_budget: float | None = None
    # resize, semi: [[ratio, points], ...] that pruning one rank of a group throughout a training costs; straight lines
    # lie between, and from 0 at 0. null: a guess from one small training (LOSS_POINTS), less in larger groups, where a
    # rank has fewer of the columns; benchmarks/balance_accuracy.py measures it
    loss_points: Any = None
    way: Way = Way.paired  # migrate, semi
    # resize, migrate, semi: before the first step a few movements and products are timed; without, movement counts as
    # free, and products take as long as they have units and columns
    pretest: bool = True

    def __post_init__(self) -> None:
        require(self.name in BALANCES, "balance.name", self.name, f"one of {list(BALANCES)}")
        for key in ("period", "refresh"):
            require(getattr(self, key) >= 1, f"balance.{key}", getattr(self, key), ">= 1")
        require(0 <= self.slack < 1, "balance.slack", self.slack, "in [0, 1)")
        require(self.ratio is None or 0 <= self.ratio < 1, "balance.ratio", self.ratio, "in [0, 1), or null")
        require(0 <= self.max_ratio < 1, "balance.max_ratio", self.max_ratio, "in [0, 1)")
        budget = self.accuracy_budget
        require(budget is None or budget >= 0, "balance.accuracy_budget", budget, ">= 0 points, or null")
        if self.loss_points is not None:
            _points(self.loss_points)

    def points(self, ranks: int) -> tuple[tuple[float, float], ...]:
        """(ratio, points of accuracy that it costs), in the order of ratios, in a group of so many ranks. What was
        measured elsewhere is taken by the share of all columns that is left out; what is given is of this group.
        """
        if self.loss_points is not None:
            return _points(self.loss_points)
        return tuple((ratio, cost * LOSS_RANKS / ranks) for ratio, cost in LOSS_POINTS)

    @property
    def guesses_points(self) -> bool:
        """Whether decisions rest on what pruning cost in another training."""
        return self.prunes and self.accuracy_budget is not None and self.loss_points is None

    @property
    def active(self) -> bool:
        return self.name != "none" or self.policy is not None

    @property
    def of_tensor_ranks(self) -> bool:
        """Whether it balances the ranks of a tensor group."""
        return self.name in ("resize", "migrate", "semi")

    @property
    def prunes(self) -> bool:
        return self.name in ("resize", "semi")

    @property
    def moves(self) -> bool:
        return self.name in ("migrate", "semi")


def _points(given: Any) -> tuple[tuple[float, float], ...]:
    """(ratio, points) in the order of ratios, of which points must not fall."""
    key = "balance.loss_points"
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    try:
        found = [(float(ratio), float(points)) for ratio, points in pairs]
    except (TypeError, ValueError) as err:
        raise ValueError(
            f"{key}={given!r}: must be null, or pairs of a ratio and its points, such as [[0.25,0.3],[0.5,0.7]]"
        ) from err
    found.sort()
    require(
        len(found) > 0 and all(0 < ratio < 1 for ratio, _ in found),
        key,
        given,
        "ratios in (0, 1) and their points",
    )
    twice = [ratio for (ratio, _), (again, _) in itertools.pairwise(found) if ratio == again]
    require(not twice, key, given, f"each ratio once; {twice[:1]} stands twice")
    falls = any(later < earlier for (_, earlier), (_, later) in itertools.pairwise(found))
    require(not falls and found[0][1] >= 0, key, given, ">= 0 points that do not fall with the ratio")
    return tuple(found)
