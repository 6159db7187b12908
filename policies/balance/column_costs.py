"""What a half of a block is predicted to take where columns of its matrices migrate (`columns`).

Each of its four stretches of products ends where all ranks meet, so that each waits for its slowest rank:

* forward of the first product: lent weights go out beside what helpers compute of their own; then the owners' outputs
  come together, and nothing is computed meanwhile.
* forward of the second: lent weights and inputs go out, likewise; results join the layer's all-reduce.
* backward of the second: helpers compute for others first, and gradients come back beside what they compute of their
  own.
* backward of the first: gradients of outputs go out beside what helpers compute of their own; gradients of weights come
  back beside the layer's all-reduce, which is on the same links and held up as long.

Movement of one half is over before the other begins, so halves add up. Copies that are no part of a leg are left out.
"""

from collections.abc import Sequence

from .movement_cost import ColumnsCost
from .policy import Half, Leg
from .split import Lending
from .work import BACKWARD, FORWARD, BlockWork


def column_half_ns(
    work: BlockWork,
    half: Half,
    unit_ns: Sequence[float],
    lending: Lending,
    cost: ColumnsCost,
    beside: Sequence[float],
) -> float:
    """Forward and backward of one micro-batch, with movement that does not hide, without the half's all-reduces.

    Args:
        unit_ns, beside: As of `costs.half_times`.
    """
    parts, own_units = work.blocks * work.passes, work.units[half]
    ranks = [
        _Rank(time_ns * (own_units - lent + more) / parts, time_ns * borrowed / parts)
        for time_ns, lent, borrowed, more in zip(unit_ns, lending.lent, lending.borrowed, beside, strict=True)
    ]
    first = work.first_share(half)
    second = 1 - first
    moves = {leg: cost.ns(leg, lending) for leg in Leg}
    return (
        _own_first(ranks, FORWARD * first, moves[Leg.weights])
        + moves[Leg.outputs]
        + _own_first(ranks, FORWARD * second, moves[Leg.operands])
        + _borrowed_first(ranks, BACKWARD * second, moves[Leg.gradients])
        + _own_first(ranks, BACKWARD * first, moves[Leg.output_gradients])
        + moves[Leg.weight_gradients]
    )


class _Rank:
    """Nanoseconds of all of a half's products, of its own columns and of borrowed ones."""

    def __init__(self, own_ns: float, borrowed_ns: float) -> None:
        self.own_ns, self.borrowed_ns = own_ns, borrowed_ns


def _own_first(ranks: Sequence[_Rank], share: float, move_ns: float) -> float:
    """What is borrowed waits for what moves."""
    return max(
        max(share * rank.own_ns, move_ns if rank.borrowed_ns else 0.0) + share * rank.borrowed_ns
        for rank in ranks
    )


def _borrowed_first(ranks: Sequence[_Rank], share: float, move_ns: float) -> float:
    """What moves waits for what is borrowed, of the last helper."""
    borrowed_ns = share * max(rank.borrowed_ns for rank in ranks)
    return max(
        *(share * (rank.own_ns + rank.borrowed_ns) for rank in ranks),
        borrowed_ns + move_ns if borrowed_ns else 0.0,
    )
