"""What the optimizer did to columns that were left out of a whole step, undone (`balance.pruned_state=frozen`).

Weights and states of columns that this rank left out of a product in all micro-batches of a step stay as they were
before it: of its own units that it computes itself. Rows of units that it has lent, which others computed with all
columns, are stepped; so are an optimizer's numbers that are no part of a matrix, such as Adam's count of steps. To be
used where there is one replica of the model: others have gradients of the same columns.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .products import BalancedProduct


@dataclass(frozen=True, slots=True)
class _Kept:
    """Numbers of one tensor as they were."""

    tensor: Tensor
    rows: Tensor
    columns: Tensor
    values: Tensor

    def put_back(self) -> None:
        self.tensor[self.rows[:, None], self.columns] = self.values


@contextmanager
def frozen(
    products: Iterable[BalancedProduct], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Around the step of an optimizer, with the columns of that step still in force.

    Args:
        parameters: What it steps, by name.
    """
    kept = list(_before(products, parameters, optimizer))
    yield
    with torch.no_grad():
        for each in kept:
            each.put_back()


@torch.no_grad()
def _before(
    products: Iterable[BalancedProduct], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[_Kept]:
    for product in products:
        left_out = [column for column in product.left_out if column < product.own_columns]
        if not left_out:
            continue
        for name, rows in zip(product.names, product.own_rows(), strict=True):
            parameter = parameters[name]
            whole = _local(parameter)
            states = optimizer.state.get(parameter, {}).values()
            at = rows.to(whole.device), torch.tensor(left_out, device=whole.device)
            for tensor in (whole, *(_local(state) for state in states if isinstance(state, Tensor))):
                if tensor.shape == whole.shape:
                    yield _Kept(tensor, *at, tensor[at[0][:, None], at[1]])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
