"""What balancing came to in a run, in words, from its log of decisions and the periods in its result."""

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .record import Record

MEASURED_EVENTS = ("GroupMeasured", "ReplicasMeasured", "StagesMeasured")
BALANCE_EVENTS = (*MEASURED_EVENTS, "MovementTimed", "ColumnsTimed", "ChangesMeasured")
SLOW = 1.3  # times the median: a rank that takes longer is told of where nothing was changed
KEPT, EVEN = "keep", "nothing"  # answers: what is in force stays; nothing is in force

_CHANGING_EVENTS = (*MEASURED_EVENTS, "ChangesMeasured")
_GROUPS_TOLD = 16
_RATIO_DIGIT = 1.5e-4  # ratios are cut after four digits
_MIGRATE = re.compile(r"migrate (\d+) (\w+) from (\d+) to \d+")
_PRUNE = re.compile(r"prune rank (\d+) by ([-+.\de]+)(?: in (\S+))?")
_LISTS = re.compile(r"(\w+)=(-?\d+(?:/-?\d+)*)")
_UNITS = {"attention": "key head", "ffn": "hidden feature"}
_SHARES = {
    "share blocks ": "stages hold {} blocks",
    "share sequences ": "replicas take {} sequences",
}


def balance_sentences(record: Record) -> list[str]:
    """One for each group of ranks in which something was changed and one for all others; of replicas or stages one.

    [] where nothing was balanced.
    """
    conf = (record.result.get("experiment") or {}).get("balance") or {}
    name = conf.get("name", "none")
    if name == "none":
        return []
    histories = _histories(record)
    changed = [history for history in histories if history.num_changes]
    several = len(histories) > 1
    sentences = [
        f"balance={name}: {f'{_ranks_text(each.ranks)}: ' if several else ''}{_change_in_words(each, conf)}"
        for each in changed[:_GROUPS_TOLD]
    ]
    if len(changed) > _GROUPS_TOLD:
        more = _many(len(changed) - _GROUPS_TOLD, "more group")
        sentences.append(f"balance={name}: {more} of ranks changed something too")
    unchanged = [history for history in histories if not history.num_changes]
    if unchanged:
        where = f" in {len(unchanged)} of {len(histories)} groups of ranks" if several else ""
        slow = _slow_in_words(unchanged, conf, several=several)
        sentences.append(f"balance={name}: nothing was changed{where}{slow}")
    return sentences


@dataclass(frozen=True, slots=True)
class _History:
    """Of one group of ranks, or of all replicas or stages.

    Attributes:
        ranks: Of the world, by place in the group; (): not of ranks, or the record does not say.
        num_changes: Answers to what was measured, other than what was in force.
        in_force: At the end.
        decided_at: Steps that were done when that came to be; None: nothing was changed, or the event does not say.
        measured: Of each period, in order, the lists of numbers in its event.
        periods: As the result has them.
        least_room_bytes: Free memory in which one unit can be borrowed; None: the record does not say.
    """

    ranks: tuple[int, ...]
    num_changes: int
    in_force: str
    decided_at: int | None
    measured: tuple[Mapping[str, tuple[int, ...]], ...]
    periods: Sequence[Mapping[str, Any]]
    least_room_bytes: int | None

    def rank(self, place: int) -> int:
        return self.ranks[place] if place < len(self.ranks) else place

    @property
    def last_ns(self) -> tuple[int, ...]:
        """Of each rank, replica or stage, in the last period; (): the record does not say."""
        return _times_ns(self.measured[-1]) if self.measured else ()


def _histories(record: Record) -> list[_History]:
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for decision in record.decisions:
        if decision.event.startswith(BALANCE_EVENTS):
            by_rank.setdefault(decision.rank, []).append((decision.event, decision.action))
    groups = (record.result.get("balance") or {}).get("groups") or [{}]
    found = []
    for group in groups:
        ranks = tuple(group.get("ranks") or ())
        teller = min((rank for rank in by_rank if not ranks or rank in ranks), default=None)
        found.append(_history(by_rank[teller] if teller is not None else (), ranks, group))
    return found


