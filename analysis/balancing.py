"""What balancing came to in a run, in words, from its log of decisions."""

import re
from collections.abc import Iterator
from typing import Any

from .record import Record

_EVENTS = ("GroupMeasured(", "ReplicasMeasured(", "StagesMeasured(")
_MIGRATE = re.compile(r"migrate (\d+) (\w+) from (\d+) to \d+")
_PRUNE = re.compile(r"prune rank (\d+) by ([\d.]+)(?: in (\S+))?")
_REPLICAS = re.compile(r"ReplicasMeasured\(step=\d+, compute_ns=([\d/]+), room=([\d/]+)\)")
_UNITS = {"attention": "key head", "ffn": "hidden feature"}
KEPT = "keep"


def balance_sentences(record: Record) -> list[str]:
    """One for the first group of ranks, or for all replicas or stages; [] where nothing was balanced."""
    conf = (record.result.get("experiment") or {}).get("balance") or {}
    if conf.get("name", "none") == "none":
        return []
    rank = min((decision.rank for decision in record.decisions), default=0)
    answers = [
        decision.action
        for decision in record.decisions
        if decision.rank == rank and decision.event.startswith(_EVENTS) and decision.action != KEPT
    ]
    if not answers:
        why = _no_room(record, rank, conf.get("slack", 0.0))
        return [f"balance={conf['name']}: nothing was changed{why}"]
    units = "columns of every matrix" if conf.get("way", "paired") != "paired" else None
    changes = f"{len(answers)} change{'s' * (len(answers) > 1)}"
    told = f"balance={conf['name']}: {changes}; at the end {_in_words(answers[-1], units)}"
    predicted = _predicted(record.result)
    if predicted is not None:
        told += f"; its products are predicted {predicted:.2f} times as fast as an even split's"
    return [told]


def _no_room(record: Record, rank: int, slack: float) -> str:
    """Of replicas: that one was slow, and no faster one had the memory for more sequences."""
    for decision in record.decisions:
        found = _REPLICAS.search(decision.event) if decision.rank == rank else None
        if found is None:
            continue
        took_ns, room = ([int(number) for number in text.split("/")] for text in found.groups())
        fast_ns = (1 + slack) * min(took_ns)
        full = all(more == 0 for ns, more in zip(took_ns, room, strict=True) if ns <= fast_ns)
        if full and max(took_ns) > fast_ns:
            slow = took_ns.index(max(took_ns))
            return f": replica {slow} is slow, but the faster ones have no memory for more sequences"
    return ""


def _predicted(result: dict[str, Any]) -> float | None:
    groups = (result.get("balance") or {}).get("groups") or []
    periods = groups[0]["periods"] if groups else []
    found: float | None = periods[-1].get("predicted_speedup") if periods else None
    return found if found is not None and found > 1 else None


def _in_words(action: str, units: str | None) -> str:
    """Of the log's "prune rank 0 by 0.5, migrate 2 attention from 0 to 1": ascending ranks."""
    if action == "nothing":
        return "all ranks do the same"
    for shared, text in (
        ("share blocks ", "stages hold {} blocks"),
        ("share sequences ", "replicas take {} sequences"),
    ):
        if action.startswith(shared):
            return text.format(action.removeprefix(shared))
    ranks = sorted({*_lenders(action), *(int(found[0]) for found in _PRUNE.findall(action))})
    told = [_rank_in_words(action, rank, units) for rank in ranks]
    return "; ".join(told) if told else action


def _lenders(action: str) -> Iterator[int]:
    return (int(src) for _, _, src in _MIGRATE.findall(action))


def _rank_in_words(action: str, rank: int, units: str | None) -> str:
    lent: dict[str, int] = {}
    for count, half, src in _MIGRATE.findall(action):
        if int(src) == rank:
            lent[half] = lent.get(half, 0) + int(count)
    ratios = [float(ratio) for of, ratio, _ in _PRUNE.findall(action) if int(of) == rank]
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
    return f"rank {rank} {' and '.join(told)}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
