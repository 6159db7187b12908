"""Whole experiments with a layout: large ones, records, and what is refused."""

import time

import pytest

from twinbed.conf.compose import compose
from twinbed.conf.schema import Backend, OptimizerConf, Recompute
from twinbed.sim.simulate import simulate

LARGE = {"layers": 24, "hidden": 4096, "heads": 64, "vocab": 51200, "sequence": 512}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (64, {"tensor": 64, "tensor_mode": "2d"}),
        (1024, {"tensor": 64, "tensor_mode": "3d"}),
        (1024, {"tensor": 8}),
        (1024, {"tensor": 64, "tensor_mode": "2.5d", "depth": 4}),
        (1024, {"tensor": 8, "pipeline": 8, "accumulation": 32}),
        (1024, {"tensor": 4, "sequence": 8, "sequence_mode": "ulysses"}),
    ],
)
def test_large_layouts_take_seconds(make, spec_of, ranks, layout):
    micro = 1 if "pipeline" in layout else 16
    experiment = make(ranks, per_node=8, micro=micro, comm="zero1", cluster_backend=Backend.nccl, **layout)
    begin = time.perf_counter()
    record = simulate(experiment, spec=spec_of(**LARGE))
    assert time.perf_counter() - begin < 20
    assert record.result["iteration_s"]["mean"] > 0
    assert record.result["folded"]


def test_rates_count_replicas_and_shares(make, spec_of):
    """Two replicas of four ranks: eight sequences of sixteen tokens a step."""
    spec = spec_of()
    record = simulate(make(8, micro=4, tensor=4, tensor_mode="2d"), spec=spec)
    mean = record.result["iteration_s"]["mean"]
    assert record.result["tokens_per_s"] == pytest.approx(2 * 4 * 16 / mean)
    alone = simulate(make(1, micro=4), spec=spec).result
    assert record.result["tflops_per_gpu"] * mean == pytest.approx(
        alone["tflops_per_gpu"] * alone["iteration_s"]["mean"] / 4, rel=1e-6
    )


def test_a_record_has_what_the_communication_policy_was_asked_and_memory_over_time(make, spec_of):
    """Of one replica, FSDP2 asks for no gather and no reduction; a replicated model's hooks do."""
    for comm, asked in (("ddp", {"GradientsReady", "WeightsChanged"}), ("zero3", {"WeightsChanged"})):
        record = simulate(make(4, tensor=4, comm=comm), spec=spec_of(), fold=False)
        events = [decision.event for decision in record.decisions if decision.iteration == 0]
        assert {event.partition("(")[0] for event in events} == {"LayerRuns", *asked}
        assert events[0].startswith("LayerRuns(kind=embedding, direction=forward")
    points = record.result["memory_over_time"]
    assert [p["phase"] for p in points][-1] == "step"
    assert {p["unit"] for p in points} >= {"embed", "block.0", "block.1", "root"}


BASE = ["target=sim", "comm=zero3", "steps=1", "warmup_steps=0", "model=gpt_tiny", "cluster=dgx_h100"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tensor=3"], ["parallel.tensor=3", "16"]),
        (["parallel.tensor=8", "parallel.tensor_mode=2d"], ["parallel.tensor=8", "square", "16"]),
        (
            ["parallel.tensor=8", "parallel.tensor_mode=2.5d", "parallel.depth=4"],
            ["parallel.depth=4", "8/4", "[2, 8]"],
        ),
        (["parallel.tensor=4", "parallel.tensor_mode=3d"], ["parallel.tensor=4", "cube", "8"]),
        (["parallel.tensor=4", "parallel.tensor_mode=2d", "batch.micro=1"], ["batch.micro=1", "2 parts"]),
        (["parallel.tensor=16"], ["model.heads=8", "16"]),
        (["parallel.pipeline=2", "batch.accumulation=1"], ["batch.accumulation=1", "parallel.pipeline=2"]),
        (
            ["parallel.pipeline=8", "batch.accumulation=8"],
            ["parallel.pipeline=8", "model.layers=4", "[1, 2, 4]"],
        ),
        (
            ["parallel.sequence=16", "parallel.sequence_mode=ulysses"],
            ["parallel.sequence=16", "model.heads=8", "ulysses"],
        ),
        (
            ["parallel.tensor=2", "parallel.sequence=4"],
            ["parallel.sequence=4", "parallel.tensor=2", "megatron"],
        ),
        (["parallel.tensor=2", "recompute=selective_op"], ["recompute=selective_op", "['none', 'full']"]),
        (["parallel.tensor=2", "offload=cpu"], ["offload=cpu", "none"]),
        (["parallel.tensor=2", "engine=deepspeed"], ["parallel.tensor=2", "engine=fsdp2 or megatron"]),
        (
            ["parallel.tensor=2", "comm=zeropp", "comm.zero_hpz_partition_size=16"],
            ["zero_hpz_partition_size=16", "8"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(overrides, words):
    def run() -> None:
        composed = compose([*BASE, *overrides])
        simulate(composed.experiment, spec=composed.spec)

    with pytest.raises(ValueError, match="parallel|batch|recompute|offload|zero_hpz") as err:
        run()
    for word in words:
        assert word in str(err.value)


def test_a_stage_that_is_no_run_of_ranks_sums_no_norms(make, spec_of):
    """The ranks of a stage are a group of their own only where the pipeline is the first or the last axis."""
    keys = {
        "pipeline": 2,
        "tensor": 2,
        "accumulation": 2,
        "optimizer": OptimizerConf(name="lamb"),
        "steps": 1,
    }
    spec = spec_of()
    with pytest.raises(ValueError, match=r"optimizer=lamb with parallel.pipeline=2.*first or the last"):
        simulate(make(8, order=["tensor", "pipeline", "sequence", "data"], **keys), spec=spec)
    record = simulate(make(8, **keys), spec=spec, fold=False)
    norms = [r for r in record.ledger if r.axis == "stage"]
    assert {(r.rank, r.payload_bytes, r.group_size) for r in norms} == {
        # two numbers a matrix or table: four of a block, and the table of words, of positions, the head
        *((rank, 2 * 4 * (4 + 2), 4) for rank in range(4)),
        *((rank, 2 * 4 * (4 + 1), 4) for rank in range(4, 8)),
    }


def test_recomputation_takes_longer_and_is_counted(make, spec_of):
    spec = spec_of()
    keys = {"tensor": 4, "cluster_emulated_flops_per_s": 1e9, "steps": 1}
    plain, again = (
        simulate(make(4, recompute=r, **keys), spec=spec) for r in (Recompute.none, Recompute.full)
    )
    assert again.result["phases_s"]["compute"] > 1.2 * plain.result["phases_s"]["compute"]
