"""How a unit's tensors become chunks, and which of them lie far."""

from collections.abc import Mapping, Sequence

from .policy import Chunk, Kind

MAX_CHUNKS = 20_000  # of one rank and kind: a policy looks at all of them at each event


def cut_chunks(
    unit_bytes: Mapping[str, int], kind: Kind, *, chunk_bytes: int | None = None
) -> tuple[Chunk, ...]:
    """Chunks of all units, in their order; one above `chunk_bytes` is cut in equal parts, the last the smallest.

    Args:
        unit_bytes: Of each unit's tensors of this kind on one rank. Nothing (an optimizer without states) is a chunk
            of 0 bytes: it is still stepped somewhere.

    Raises:
        ValueError: There are more than MAX_CHUNKS.
    """
    count = sum(max(1, -(-nbytes // chunk_bytes)) for nbytes in unit_bytes.values()) if chunk_bytes else 0
    if count > MAX_CHUNKS:
        least = -(-sum(unit_bytes.values()) // (MAX_CHUNKS // 2))
        raise ValueError(
            f"offload.chunk_bytes={chunk_bytes} cuts the {kind.value} of one rank into {count} chunks, must be at most "
            f"{MAX_CHUNKS}: such as offload.chunk_bytes={least}"
        )
    found = []
    for unit, nbytes in unit_bytes.items():
        name = f"{kind.value}/{unit}"
        parts = max(1, -(-nbytes // chunk_bytes)) if chunk_bytes else 1
        if parts == 1:
            found.append(Chunk(name, kind, unit, nbytes))
            continue
        size = -(-nbytes // parts)
        for i in range(-(-nbytes // size)):
            found.append(Chunk(f"{name}/{i}", kind, unit, min(size, nbytes - i * size)))
    return tuple(found)


def spread_far(chunks: Sequence[Chunk], share: float) -> frozenset[str]:
    """Names of the chunks that lie far: their bytes are within half the largest chunk of `share` of all.

    They are spread evenly over the order of use, so that a copy has the computation between two to hide behind.
    """
    far, before, at = [], 0, 0
    for chunk in chunks:
        at += chunk.nbytes
        with_it, without = abs(before + chunk.nbytes - share * at), abs(before - share * at)
        if with_it < without or (with_it == without and share >= 0.5):
            far.append(chunk.name)
            before += chunk.nbytes
    return frozenset(far)
