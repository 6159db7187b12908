"""Ranks that are dealt out to the nodes: simulator and runtime agree on what leaves a node."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.runtime.case import Case, write_launch
from twinbed.runtime.script import write_script

POLICIES = ("ddp", "ps", "zero3", "hpz", "qgz", "zeropp")
KEYS = ("data=synthetic", "cluster.shaped=false", "cluster.rank_order=cyclic", "steps=2", "warmup_steps=0")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.long)])
def test_ledgers_of_cyclic_ranks_are_equal(
    nodes: int, per_node: int, odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    size = (f"cluster.nodes={nodes}", f"cluster.devices_per_node={per_node}")
    cases = {policy: (*odd_model, *KEYS, *size, f"comm={policy}") for policy in POLICIES}
    for name, (composed, real) in run_cases(cases).items():
        sim = same_ledger(composed, real)
        if name == "hpz":  # consecutive ranks lie on different nodes, so the gathers of backward leave theirs
            gathers = [row for row in sim.ledger if row.axis == "hpz"]
            assert gathers
            assert all(row.inter_node_bytes == row.wire_bytes > 0 for row in gathers)


# Starts four tasks as srun does on two nodes with --distribution=cyclic, all on this machine.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do [[ "$1" == --distribution=cyclic ]] && cyclic=1; shift; done
[[ -n "${cyclic:-}" ]] || exit 9
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task / 2)) SLURM_NTASKS=4 "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_the_slurm_script_places_ranks_cyclically(
    tmp_path: Path, odd_model: Any, same_ledger: Callable[..., Any]
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\n")):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    composed = compose(("target=runtime", "launch=slurm", "comm=hpz", *odd_model, *KEYS))
    run = tmp_path / "run"
    run.mkdir()
    write_launch(run, (Case(name="hpz", folder="hpz", experiment=composed.resolved),), git_commit="")
    script = write_script(run, composed.experiment)
    here = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_JOB_NODELIST": "here",
        "RDZV_PORT": "29473",
    }
    done = subprocess.run(
        ["bash", script], env=here, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    same_ledger(composed, read_record(run / "hpz"))