def _history(
    answers: Sequence[tuple[str, str]], ranks: tuple[int, ...], group: Mapping[str, Any]
) -> _History:
    in_force, num_changes, decided_at = EVEN, 0, None
    measured: list[Mapping[str, tuple[int, ...]]] = []
    for event, answer in answers:
        numbers = {key: tuple(map(int, of.split("/"))) for key, of in _LISTS.findall(event)}
        if event.startswith(MEASURED_EVENTS):
            measured.append(numbers)
        if answer == KEPT or not event.startswith(_CHANGING_EVENTS):
            continue
        wanted = EVEN if _is_even(answer) else answer
        # ratios that follow how weights change are renewed often, for the same split
        if wanted != in_force and event.startswith(MEASURED_EVENTS):
            num_changes += 1
            decided_at = numbers["step"][0] if "step" in numbers else None
        in_force = wanted
    return _History(
        ranks,
        num_changes,
        in_force,
        decided_at,
        tuple(measured),
        group.get("periods") or [],
        group.get("least_room_bytes"),
    )


def _is_even(action: str) -> bool:
    """Whether all do the same: of blocks that do not part evenly the first stages hold one more."""
    for shared in _SHARES:
        if action.startswith(shared):
            counts = [int(count) for count in action.removeprefix(shared).split("/")]
            each, more = divmod(sum(counts), len(counts))
            return counts == [each + (place < more) for place in range(len(counts))]
    return action == EVEN


# ---- what was changed


def _change_in_words(history: _History, conf: Mapping[str, Any]) -> str:
    told = f"{_many(history.num_changes, 'change')}; at the end {_in_words(history, conf)}"
    return told + _less_than_asked(history, conf) + _gain_in_words(history)


def _gain_in_words(history: _History) -> str:
    """What was predicted when it was decided, and beside it what was measured, the slowest rank of each half."""
    told = ""
    at = history.decided_at
    period = next((each for each in history.periods if at is not None and each.get("step") == at), None)
    predicted = (period or {}).get("predicted_speedup")
    first, last = history.measured[0], history.measured[-1]
    what = (
        "blocks" if "around_ns" in first else "products"
    )  # all that these take, or nothing else was measured
    if predicted is not None and history.in_force != EVEN:
        told += f"; when that was decided its {what} were predicted {predicted:.2f} times as fast as an even split's"
    before_ns, after_ns = _blocks_ns(first), _blocks_ns(last)
    if at is not None and last.get("step", (at,))[0] <= at:
        return told + ("; no period was measured since" if told else "")
    if before_ns and after_ns:
        told += (
            f"; from the first period to the last the {what} of its slowest ranks went from {before_ns / 1e9:.4g} s "
            f"to {after_ns / 1e9:.4g} s a step, {before_ns / after_ns:.2f} times as fast"
        )
    return told


def _blocks_ns(numbers: Mapping[str, tuple[int, ...]]) -> float:
    """Without communication: at the end of a half all wait for its slowest rank. 0: not of blocks."""
    found = 0.0
    for half in ("attention", "ffn"):
        products = numbers.get(f"{half}_ns", (0,))
        between, around = (
            numbers.get(key, (0,) * len(products)) for key in (f"{half}_between_ns", "around_ns")
        )
        found += max(sum(of) for of in zip(products, between, (ns / 2 for ns in around), strict=True))
    return found


def _in_words(history: _History, conf: Mapping[str, Any]) -> str:
    """Of the log's "prune rank 0 by 0.5, migrate 2 attention from 0 to 1": ascending ranks."""
    action = history.in_force
    if action == EVEN:
        return "all do the same" if not history.ranks else "all ranks do the same"
    for shared, text in _SHARES.items():
        if action.startswith(shared):
            return text.format(action.removeprefix(shared))
    units = "columns of every matrix" if conf.get("way", "paired") != "paired" else None
    places = {*_lenders(action), *(int(found[0]) for found in _PRUNE.findall(action))}
    told = [_rank_in_words(history, place, units) for place in sorted(places, key=history.rank)]
    return "; ".join(told) if told else action


def _lenders(action: str) -> Iterator[int]:
    return (int(src) for _, _, src in _MIGRATE.findall(action))


