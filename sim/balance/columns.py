"""What one rank of a tensor group does while columns of matrices migrate: each product has plans of its own."""

from dataclasses import dataclass, field

from ...conf.schema import Way
from ...policies.balance import Assignment, BlockWork, Half, Product, moves
from ...policies.balance.columns import column_plans
from ...policies.plan import Plan


@dataclass(frozen=True)
class ColumnShare:
    """Of every block of a stage.

    Args:
        place: Of the rank in its group.
        lent: By half, [from][to] units.
    """

    way: Way
    place: int
    lent: tuple[tuple[tuple[int, ...], ...], ...]
    assignment: Assignment = field(compare=False, repr=False)

    @classmethod
    def of(cls, assignment: Assignment, place: int, way: Way) -> "ColumnShare":
        ranks = range(assignment.work.ranks)
        lent = tuple(tuple(assignment.lent(half, src) for src in ranks) for half in Half)
        return cls(way, place, lent, assignment)

    def plans(self, product: Product, *, bias: bool) -> tuple[Plan, Plan] | None:
        """Forward and backward; None: no rank lends columns of it, so it is as ever."""
        if not self.assignment.sources(product.half):
            return None
        return column_plans(self.assignment, product, self.place, self.way, bias=bias)

    def __str__(self) -> str:
        """The same for equal shares."""
        lent = "/".join(":".join(map(str, row)) for half in self.lent for row in half)
        return f"{self.way.value}/{self.place}/{lent}"

    @classmethod
    def parse(cls, text: str, work: BlockWork) -> "ColumnShare":
        """What `str` wrote."""
        way, place, *rows = text.split("/")
        parts = [tuple(map(int, row.split(":"))) for row in rows]
        actions = tuple(
            action
            for number, row in enumerate(parts)
            for action in moves(tuple(Half)[number // work.ranks], number % work.ranks, row)
        )
        return cls.of(Assignment(work, actions), int(place), Way(way))
