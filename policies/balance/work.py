"""What a block of a model comes to on the ranks of a tensor group, in units that can move."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd

from ...conf.model_spec import ModelSpec
from .policy import Half

FORWARD = 1 / 3  # of a product's time: one of three multiplications of the same size
BACKWARD = 2 / 3


class Product(Enum):
    """A matrix, or several that share their input, of a block; ZERO-resizing shrinks all four."""

    qkv = "qkv"
    out = "out"
    fc1 = "fc1"
    fc2 = "fc2"

    @property
    def half(self) -> Half:
        return Half.attention if self in (Product.qkv, Product.out) else Half.ffn

    @property
    def is_first(self) -> bool:
        """Whether it is cut by its outputs (a column layer); the other of its half is cut by its inputs."""
        return self in (Product.qkv, Product.fc1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """Of one block, evenly shared out over the ranks of a tensor group.

    Args:
        ranks: Of the group.
        blocks: Of a stage.
        tokens: Of a micro-batch.
        units: Of one rank.
        unit_numel: Numbers that a unit's weights and biases are, of both products of its half.
        unit_features: Contraction columns of the half's second product that a unit is.
        unit_flop: Of its products, forward, a micro-batch.
        hidden: Contraction columns of the half's first product.
        element_bytes: Of weights when they are used.
        by_columns: A unit is a share of the contraction columns of each product, and not heads or hidden features.
        passes: Micro-batches of a step: so often a block's lent units go out and their gradients come back.
        ahead: Whether units are lent one block before they are needed, for weights lie whole on their rank by then.
    """

    ranks: int
    blocks: int
    tokens: int
    units: Mapping[Half, int]
    unit_numel: Mapping[Half, int]
    unit_features: Mapping[Half, int]
    unit_flop: Mapping[Half, int]
    hidden: int
    element_bytes: int
    by_columns: bool = False
    passes: int = 1
    ahead: bool = False

    def unit_bytes(self, half: Half) -> int:
        """Of a unit's weights and biases, one way."""
        return self.unit_numel[half] * self.element_bytes

    def lent_input_bytes(self, half: Half) -> int:
        """Of a unit's columns of the second product's input, which by columns go along with those of its weights."""
        return self.tokens * self.unit_features[half] * self.element_bytes if self.by_columns else 0

    def columns(self, product: Product, units: int) -> int:
        """Contraction columns of a product of a rank that computes so many units."""
        if not product.is_first:
            return units * self.unit_features[product.half]
        return units * (self.hidden // self.units[product.half]) if self.by_columns else self.hidden

    @property
    def least_kept(self) -> int:
        """Units of each half that a rank must compute itself: without any column it would have no product."""
        return int(self.by_columns)

    def rows(self, product: Product) -> int:
        """Outputs of a rank's part of a product, in an even split."""
        if not product.is_first:
            return self.hidden
        half = product.half
        both = self.units[half] * self.unit_flop[half] // (2 * self.tokens)  # numbers of both matrices
        return both // self.hidden - self.units[half] * self.unit_features[half]

    def first_share(self, half: Half) -> float:
        """Of a half's work, what its first product (qkv, fc1) is."""
        both = self.unit_flop[half] / (2 * self.tokens * self.hidden)
        return 1 - self.unit_features[half] / both

    def products(self, blocks: int | None = None) -> Iterator[tuple[str, Product]]:
        """Names that actions give a stage's products, in the order of forward: blocks count from 0 in each stage.

        Args:
            blocks: The first so many; None: all.
        """
        for block in range(self.blocks if blocks is None else blocks):
            for product in Product:
                yield f"block.{block}.{product.value}", product


def block_work(
    spec: ModelSpec,
    *,
    ranks: int,
    blocks: int,
    micro: int,
    sequence: int,
    element_bytes: int,
    passes: int = 1,
    ahead: bool = False,
) -> BlockWork:
    """Of a model whose sizes a 1D layout can cut.

    Args:
        micro: Sequences of a micro-batch.
        sequence: Tokens of one that a rank sees.
        passes, ahead: As `BlockWork` says.
    """
    hidden, size = spec.hidden, spec.head_dim
    sharing = spec.heads // spec.kv_heads
    rows = (sharing + 2) * size  # of queries, keys and values
    gates = 2 if spec.family in ("llama", "qwen2") else 1
    biased = {
        Half.attention: spec.qkv_bias,
        Half.ffn: spec.mlp_bias,
    }
    outputs = {Half.attention: rows, Half.ffn: gates}
    features = {Half.attention: sharing * size, Half.ffn: 1}
    tokens = micro * sequence
    matrices = {half: hidden * (outputs[half] + features[half]) for half in Half}
    return BlockWork(
        ranks=ranks,
        blocks=blocks,
        tokens=tokens,
        units={Half.attention: spec.kv_heads // ranks, Half.ffn: spec.ffn // ranks},
        unit_numel={half: matrices[half] + (outputs[half] if biased[half] else 0) for half in Half},
        unit_features=features,
        unit_flop={half: 2 * tokens * matrices[half] for half in Half},
        hidden=hidden,
        element_bytes=element_bytes,
        passes=passes,
        ahead=ahead,
    )


def column_work(spec: ModelSpec, even: BlockWork) -> BlockWork:
    """The same, where columns of each matrix move: as many units as columns of all four allow."""
    features = {half: even.units[half] * even.unit_features[half] for half in Half}
    units = gcd(even.hidden, *features.values())
    outputs = {Half.attention: (spec.heads + 2 * spec.kv_heads) * spec.head_dim, Half.ffn: spec.ffn}
    if spec.family in ("llama", "qwen2"):
        outputs[Half.ffn] *= 2
    numel = {
        half: (outputs[half] // even.ranks * even.hidden + features[half] * even.hidden) // units
        for half in Half
    }
    return replace(
        even,
        units=dict.fromkeys(Half, units),
        unit_numel=numel,
        unit_features={half: features[half] // units for half in Half},
        unit_flop={half: 2 * even.tokens * numel[half] for half in Half},
        by_columns=True,
    )
