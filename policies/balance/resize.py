"""balance=resize: slow ranks leave columns of their products out (ZERO-resizing). Nothing moves."""

from ...conf.schema import BalanceConf, Goal
from .budget import AccuracyBudget
from .decider import Decider, Room
from .policy import BalanceAction, Half
from .product_cost import Products, product_cost
from .speeds import Speeds
from .work import BlockWork


class ResizePolicy(Decider):
    """The ratio is `balance.ratio`, or what brings a straggler to `balance.goal`; at most what the budget allows."""

    @property
    def name(self) -> str:
        return "resize"

    def _answer(self, speeds: Speeds, room: Room) -> tuple[tuple[BalanceAction, ...], dict[int, float]]:
        return (), resize_ratios(speeds, self._work, self._conf, self._budget, self._products)


def resize_ratios(
    speeds: Speeds,
    work: BlockWork,
    conf: BalanceConf,
    budget: AccuracyBudget,
    products: Products | None = None,
) -> dict[int, float]:
    """Of each straggler. ZERO-resizing to a target time: gamma = clip((T - T*) / M, 0, max_ratio), T at ratio 0.

    T* is the time of ranks that are no stragglers, or the mean of all before balancing. A rank for which that is less
    than pruning takes beside does not prune.
    """
    if conf.ratio is not None:
        return budget.of_all(speeds.stragglers, conf.ratio)
    times, beside_ns = speeds.even_ns(work), speeds.beside.even_ns(work)
    all_ns = [sum(both) for both in zip(times, beside_ns, strict=True)]
    goal_ns = min(all_ns) if conf.goal is Goal.fastest else sum(all_ns) / len(all_ns)
    found = budget.to_level(
        {rank: times[rank] for rank in speeds.stragglers}, goal_ns, dict(enumerate(beside_ns))
    )

    def beside(rank: int, ratio: float) -> float:
        """Of a rank's time at even work."""
        pruning_ns = sum(
            work.units[half]
            * speeds.unit_ns[half][rank]
            * product_cost(products or {}, work, half).pruning(1 - ratio)
            for half in Half
        )
        return speeds.overhead + pruning_ns / times[rank]

    return {rank: ratio for rank, ratio in found.items() if ratio > beside(rank, ratio)}
