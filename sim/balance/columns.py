"""What one rank of a tensor group does while columns of matrices migrate: each product has plans of its own."""

from dataclasses import dataclass, field

from ...conf.schema import Way
from ...policies.balance import Assignment, BlockWork, Half, Product, kept_columns, moves
from ...policies.balance.columns import column_plans
from ...policies.plan import Plan
from .share import PRODUCTS


@dataclass(frozen=True)
class ColumnShare:
    """Of one block.

    Args:
        place: Of the rank in its group.
        left_out: Of the columns that the rank computes of each product, in the order of PRODUCTS, the share that it
            leaves out.
        lent: By half, [from][to] units.
    """

    way: Way
    place: int
    left_out: tuple[float, ...]
    lent: tuple[tuple[tuple[int, ...], ...], ...]
    assignment: Assignment = field(compare=False, repr=False)

    @classmethod
    def of(cls, assignment: Assignment, place: int, way: Way, block: int) -> "ColumnShare":
        """`block`: of the stage, numbered from 0."""
        left_out = tuple(assignment.ratio(place, f"block.{block}.{product.value}") for product in PRODUCTS)
        return cls(way, place, left_out, _lent(assignment), assignment)

    def kept(self, product: Product, columns: int) -> int:
        """Of a product's `columns`, those that are computed."""
        return kept_columns(columns, self.left_out[PRODUCTS.index(product)])

    def plans(self, product: Product, *, bias: bool) -> tuple[Plan, Plan] | None:
        """Forward and backward; None: no rank lends columns of it, so it is as ever."""
        if not self.assignment.sources(product.half):
            return None
        ratio = self.left_out[PRODUCTS.index(product)]
        return column_plans(self.assignment, product, self.place, self.way, bias=bias, ratio=ratio)

    def __str__(self) -> str:
        """The same for equal shares."""
        lent = "/".join(":".join(map(str, row)) for half in self.lent for row in half)
        return f"{self.way.value}/{self.place}/{':'.join(map(repr, self.left_out))}/{lent}"

    @classmethod
    def parse(cls, text: str, work: BlockWork) -> "ColumnShare":
        """What `str` wrote."""
        way, place, left_out, *rows = text.split("/")
        parts = [tuple(map(int, row.split(":"))) for row in rows]
        assignment = Assignment(
            work,
            tuple(
                action
                for number, row in enumerate(parts)
                for action in moves(tuple(Half)[number // work.ranks], number % work.ranks, row)
            ),
        )
        ratios = tuple(map(float, left_out.split(":")))
        return cls(Way(way), int(place), ratios, _lent(assignment), assignment)


def _lent(assignment: Assignment) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ranks = range(assignment.work.ranks)
    return tuple(tuple(assignment.lent(half, src) for src in ranks) for half in Half)
