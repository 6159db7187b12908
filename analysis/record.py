"""The record that both targets write: result, ledger, decisions and timeline of one run.

`analysis` reads folders of records and nothing else; the simulator and the runtime write them here.
"""

import csv
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "failed")
RESULT, LEDGER, DECISIONS, TIMELINE = "result.json", "ledger.csv", "decisions.jsonl", "timeline.json"


# Not frozen, though never changed: a run has thousands of these, and a frozen one takes four times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class LedgerRow:
    """One executed collective, as one rank saw it. Bytes are of this rank.

    `payload_bytes` is the whole logical tensor before quantization, `wire_bytes` what the rank sends under
    the algorithm taken (scales included), `inter_node_bytes` the part of it that leaves the node.
    `count` ranks behaved alike (a folded simulation); `rank` is the first of them.
    """

    rank: int
    stream: str
    iteration: int
    phase: str  # forward, backward, step, eval
    layer: str  # the unit: root, block.0, ...; "" for collectives that belong to no unit
    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce
    axis: str
    group_size: int
    payload_bytes: int
    wire_bytes: int
    inter_node_bytes: int
    count: int = 1


@dataclass(slots=True, unsafe_hash=True)
class Decision:
    """One event and the action that a policy answered with, both as text that is equal for equal values."""

    rank: int
    iteration: int
    event: str
    action: str


@dataclass(slots=True, unsafe_hash=True)
class Span:
    """Something that took time on one stream of one rank."""

    rank: int
    stream: str
    name: str
    start_ns: int
    end_ns: int
    nbytes: int = 0


@dataclass(slots=True)
class Counter:
    """What a rank held of something from `at_ns` on, by class."""

    rank: int
    name: str
    at_ns: int
    values: dict[str, float]


@dataclass(slots=True)
class Record:
    """A run's whole output. `result` holds the keys that the design names."""

    result: dict[str, Any]
    ledger: list[LedgerRow] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    missing: tuple[str, ...] = ()  # files that a folder lacks: what they would hold is not known to be empty


def new_result(target: str, experiment: Mapping[str, Any], *, seed: int, git_commit: str) -> dict[str, Any]:
    """A result with every agreed key present and empty; status is `failed` until the run says otherwise."""
    return {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "experiment": dict(experiment),
        "git_commit": git_commit,
        "seed": seed,
        "status": "failed",
        "error": None,
        "warnings": [],
        "iteration_s": {
            "mean": None,
            "p50": None,
            "min": None,
            "max": None,
            "n": 0,
            "low": None,
            "high": None,
        },
        "tokens_per_s": None,
        "tflops_per_gpu": None,
        "tflops_per_gpu_hardware": None,
        "mfu": None,
        "time_to_train_s": None,
        "gpu_hours": None,
        "cost": None,
        "phases_s": {
            "compute": None,
            "comm_exposed": None,
            "comm_total": None,
            "quantize": None,
            "idle": None,
        },
        "ranks": [],
        "comm": {
            "payload_bytes": 0,
            "wire_bytes": 0,
            "inter_node_bytes": 0,
            "intra_node_bytes": 0,
            "collectives": 0,
        },
        "memory_bytes": {
            "parameters": 0,
            "gradients": 0,
            "optimizer": 0,
            "secondary_shard": 0,
            "activations": 0,
            "buffers": 0,
            "peak": 0,
        },
        "loss": [],
        "energy_j": None,
        "guessed_inputs": [],
        "fitted_constants": [],
    }


