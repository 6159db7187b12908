"""Events of balancing policies out of a record's decisions, to be put to policies in place of measurements."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...analysis.record import Decision
from ...policies.balance import BalanceEvent, is_balance_event, parse_balance_event


class Recorded:
    """Of one tensor group, in order."""

    def __init__(self, events: Sequence[BalanceEvent], ranks: Sequence[int]) -> None:
        self._left: Iterator[BalanceEvent] = iter(events)
        self._ranks = ranks

    def next(self, like: BalanceEvent) -> BalanceEvent:
        """The one that stands for `like`, which was measured here.

        Raises:
            ValueError: If the record has another one there, or no more.
        """
        found = next(self._left, None)
        where = f"the recorded events of ranks {list(self._ranks)}"
        if found is None:
            raise ValueError(f"{where} end before {like}: they are of a run with fewer steps, or that failed")
        if _kind(found) != _kind(like):
            raise ValueError(
                f"{where} have {found} where this experiment has {like}: they are of another one"
            )
        return found


def recorded_by_group(
    decisions: Iterable[Decision], groups: Sequence[tuple[int, ...]]
) -> Mapping[int, Recorded]:
    """By the number of the tensor group: the events that the lowest of its ranks with any has seen. A record of rank 0
    alone has those of the first group.
    """
    by_rank: dict[int, list[BalanceEvent]] = {}
    for decision in decisions:
        if is_balance_event(decision.event):
            by_rank.setdefault(decision.rank, []).append(parse_balance_event(decision.event))
    found = {}
    for number, ranks in enumerate(groups):
        own = next((by_rank[rank] for rank in ranks if rank in by_rank), None)
        if own is not None:
            found[number] = Recorded(own, ranks)
    return found


def _kind(event: BalanceEvent) -> tuple[object, ...]:
    """What must agree whatever was measured."""
    return (type(event), getattr(event, "half", None), getattr(event, "step", None))
