"""Does a prediction agree with the run it predicted? Ledgers entry by entry, decisions, ratios of times.

Imports neither pandas nor matplotlib: `target=both` calls this at the end of every run.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from .balancing import BALANCE_EVENTS
from .record import LEDGER, Decision, LedgerRow, Record, write_text

PARITY = "parity.json"
PHASES = ("compute", "comm_exposed", "comm_total", "quantize", "idle")
VOLUMES = ("payload_bytes", "wire_bytes", "inter_node_bytes", "intra_node_bytes", "collectives")
TOLD_OTHERWISE = (
    "the balancing policies were told different times and decided differently; ledgers of balanced runs are compared "
    "only when the simulation is told the run's events, as target=both does"
)
COMPARED = tuple(f.name for f in fields(LedgerRow) if f.name != "count")

_KEYS = (
    "status",
    "reasons",
    "ledger_equal",
    "ledger_rows",
    "first_difference",
    "replay_equal",
    "num_decisions",
    "decisions_equal",
    "first_decision_difference",
    "iteration_s_ratio",
    "phases_s_ratio",
    "comm_ratio",
    "void",
    "experiment_differences",
)

# Keys in which a prediction and its run may differ without being different experiments: the target itself,
# how the run is started, and costs that a probe fills in for one side.
_FREE_KEYS = (
    "target",
    "launch",
    "cluster.host",
    "cluster.disk",
    "cluster.source",
    "cluster.guesses",
    "cluster.intra_node",
    "cluster.device.memory_Bps",
    "hydra",
)


def compare_records(
    sim: Record,
    real: Record,
    *,
    told: Record | None = None,
    replay_equal: bool | None = None,
    void: str | None = None,
) -> dict[str, Any]:
    """The contents of `parity.json`.

    Args:
        sim: The prediction; folded rows are expanded.
        real: The run.
        told: A second prediction, whose balancing policies were told what the run measured: its ledger and decisions
            are compared in place of the first's, times are not. None: there is none.
        replay_equal: Whether either side's events, replayed through the policy, gave the same actions. The
            caller knows: this room runs nothing. None: not tried.
        void: Why the times mean nothing (the machine was busy beside), or None.

    Returns:
        `status` is `failed` if either run failed, the ledgers differ or the replay did; `reasons` says which.
        `ledger_equal` is None when a run that stopped early left no whole ledger to compare, or the file is gone, or
        the ledgers differ and balancing policies were told different times (`ledger_not_comparable` says so).
        `decisions_equal` is by actions: events that carry measured times may differ.
        Ratios are predicted / measured, None where either side is missing or nothing was measured.

    Raises:
        ValueError: If a folded row's class cannot be told from the record.
    """
    reasons = [
        f"{side}: {record.result.get('error') or 'failed without a reason'}"
        for side, record in (("simulation", sim), ("real run", real))
        if record.result.get("status") == "failed"
    ]
    reasons += [
        f"{side}: the run left no {LEDGER}"
        for side, record in (("simulation", sim), ("real run", real))
        if lacks_ledger(record)
    ]
    # out of memory before the first collective: an empty ledger is no ledger
    stopped = any(record.result.get("status") == "oom" and not record.ledger for record in (sim, real))
    comparable = not reasons and not stopped
    same = told if told is not None else sim  # what must have done the same
    difference = first_difference(same, real) if comparable else None
    told_otherwise = difference is not None and told is None and _balanced_otherwise(sim, real)
    if told_otherwise:
        difference = None
    if difference is not None:
        reasons.append(str(difference["message"]))
    if replay_equal is False:
        reasons.append("replaying the events through the policy gave other actions")
    decision_difference = first_decision_difference(same, real) if comparable else None
    return {
        "schema_version": 1,
        "status": "failed" if reasons else "ok",
        "reasons": reasons,
        "ledger_equal": difference is None if comparable and not told_otherwise else None,
        "ledger_not_comparable": TOLD_OTHERWISE if told_otherwise else None,
        "ledger_of": "prediction" if told is None else "a second simulation, told the run's balance events",
        "ledger_rows": {
            "sim": sum(row.count for row in same.ledger),
            "runtime": sum(row.count for row in real.ledger),
        },
        "ledger_missing": [
            side for side, record in (("sim", sim), ("runtime", real)) if lacks_ledger(record)
        ],
        "first_difference": difference,
        "replay_equal": replay_equal,
        "num_decisions": {"sim": len(same.decisions), "runtime": len(real.decisions)},
        "decisions_equal": decision_difference is None if comparable else None,
        "first_decision_difference": decision_difference,
        "iteration_s_ratio": ratio(value(sim, "iteration_s", "mean"), value(real, "iteration_s", "mean")),
        "phases_s_ratio": {
            phase: ratio(value(sim, "phases_s", phase), value(real, "phases_s", phase)) for phase in PHASES
        },
        "comm_ratio": {
            volume: ratio(value(sim, "comm", volume), value(real, "comm", volume)) for volume in VOLUMES
        },
        "void": void is not None,
        "void_reason": void,
        "experiment_differences": experiment_differences(sim.result, real.result),
    }


def lacks_ledger(record: Record) -> bool:
    """Whether a run that came to its end has no ledger file: what it communicated is not known."""
    return LEDGER in record.missing and record.result.get("status") != "failed"


def unrelated(sim: Mapping[str, Any], real: Mapping[str, Any]) -> list[str]:
    """Why two results cannot be a prediction and its run: `key: predicted / measured`."""
    sizes = ("cluster.nodes", "cluster.devices_per_node")
    return [
        difference
        for difference in experiment_differences(sim, real)
        if difference.startswith("model.") or difference.partition(":")[0] in sizes
    ]


def write_parity(folder: Path, parity: Mapping[str, Any]) -> Path:
    """Write `parity.json` into `folder`, whole or not at all.

    Raises:
        OSError: If the folder cannot be written, with the file's name.
    """
    path = folder / PARITY
    write_text(path, json.dumps(parity, indent=1, allow_nan=False) + "\n")
    return path


def first_difference(sim: Record, real: Record) -> dict[str, Any] | None:
    """The first entry in which the ledgers differ, in order of rank and stream; None if they are equal.

    Returns:
        `rank`, `stream`, `index` (from 0, within that rank and stream), `columns` that differ, the two rows
        as `sim` and `runtime` (None: no such entry on that side), and a `message` that says it in words.
    """
    predicted, executed = _tracks(_expanded(sim)), _tracks(_expanded(real))
    for rank, stream in sorted({*predicted, *executed}):
        ours, theirs = predicted.get((rank, stream), []), executed.get((rank, stream), [])
        for index in range(max(len(ours), len(theirs))):
            left = ours[index] if index < len(ours) else None
            right = theirs[index] if index < len(theirs) else None
            columns = _differing(left, right)
            if columns:
                return {
                    "rank": rank,
                    "stream": stream,
                    "index": index,
                    "columns": columns,
                    "sim": _as_dict(left),
                    "runtime": _as_dict(right),
                    "message": _difference_in_words(rank, stream, index, columns, left, right),
                }
    return None


def first_decision_difference(sim: Record, real: Record) -> dict[str, Any] | None:
    """The first decision in which the two live runs differ, rank by rank.

    Of a balancing policy's events, which carry measured times, only the kind counts; a rank that the simulation folded
    into another's class has no decisions of its own and is left out.
    """
    ours, theirs = _by_rank(sim.decisions), _by_rank(real.decisions)
    folded = bool(ours) and any(row.count > 1 for row in sim.ledger)
    for rank in sorted(ours if folded else {*ours, *theirs}):
        left, right = ours.get(rank, []), theirs.get(rank, [])
        for index in range(max(len(left), len(right))):
            a = left[index] if index < len(left) else None
            b = right[index] if index < len(right) else None
            if _as_decided(a) != _as_decided(b):
                return {
                    "rank": rank,
                    "index": index,
                    "sim": None if a is None else asdict(a),
                    "runtime": None if b is None else asdict(b),
                }
    return None


def experiment_differences(sim: Mapping[str, Any], real: Mapping[str, Any]) -> list[str]:
    """Keys that the two results' experiments set differently, each as `key: predicted / measured`."""
    ours = dict(_flat(sim.get("experiment") or {}))
    theirs = dict(_flat(real.get("experiment") or {}))
    return [
        f"{key}: {ours.get(key, '(absent)')} / {theirs.get(key, '(absent)')}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
        and not any(key == free or key.startswith(free + ".") for free in _FREE_KEYS)
    ]


