"""A product of a block as a rank computes it while balancing is in force: with other units, without some columns."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ...conf.schema import BalanceConf
from ...kernels.pruned import pruned_matmul
from ...policies.balance import Assignment, Half, Product
from .columns import ByColumns, PrunedColumns
from .held import HeldHalf, Source
from .imputation import Filler
from .repeat import repeated
from .selection import Columns

if TYPE_CHECKING:
    from ..layout.autograd import Program
    from ..layout.pace import Rate


class BalancedProduct:
    """Of one block. Several matrices that share their input are one product.

    Args:
        name: "block.3.fc1", with the number of the block in the model.
        names: Of the weights in the model.
        place: Of this rank in the tensor group.
        seed: Of random selections.
    """

    def __init__(
        self,
        name: str,
        product: Product,
        held: HeldHalf,
        conf: BalanceConf,
        *,
        weights: Sequence[Source],
        biases: Sequence[Source],
        names: Sequence[str],
        place: int,
        seed: int,
        assignment: Callable[[], Assignment],
        rate: "Rate | None",
    ) -> None:
        self.name, self.product, self.names, self.held = name, product, tuple(names), held
        self._weights, self._biases = tuple(weights), tuple(biases)
        self._place, self._assignment, self._rate, self._conf = place, assignment, rate, conf
        columns = assignment().work.columns(product, held.units)
        self.columns = Columns(conf.selection, columns, seed=seed)
        self._fill_x = Filler(conf.imputation, of_input=True)
        self._fill_w = [Filler(conf.imputation, of_input=False) for _ in weights]
        self.looks = False  # at the weights, in the next forward with gradients
        self._columns = ByColumns(name, product, conf.way, place)
        self.pruned = PrunedColumns(
            self.columns, self._fill_x, self._fill_w, lambda: [len(weight()) for weight in weights]
        )

    @property
    def half(self) -> Half:
        return self.product.half

    def begins(self) -> bool:
        """A forward begins, and weights are there; whether it is to be `outputs`: else torch's own product is it."""
        if not torch.is_grad_enabled():
            return False
        self._look()
        remembers = self._conf.prunes and self._fill_x.remembers
        repeats = (
            self._rate is not None and self._rate.straggler is not None and self._rate.straggler.repeats > 0
        )
        return self.held.moves or self.kept is not None or remembers or repeats

    @property
    def by_columns(self) -> "ByColumns":
        """How the product is computed while columns of it migrate."""
        return self._columns

    def migrates_columns(self) -> "Program | None":
        """A forward begins: what it is to be computed by; None: no rank lends columns of this product."""
        if not torch.is_grad_enabled():
            return None
        program = self._columns.program(self._assignment())
        if program is not None:
            self._look()
        return program

    def _look(self) -> None:
        """At the weights, if that is due."""
        if self.looks:
            self.looks = False
            self.columns.observe([weight() for weight in self._weights])

    @property
    def kept(self) -> tuple[int, ...] | None:
        """Columns that this rank computes; None: all of them."""
        kept, columns = self._assignment().kept_columns(self._place, self.product, self.name)
        return self.columns.choose(columns, kept) if kept < columns else None

    @property
    def left_out(self) -> tuple[int, ...]:
        """Columns of the present step that this rank does not compute."""
        return () if self.kept is None else self.columns.left_out

    @property
    def own_columns(self) -> int:
        """Of this rank's own part that it computes, before pruning: the first ones."""
        of = self._assignment()
        return of.work.columns(self.product, of.kept(self.half, self._place))

    def own_rows(self) -> list[Tensor]:
        """Of each matrix, the rows of this rank's own units that it computes; a unit that is columns has them all."""
        shape, units = self.held.shape, self.held.units
        if not self.product.is_first or self._assignment().work.by_columns:
            return [torch.arange(len(weight())) for weight in self._weights]
        kept = self._assignment().kept(self.half, self._place)
        found = []
        for sections in shape.rows:
            parts, begin = [], 0
            for rows in sections:
                parts.append(torch.arange(begin, begin + kept * rows))
                begin += units * rows
            found.append(torch.cat(parts))
        return found

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Of each matrix [..., its rows that are computed here], with its bias; of a second product, without.

        Args:
            x: [..., columns], this rank's.
        """
        weights, biases = self._operands()
        kept = self.kept
        x = self._fill_x.around(x, kept)
        return tuple(
            self._multiply(x, fill.around(weight, kept), bias, kept)
            for weight, bias, fill in zip(weights, biases, self._fill_w, strict=True)
        )

    def over(self) -> None:
        """The half's sum has arrived."""
        self.held.over()

    def _operands(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        own_biases = [bias() for bias in self._biases] if self.product.is_first else []
        if not self.held.moves:
            weights = [weight() for weight in self._weights]
            return weights, own_biases or [None] * len(weights)
        if not self.product.is_first:
            return self.held.taken[-1:], [None]
        *firsts, _ = self.held.take()
        count = len(self._weights)
        return firsts[:count], firsts[count:] or [None] * count

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, kept: tuple[int, ...] | None
    ) -> Tensor:
        rate = self._rate

        def call(x: Tensor) -> Tensor:
            if kept is None:
                y = functional.linear(x, weight, bias)
            else:
                y = pruned_matmul(x, weight.t(), kept)
                y = y if bias is None else y + bias
            straggler = None if rate is None else rate.straggler
            if straggler is not None and straggler.repeats:
                y = repeated(y, x, weight, kept, lambda: straggler.repeats)
            return y

        def flop(_: Sequence[Tensor], y: Tensor) -> int:
            return 2 * y.numel() * (x.shape[-1] if kept is None else len(kept))

        return call(x) if rate is None else rate.around(call, flop, self.half)(x)
