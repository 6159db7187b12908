"""What all policies of this package share: when to look for an answer, and whether it is worth the change."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ...conf.schema import BalanceConf, Selection
from .assignment import Assignment
from .budget import AccuracyBudget
from .costs import lending_of, predicted_ns
from .differentiated import prunes
from .movement_cost import ColumnsCost, MovementCost, fit_columns, fit_movement
from .policy import (
    BalanceAction,
    BalanceEvent,
    ChangesMeasured,
    ColumnsTimed,
    GroupMeasured,
    Half,
    Migrate,
    MovementTimed,
    ProductsTimed,
)
from .product_cost import ProductCost, fit_products
from .speeds import Speeds, SpeedTracker, kept_share
from .split import room_for_units
from .work import BlockWork

# What is in force stays until a change promises more than a third of the slack, where a rank has become a straggler
# since (it would not be one by chance); more than the slack, where a speed has just changed; else more than a third of
# the slack and than so many standard errors could feign.
LEAST_SHARE = 1 / 3
SURE_ERRORS = 6.0

Room = Mapping[Half, tuple[int, ...]]


class Decider(ABC):
    """Answers a measurement by the best answer to the speeds, if it is better than what is in force by enough.

    What is in force is left at once, however little that gains, where it takes work from a rank that is slow no more.
    Without a pretest (`MovementTimed`, by columns `ColumnsTimed`) movement is taken to cost nothing. Without
    `ProductsTimed` products take as long as they have units and columns.
    """

    def __init__(self, conf: BalanceConf, work: BlockWork) -> None:
        self._conf = conf
        self._work = work
        self._budget = AccuracyBudget.of(conf, work.ranks)
        self._products: dict[Half, ProductCost] = {}
        self._tracker = SpeedTracker(work, conf.slack, self._products)
        self._movement: dict[Half, MovementCost | ColumnsCost] = {}
        self._changes: ChangesMeasured | None = None
        self._in_force = Assignment(work)
        # a step after which ratios were renewed, and what was in force until then
        self._before_changes: tuple[int, Assignment] = (-1, self._in_force)
        self._ratios: dict[int, float] = {}  # in force, mean over a rank's products
        self._answered: frozenset[int] = frozenset()  # stragglers when that was decided
        self._speedup = 1.0

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def predicted_speedup(self) -> float:
        """Of the last decision: predicted time of all blocks with nothing done, over that with what is in force."""
        return self._speedup

    @abstractmethod
    def _answer(self, speeds: Speeds, room: Room) -> tuple[tuple[BalanceAction, ...], dict[int, float]]:
        """Moves, and ratios of ranks that prune, where there are stragglers."""

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        if isinstance(event, MovementTimed):
            self._movement[event.half] = fit_movement(event)
            return None
        if isinstance(event, ColumnsTimed):
            self._movement[event.half] = fit_columns(event)
            return None
        if isinstance(event, ProductsTimed):
            self._products[event.half] = fit_products(event, self._work)
            return None
        if isinstance(event, ChangesMeasured):
            return self._take_changes(event)
        return self._measured(event) if isinstance(event, GroupMeasured) else None

    def _measured(self, event: GroupMeasured) -> tuple[BalanceAction, ...] | None:
        renewed_at, measured = self._before_changes
        speeds = self._tracker.observe(event, measured if renewed_at == event.step else self._in_force)
        wanted, ratios = Assignment(self._work), dict[int, float]()
        if speeds.stragglers:
            borrowed = {half: lending_of(self._in_force, half).borrowed for half in Half}
            moves, ratios = self._answer(speeds, room_for_units(self._work, event.free_bytes, borrowed))
            wanted = self._assignment(moves, ratios)
        even_ns, now_ns, wanted_ns = (
            predicted_ns(
                assignment, speeds.unit_ns, self._movement, speeds.overhead, self._products, speeds.beside
            )
            for assignment in (Assignment(self._work), self._in_force, wanted)
        )
        if wanted.actions == self._in_force.actions or not (
            self._outdated(speeds) or self._pays(now_ns, wanted_ns, wanted, speeds)
        ):
            self._speedup = even_ns / now_ns
            return None
        self._in_force, self._ratios, self._speedup = wanted, ratios, even_ns / wanted_ns
        self._answered = frozenset(speeds.stragglers)
        return wanted.actions

    # ---- whether to change

    def _outdated(self, speeds: Speeds) -> bool:
        """Whether what is in force takes work from a rank that is no straggler."""
        relieved = {rank for half in Half for rank in self._in_force.sources(half)} | {
            rank for rank, ratio in self._ratios.items() if ratio
        }
        return not relieved <= set(speeds.stragglers)

    def _pays(self, now_ns: float, wanted_ns: float, wanted: Assignment, speeds: Speeds) -> bool:
        """Whether time is gained by enough; or columns, of a rank that prunes more than it would have to, and no other
        prunes more instead.
        """
        least = LEAST_SHARE * self._conf.slack
        if not set(speeds.stragglers) <= self._answered:
            bound = 1 + least
        elif speeds.fresh:
            bound = 1 + self._conf.slack
        else:
            bound = 1 + max(least, SURE_ERRORS * speeds.error)
        if now_ns > bound * wanted_ns:
            return True
        places = [(half, rank) for half in Half for rank in range(self._work.ranks)]
        kept = [(kept_share(self._in_force, *place), kept_share(wanted, *place)) for place in places]
        return any(then > bound * now for now, then in kept) and all(bound * then > now for now, then in kept)

    # ---- from ratios to actions

    def _take_changes(self, event: ChangesMeasured) -> tuple[BalanceAction, ...] | None:
        if self._conf.selection is not Selection.differentiated:
            return None
        self._changes = event
        moves = tuple(action for action in self._in_force.actions if isinstance(action, Migrate))
        renewed = self._assignment(moves, self._ratios)
        if renewed.actions == self._in_force.actions:
            return None
        self._before_changes = (event.step, self._in_force)
        self._in_force = renewed
        return renewed.actions

    def _assignment(self, moves: tuple[BalanceAction, ...], ratios: Mapping[int, float]) -> Assignment:
        moved = Assignment(self._work, moves)
        changes = None if self._changes is None else self._changes.changes
        pruned = prunes(moved, ratios, changes, max_ratio=self._conf.max_ratio)
        return Assignment(self._work, (*pruned, *moves))
