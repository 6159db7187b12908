"""Uneven stages: slow ones hold fewer blocks. Decided once, before the model is built."""

from .best_split import best_split, taken_for_equal
from .policy import BalanceAction, BalanceEvent
from .shares import ShareBlocks, StagesMeasured


class BalanceLayers:
    """Blocks of each stage with the smallest slowest time of a micro-batch; what the root computes on the first and the
    last stage counts.

    The split stays for the whole run: weights and optimizer states would have to move between stages. A run that is
    started anew from a checkpoint measures again, and can go on with another one.

    Args:
        stages: Of the pipeline.
        layers: Blocks of the model.
        slack: In [0, 1). Stages whose speeds differ by less are taken for equal.
    """

    name = "layers"

    def __init__(self, *, stages: int, layers: int, slack: float) -> None:
        self._stages, self._layers, self._slack = stages, layers, slack

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        if not isinstance(event, StagesMeasured):
            return None
        if len(event.block_ns) != self._stages:
            raise ValueError(f"{event}: must be of {self._stages} stages")
        first_ns, last_ns = event.ends_ns
        ends_ns = [0.0] * self._stages
        ends_ns[0] += first_ns
        ends_ns[-1] += last_ns
        each_ns = taken_for_equal([max(1, ns) for ns in event.block_ns], self._slack)
        return (ShareBlocks(best_split(self._layers, each_ns, ends_ns=ends_ns)),)
