"""Data, pipeline, 2D and ring together, under ZeRO++: 32 ranks. Simulated always; on real ranks where asked for."""

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local
from twinbed.sim.simulate import simulate

EVERYTHING = (
    "model=gpt",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=4",
    "model.vocab=61",
    "model.sequence=8",
    "data=synthetic",
    "cluster.nodes=2",
    "cluster.devices_per_node=16",
    "cluster.shaped=false",
    "precision=fp32",
    "steps=2",
    "warmup_steps=0",
    "batch.micro=2",
    "batch.accumulation=2",
    "train.timeout_s=300",
    "parallel.pipeline=2",
    "parallel.tensor=4",
    "parallel.tensor_mode=2d",
    "parallel.sequence=2",
    "parallel.sequence_mode=ring",
    # neighbours share a matrix, replicas lie on both nodes
    "parallel.order=[tensor,pipeline,sequence,data]",
    "comm=zeropp",
    # finer than the defaults, which would fill up parameters as small as these
    "comm.weight_block=64",
    "comm.gradient_block=64",
)
ASKED = "TWINBED_TEST_32_RANKS"  # in the environment; minutes on two cores


def test_simulated() -> None:
    composed = compose(["target=sim", *EVERYTHING])
    sim = simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)
    assert sim.result["status"] == "ok"
    assert {row.rank for row in sim.ledger} == set(range(32))
    steps = [
        Counter(
            (row.axis, row.op, row.phase) for row in sim.ledger if row.rank == rank and row.iteration == 1
        )
        for rank in (0, 4)  # of the first stage and of the last: a square lies between
    ]
    for rows in steps:
        # a ring of two in one block: keys and values once forward, and back with their gradients
        assert (rows["sequence", "send", "forward"], rows["sequence", "send", "backward"]) == (2, 4)
        # nothing is gathered or scattered over the ring or the stages, between which each micro-batch is one message
        over_both = {key[:2] for key in rows if key[0] in ("sequence", "pipeline")} - {
            ("sequence", "all_reduce")
        }
        assert over_both == {("sequence", "send"), ("pipeline", "send")}
        assert rows["row", "broadcast", "forward"] > 0
        assert rows["replicas", "all_gather", "forward"] == 4  # root and block, for two micro-batches
    assert steps[0]["pipeline", "send", "forward"] == steps[1]["pipeline", "send", "backward"] == 2
    assert steps[0]["sequence", "all_reduce", "forward"] == 0
    assert steps[1]["sequence", "all_reduce", "forward"] == 2  # the loss of all tokens of a sequence
    quantized = [row for row in sim.ledger if row.op == "all_to_all"]
    assert quantized, "gradients are quantized"
    assert all(row.axis.startswith("replicas") for row in quantized)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.environ.get(ASKED), reason=f"32 processes: set {ASKED}=1")
def test_on_real_ranks(tmp_path: Path, same_ledger: Callable[..., Any]) -> None:
    composed = compose(["target=runtime", *EVERYTHING])
    outcome = launch_local(
        tmp_path,
        cluster=composed.experiment.cluster,
        cases=[Case(name="everything", folder="everything", experiment=composed.resolved)],
        timeout_s=800,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error
    real = read_record(tmp_path / "everything")
    same_ledger(composed, real)
    assert real.result["loss"] == pytest.approx([math.log(61)] * 2, rel=0.05)  # words are random
