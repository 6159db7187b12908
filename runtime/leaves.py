"""The modules, beside torch's own, that models are put together from. None knows the whole model's sizes: a form of
parallelism may put another module with the same call in the place of each, which holds a part of it.

Shapes: B sequences, T tokens, D features, H heads, K key heads, E head size, V classes, S positions.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional


class Table(nn.Module, ABC):
    """Adds to each token a row of a table.

    Attributes:
        token_index: [T] int64, the positions of the tokens that are here; None: 0 to T - 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token_index: Tensor | None = None

    @abstractmethod
    def table(self) -> Tensor:
        """[S, D]."""

    def rows(self, x_BTD: Tensor, first: int = 0) -> Tensor:
        """[T] int64, those of the tokens that are here."""
        return _index(self.token_index, x_BTD, dim=1, first=first)

    def forward(self, x_BTD: Tensor, first: int = 0) -> Tensor:
        """x + rows; without `token_index` the tokens stand at positions `first` and on."""
        x_BTD = x_BTD + functional.embedding(self.rows(x_BTD, first), self.table())
        return x_BTD


class Positions(Table):
    """Adds to each token the row of a table that belongs to its position."""

    def __init__(self, num_positions: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden))
        nn.init.normal_(self.weight)

    def table(self) -> Tensor:
        return self.weight


class TokenTypes(Positions):
    """Adds to each token the row of its type, which is 0."""

    def rows(self, x_BTD: Tensor, first: int = 0) -> Tensor:
        return torch.zeros(x_BTD.shape[1], dtype=torch.int64, device=x_BTD.device)


class PositionsOf(Table):
    """As `Positions`, with a table that is a parameter of another module, [1, S, D], under that module's name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owned = Owned(owner, name)

    def table(self) -> Tensor:
        return self.owned.tensor[0]


class FirstToken(nn.Module):
    """Puts a learned token before all others: a parameter of another module, [1, 1, D], under that module's name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owned = Owned(owner, name)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T + 1, D]."""
        return torch.cat([self.owned.tensor.expand(len(x_BTD), -1, -1), x_BTD], dim=1)


class Owned:
    """A parameter that another module has, looked for anew each time: it may have been replaced. It is not registered
    with whoever uses it.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.name)
        return found


class ByPosition(nn.Module):
    """Does something to queries and keys that depends on where their tokens stand.

    Attributes:
        token_index: [T] int64, the positions of the tokens that are here; None: 0 to T - 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token_index: Tensor | None = None


class Rotary(ByPosition):
    """Turns queries and keys by their tokens' positions (Su et al. 2021), each head's first half against its second,
    as Llama's released code in transformers does.

    Args:
        head_size: Even.
        theta: Base of the wavelengths, 2 pi theta^(2 i / E).
    """

    def __init__(self, head_size: int, *, theta: float = 10_000.0) -> None:
        super().__init__()
        if head_size % 2:
            raise ValueError(f"head_size={head_size}: rotary positions turn pairs of features; must be even")
        self._head_size, self._theta = head_size, theta

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Both turned; angles are worked out in fp32."""
        index_T = _index(self.token_index, q_BHTE, dim=2)
        pair = torch.arange(0, self._head_size, 2, device=q_BHTE.device, dtype=torch.float32)
        angle_TE = torch.outer(index_T.float(), 1.0 / self._theta ** (pair / self._head_size)).repeat(1, 2)
        cos_TE, sin_TE = angle_TE.cos().to(q_BHTE.dtype), angle_TE.sin().to(q_BHTE.dtype)
        return _turn(q_BHTE, cos_TE, sin_TE), _turn(k_BKTE, cos_TE, sin_TE)


class AttentionCore(nn.Module):
    """Softmax of scaled products of queries and keys, times values; key heads may be shared by query heads.

    Args:
        causal: A token sees those before it and itself; a single query sees all keys that there are.
        head_size: E.
    """

    def __init__(self, *, causal: bool, head_size: int) -> None:
        super().__init__()
        self.causal, self.head_size = causal, head_size

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """[B, T, H E]."""
        mixed_BHTE = functional.scaled_dot_product_attention(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            is_causal=self.causal and q_BHTE.shape[2] > 1,
            scale=1 / math.sqrt(self.head_size),
            enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
        )
        return mixed_BHTE.transpose(1, 2).flatten(2)


class TiedHead(nn.Module):
    """Logits by the matrix of an embedding, which is looked for anew each time: it may have been replaced.

    Args:
        owner: The module that has the embedding.
        path: Dotted, of the embedding within it.
        bias: Dotted, of a parameter within `owner` that is added; None: nothing is.
    """

    def __init__(self, owner: nn.Module, path: str, *, bias: str | None = None) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that torch does not register its parameters here too
        self._path, self._bias = path, bias

    @property
    def embedding(self) -> nn.Module:
        """Whose `weight`, [V, D], is the matrix."""
        return self._owner[0].get_submodule(self._path)

    @property
    def bias_path(self) -> str:
        """Dotted, within the owner; "": there is none."""
        return self._bias or ""

    @property
    def owned_bias(self) -> Owned | None:
        """[V]."""
        if self._bias is None:
            return None
        where, _, name = self._bias.rpartition(".")
        return Owned(self._owner[0].get_submodule(where), name)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, V]."""
        weight_VD = self.embedding.weight
        assert isinstance(weight_VD, Tensor)
        bias = self.owned_bias
        return functional.linear(x_BTD, weight_VD, None if bias is None else bias.tensor)


class CrossEntropy(nn.Module):
    """Mean cross-entropy in nats over the targets that are not -100 (torch's ignore_index), in fp32, or fp64 of fp64.

    Args:
        over_all: Divide by the number of all targets, so that ignored ones count as 0. Without it the loss of targets
            that are all ignored is NaN, as torch's.
    """

    def __init__(self, *, over_all: bool = False) -> None:
        super().__init__()
        self.over_all = over_all

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """One number. Logits may have any leading sizes; the targets have the same."""
        logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
        logits_NV, targets_N = logits_BTV.flatten(0, -2), targets_BT.flatten()
        if not self.over_all:
            return functional.cross_entropy(logits_NV, targets_N)
        total = functional.cross_entropy(logits_NV, targets_N, reduction="sum")
        return total / len(targets_N)


class CountRight(nn.Module):
    """How often the likeliest class is the target; one number. Where classes or targets are cut over ranks, each counts
    its share, so that the sum over all ranks is the number.
    """

    def forward(self, logits_BV: Tensor, targets_B: Tensor) -> Tensor:
        return (logits_BV.argmax(-1) == targets_B).sum()


def split_heads(x_BTX: Tensor, head_size: int) -> Tensor:
    """[B, H, T, E] of as many heads as there are in X."""
    x_BTHE = torch.unflatten(x_BTX, -1, (-1, head_size))
    return x_BTHE.transpose(1, 2)


def _index(given: Tensor | None, x: Tensor, *, dim: int, first: int = 0) -> Tensor:
    """Positions of what lies along `dim` of x."""
    if given is None:
        return torch.arange(first, first + x.shape[dim], device=x.device)
    if first:
        raise ValueError(f"first={first} has no effect where token_index says where the tokens stand")
    return given.to(x.device)


def _turn(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE
