"""Uneven micro-batches: slow replicas of the model take fewer sequences, so that all end a step together."""

from collections.abc import Sequence

from .best_split import best_split, taken_for_equal
from .policy import BalanceAction, BalanceEvent
from .shares import ReplicasMeasured, ShareSequences

_WINDOW = 4  # periods that a speed is averaged over, about
_LONG_WINDOW = 16  # and what it is compared with: one noisy average must not look like a change


class BalanceBatch:
    """Shares with the smallest slowest time, by what a sequence takes each replica.

    That is averaged over some periods; a measurement that is further than `slack` from the average begins a new one, so
    that a real change counts at once and noise does not. A change of shares is made if it promises more than `slack` of
    the time of a step. The even split, which is where replicas begin, comes back also if all were taken for equal twice
    in a row: a straggler that has gone leaves less than that to be won.

    Few sequences take longer each than many (launches, waves of tiles), so what a replica takes for fewer does not tell
    its speed at the even split. It is compared with what itself took for as many before: once it is clearly faster than
    that, the even split comes back at once, where all are measured alike, and the next period decides anew.

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
        # [replicas], of a micro-batch of these counts; before the first measurement of them, the least it can be
        self._known_ns = [0.0] * replicas
        self._num_known = [0] * replicas
        self._num_below = [0] * replicas  # measurements in a row that are faster by more than the slack

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        if not isinstance(event, ReplicasMeasured):
            return None
        if len(event.compute_ns) != len(self._even):
            raise ValueError(f"{event}: must be of {len(self._even)} replicas")
        most = [n + max(0, room) for n, room in zip(self._counts, event.room, strict=True)]
        # all are asked, as each remembers what it measured
        faster = [self._got_faster(i, max(1, ns)) for i, ns in enumerate(event.compute_ns)]
        if any(faster) and all(n <= limit for n, limit in zip(self._even, most, strict=True)):
            return self._share(self._even)
        for i, (ns, count) in enumerate(zip(event.compute_ns, self._counts, strict=True)):
            self._average(i, max(1, ns) / count)
        each_ns = taken_for_equal(self._each_ns, self._slack)
        wanted = best_split(self._total, each_ns, most=most)
        equal = len(set(each_ns)) == 1
        recovered = equal and self._were_equal and wanted == self._even
        self._were_equal = equal
        gains = _slowest(self._counts, each_ns) > (1 + self._slack) * _slowest(wanted, each_ns)
        if wanted == self._counts or not (gains or recovered):
            return None
        return self._share(wanted)

    def _share(self, counts: tuple[int, ...]) -> tuple[BalanceAction, ...]:
        for i, (before, now) in enumerate(zip(self._counts, counts, strict=True)):
            if now != before:
                # the time of a sequence falls with their number, that of a micro-batch rises with it
                self._known_ns[i] *= min(1.0, now / before)
                self._num_known[i] = min(1, self._num_known[i])
                self._num_below[i] = 0
        if counts == self._even:
            # what is known per sequence was of other counts
            self._num_measured = [0] * len(counts)
            self._each_ns = [0.0] * len(counts)
            self._num_known = [0] * len(counts)
            self._were_equal = False
        self._counts = counts
        return (ShareSequences(counts),)

    def _got_faster(self, replica: int, ns: int) -> bool:
        """If one that gave sequences away has certainly become faster: by twice the slack in one period, or by more
        than the slack in two in a row. Else the measurement goes into what is known.
        """
        known_ns, num_known = self._known_ns[replica], self._num_known[replica]
        gave = self._counts[replica] < self._even[replica]
        below = num_known > 1 and known_ns > (1 + self._slack) * ns
        if gave and num_known and known_ns > (1 + self._slack) ** 2 * ns:
            return True
        self._num_below[replica] = self._num_below[replica] + 1 if gave and below else 0
        if self._num_below[replica]:
            return self._num_below[replica] > 1
        if max(ns, known_ns) > (1 + self._slack) ** 2 * min(ns, known_ns):
            num_known = 0
        self._num_known[replica] = num_known + 1
        self._known_ns[replica] += (ns - known_ns) / min(num_known + 1, _LONG_WINDOW)
        return False

    def _average(self, replica: int, ns: float) -> None:
        before = self._each_ns[replica]
        if max(ns, before) > (1 + self._slack) * min(ns, before):
            self._num_measured[replica] = 0
        self._num_measured[replica] += 1
        self._each_ns[replica] += (ns - before) / min(self._num_measured[replica], _WINDOW)


def _slowest(counts: Sequence[int], each_ns: Sequence[float]) -> float:
    return max(n * ns for n, ns in zip(counts, each_ns, strict=True))
