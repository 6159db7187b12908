"""Uneven micro-batches: slow replicas of the model take fewer sequences, so that all end a step together."""

from collections.abc import Sequence

from .best_split import best_split, taken_for_equal
from .policy import BalanceAction, BalanceEvent
from .shares import ReplicasMeasured, ShareSequences

_WINDOW = 4  # periods that a speed is averaged over, about


class BalanceBatch:
    """Shares with the smallest slowest time, by what a sequence takes each replica.

    That is averaged over some periods; a measurement that is further than `slack` from the average begins a new one, so
    that a real change counts at once and noise does not. A change of shares is made if it promises more than `slack` of
    the time of a step. The even split, which is where replicas begin, comes back also if all were taken for equal twice
    in a row: a straggler that has gone leaves less than that to be won.

    Args:
        replicas: Of the model.
        micro: Sequences of a micro-batch of one of them, in an even split.
        slack: In [0, 1). Replicas whose speeds differ by less are taken for equal.
    """

    name = "batch"

    def __init__(self, *, replicas: int, micro: int, slack: float) -> None:
        self._total, self._even = replicas * micro, (micro,) * replicas
        self._slack = slack
        self._counts = self._even
        self._each_ns = [0.0] * replicas
        self._num_measured = [0] * replicas  # that the average is of
        self._were_equal = False

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        if not isinstance(event, ReplicasMeasured):
            return None
        if len(event.compute_ns) != len(self._even):
            raise ValueError(f"{event}: must be of {len(self._even)} replicas")
        for i, (ns, count) in enumerate(zip(event.compute_ns, self._counts, strict=True)):
            self._average(i, max(1, ns) / count)
        each_ns = taken_for_equal(self._each_ns, self._slack)
        most = [n + max(0, room) for n, room in zip(self._counts, event.room, strict=True)]
        wanted = best_split(self._total, each_ns, most=most)
        equal = len(set(each_ns)) == 1
        recovered = equal and self._were_equal and wanted == self._even
        self._were_equal = equal
        gains = _slowest(self._counts, each_ns) > (1 + self._slack) * _slowest(wanted, each_ns)
        if wanted == self._counts or not (gains or recovered):
            return None
        self._counts = wanted
        return (ShareSequences(wanted),)

    def _average(self, replica: int, ns: float) -> None:
        before = self._each_ns[replica]
        if max(ns, before) > (1 + self._slack) * min(ns, before):
            self._num_measured[replica] = 0
        self._num_measured[replica] += 1
        self._each_ns[replica] += (ns - before) / min(self._num_measured[replica], _WINDOW)


def _slowest(counts: Sequence[int], each_ns: Sequence[float]) -> float:
    return max(n * ns for n, ns in zip(counts, each_ns, strict=True))
