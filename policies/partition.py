"""How tensors are cut over ranks: FSDP2's shards and the secondary shards of hpZ."""

from collections.abc import Sequence

Shape = tuple[int, ...]


def shard_numel(shape: Shape, parts: int) -> int:
    """Elements of one rank's shard as it goes on the wire: dimension 0 is cut in `parts`, padded up."""
    rest = 1
    for size in shape[1:]:
        rest *= size
    return -(-shape[0] // parts) * rest


def shard_segments(shapes: Sequence[Shape], parts: int) -> tuple[int, ...]:
    """Elements of each tensor's shard, in the order in which a unit's shards lie side by side."""
    return tuple(shard_numel(shape, parts) for shape in shapes)


def fsdp2_order(names: Sequence[str]) -> tuple[int, ...]:
    """Where in `names` (dotted, as torch registers them) the tensors of a unit are, in the order in which FSDP2 lays
    their shards side by side: it goes through modules depth first, and comes to a module's own after its children's.
    """
    own: list[int] = []
    below: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        child, dot, _ = name.partition(".")
        if dot:
            below.setdefault(child, []).append(at)
        else:
            own.append(at)
    ordered = []
    for child, places in below.items():
        inner = fsdp2_order([names[at][len(child) + 1 :] for at in places])
        ordered += [places[at] for at in inner]
    return (*ordered, *own)


def copy_slice(numel: int, parts: int, index: int) -> tuple[int, int]:
    """[start, end) of secondary shard `index` when a gathered tensor of `numel` elements is cut in `parts`.

    Raises:
        ValueError: If `parts` does not divide `numel` (a gathered tensor is padded to the world size).
    """
    if numel % parts:
        raise ValueError(f"hpZ partition {parts} must divide the padded size {numel}")
    size = numel // parts
    return index * size, (index + 1) * size


def real_elements(numel: int, padded: int, parts: int) -> list[int]:
    """How many elements of each of `parts` equal shards are not padding.

    32 elements padded to 2048, 16 parts: [32, 0, 0, ...], in shards of 128.
    """
    size = padded // parts
    return [min(max(numel - size * i, 0), size) for i in range(parts)]


def cut_segments(segments: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """What of each of consecutive ranges lies in [start, end): the segments of one chunk."""
    inside, at = [], 0
    for numel in segments:
        inside.append(max(0, min(at + numel, end) - max(at, start)))
        at += numel
    return tuple(inside)


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """Shares as equal as whole numbers can be; the first ones have one more."""
    each, more = divmod(total, parts)
    return tuple(each + (part < more) for part in range(parts))
