"""What moving units takes, by how many: lines through two timed movements."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .policy import ColumnsTimed, Leg, MovementTimed
from .split import Lending


@dataclass(frozen=True, slots=True)
class MovementCost:
    """Of one rank that lends: `start_ns` for each time, `unit_ns` for each unit (c0, c1).

    Args:
        shared: Of what several ranks that lend take, what is one after the other. 0: each sends and gets on links of
            its own; 1: what they send goes over the same links.
    """

    start_ns: float = 0.0
    unit_ns: float = 0.0
    shared: float = 1.0

    def all_ns(self, lending: Lending) -> float:
        """Until all has moved that a line is of: the paired way's is of units out and gradients back."""
        if not any(lending.lent):
            return 0.0
        in_turn = sum(self.start_ns + self.unit_ns * units for units in lending.lent if units)
        longest = self.start_ns + self.unit_ns * max(*lending.lent, *lending.borrowed)
        return longest + self.shared * max(0.0, in_turn - longest)

    def one_way_ns(self, lending: Lending) -> float:
        """Until the last rank has what it is lent, where it comes back in as long."""
        return self.all_ns(lending) / 2


@dataclass(frozen=True, slots=True)
class ColumnsCost:
    """Of what ways by columns move, leg by leg. Some do not depend on the units: whole outputs and their gradients."""

    legs: Mapping[Leg, MovementCost] = field(default_factory=dict)

    def ns(self, leg: Leg, lending: Lending) -> float:
        """Until the last rank has what a leg brings it."""
        return self.legs[leg].all_ns(lending) if leg in self.legs else 0.0


def fit_movement(timed: MovementTimed) -> MovementCost:
    """The line through two timed movements, no part of which falls; and how much longer several ranks at once took."""
    if min(*timed.units, 1 + min(timed.time_ns)) < 1:
        raise ValueError(f"{timed}: must be of at least one unit and 0 ns")
    return _line(timed.units, timed.time_ns, timed.together_ns, timed.lenders)


def fit_columns(timed: ColumnsTimed) -> ColumnsCost:
    """The same for each leg."""
    legs = tuple(Leg)
    times = (timed.few_ns, timed.many_ns, timed.together_ns)
    if any(len(each) != len(legs) for each in times):
        raise ValueError(f"{timed}: must have {len(legs)} times, one for each leg, each time")
    if min(*timed.units, 1 + min(map(min, times))) < 1:
        raise ValueError(f"{timed}: must be of at least one unit and 0 ns")
    return ColumnsCost(
        {
            leg: _line(timed.units, (few_ns, many_ns), together_ns, timed.lenders)
            for leg, few_ns, many_ns, together_ns in zip(legs, *times, strict=True)
        }
    )


def _line(units: tuple[int, int], time_ns: tuple[int, int], together_ns: int, lenders: int) -> MovementCost:
    (few, many), (few_ns, many_ns) = units, time_ns
    shared = 1.0
    if lenders > 1:
        shared = (together_ns / max(1, many_ns) - 1) / (lenders - 1)
        shared = min(1.0, max(0.0, shared))
    if few == many:
        return MovementCost(0.0, (few_ns + many_ns) / (few + many), shared)
    unit_ns = max(0.0, (many_ns - few_ns) / (many - few))
    return MovementCost(max(0.0, few_ns - unit_ns * few), unit_ns, shared)
