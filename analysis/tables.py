"""Tables of records as DataFrames, in SI units: bytes, seconds. `analysis.show` formats them for people."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ..conf.placement import Placement
from .load import Run, Sweep, SweptRun
from .parity import PHASES, VOLUMES, rank_classes, ratio, value, value_of, void_reason
from .record import Record

MEMORY = ("parameters", "gradients", "optimizer", "secondary_shard", "activations", "buffers")
SIDES = ("predicted", "measured")

PEAK = "peak memory"
# What a rank on a CPU can measure of itself is more than what a prediction counts
RESIDENT = "(measured: the process, with Python and torch)"

# metric, unit, group of result.json ("" for the top level), key
_PARITY_ROWS = (
    ("iteration time, mean", "s", "iteration_s", "mean"),
    ("iteration time, median", "s", "iteration_s", "p50"),
    ("tokens per second", "1/s", "", "tokens_per_s"),
    ("TFLOP/s per device", "TFLOP/s", "", "tflops_per_gpu"),
    ("model FLOP utilization", "fraction", "", "mfu"),
    ("compute", "s", "phases_s", "compute"),
    ("communication, exposed", "s", "phases_s", "comm_exposed"),
    ("communication, total", "s", "phases_s", "comm_total"),
    ("quantize", "s", "phases_s", "quantize"),
    ("idle", "s", "phases_s", "idle"),
    ("payload per rank", "byte", "comm", "payload_bytes"),
    ("on the wire per rank", "byte", "comm", "wire_bytes"),
    ("between nodes per rank", "byte", "comm", "inter_node_bytes"),
    ("inside the node per rank", "byte", "comm", "intra_node_bytes"),
    ("collectives per rank", "count", "comm", "collectives"),
    (PEAK, "byte", "memory_bytes", "peak"),
)
_NAIVE_ROWS = ("iteration time, mean", "communication, total")


def sides(run: Run) -> list[tuple[str, Record]]:
    """(`predicted` or `measured`, record) of what is there, prediction first."""
    pairs = zip(SIDES, (run.sim, run.real), strict=True)
    return [(side, record) for side, record in pairs if record is not None]


def parity_table(run: Run) -> pd.DataFrame:
    """metric, unit, predicted, measured, ratio (predicted / measured), naive (seconds; see `naive_s`)."""
    naive = naive_s(run)
    rows = []
    for metric, unit, group, key in _PARITY_ROWS:
        predicted, measured = (
            None if record is None else _at(record, group, key) for record in (run.sim, run.real)
        )
        if predicted is None and measured is None:
            continue
        rows.append(
            {
                "metric": f"{metric} {RESIDENT}" if metric == PEAK and measures_residence(run) else metric,
                "unit": unit,
                "predicted": predicted,
                "measured": measured,
                "ratio": ratio(predicted, measured),
                "naive": naive if metric in _NAIVE_ROWS else None,
            }
        )
    return _frame(rows, ["metric", "unit", "predicted", "measured", "ratio", "naive"])


def measures_residence(run: Run) -> bool:
    """Whether the real run's peak memory is its processes' resident size: there is no device to ask."""
    if run.real is None or not value(run.real, "memory_bytes", "peak"):
        return False
    cluster = (run.real.result.get("experiment") or {}).get("cluster") or {}
    return bool(cluster.get("backend", "gloo") != "nccl")


def iteration_table(run: Run) -> pd.DataFrame:
    """side, n, mean, p50, min, max, low, high: seconds; n iterations after the warm-up."""
    keys = ("n", "mean", "p50", "min", "max", "low", "high")
    rows = [
        {"side": side} | {key: (record.result.get("iteration_s") or {}).get(key) for key in keys}
        for side, record in sides(run)
    ]
    return _frame(rows, ["side", *keys])


def phase_table(run: Run) -> pd.DataFrame:
    """side, phase, seconds: the mean rank's time in each phase of an iteration."""
    rows = [
        {"side": side, "phase": phase, "seconds": value(record, "phases_s", phase)}
        for side, record in sides(run)
        for phase in PHASES
    ]
    return _frame([row for row in rows if row["seconds"] is not None], ["side", "phase", "seconds"])


