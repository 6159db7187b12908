"""balance=semi: of each slow rank, how much it prunes, how much it lends and to whom, so that a step ends earliest."""

from ...conf.schema import BalanceConf
from .budget import AccuracyBudget
from .decider import Decider, Room
from .policy import BalanceAction
from .search import Search
from .speeds import Speeds
from .work import BlockWork

STEPS = 4  # from no pruning to the most that is useful and allowed, all stragglers pruning
SUBSET_STEPS = 2  # the same where some of them do not prune


class SemiPolicy(Decider):
    """Searches a grid of answers with the model of `costs`: pruning within the budget times moving, from none to all.

    Both other policies' answers are in the grid: it is never slower than they are, by the model, but for what the
    search gives up to prune less.
    """

    @property
    def name(self) -> str:
        return "semi"

    def _answer(self, speeds: Speeds, room: Room) -> tuple[tuple[BalanceAction, ...], dict[int, float]]:
        candidates = pruning_candidates(speeds, self._work, self._conf, self._budget)
        found = Search(self._work, speeds, room, self._movement, self._products).best(candidates)
        return found.moves(), dict(found.ratios)


def pruning_candidates(
    speeds: Speeds, work: BlockWork, conf: BalanceConf, budget: AccuracyBudget
) -> list[dict[int, float]]:
    """Ratios by rank, the first of them none.

    Which stragglers prune: all, the slowest few, or the least slow few (the others can still lend). How much: they are
    brought to a common time, in steps down to that of the fastest ranks or the earliest that the budget allows.
    """
    times, beside_ns = speeds.even_ns(work), dict(enumerate(speeds.beside.even_ns(work)))
    all_ns = [time_ns + beside_ns[rank] for rank, time_ns in enumerate(times)]
    slow = sorted(speeds.stragglers, key=lambda rank: (-times[rank], rank))
    counts = sorted({1, len(slow) // 2, len(slow) - 1} - {0, len(slow)})
    subsets = [slow] + [slow[:count] for count in counts] + [slow[-count:] for count in counts]
    found: list[dict[int, float]] = [{}]
    for subset in subsets:
        of_subset = {rank: times[rank] for rank in subset}
        best = budget.to_level(of_subset, min(all_ns), beside_ns)
        slowest = max(all_ns[rank] for rank in subset)
        # the common time that these ratios come to
        level_ns = max(times[rank] * (1 - ratio) + beside_ns[rank] for rank, ratio in best.items())
        steps = STEPS if len(subset) == len(slow) else SUBSET_STEPS
        for step in range(1, steps + 1):
            ratios = (
                best
                if step == steps
                else budget.to_level(of_subset, slowest - (slowest - level_ns) * step / steps, beside_ns)
            )
            pruning = {rank: ratio for rank, ratio in ratios.items() if ratio}
            if pruning and pruning not in found:
                found.append(pruning)
    return found
