"""What each rank of a tensor group computes while some actions are in force."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .policy import BalanceAction, Half, Migrate, Prune
from .work import BlockWork, Product


@dataclass(frozen=True)
class Assignment:
    """Checked actions. A rank's own units are numbered from 0; those that it lends are its last ones, to ascending
    ranks; those that it is lent come behind its own, from ascending ranks.

    Args:
        actions: In force; () is an even split.

    Raises:
        ValueError: If an action cannot be carried out, naming it and what would be legal.
    """

    work: BlockWork
    actions: tuple[BalanceAction, ...] = ()

    def __post_init__(self) -> None:
        for action in self.actions:
            self._check(action)
        for half in Half:
            for rank in range(self.work.ranks):
                lent, own = sum(self.lent(half, rank)), self.work.units[half]
                if lent > own:
                    raise ValueError(
                        f"rank {rank} is to lend {lent} units of {half.value} to others, and has {own}"
                    )
                if lent and own - lent < self.work.least_kept:
                    raise ValueError(
                        f"rank {rank} is to lend all its columns of {half.value}: it must keep one unit"
                    )
                if lent and self.received(half, rank):
                    raise ValueError(f"rank {rank} both lends units of {half.value} and is lent some")
                if self.work.by_columns and self.prunes(rank) and self.received(half, rank):
                    raise ValueError(
                        f"rank {rank} both prunes and is lent columns of {half.value}: a rank that prunes must be lent "
                        "none"
                    )

    @property
    def is_even(self) -> bool:
        return not self.actions

    # ---- units

    def lent(self, half: Half, src: int) -> tuple[int, ...]:
        """Units that `src` lends, to each rank."""
        return self._lent[half][src]

    def received(self, half: Half, rank: int) -> int:
        """Units that a rank computes for others."""
        return sum(parts[rank] for parts in self._lent[half])

    def kept(self, half: Half, rank: int) -> int:
        """Of its own units, those that a rank computes itself."""
        return self.work.units[half] - sum(self.lent(half, rank))

    def computed(self, half: Half, rank: int) -> int:
        """Units that a rank computes."""
        return self.kept(half, rank) + self.received(half, rank)

    def sources(self, half: Half) -> tuple[int, ...]:
        """Ranks that lend some, ascending."""
        return tuple(rank for rank in range(self.work.ranks) if any(self.lent(half, rank)))

    @cached_property
    def _lent(self) -> dict[Half, tuple[tuple[int, ...], ...]]:
        ranks = self.work.ranks
        counts = {half: [[0] * ranks for _ in range(ranks)] for half in Half}
        for action in self.actions:
            if isinstance(action, Migrate):
                counts[action.half][action.src][action.dst] += action.units
        return {half: tuple(tuple(parts) for parts in of_half) for half, of_half in counts.items()}

    # ---- columns

    def ratio(self, rank: int, product: str) -> float:
        """Share of its columns that a rank leaves out of a product, such as "block.0.fc1"."""
        return self._ratios[rank].get(product, self._ratios[rank].get("", 0.0))

    def prunes(self, rank: int) -> bool:
        return any(self._ratios[rank].values())

    def names_products(self, rank: int) -> bool:
        """Whether a rank's ratios differ by product."""
        return any(self._ratios[rank].keys() - {""})

    def kept_columns(self, rank: int, product: Product, name: str) -> tuple[int, int]:
        """(columns that are computed, all of them) of a rank's part of a product, lent units left out of the latter
        and borrowed ones in it: pruning is of all that the rank computes.
        """
        columns = self.work.columns(product, self.computed(product.half, rank))
        return kept_columns(columns, self.ratio(rank, name)), columns

    @cached_property
    def _ratios(self) -> tuple[dict[str, float], ...]:
        found: tuple[dict[str, float], ...] = tuple({} for _ in range(self.work.ranks))
        for action in self.actions:
            if isinstance(action, Prune):
                found[action.rank][action.product] = action.ratio
        return found

    def _check(self, action: BalanceAction) -> None:
        ranks = range(self.work.ranks)
        if not isinstance(action, Prune | Migrate):
            raise ValueError(f"{action}: is not of ranks of a tensor group")
        named = (action.rank,) if isinstance(action, Prune) else (action.src, action.dst)
        for rank in named:
            if rank not in ranks:
                raise ValueError(f"{action}: rank {rank} must be in [0, {len(ranks)})")
        if isinstance(action, Prune):
            if not 0 <= action.ratio < 1:
                raise ValueError(f"{action}: ratio={action.ratio} must be in [0, 1)")
        elif action.src == action.dst or action.units < 1:
            raise ValueError(f"{action}: must move at least one unit to another rank")


def kept_columns(columns: int, ratio: float) -> int:
    """Of `columns`, those that are computed: at least one, where there is one."""
    return max(min(1, columns), columns - int(columns * ratio + 1e-9))


def moves(half: Half, src: int, parts: Sequence[int]) -> Iterable[Migrate]:
    """Actions by which `src` lends `parts[i]` units to the i-th rank."""
    return (Migrate(src, dst, half, units) for dst, units in enumerate(parts) if units)