def rank_table(run: Run) -> pd.DataFrame:
    """side, rank, ranks (how many behaved alike), and seconds in each phase."""
    rows = []
    for side, record in sides(run):
        for position, entry in enumerate(record.result.get("ranks") or []):
            phases = entry.get("phases_s") or entry
            rows.append(
                {"side": side, "rank": entry.get("rank", position), "ranks": entry.get("count", 1)}
                | {phase: phases.get(phase) for phase in PHASES}
            )
    return _frame(rows, ["side", "rank", "ranks", *PHASES])


def volume_table(run: Run) -> pd.DataFrame:
    """side, volume, bytes: per rank and iteration, mean."""
    rows = [
        {"side": side, "volume": volume.removesuffix("_bytes"), "bytes": value(record, "comm", volume)}
        for side, record in sides(run)
        for volume in VOLUMES
        if volume != "collectives"
    ]
    return _frame([row for row in rows if row["bytes"] is not None], ["side", "volume", "bytes"])


def rank_bytes_table(run: Run) -> pd.DataFrame:
    """side, rank, ranks, payload_bytes, wire_bytes, inter_node_bytes, collectives, each per iteration.

    Summed from the ledgers, validation left out. A folded prediction has one row for each class of `ranks`
    ranks.
    """
    columns = ["payload_bytes", "wire_bytes", "inter_node_bytes", "collectives"]
    rows = []
    for side, record in sides(run):
        sums, iterations = _rank_sums(record)
        for rank, (count, totals) in sorted(sums.items()):
            means = (total / iterations for total in totals)
            rows.append({"side": side, "rank": rank, "ranks": count} | dict(zip(columns, means, strict=True)))
    return _frame(rows, ["side", "rank", "ranks", *columns])


def node_bytes_table(run: Run) -> pd.DataFrame:
    """side, node, inter_node_bytes: what each node sends to others in an iteration, validation left out."""
    rows = [
        {"side": side, "node": node, "inter_node_bytes": nbytes}
        for side, record in sides(run)
        for node, nbytes in sorted(_node_bytes(record).items())
    ]
    return _frame(rows, ["side", "node", "inter_node_bytes"])


