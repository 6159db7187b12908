"""Data, pipeline, 2D and ring together, under ZeRO++: 32 ranks. Simulated, and on real ranks (`make test-long`)."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from twinbed.analysis.record import Record, read_record
from twinbed.conf.compose import Composed, compose
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
LEARNS = ("data=text", "model.vocab=257", "steps=8", "optimizer.lr=1e-2", "train.gradient_clipping=1")
ALONE = (
    *("parallel.pipeline=1", "parallel.tensor=1", "parallel.tensor_mode=1d", "parallel.sequence=1"),
    *("cluster.nodes=1", "cluster.devices_per_node=1", "comm=ddp", "batch.micro=8", "batch.accumulation=1"),
)


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
@pytest.mark.long
@pytest.mark.timeout(900)
def test_on_real_ranks(tmp_path: Path, same_ledger: Callable[..., Any]) -> None:
    """Ledgers equal the simulator's, losses those of one process that has the whole batch."""
    everything = {
        "zeropp": compose(["target=runtime", *EVERYTHING, *LEARNS]),
        "zero3": compose(["target=runtime", *EVERYTHING, *LEARNS, "comm=zero3"]),
    }
    alone = compose(["target=runtime", *EVERYTHING, *LEARNS, *ALONE])
    found = train(tmp_path / "32", everything) | train(tmp_path / "1", {"alone": alone})
    for name, composed in everything.items():
        same_ledger(composed, found[name])
    losses = {name: record.result["loss"] for name, record in found.items()}
    assert losses["alone"][-1] < 0.95 * losses["alone"][0]
    assert losses["zero3"] == pytest.approx(losses["alone"], rel=3e-5)
    assert losses["zeropp"] == pytest.approx(losses["alone"], rel=0.02)  # 8 and 4 bits


def train(folder: Path, cases: Mapping[str, Composed]) -> dict[str, Record]:
    outcome = launch_local(
        folder,
        cluster=next(iter(cases.values())).experiment.cluster,
        cases=[Case(name=name, folder=name, experiment=each.resolved) for name, each in cases.items()],
        timeout_s=800,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error
    return {name: read_record(folder / name) for name in cases}