def iteration_stats(times_s: Sequence[float], warmup: int) -> dict[str, Any]:
    """`iteration_s` without the first `warmup` iterations; null figures if none are left."""
    kept = sorted(times_s[warmup:])
    empty = {"mean": None, "p50": None, "min": None, "max": None, "n": 0, "low": None, "high": None}
    if not kept:
        return empty
    n = len(kept)
    middle = kept[n // 2] if n % 2 else (kept[n // 2 - 1] + kept[n // 2]) / 2
    mean = sum(kept) / n
    return empty | {
        "mean": mean,
        "p50": middle,
        "min": kept[0],
        "max": kept[-1],
        "n": n,
        "low": mean,
        "high": mean,
    }


def comm_means(rows: Iterable[LedgerRow], *, num_ranks: int, num_iterations: int) -> dict[str, float]:
    """The `comm` part of a result: per rank and iteration, mean."""
    payload = wire = inter = collectives = 0
    for row in rows:
        payload += row.payload_bytes * row.count
        wire += row.wire_bytes * row.count
        inter += row.inter_node_bytes * row.count
        collectives += row.count
    totals = (payload, wire, inter, collectives)
    return means_of(totals, num_ranks=num_ranks, num_iterations=num_iterations)


def means_of(totals: tuple[int, int, int, int], *, num_ranks: int, num_iterations: int) -> dict[str, float]:
    """`comm_means` of what all ranks sent: bytes of payload, on the wire and between nodes, and collectives."""
    payload, wire, inter, collectives = totals
    share = 1 / (num_ranks * max(num_iterations, 1))
    return {
        "payload_bytes": payload * share,
        "wire_bytes": wire * share,
        "inter_node_bytes": inter * share,
        "intra_node_bytes": (wire - inter) * share,
        "collectives": collectives * share,
    }


def write_record(folder: Path, record: Record) -> None:
    """Write all files of a run into `folder`; each appears whole or not at all.

    Raises:
        OSError: If the folder cannot be written, with the file's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    columns = [f.name for f in fields(LedgerRow)]
    cells = attrgetter(*columns)  # dataclasses.astuple copies each value: minutes, where a ledger is long
    write_text(folder / LEDGER, _csv(itertools.chain([columns], map(cells, record.ledger))))
    lines = (
        json.dumps({"rank": d.rank, "iteration": d.iteration, "event": d.event, "action": d.action}) + "\n"
        for d in record.decisions
    )
    write_text(folder / DECISIONS, lines)
    write_text(folder / TIMELINE, json.dumps(trace_events(record.spans, record.counters)))
    write_text(folder / RESULT, json.dumps(record.result, indent=1, allow_nan=False) + "\n")


def read_record(folder: Path) -> Record:
    """Read a run's folder back.

    Raises:
        ValueError: If it is no record or a file is broken, naming the file.
    """
    if not (folder / RESULT).is_file():
        raise ValueError(f"{folder} holds no {RESULT}: not the folder of a run")
    try:
        result = json.loads((folder / RESULT).read_text())
        ledger = _read_ledger(folder / LEDGER)
        decisions = _read_decisions(folder / DECISIONS)
        spans, counters = _read_timeline(folder / TIMELINE)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as err:
        raise ValueError(f"{folder}: broken record: {err}") from err
    missing = tuple(name for name in (LEDGER, DECISIONS, TIMELINE) if not (folder / name).is_file())
    return Record(result, ledger, decisions, spans, counters, missing)


def trace_events(spans: Sequence[Span], counters: Sequence[Counter] = ()) -> dict[str, Any]:
    """Chrome trace events, which Perfetto opens: pid is the rank, tid the stream, times in microseconds.

    Spans on a track must nest: where those of a stream overlap otherwise, it has further tracks. A
    counter becomes a track for each of its classes.
    """
    ordered = sorted(spans, key=lambda s: (s.start_ns, s.rank, s.stream, -s.end_ns))
    lanes = _lanes(ordered)
    tid = {
        track: i
        for i, track in enumerate(sorted({(s.stream, n) for s, n in zip(ordered, lanes, strict=True)}))
    }
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for (stream, lane), number in tid.items():
            name = f"{stream} {lane + 1}" if lane else stream
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            )
    for span, lane in zip(ordered, lanes, strict=True):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": span.rank,
                "tid": tid[span.stream, lane],
                "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"bytes": span.nbytes, "stream": span.stream},
            }
        )
    for counter in counters:
        events.append(
            {
                "ph": "C",
                "name": counter.name,
                "pid": counter.rank,
                "ts": counter.at_ns / 1000,
                "args": counter.values,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _lanes(ordered: Sequence[Span]) -> list[int]:
    """For each span the first track of its rank and stream on which it lies within or behind the others."""
    open_ends: dict[tuple[int, str], list[list[int]]] = {}  # of each track, the ends of the spans around here
    found = []
    for span in ordered:
        tracks = open_ends.setdefault((span.rank, span.stream), [])
        lane = 0
        while lane < len(tracks) and not _fits(span, tracks[lane]):
            lane += 1
        if lane == len(tracks):
            tracks.append([])
        tracks[lane].append(span.end_ns)
        found.append(lane)
    return found


def _fits(span: Span, ends: list[int]) -> bool:
    """Whether `span` lies within the last of the spans that end at `ends`, once those before it are dropped."""
    while ends and ends[-1] <= span.start_ns:
        ends.pop()
    return not ends or span.end_ns <= ends[-1]


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Write a file so that it appears whole or not at all. `text`: in one, or in pieces."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as err:  # it names the temporary file
        raise OSError(err.errno, f"cannot write {path}: {err.strerror}") from err
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.writelines((text,) if isinstance(text, str) else text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as err:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(err, OSError):
            raise OSError(err.errno, f"cannot write {path}: {err.strerror}") from err
        raise


def _csv(rows: Iterable[Sequence[object]]) -> Iterator[str]:
    return (",".join(map(str, row)) + "\n" for row in rows)


def _read_ledger(path: Path) -> list[LedgerRow]:
    if not path.is_file():
        return []
    text = {"stream", "phase", "layer", "op", "axis"}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            LedgerRow(**{key: value if key in text else int(value) for key, value in row.items()})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        ]


def _read_decisions(path: Path) -> list[Decision]:
    if not path.is_file():
        return []
    return [Decision(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _read_timeline(path: Path) -> tuple[list[Span], list[Counter]]:
    if not path.is_file():
        return [], []
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [
        Span(
            e["pid"],
            e["args"]["stream"],
            e["name"],
            round(e["ts"] * 1000),
            round((e["ts"] + e["dur"]) * 1000),
            e["args"]["bytes"],
        )
        for e in events
        if e["ph"] == "X"
    ]
    counters = [
        Counter(e["pid"], e["name"], round(e["ts"] * 1000), e["args"]) for e in events if e["ph"] == "C"
    ]
    return spans, counters
