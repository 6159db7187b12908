"""Where ranks lie: on which node, and at which place on it. Simulator, runtime and reports all ask here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ranks = TypeVar("Ranks", int, NDArray[np.int64])  # one, or a vector of them


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of equal nodes.

    A rank's slot is its node times `per_node`, plus its place on the node: slots count through the nodes one after the
    other. In block order a rank's slot is its number. `cyclic`: ranks are dealt out to the nodes like cards, as
    Slurm's `--distribution=cyclic` does.
    """

    nodes: int
    per_node: int
    cyclic: bool = False

    def slot(self, rank: "Ranks") -> "Ranks":
        return rank % self.nodes * self.per_node + rank // self.nodes if self.cyclic else rank

    def node(self, rank: "Ranks") -> "Ranks":
        return rank % self.nodes if self.cyclic else rank // self.per_node

    def local(self, rank: "Ranks") -> "Ranks":
        """The rank's place on its node."""
        return rank // self.nodes if self.cyclic else rank % self.per_node

    def rank_at(self, slot: "Ranks") -> "Ranks":
        """Who lies there."""
        return slot % self.per_node * self.nodes + slot // self.per_node if self.cyclic else slot

    def ranks_on(self, node: int) -> range:
        """The ranks of a node, by their place."""
        if self.cyclic:
            return range(node, self.nodes * self.per_node, self.nodes)
        return range(node * self.per_node, (node + 1) * self.per_node)