def rank_classes(record: Record) -> dict[int, tuple[int, ...]]:
    """Which ranks each ledger rank stands for.

    `result["classes"]` has for each class the `rank` that is in the ledger, the `count`, and all `ranks` as
    ranges [start, stop, step]. Without it a row that counts all ranks stands for all, and any other rank for
    itself.

    Raises:
        ValueError: If rows are folded and no class tells into what.
    """
    classes = {
        int(entry["rank"]): tuple(sorted(r for ranks in entry["ranks"] for r in range(*ranks)))
        for entry in record.result.get("classes") or []
    }
    for row in record.ledger:
        members = classes.get(row.rank)
        if members is None:
            world = num_ranks(record.result)
            if row.count not in (1, world):
                raise ValueError(
                    f"ledger row of rank {row.rank} counts {row.count} ranks, and result.json has no class "
                    f"that starts with rank {row.rank}: cannot expand it"
                )
            members = (row.rank,) if row.count == 1 else tuple(range(row.count))
            classes[row.rank] = members
        if len(members) != row.count:
            raise ValueError(
                f"ledger row of rank {row.rank} counts {row.count} ranks, its class in result.json has "
                f"{len(members)}"
            )
    return classes


def num_ranks(result: Mapping[str, Any]) -> int | None:
    """Ranks of the experiment's cluster, or None where the record does not tell."""
    cluster = (result.get("experiment") or {}).get("cluster") or {}
    nodes, devices = cluster.get("nodes"), cluster.get("devices_per_node")
    return nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None


