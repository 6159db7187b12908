"""What of a block one rank of a tensor group computes, where ranks are balanced, and the shapes that follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...conf.model_spec import ModelSpec
from ...policies.balance import Assignment, Half, Product, kept_columns
from ...policies.layout import Kind, Layer
from ..layers import Widths

PRODUCTS = tuple(Product)  # in the order of forward


@dataclass(frozen=True, slots=True)
class Share:
    """Of one block.

    Args:
        attention, ffn: Units of that half.
        left_out: Share of the columns of each product, in the order of PRODUCTS, that is not computed.
    """

    attention: int
    ffn: int
    left_out: tuple[float, ...]

    def units(self, half: Half) -> int:
        return self.attention if half is Half.attention else self.ffn

    def kept(self, product: Product, columns: int) -> int:
        """Of a product's `columns`, those that are computed."""
        return kept_columns(columns, self.left_out[PRODUCTS.index(product)])

    def __str__(self) -> str:
        return ":".join([str(self.attention), str(self.ffn), *map(repr, self.left_out)])

    @classmethod
    def parse(cls, text: str) -> "Share":
        """What `str` wrote."""
        attention, ffn, *left_out = text.split(":")
        return cls(int(attention), int(ffn), tuple(map(float, left_out)))


def shares_of(assignment: Assignment, place: int) -> tuple[Share | None, ...]:
    """Of each block of the stage, numbered from 0 as an action's `product` names them; None: an even share, all of it
    computed.
    """
    work, found = assignment.work, []
    units = {half: assignment.computed(half, place) for half in Half}
    even = units == dict(work.units)
    for block in range(work.blocks):
        ratios = tuple(assignment.ratio(place, f"block.{block}.{product.value}") for product in PRODUCTS)
        share = Share(units[Half.attention], units[Half.ffn], ratios)
        whole = all(
            kept == columns
            for kept, columns in (
                assignment.kept_columns(place, product, f"block.{block}.{product.value}")
                for product in PRODUCTS
            )
        )
        found.append(None if even and whole else share)
    return tuple(found)


def products_of(layers: Sequence[Layer]) -> dict[int, Product]:
    """Which layers of a block are its four products, by position; {} where they are others."""
    linears = [i for i, layer in enumerate(layers) if layer.kind is Kind.linear]
    return dict(zip(linears, PRODUCTS, strict=True)) if len(linears) == len(PRODUCTS) else {}


class Resized(NamedTuple):
    """A block's layers with the features of as many ranks that all have one share, and what one of them has."""

    layers: tuple[Layer, ...]
    widths: Widths


def resized(layers: Sequence[Layer], share: Share, spec: ModelSpec, ranks: int) -> Resized:
    """A block of 1D tensor parallelism over `ranks`, as if every rank computed what this share has."""
    products, sharing = products_of(layers), spec.heads // spec.kv_heads
    wholes = {Half.attention: spec.kv_heads, Half.ffn: spec.ffn}
    made = []
    for i, layer in enumerate(layers):
        product = products.get(i)
        if product is not None:
            units, whole = share.units(product.half) * ranks, wholes[product.half]
            layer = _outputs(layer, units, whole) if product.is_first else _inputs(layer, units, whole)
        made.append(layer)
    return Resized(tuple(made), Widths(share.attention * sharing, share.attention, share.ffn))


def _outputs(layer: Layer, units: int, whole: int) -> Layer:
    others = tuple(_outputs(other, units, whole) for other in layer.others)
    sections = tuple(size * units // whole for size in layer.sections)
    return replace(layer, features_out=layer.features_out * units // whole, others=others, sections=sections)


def _inputs(layer: Layer, units: int, whole: int) -> Layer:
    return replace(layer, features_in=layer.features_in * units // whole)
