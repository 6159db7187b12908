"""What a tensor-parallel mode says of each layer kind: borders, cuts, plans."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...mesh import Dims
from ...plan import Plan
from ..border import Border, Cut
from ..layers import Kind, LayerRuns, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What must divide, by the keys that the user gives: `batch.micro`, `model.hidden`, `model.heads`, ..."""

    batch: int  # sequences of a micro-batch, on the ranks of one replica together
    tokens: int  # of a sequence, on the ranks of one sequence group together
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int  # padded beforehand

    def keys(self) -> Mapping[str, int]:
        return {
            "batch.micro": self.batch,
            "batch.sequence": self.tokens,
            "model.hidden": self.hidden,
            "model.heads": self.heads,
            "model.kv_heads": self.kv_heads,
            "model.ffn": self.ffn,
        }


@dataclass(frozen=True, slots=True)
class Cuts:
    """Of one layer: the border after it, and how its parameters are cut ([out, in] and [out], as torch has them)."""

    output: Border
    weight: Cut
    bias: Cut


class TensorMode(Protocol):
    """How products are shared out over the ranks of a tensor group. Same question, same answer, on every rank.

    No clock, no I/O, no torch, no simpy, no randomness.
    """

    @property
    def name(self) -> str: ...

    @property
    def dims(self) -> Dims:
        """The axes that the mode adds to the mesh, the one of consecutive ranks first; their product is its ranks."""
        ...

    @property
    def outer(self) -> Border:
        """Between the halves of a block: what the residual stream is cut by."""
        ...

    def cuts(self, kind: Kind, role: Role, given: Border) -> Cuts:
        """Of a product, a tied product or an embedding, whose input has the border `given`."""
        ...

    def plan(self, event: LayerRuns) -> Plan | None:
        """Of a product, a tied product or an embedding."""
        ...

    def check(self, sizes: Sizes) -> None:
        """Raises ValueError if a size does not divide, naming the keys and both numbers."""
        ...

    @property
    def by_dtensor(self) -> bool:
        """Whether torch's DTensor sends for its products and words what the plans say, so that it may compute them."""
        ...

    @property
    def vocab_parts(self) -> int:
        """What a vocabulary is padded to a multiple of."""
        ...