def ratio(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured, or None where that means nothing."""
    return None if predicted is None or not measured else predicted / measured


def value(record: Record, group: str, key: str) -> float | None:
    """`result[group][key]` as a number, or None where it is missing."""
    return value_of(record.result, group, key)


def value_of(result: Mapping[str, Any], group: str, key: str) -> float | None:
    """As `value`, of a result alone."""
    found = (result.get(group) or {}).get(key)
    return float(found) if isinstance(found, int | float) else None


def read_whole(parity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `compare_records` wrote, with the keys that it has now; None: it is not all there.

    It cannot be made anew from a balanced run's folder: the simulation that was told the run's events is gone.
    """
    late: dict[str, Any] = {"ledger_not_comparable": None, "ledger_missing": [], "ledger_of": "prediction"}
    found = late | dict(parity)
    return found if all(key in found for key in _KEYS) else None


def void_reason(parity: Mapping[str, Any]) -> str | None:
    """Why the times of a run mean nothing, from its parity.json; None where they do."""
    void = parity.get("void_reason") or parity.get("void")  # the reason may stand in `void` itself
    return void if isinstance(void, str) else "no reason given" if void else None


def _expanded(record: Record) -> list[LedgerRow]:
    if all(row.count == 1 for row in record.ledger):
        return record.ledger
    classes = rank_classes(record)
    return [replace(row, rank=rank, count=1) for row in record.ledger for rank in classes[row.rank]]


def _tracks(rows: Sequence[LedgerRow]) -> dict[tuple[int, str], list[LedgerRow]]:
    tracks: defaultdict[tuple[int, str], list[LedgerRow]] = defaultdict(list)
    for row in rows:
        tracks[row.rank, row.stream].append(row)
    return tracks


def _differing(left: LedgerRow | None, right: LedgerRow | None) -> list[str]:
    if left is None or right is None:
        return list(COMPARED)
    return [column for column in COMPARED if getattr(left, column) != getattr(right, column)]


def _as_dict(row: LedgerRow | None) -> dict[str, Any] | None:
    return None if row is None else {column: getattr(row, column) for column in COMPARED}


def _difference_in_words(
    rank: int,
    stream: str,
    index: int,
    columns: Sequence[str],
    left: LedgerRow | None,
    right: LedgerRow | None,
) -> str:
    where = f"ledgers differ first at rank {rank}, stream {stream}, entry {index}"
    if left is None or right is None:
        row, side = (left, "real run") if right is None else (right, "simulation")
        assert row is not None
        what = f"{row.op} of {row.layer or 'no unit'} ({row.phase}, iteration {row.iteration})"
        return f"{where}: {what} is missing in the {side}"
    pairs = (f"{c} is {getattr(left, c)} predicted, {getattr(right, c)} executed" for c in columns)
    return f"{where}: " + "; ".join(pairs)


def _by_rank(decisions: Sequence[Decision]) -> dict[int, list[Decision]]:
    ranks: defaultdict[int, list[Decision]] = defaultdict(list)
    for decision in decisions:
        ranks[decision.rank].append(decision)
    return ranks


def _as_decided(decision: Decision | None) -> Decision | None:
    """Without what a balancing policy's event says was measured."""
    if decision is None or not decision.event.startswith(BALANCE_EVENTS):
        return decision
    return replace(decision, event=decision.event.partition("(")[0])


def _balanced_otherwise(sim: Record, real: Record) -> bool:
    """Whether balancing policies of the two runs were told different times and decided differently.

    Where they decided alike ledgers must be equal, whatever the times.
    """
    ours, theirs = (
        Record(record.result, ledger=record.ledger, decisions=decisions)
        for record in (sim, real)
        for decisions in [[each for each in record.decisions if each.event.startswith(BALANCE_EVENTS)]]
    )
    both = bool(ours.decisions and theirs.decisions)
    return both and first_decision_difference(ours, theirs) is not None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in tree.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flat(item, name + ".")
        else:
            yield name, item
