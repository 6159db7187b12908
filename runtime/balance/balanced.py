"""The blocks of this rank's part of a model, whose products follow an assignment.

What lies where does not change: parameters, their gradients and what the optimizer steps are those of an even split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...conf.schema import BalanceConf
from ...policies.balance import Assignment, BlockWork, Half, Product
from ..collectives import Collectives
from ..groups import Groups
from ..ledger import Ledger
from .held import HeldHalf, Source
from .movements import Movements
from .products import BalancedProduct
from .units import UnitShape

if TYPE_CHECKING:
    from ..layout.pace import Rate

_SEED_OF_PRODUCT, _SEED_OF_RANK = 1_000_003, 7_919  # primes: no two products draw alike


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one product of a block, on this rank.

    Args:
        weights, biases: One for each matrix; biases are left out where there are none.
        names: Of the weights in the model.
        sections: Of each matrix, rows of a unit in each of its sections; of a second product not read.
    """

    weights: Sequence[Source]
    biases: Sequence[Source]
    names: Sequence[str]
    sections: Sequence[Sequence[int]] = ()


class BalancedBlock:
    """One block; told when its forward begins and its weights are there."""

    def __init__(self, name: str, balanced: "Balanced", products: dict[Product, BalancedProduct]) -> None:
        self.name, self._balanced, self.products = name, balanced, products
        self.halves = [products[first].held for first in (Product.qkv, Product.fc1)]
        self.is_first = True  # of the blocks that are here
        self.following: BalancedBlock | None = None

    def begins(self) -> None:
        """What is lent is on its way before this block computes; that of the next one too, if its weights are there."""
        balanced = self._balanced
        if not torch.is_grad_enabled() or balanced.assignment.is_even or balanced.work.by_columns:
            return
        if self.is_first or not balanced.ahead:
            self.lend()
        if balanced.ahead and self.following is not None:
            self.following.lend()
        for half in self.halves:
            half.starts()

    def lend(self) -> None:
        for half in self.halves:
            half.lend(self._balanced.assignment)


class Balanced:
    """What of a rank is balanced: shared by the parts of the model that it holds.

    Args:
        work: What a block comes to.
        groups: On the mesh of the layout.
        dtype: In which weights are computed with.
        seed: Of random selections.
        rate: How long products take; it measures them, too.
    """

    def __init__(
        self,
        conf: BalanceConf,
        work: BlockWork,
        *,
        groups: Groups,
        ledger: Ledger,
        collectives: Collectives,
        dtype: torch.dtype,
        seed: int = 0,
        rate: "Rate | None" = None,
    ) -> None:
        self.conf, self.work, self.ledger = conf, work, ledger
        self.groups, self.collectives = groups, collectives
        self.movements = Movements(groups, ledger, collectives)
        self.dtype, self.rate = dtype, rate
        self.assignment = Assignment(work)
        # Whether weights lie whole on this rank between units, so that they can be lent before their block begins
        self.ahead = False
        self.blocks: list[BalancedBlock] = []
        self._seed = seed

    def add_part(
        self, blocks: Sequence[tuple[str, nn.Module, dict[Product, Matrices]]]
    ) -> "list[BalancedBlock]":
        """The blocks of one part of the model, in the order of forward; each is told when it begins."""
        made = [self._block(name, module, matrices) for name, module, matrices in blocks]
        for before, after in pairwise(made):
            before.following, after.is_first = after, False
        self.blocks += made
        return made

    def products(self) -> Iterator[BalancedProduct]:
        """Of all blocks of this rank's parts, in the order of forward."""
        for block in self.blocks:
            yield from (block.products[product] for product in Product)

    # ---- making blocks

    def _block(self, name: str, module: nn.Module, matrices: dict[Product, Matrices]) -> BalancedBlock:
        held = {
            half: self._held(f"{name}.{half.value}", half, matrices[first], matrices[second])
            for half, first, second in (
                (Half.attention, Product.qkv, Product.out),
                (Half.ffn, Product.fc1, Product.fc2),
            )
        }
        products = {
            product: BalancedProduct(
                f"{name}.{product.value}",
                product,
                held[product.half],
                self.conf,
                weights=of.weights,
                biases=of.biases,
                names=of.names,
                place=self.movements.index,
                seed=self._seed_of(name, product),
                assignment=self._in_force,
                rate=self.rate,
            )
            for product, of in matrices.items()
        }
        block = BalancedBlock(name, self, products)
        # FSDP2 puts its own hook, which gathers the weights, before those that are there
        module.register_forward_pre_hook(lambda _module, _args: block.begins())
        return block

    def _held(self, label: str, half: Half, first: Matrices, second: Matrices) -> HeldHalf:
        shape = UnitShape(
            tuple(tuple(rows) for rows in first.sections),
            biased=bool(first.biases),
            features=self.work.unit_features[half],
        )
        return HeldHalf(
            label,
            half,
            shape,
            (*first.weights, *first.biases, *second.weights),
            self.movements,
            units=self.work.units[half],
            numel=self.work.unit_numel[half],
            dtype=self.dtype,
        )

    def _in_force(self) -> Assignment:
        return self.assignment

    def _seed_of(self, name: str, product: Product) -> int:
        number = int(name.rpartition(".")[2]) * len(Product) + list(Product).index(product)
        return self._seed + _SEED_OF_PRODUCT * (number + 1) + _SEED_OF_RANK * (self.movements.index + 1)
