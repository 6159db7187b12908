"""Small records as both targets write them: 2 nodes of 2 ranks, three units, a gather and a reduce each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinbed.analysis.record import (
    Decision,
    LedgerRow,
    Record,
    Span,
    comm_means,
    iteration_stats,
    new_result,
    write_record,
)

UNITS = ("root", "block.0", "block.1")
STEPS = 5


def experiment(policy: str = "zero3", links: int = 1) -> dict[str, Any]:
    return {
        "cluster": {
            "name": "local_2x2",
            "nodes": 2,
            "devices_per_node": 2,
            "inter_node": {"links": links, "bandwidth_Bps": 12.5e6, "latency_ns": 0},
        },
        "model": {"name": "gpt_tiny", "layers": 2},
        "comm": {"name": policy, "zero_stage": 3},
        "precision": "bf16",
        "steps": STEPS,
        "warmup_steps": 2,
        "seed": 0,
    }


def ledger(ranks: Sequence[int] = range(4), count: int = 1) -> list[LedgerRow]:
    rows = []
    for iteration in range(STEPS):
        for rank in ranks:
            for unit in UNITS:
                gather = LedgerRow(
                    rank,
                    "gather",
                    iteration,
                    "forward",
                    unit,
                    "all_gather",
                    "world",
                    4,
                    4000,
                    3000,
                    1500,
                    count,
                )
                rows.append(gather)
                rows.append(replace(gather, stream="reduce", phase="backward", op="reduce_scatter"))
    return rows


def spans(step_ns: int, start_ns: int, ranks: Sequence[int] = range(4)) -> list[Span]:
    found = []
    for rank in ranks:
        for step in range(STEPS):
            at = start_ns + step * step_ns
            part = step_ns // (2 * len(UNITS) + 1)
            for i, unit in enumerate(UNITS):
                begin = at + i * part
                found.append(Span(rank, "gather", f"all_gather {unit}", begin, begin + part // 2, 3000))
                found.append(Span(rank, "gather", "encode", begin, begin + part // 8))
                found.append(Span(rank, "compute", f"forward/{unit}", begin + part // 2, begin + part))
                late = at + (len(UNITS) + i) * part
                found.append(Span(rank, "compute", f"backward/{unit}", late, late + part // 2))
                found.append(
                    Span(rank, "reduce", f"reduce_scatter {unit}", late + part // 2, late + part, 3000)
                )
            late = at + 2 * len(UNITS) * part
            middle = (late + at + step_ns) // 2  # the clipping's all-reduce cuts the step in two
            found.append(Span(rank, "compute", "step", late, middle))
            found.append(Span(rank, "library", "all_reduce", middle, middle + 100, 4))
            found.append(Span(rank, "compute", "step", middle + 100, at + step_ns))
    return found


def make(
    target: str = "sim",
    *,
    policy: str = "zero3",
    links: int = 1,
    step_s: float = 0.4,
    folded: bool = False,
    losses: Sequence[float] = (),
    seed: int = 0,
    status: str = "ok",
) -> Record:
    """A successful run. `folded`: ranks 0 and 2 are one class, 1 and 3 the other."""
    result = new_result(target, experiment(policy, links), seed=seed, git_commit="abc1234")
    shown = (0, 1) if folded else range(4)
    rows = ledger(shown, count=2 if folded else 1)
    times = [9.0, 9.0, step_s * 0.9, step_s, step_s * 1.1]
    result |= {
        "status": status,
        "error": None if status == "ok" else "out of memory: a rank needs 90 GB",
        "iteration_s": iteration_stats(times, 2),
        "tokens_per_s": 512 / step_s,
        "tflops_per_gpu": 0.01 / step_s,
        "phases_s": {
            "compute": step_s * 0.5,
            "comm_exposed": step_s * 0.45,
            "comm_total": step_s * 0.5,
            "quantize": 0.0,
            "idle": step_s * 0.05,
        },
        "comm": comm_means(rows, num_ranks=4, num_iterations=STEPS),
        "memory_bytes": {
            "parameters": 2_000_000,
            "gradients": 2_000_000,
            "optimizer": 8_000_000,
            "secondary_shard": 0,
            "activations": 5_000_000,
            "buffers": 1_000_000,
            "peak": 17_000_000,
        },
        "loss": list(losses),
        "ranks": [
            {
                "rank": rank,
                "count": 2 if folded else 1,
                "compute": step_s * 0.5,
                "comm_exposed": step_s * 0.45,
            }
            for rank in shown
        ],
    }
    if folded:
        result["classes"] = [
            {"rank": 0, "count": 2, "ranks": [[0, 4, 2]]},
            {"rank": 1, "count": 2, "ranks": [[1, 4, 2]]},
        ]
    step_ns = round(step_s * 1e9)
    decisions = [
        Decision(r, i, f"WeightsNeeded {u}", "gather") for r in shown for i in range(2) for u in UNITS
    ]
    start = 0 if target == "sim" else 123_456_789_000
    return Record(result, rows, decisions, spans(step_ns, start, shown))


def unfinished(target: str, status: str, error: str) -> Record:
    """A run that failed before anything was measured, or does not fit in memory."""
    result = new_result(target, experiment(), seed=0, git_commit="abc1234")
    return Record(result | {"status": status, "error": error})


def write_both(folder: Path, sim: Record, real: Record) -> Path:
    write_record(folder / "sim", sim)
    write_record(folder / "runtime", real)
    return folder


def write_sweep(folder: Path, runs: Sequence[tuple[list[str], Record | None]]) -> Path:
    """A Hydra multirun: numbered sub-folders with their overrides; None: the run left no record."""
    for number, (overrides, record) in enumerate(runs):
        run = folder / str(number)
        (run / ".hydra").mkdir(parents=True)
        (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
        if record is not None:
            write_record(run, record)
    return folder


@pytest.fixture
def make_record() -> Callable[..., Record]:
    return make


@pytest.fixture
def make_unfinished() -> Callable[[str, str, str], Record]:
    return unfinished


@pytest.fixture
def sweep_folder() -> Callable[[Path, Sequence[tuple[list[str], Record | None]]], Path]:
    return write_sweep


@pytest.fixture
def both_folder() -> Callable[[Path, Record, Record], Path]:
    return write_both


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A `target=both` folder: predicted 0.4 s, measured 0.42 s, equal ledgers."""
    real = make("runtime", step_s=0.42, losses=[5.5, 5.1, 4.8, 4.5, 4.3])
    return write_both(tmp_path / "both", make("sim"), real)
