"""Which tokens of a sequence lie on which rank of a ring, and how much attention has to do there.

A token of a causal model sees itself and those before it. Cut into one run a rank ("contiguous"), the last rank has
nearly twice the mean work, and all wait for it at each step of the ring. With zigzag the sequence is cut into 2 N
pieces, and rank r holds the r-th and the r-th from the end: every pair of ranks then has the same work, half a full
block, at every step. Striped attention (Brandon et al. 2023) balances the same by dealing out single tokens, for a mask
in every block; pieces keep all but a rank's own block free of masks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seen:
    """The part of a block of T x T scores that is computed, in halves of T: rows [first_query, 2), columns [0, keys).

    `diagonal`: a token does not see those after it; only where the part is the whole block. No other part is masked.
    """

    first_query: int
    keys: int
    diagonal: bool = False


def seen(*, size: int, zigzag: bool, causal: bool, rank: int, step: int) -> Seen:
    """What the queries of `rank` see of the keys of the rank that lies `step` before it on the ring."""
    if not causal:
        return Seen(0, 2)
    if step % size == 0:
        return Seen(0, 2, diagonal=True)
    earlier = (rank - step) % size < rank
    if zigzag:  # the late piece of a rank sees all early ones, and the late ones of ranks behind it
        return Seen(0, 1) if earlier else Seen(1, 2)
    return Seen(0, 2) if earlier else Seen(2, 2)


def block_pairs(*, size: int, zigzag: bool, causal: bool, rank: int, step: int) -> float:
    """How much of a full block of T x T scores `rank` computes at a step, as a fraction; a diagonal counts half.

    Args:
        size: N, ranks of the ring; T is the tokens of one of them.
        step: How far before `rank` on the ring the keys lie, 0 <= step < size.

    Raises:
        ValueError: If there is no such rank or step.
    """
    for key, value in (("rank", rank), ("step", step)):
        if not 0 <= value < size:
            raise ValueError(f"{key}={value} of a ring of {size} must be in [0, {size - 1}]")
    part = seen(size=size, zigzag=zigzag, causal=causal, rank=rank, step=step)
    return (2 - part.first_query) * part.keys / 4 * (0.5 if part.diagonal else 1.0)


def pieces(*, size: int, zigzag: bool, rank: int) -> tuple[int, ...]:
    """Which of the equal pieces of a sequence (`size`, with zigzag twice as many) are the rank's, in order."""
    return (rank, 2 * size - 1 - rank) if zigzag else (rank,)


def token_runs(tokens: int, *, size: int, zigzag: bool, rank: int) -> tuple[tuple[int, int], ...]:
    """[start, end) of each run of tokens that the rank holds, in the order in which they lie there.

    Args:
        tokens: Of the whole sequence.

    Raises:
        ValueError: If the pieces do not divide them.
    """
    held = pieces(size=size, zigzag=zigzag, rank=rank)
    parts = size * len(held)
    if tokens % parts:
        raise ValueError(f"{tokens} tokens cannot be cut in {parts} equal pieces for {size} ranks")
    length = tokens // parts
    return tuple((piece * length, (piece + 1) * length) for piece in held)


def causal_work(size: int, zigzag: bool) -> list[float]:
    """Scores that each rank computes under a causal mask, in blocks of (L / 2N)^2, those on the diagonal as halves.

    Counted from who sees whom, piece by piece. Contiguous: (4 r + 2), so max / mean is 2 - 1 / N; zigzag: 2 N for all.
    """
    work = []
    for rank in range(size):
        own = _small_pieces(size, zigzag, rank)
        work.append(
            sum(1.0 if there < here else 0.5 for here in own for there in range(2 * size) if there <= here)
        )
    return work


def _small_pieces(size: int, zigzag: bool, rank: int) -> tuple[int, ...]:
    """Of 2 N pieces, whatever the cut."""
    return pieces(size=size, zigzag=True, rank=rank) if zigzag else (2 * rank, 2 * rank + 1)