def operation_table(run: Run) -> pd.DataFrame:
    """side, phase, op, axis, group_size, entries and bytes over all ranks and iterations, from ledgers."""
    rows = []
    for side, record in sides(run):
        sums: defaultdict[tuple[str, str, str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for row in record.ledger:
            total = sums[row.phase, row.op, row.axis, row.group_size]
            new = (1, row.payload_bytes, row.wire_bytes, row.inter_node_bytes)
            for i, amount in enumerate(new):
                total[i] += amount * row.count
        for (phase, op, axis, size), total in sorted(sums.items()):
            rows.append(
                {
                    "side": side,
                    "phase": phase,
                    "op": op,
                    "axis": axis,
                    "group_size": size,
                    "entries": total[0],
                    "payload_bytes": total[1],
                    "wire_bytes": total[2],
                    "inter_node_bytes": total[3],
                }
            )
    columns = ["side", "phase", "op", "axis", "group_size", "entries"]
    return _frame(rows, [*columns, "payload_bytes", "wire_bytes", "inter_node_bytes"])


def memory_table(run: Run) -> pd.DataFrame:
    """side, class, bytes: the fullest rank; `peak` is the largest sum at one time, not that of the rows."""
    rows = [
        {"side": side, "class": name, "bytes": value(record, "memory_bytes", name)}
        for side, record in sides(run)
        for name in (*MEMORY, "peak")
    ]
    return _frame([row for row in rows if row["bytes"] is not None], ["side", "class", "bytes"])


def memory_series(run: Run) -> pd.DataFrame:
    """rank, t_s, phase, unit, micro_batch and bytes by class: a predicted step of the fullest rank, in time.

    A row holds from its `t_s` on. Empty where the record has no series with times.
    """
    points = run.sim.result.get("memory_over_time") if run.sim is not None else None
    timed = [point for point in points or [] if "t_s" in point]
    columns = ["rank", "t_s", "phase", "unit", "micro_batch", *MEMORY]
    if not timed:
        return _frame([], columns)
    fullest = max(timed, key=lambda point: sum(point.get(name, 0) for name in MEMORY))["rank"]
    return _frame([point for point in timed if point["rank"] == fullest], columns)


def loss_table(runs: Sequence[tuple[str, str, Sequence[float | None]]]) -> pd.DataFrame:
    """label, policy, step, loss. `runs`: (label, policy, losses from step 0); null: a skipped step."""
    rows = [
        {"label": label, "policy": policy, "step": step, "loss": loss}
        for label, policy, losses in runs
        for step, loss in enumerate(losses)
    ]
    return _frame(rows, ["label", "policy", "step", "loss"])


def other_table(run: Run) -> pd.DataFrame:
    """quantity, unit, predicted, measured: what a run gives beyond the parity table, where it gives it."""
    wanted = [
        ("TFLOP/s per device, recompute counted", "TFLOP/s", "", "tflops_per_gpu_hardware"),
        ("time to train", "s", "", "time_to_train_s"),
        ("GPU hours", "h", "", "gpu_hours"),
        ("cost", "price unit", "", "cost"),
        ("energy", "J", "", "energy_j"),
        ("job completion, mean", "s", "jobs", "avg_jct_s"),
        ("job completion, 99th percentile", "s", "jobs", "p99_jct_s"),
        ("queueing, mean", "s", "jobs", "avg_queue_s"),
        ("makespan", "s", "jobs", "makespan_s"),
        ("utilization", "fraction", "jobs", "utilization"),
    ]
    rows = []
    for quantity, unit, group, key in wanted:
        pair = [None if record is None else _at(record, group, key) for record in (run.sim, run.real)]
        if pair != [None, None]:
            rows.append({"quantity": quantity, "unit": unit} | dict(zip(SIDES, pair, strict=True)))
    return _frame(rows, ["quantity", "unit", *SIDES])


def input_table(run: Run, key: str) -> pd.DataFrame:
    """`guessed_inputs` or `fitted_constants` of both sides, a row each, each once; plain text is left out."""
    rows: list[dict[str, Any]] = []
    for _, record in sides(run):
        for item in record.result.get(key) or []:
            if isinstance(item, Mapping) and item not in rows:
                rows.append(dict(item))
    return pd.DataFrame(rows, dtype=object)


def sweep_table(sweep: Sweep) -> pd.DataFrame:
    """A row a run: its number, the swept overrides, status, error, times, rates, bytes, speed-up.

    `iteration_s` is measured where there is a real run, else predicted; `low_s` and `high_s` are its smallest
    and largest iteration, or the range over the guessed inputs. `speedup` is the first successful run's
    time over this one's, for as many tokens. `inter_node_bytes_per_rank` is per iteration, mean over ranks, as
    in result.json. `void` says why the times of a run mean nothing, or is empty.
    """
    keys = swept_keys(sweep)
    rows: list[dict[str, Any]] = []
    first: float | None = None
    for run in sweep.runs:
        result = run.main or {}
        times = result.get("iteration_s") or {}
        mean = times.get("mean") if result.get("status") in ("ok", "oom") else None
        per_token = 1 / result["tokens_per_s"] if mean is not None and result.get("tokens_per_s") else mean
        first = per_token if first is None and result.get("status") == "ok" else first
        predicted = ((run.sim or {}).get("iteration_s") or {}).get("mean")
        both = run.sim is not None and run.real is not None
        rows.append(
            {"run": run.number}
            | {key: run.overrides.get(key, "") for key in keys}
            | {
                "status": _sweep_status(run),
                "iteration_s": mean,
                "low_s": times.get("min" if run.real else "low") if mean is not None else None,
                "high_s": times.get("max" if run.real else "high") if mean is not None else None,
                "predicted_s": predicted if both else None,
                "ratio": ratio(predicted, mean) if both else None,
                "ledger_equal": (run.parity or {}).get("ledger_equal") if both else None,
                "void": void_reason(run.parity or {}) or "",
                "tokens_per_s": result.get("tokens_per_s"),
                "tflops_per_gpu": result.get("tflops_per_gpu"),
                "inter_node_bytes_per_rank": value_of(result, "comm", "inter_node_bytes")
                if mean is not None
                else None,
                "peak_memory_bytes": (result.get("memory_bytes") or {}).get("peak") or None,
                "speedup": ratio(first, per_token),
                "error": _sweep_error(run),
            }
        )
    return _frame(rows, list(rows[0]))


def swept_keys(sweep: Sweep) -> list[str]:
    """Override keys whose value is not the same in all runs, in the order given; all keys if none differ."""
    keys = list(dict.fromkeys(key for run in sweep.runs for key in run.overrides))
    varied = [key for key in keys if len({run.overrides.get(key) for run in sweep.runs}) > 1]
    return varied or keys


def naive_s(run: Run) -> float | None:
    """What bytes over bandwidth would predict: the busiest node's inter-node bytes of one iteration over
    `inter_node.links * inter_node.bandwidth_Bps`. No latency, no compute, no sharing.

    From the real run's ledger where there is one, else the prediction's. None where unknown.
    """
    for record in (run.real, run.sim):
        if record is None:
            continue
        node_bytes = _node_bytes(record)
        inter = ((record.result.get("experiment") or {}).get("cluster") or {}).get("inter_node") or {}
        links, bandwidth = inter.get("links"), inter.get("bandwidth_Bps")
        if node_bytes and links and bandwidth:
            return max(node_bytes.values()) / (float(links) * float(bandwidth))
    return None


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts by column name; a missing number is NaN."""
    return [{str(key): item for key, item in row.items()} for row in table.to_dict("records")]


def _rank_sums(record: Record) -> tuple[dict[int, tuple[int, list[int]]], int]:
    """rank -> (ranks alike, [payload, wire, inter, entries] over the run), and the number of iterations."""
    sums: dict[int, tuple[int, list[int]]] = {}
    iterations = set()
    for row in record.ledger:
        if row.phase == "eval":
            continue
        iterations.add(row.iteration)
        _, totals = sums.setdefault(row.rank, (row.count, [0, 0, 0, 0]))
        for i, amount in enumerate((row.payload_bytes, row.wire_bytes, row.inter_node_bytes, 1)):
            totals[i] += amount
    return sums, max(len(iterations), 1)


def _node_bytes(record: Record) -> dict[int, float]:
    cluster = (record.result.get("experiment") or {}).get("cluster") or {}
    per_node = cluster.get("devices_per_node")
    if not isinstance(per_node, int) or per_node < 1:
        return {}
    sums, iterations = _rank_sums(record)
    classes = rank_classes(record)
    placement = Placement(cluster.get("nodes") or 1, per_node, cluster.get("rank_order") == "cyclic")
    nodes: defaultdict[int, float] = defaultdict(float)
    for rank, (_, totals) in sums.items():
        for member in classes[rank]:
            nodes[placement.node(member)] += totals[2] / iterations
    return dict(nodes)


def _sweep_status(run: SweptRun) -> str:
    states = [str(result.get("status")) for result in (run.sim, run.real) if result is not None]
    if not states:
        return "broken" if run.broken else "no record"
    return next((state for state in ("failed", "oom") if state in states), states[0])


def _sweep_error(run: SweptRun) -> str:
    if run.main is None:
        return run.broken or "the run left no result.json"
    errors = [result.get("error") for result in (run.sim, run.real) if result is not None]
    return "; ".join(dict.fromkeys(str(error) for error in errors if error))


def _at(record: Record, group: str, key: str) -> float | None:
    if group:
        found = value(record, group, key)
        # a run that stopped early leaves the zeros of an empty result
        return None if not found and record.result.get("status") != "ok" else found
    found = record.result.get(key)
    return float(found) if isinstance(found, int | float) else None


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns))
