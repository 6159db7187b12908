"""What each rank sends for the products of a transformer block in forward, counted from a mode's own plans.

Products alone: the four of a block (queries, keys and values; their projection; the two of the MLP). Norms, biases'
gradients, attention and the loss send little or nothing beside them, and are left out, as published formulas do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

from ...conf.model_spec import ModelSpec
from ...conf.schema import ParallelConf
from ...policies.layout import Direction, Kind, ParallelLayout, build_parallel
from ...policies.mesh import Mesh
from ..interpreter import Transfer
from ..ledger import Ledger
from .operands import follow
from .shapes import BLOCK, Shapes


@dataclass(frozen=True, slots=True)
class ForwardVolume:
    """Of the four products of one block, in elements.

    Args:
        ring: Sent by a rank, mean over ranks, with the fewest bytes that each collective can do with: a broadcast in a
            group of g, cut in pieces that go round, is (g - 1) / g of a message a rank.
        tree: The same, but of a broadcast what a binomial tree sends one after the other: log2(g) whole messages,
            rounded up (Xu et al. 2021, section 3.3, count so).
        activation: bsh, the elements of one activation between blocks.
    """

    ring: float
    tree: float
    activation: int

    @property
    def ring_bsh(self) -> float:
        return self.ring / self.activation

    @property
    def tree_bsh(self) -> float:
        return self.tree / self.activation


def block_layout(
    parallel: ParallelConf, spec: ModelSpec, *, micro: int, sequence: int
) -> tuple[ParallelLayout, Mesh]:
    """One tensor group, and nothing beside it.

    Raises:
        ValueError: If the layout does not fit the model or the batch, naming the keys.
    """
    ranks = parallel.ranks_a_replica
    layout = build_parallel(parallel, spec, num_ranks=ranks, micro=micro, micro_batches=1, sequence=sequence)
    return layout, Mesh(ranks, ranks, dims=layout.dims)


def forward_volume(parallel: ParallelConf, spec: ModelSpec, *, micro: int, sequence: int) -> ForwardVolume:
    """Args:
        micro, sequence: Of the batch that a tensor group computes together.

    Raises:
        ValueError: As `block_layout`.
    """
    layout, mesh = block_layout(parallel, spec, micro=micro, sequence=sequence)
    ledger, ranks = Ledger(mesh), range(mesh.num_ranks)
    ring = tree = 0.0
    for transfer in product_transfers(layout, spec, mesh, micro=micro, sequence=sequence):
        # the ledger's broadcasts are trees, whose ranks send as much altogether as those of a ring
        mean = sum(ledger.sent(rank, transfer).wire_bytes for rank in ranks) / len(ranks)
        ring += mean
        tree += _on_a_tree(transfer) if transfer.op == "broadcast" else mean
    return ForwardVolume(ring, tree, micro * sequence * spec.hidden)


def product_transfers(
    layout: ParallelLayout, spec: ModelSpec, mesh: Mesh, *, micro: int, sequence: int
) -> list[Transfer]:
    """Collectives of the products of one block in forward, one byte an element."""
    shapes = Shapes(layout, spec, mesh, micro=micro, sequence=sequence, element_bytes=1)
    found: list[Transfer] = []
    before = None
    for layer in shapes.parts[BLOCK]:
        plan = layout.decide(layer.runs(Direction.forward)) if layer.kind is Kind.linear else None
        if plan is not None:
            steps = follow(plan, shapes.forward(layer, before), mesh).steps
            found += [step.what for step in steps if isinstance(step.what, Transfer)]
        before = layer
    return found


def partners(mesh: Mesh, axes: Iterable[str]) -> set[tuple[int, int]]:
    """Ordered pairs of different ranks that lie in one group of one of the axes."""
    return {pair for axis in axes for group in mesh.groups(axis) for pair in permutations(group, 2)}


def _on_a_tree(transfer: Transfer) -> float:
    """ceil(log2(g)) messages one after the other, the length of a binomial tree."""
    return float((transfer.group_size - 1).bit_length() * transfer.message_bytes)
