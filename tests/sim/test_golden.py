"""Simulated times and volumes of a few experiments, as last reviewed: `pytest --rewrite-goldens` writes them anew."""

import json
from collections.abc import Callable
from pathlib import Path

from twinbed.conf.compose import compose
from twinbed.sim.simulate import simulate

GOLDEN = Path(__file__).with_name("golden") / "iterations.json"
BIG = ("target=sim", "cluster=dgx2_v100", "model=gpt_18b", "recompute=full", "batch.micro=2")
EXPERIMENTS = {
    **{f"local {comm}": ("target=sim", f"comm={comm}") for comm in ("ddp", "ps", "zero1", "zero3", "zeropp")},
    "local zeropp overlap": ("target=sim", "comm=zeropp", "comm.overlap=true"),
    "local zero3 k=3 5 ms": (
        "target=sim",
        "comm=zero3",
        "batch.accumulation=3",
        "cluster.inter_node.latency_ns=5000000",
    ),
    **{
        f"384 V100 {comm} 1 link": (*BIG, f"comm={comm}", "cluster.inter_node.links=1")
        for comm in ("zero3", "zeropp")
    },
}


def test_iterations_are_as_reviewed(same_as_golden: Callable[[Path, str], None]) -> None:
    found = {}
    for name, overrides in EXPERIMENTS.items():
        composed = compose(overrides)
        result = simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved).result
        found[name] = {
            "iteration_ns": round(result["iteration_s"]["mean"] * 1e9),
            "inter_node_bytes": round(result["comm"]["inter_node_bytes"]),
            "wire_bytes": round(result["comm"]["wire_bytes"]),
            "peak_bytes": result["memory_bytes"]["peak"],
        }
    same_as_golden(GOLDEN, json.dumps(found, indent=1) + "\n")
