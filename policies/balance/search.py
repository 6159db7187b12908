"""The predicted fastest of a grid of answers: pruning by given ratios, and a share of each half's lossless moves."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .assignment import moves
from .costs import HalfTimes, Movement, all_reduce_ns, block_ns, half_times, pruning_units
from .movement_cost import MovementCost
from .policy import Half, Migrate
from .product_cost import Products, product_cost
from .speeds import Speeds
from .split import Lending, lend
from .work import BlockWork

COARSE = (0.0, 0.5, 1.0)  # shares of the way from an even split to the earliest end, each half's
FINE = (0.125, 0.25, 0.375, 0.625, 0.75, 0.875)
REFINED = 3  # sets of ratios that look best on the coarse grid
AS_GOOD = 1.01  # of the shortest time: of these answers the one that prunes least, then that moves least


@dataclass(frozen=True, slots=True)
class Found:
    """An answer of the grid.

    Args:
        ratios: By rank.
        time_ns: Predicted, of one block and micro-batch.
        moved_bytes: Of one block, one way.
    """

    ratios: Mapping[int, float]
    lending: Mapping[Half, Lending]
    time_ns: float
    moved_bytes: int

    def moves(self) -> tuple[Migrate, ...]:
        """Ascending: by half, by rank that lends, by rank that borrows."""
        return tuple(
            action
            for half, lending in self.lending.items()
            for src, parts in enumerate(lending.parts())
            for action in moves(half, src, parts)
        )


class Search:
    """For speeds that are known now."""

    def __init__(
        self,
        work: BlockWork,
        speeds: Speeds,
        room: Mapping[Half, Sequence[int]],
        movement: Movement,
        products: Products | None = None,
    ) -> None:
        self._work = work
        self._speeds = speeds
        self._room = room
        self._movement = movement
        self._products: Products = products or {}
        self._reduce_ns = all_reduce_ns(work, movement)

    def best(self, candidates: Sequence[Mapping[int, float]]) -> Found:
        """Of all pairs of pruning and moving.

        Args:
            candidates: Ratios by rank of which one is chosen; the first is taken to prune nothing.
        """
        coarse = [self._grid(ratios, COARSE) for ratios in candidates]
        quick = sorted(range(len(candidates)), key=lambda i: (min(found.time_ns for found in coarse[i]), i))
        found = [each for grid in coarse for each in grid]
        for i in quick[:REFINED]:
            found += self._grid(candidates[i], (*COARSE, *FINE))
        shortest = min(each.time_ns for each in found)
        return min(
            (each for each in found if each.time_ns <= AS_GOOD * shortest),
            key=lambda each: (sum(each.ratios.values()), each.moved_bytes, each.time_ns),
        )

    def _grid(self, ratios: Mapping[int, float], shares: Sequence[float]) -> list[Found]:
        halves = [self._of_half(half, ratios, shares) for half in Half]
        return [
            Found(
                ratios,
                {Half.attention: attention, Half.ffn: ffn},
                block_ns(attention_times, ffn_times, ahead=self._work.ahead, reduce_ns=self._reduce_ns),
                attention_bytes + ffn_bytes,
            )
            for (attention, attention_times, attention_bytes), (ffn, ffn_times, ffn_bytes) in (
                itertools.product(*halves)
            )
        ]

    def _of_half(
        self, half: Half, ratios: Mapping[int, float], shares: Sequence[float]
    ) -> list[tuple[Lending, HalfTimes, int]]:
        work, cost = self._work, self._movement.get(half, MovementCost())
        kept = [1 - ratios.get(rank, 0.0) for rank in range(work.ranks)]
        product, overhead = product_cost(self._products, work, half), self._speeds.overhead
        unit_ns = [
            time_ns * product.left_of(share)
            for time_ns, share in zip(self._speeds.unit_ns[half], kept, strict=True)
        ]
        pruning = [pruning_units(product, share, overhead) for share in kept]
        extras = self._speeds.beside.of(half, work)
        # a rank that computed nothing at all would never be seen to recover
        at_least = max(int(half is Half.ffn), work.least_kept)
        room = self._room[half]
        if work.by_columns:
            room = [0 if ratios.get(rank) else units for rank, units in enumerate(room)]
        # a share of each rank's time goes with units, the other is beside
        lent_ns = [
            time_ns * product.slope + extra.unit_ns for time_ns, extra in zip(unit_ns, extras, strict=True)
        ]
        fixed_ns = [
            time_ns * (more + product.fixed) + extra.fixed_ns
            for time_ns, more, extra in zip(unit_ns, pruning, extras, strict=True)
        ]
        lendings = lend(
            lent_ns,
            work.units[half],
            room,
            shares,
            at_least=at_least,
            beside=[fixed / each for fixed, each in zip(fixed_ns, lent_ns, strict=True)],
        )
        return [
            (
                lending,
                half_times(work, half, unit_ns, lending, cost, pruning, product, extras),
                sum(lending.lent) * work.unit_bytes(half),
            )
            for lending in dict.fromkeys(lendings)
        ]