def _rank_in_words(history: _History, place: int, units: str | None) -> str:
    lent: Counter[str] = Counter()
    for count, half, src in _MIGRATE.findall(history.in_force):
        if int(src) == place:
            lent[half] += int(count)
    ratios = _ratios(history.in_force, place)
    told = []
    if lent and units is not None:
        told.append(
            f"lends {' and '.join(f'{count} {half} units' for half, count in lent.items())} ({units})"
        )
    elif lent:
        told.append(f"lends {' and '.join(_many(count, _UNITS[half]) for half, count in lent.items())}")
    if ratios:
        low, high = min(ratios), max(ratios)
        told.append(f"leaves {low:.2g}{'' if low == high else f' to {high:.2g}'} of its columns out")
    return f"rank {history.rank(place)} {' and '.join(told)}"


def _ratios(action: str, place: int | None = None) -> list[float]:
    return [float(ratio) for of, ratio, _ in _PRUNE.findall(action) if place is None or int(of) == place]


def _less_than_asked(history: _History, conf: Mapping[str, Any]) -> str:
    """Where a rank leaves less out than `balance.ratio`: which key allows no more."""
    ratios = _ratios(history.in_force)
    key = _limit(conf, max(ratios)) if ratios else None
    return f", less than balance.ratio={conf['ratio']:g}: {key} allows no more" if key is not None else ""


def _limit(conf: Mapping[str, Any], found: float) -> str | None:
    """The key that keeps the largest ratio, `found`, below `balance.ratio`; None: none does."""
    asked, most, budget = conf.get("ratio"), conf.get("max_ratio"), conf.get("accuracy_budget")
    if asked is None or found >= asked - _RATIO_DIGIT:
        return None
    if most is not None and most < asked and (budget is None or found >= most - _RATIO_DIGIT):
        return f"balance.max_ratio={most:g}"
    return f"balance.accuracy_budget={budget:g}" if budget is not None else None


# ---- what was not


def _slow_in_words(histories: Sequence[_History], conf: Mapping[str, Any], *, several: bool) -> str:
    """Of the unchanged group with the slowest rank: that one is slow all the same, and why."""
    slow = [(max(each.last_ns) / statistics.median(each.last_ns), each) for each in histories if each.last_ns]
    factor, history = max(slow, key=lambda pair: pair[0], default=(0.0, None))
    if history is None or factor <= SLOW:
        return ""
    times_ns = history.last_ns
    slowest = times_ns.index(max(times_ns))
    numbers = history.measured[-1]
    name = next(
        (what for key, what in (("compute_ns", "replica"), ("block_ns", "stage")) if key in numbers), ""
    )
    who = f"{name} {slowest}" if name else f"rank {history.rank(slowest)}"
    whose = f"of {_ranks_text(history.ranks)}" if several else "of all"
    when = "when stages were timed" if name == "stage" else "in the last period"
    told = f", although {who} took {factor:.2f} times the median {whose} {when}"
    if not _has_room(history, slowest):
        what = {"replica": "a sequence more", "stage": "a block more"}.get(name, "a unit of it")
        if name or conf.get("name") in ("migrate", "semi"):
            told += f": no other {name or 'rank'} has memory for {what}"
    key = _limit(conf, 0.0) if conf.get("name") == "resize" else None
    if key is not None:
        told += f": {key} allows nothing of balance.ratio={conf['ratio']:g}"
    return told


def _has_room(history: _History, slowest: int) -> bool:
    """Whether any other could take more of the slowest's work; True where the record does not say."""
    numbers = history.measured[-1]
    if "room" in numbers:
        return any(room > 0 for place, room in enumerate(numbers["room"]) if place != slowest)
    free = numbers.get("free_bytes")
    if free is None:
        return True
    least = max(1, history.least_room_bytes or 1)
    return any(free_bytes >= least for place, free_bytes in enumerate(free) if place != slowest)


def _times_ns(numbers: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    for key in ("compute_ns", "block_ns"):
        if key in numbers:
            return numbers[key]
    halves = [numbers[key] for key in ("attention_ns", "ffn_ns") if key in numbers]
    return tuple(map(sum, zip(*halves, strict=True)))


def _ranks_text(ranks: Sequence[int]) -> str:
    """`ranks 4 to 7`, or `ranks 0, 2, 4`."""
    if not ranks:
        return "ranks of one group"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
