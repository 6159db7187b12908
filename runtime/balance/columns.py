"""A product whose columns migrate (the paper's way): each rank runs plans of its own, which follow the assignment."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...conf.schema import Way
from ...policies.balance import Assignment, BalanceAction, Product
from ...policies.balance.columns import column_plans
from ...policies.plan import Plan
from .imputation import Filler
from .selection import Columns

if TYPE_CHECKING:
    from ..layout.autograd import Program

MakeProgram = Callable[[Plan, Plan], "Program"]  # of forward and backward


class ByColumns:
    """Of one product on one rank. Programs are kept, for assignments come again in every micro-batch.

    Args:
        name: As actions name it.
        place: Of this rank in the tensor group.

    Attributes:
        make: Makes the program of two plans; set where the layer is laid out, if it can be computed so.
        bias: Whether the layer has one.
    """

    def __init__(self, name: str, product: Product, way: Way, place: int) -> None:
        self._name, self._product, self._way, self._place = name, product, way, place
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
        ratio = assignment.ratio(self._place, self._name)
        plans = column_plans(assignment, self._product, self._place, self._way, bias=self.bias, ratio=ratio)
        return make(*plans)


class PrunedColumns:
    """What `Keep` and `Fill` of a product's plans do on one rank.

    Args:
        columns: Which are left out.
        fill_x, fill_w: Of the gradients of its input, and of each of its weights.
        rows: Of each weight; the plan has them one below the other.
    """

    def __init__(
        self, columns: Columns, fill_x: Filler, fill_w: Sequence[Filler], rows: Callable[[], Sequence[int]]
    ) -> None:
        self._columns, self._fill_x, self._fill_w, self._rows = columns, fill_x, tuple(fill_w), rows

    def keep(self, x: Tensor, size: int, of: int) -> Tensor:
        """[..., size] of [..., at least `of`]."""
        return x.index_select(-1, torch.tensor(self._columns.choose(of, size), device=x.device))

    def fill(self, gradient: Tensor, of: int, *, of_input: bool) -> Tensor:
        """[..., of] of [..., size]."""
        kept = self._columns.choose(of, gradient.shape[-1])
        whole = gradient.new_zeros(*gradient.shape[:-1], of)
        whole.index_copy_(-1, torch.tensor(kept, device=gradient.device), gradient)
        if of_input:
            return self._fill_x.filled(whole, kept)
        parts = torch.split(whole, list(self._rows()))
        return torch.cat([fill.filled(part, kept) for fill, part in zip(self._fill_w, parts, strict=True)])
