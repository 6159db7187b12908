"""Which local work of a rank's program is of a half's products, between them, or around them."""

from collections.abc import Sequence

from ...policies.balance import Half
from ..program import MAIN, Item, Program
from .lending import COPIES

# indices of items: products, by half; between a half's two products, by half; around them
Stretches = tuple[tuple[int, ...], ...]


def stretches(program: Program) -> Stretches:
    """Of all blocks. What is no block's is left out, and copies of units that move."""
    products: dict[Half, list[int]] = {half: [] for half in Half}
    between: dict[Half, list[int]] = {half: [] for half in Half}
    around: list[int] = []
    since: list[int] = []  # the last product
    last: Item | None = None
    items = [item for item in program.items if item.worker == MAIN and item.parts]
    blocks = {item.unit for item in items if item.half is not None}
    for item in items:
        if item.half is not None:
            within = last is not None and (last.half, last.unit, last.phase) == (
                item.half,
                item.unit,
                item.phase,
            )
            (between[item.half] if within else around).extend(since)
            since.clear()
            products[item.half].append(item.index)
            last = item
        elif item.unit in blocks and not _is_copy(item):
            since.append(item.index)
    around += since
    return (*_lists(products), *_lists(between), tuple(around))


def _lists(by_half: dict[Half, list[int]]) -> Sequence[tuple[int, ...]]:
    return [tuple(by_half[half]) for half in Half]


def _is_copy(item: Item) -> bool:
    return item.parts[0].name.rpartition(" ")[2] in COPIES
