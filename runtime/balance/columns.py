"""A product whose columns migrate (the paper's way): each rank runs plans of its own, which follow the assignment."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...conf.schema import Way
from ...policies.balance import Assignment, BalanceAction, Product
from ...policies.balance.columns import column_plans
from ...policies.plan import Plan

if TYPE_CHECKING:
    from ..layout.autograd import Program

MakeProgram = Callable[[Plan, Plan], "Program"]  # of forward and backward


class ByColumns:
    """Of one product on one rank. Programs are kept, for assignments come again in every micro-batch.

    Args:
        place: Of this rank in the tensor group.

    Attributes:
        make: Makes the program of two plans; set where the layer is laid out, if it can be computed so.
        bias: Whether the layer has one.
    """

    def __init__(self, product: Product, way: Way, place: int) -> None:
        self._product, self._way, self._place = product, way, place
        self.make: MakeProgram | None = None
        self.bias = False
        self._known: dict[tuple[BalanceAction, ...], Program | None] = {}

    def program(self, assignment: Assignment) -> "Program | None":
        """None: no rank lends columns of it."""
        if self.make is None or not assignment.work.by_columns:
            return None
        actions = assignment.actions
        if actions not in self._known:
            self._known[actions] = self._program(assignment, self.make)
        return self._known[actions]

    def _program(self, assignment: Assignment, make: MakeProgram) -> "Program | None":
        if not assignment.sources(self._product.half):
            return None
        return make(*column_plans(assignment, self._product, self._place, self._way, bias=self.bias))
