"""Uneven shares in simulated time: closed forms with computation alone, mixed clusters, memory, and recovery."""

import re

import pytest

from twinbed.conf.compose import compose
from twinbed.sim.simulate import simulate

# Products take what they take at this rate, and nothing else takes long
COMPUTES = (
    "target=sim",
    "cluster.nodes=1",
    "cluster.devices_per_node=4",
    "cluster.emulated_flops_per_s=1e8",
    "cluster.intra_node.bandwidth_Bps=1e13",
    "model=gpt",
    "model.layers=4",
    "model.hidden=64",
    "model.heads=4",
    "model.vocab=64",
    "model.sequence=16",
    "batch.micro=7",
    "warmup_steps=4",
    "steps=8",
    "precision=fp32",
    "comm=ddp",
)
BATCH = ("balance=batch", "balance.period=2")
HALF = "cluster.slowdown={3: 2.0}"


def run(*overrides):
    composed = compose(overrides)
    record = simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)
    assert record.result["status"] == "ok", record.result["error"]
    return record


def mean_s(record):
    return record.result["iteration_s"]["mean"]


def shares(record):
    """By the step in which they were answered."""
    return {
        d.iteration: tuple(map(int, re.findall(r"\d+", d.action)))
        for d in record.decisions
        if d.action.startswith("share")
    }


def computed(record, step):
    (event,) = [d.event for d in record.decisions if d.event.startswith(f"ReplicasMeasured(step={step},")]
    return [int(ns) for ns in re.search(r"compute_ns=([\d/]+)", event)[1].split("/")]


def test_a_replica_at_half_speed_takes_half():
    """Even: 2.00 times as long as four equal replicas; 8, 8, 8 and 4 of 28 sequences: 8/7."""
    equal, even, uneven = (mean_s(run(*COMPUTES, *keys)) for keys in ((), (HALF,), (HALF, *BATCH)))
    assert even / equal == pytest.approx(2, rel=0.01)
    assert uneven / equal == pytest.approx(8 / 7, rel=0.01)
    assert shares(run(*COMPUTES, HALF, *BATCH)) == {1: (8, 8, 8, 4)}


@pytest.mark.parametrize("folded", [True, False])
def test_folded_or_not_it_is_the_same(folded):
    composed = compose([*COMPUTES, HALF, *BATCH, "comm=zero3"])
    record = simulate(composed.experiment, spec=composed.spec, fold=folded)
    assert shares(record) == {1: (8, 8, 8, 4)}


def test_what_a_replica_computes_follows_its_share():
    record = run(*COMPUTES, HALF, *BATCH)
    before, after = computed(record, 2), computed(record, 4)
    assert [b * n for b, n in zip(before, (8, 8, 8, 4), strict=True)] == pytest.approx(
        [a * 7 for a in after], rel=1e-6
    )


def test_a_straggler_that_comes_and_goes():
    step_s = mean_s(run(*COMPUTES))
    slow = [{"rank": 2, "factor": 2.0, "from_s": 4.2 * step_s, "until_s": 18 * step_s}]
    record = run(*COMPUTES, *BATCH, "steps=24", f"cluster.slowdown={slow}".replace("'", ""))
    found = shares(record)
    assert (8, 8, 4, 8) in found.values()
    assert list(found.values())[-1] == (7, 7, 7, 7)
    first = next(step for step, counts in found.items() if counts == (8, 8, 4, 8))
    assert 5 <= first <= 4 + 2 * 2  # it comes in step 4, and a period has 2


@pytest.mark.parametrize("until", [10, 12, 15])
def test_on_an_a100_the_even_split_comes_back(until):
    """There two sequences take more than half as long as four."""
    slow = f"cluster.slowdown=[{{rank: 0, factor: 2, from_step: 5, until_step: {until}}}]"
    keys = (
        "target=sim",
        "comm=zero3",
        "cluster=dgx_a100",
        "cluster.nodes=1",
        "model=gpt_18b",
        "model.layers=8",
    )
    record = run(
        *keys, "recompute=none", "precision=bf16", "batch.micro=4", "steps=40", "balance=batch", slow
    )
    found = shares(record)
    assert found[9][0] < 4
    *_, last = found
    assert found[last] == (4,) * 8
    assert last <= until + 2 * 5 - 1


def test_equal_replicas_stay_even():
    record = run(*COMPUTES, *BATCH)
    assert shares(record) == {}
    assert mean_s(record) == pytest.approx(mean_s(run(*COMPUTES)), rel=0.001)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        # the slowest rank counts: 10 sequences at full speed take as long as 5 at half of it
        (("parallel.tensor=2", "comm=zero3"), (10, 4)),
        (("parallel.sequence=2", "parallel.sequence_mode=ring", "comm=zero1"), (10, 4)),
        # two micro-batches through a stage at half speed and one through the other: 5 against 3
        (("parallel.pipeline=2", "batch.accumulation=2"), (9, 5)),
    ],
)
def test_replicas_of_several_ranks(layout, counts):
    record = run(*COMPUTES, *layout, *BATCH, HALF)
    assert shares(record) == {1: counts}
    assert mean_s(record) < 0.8 * mean_s(run(*COMPUTES, *layout, HALF))


def test_activations_of_a_pipeline_and_of_tensor_ranks_follow_the_share():
    for layout, op, (many, few) in (
        (("parallel.tensor=2", "comm=zero3"), "all_reduce", (10, 4)),
        (("parallel.pipeline=2", "batch.accumulation=2"), "send", (9, 5)),
    ):
        record = run(*COMPUTES, *layout, *BATCH, HALF)
        axis = "tensor" if op == "all_reduce" else "pipeline"
        sizes = {
            (row.rank in (1, 3) if axis == "pipeline" else row.rank >= 2, row.iteration): row.payload_bytes
            for row in record.ledger
            if row.op == op and row.axis == axis and row.payload_bytes > 64
        }
        assert sizes[True, 0] == sizes[False, 0]
        assert sizes[False, 4] * few == sizes[True, 4] * many


MIXED = (
    "target=sim",
    "cluster=mixed_v100_a100",
    "model=gpt2_xl",
    "batch.micro=8",
    "precision=fp16",
    "steps=8",
    "warmup_steps=4",
)


def test_a_mixed_cluster_gains_and_fits():
    even, uneven = run(*MIXED, "comm=zero3"), run(*MIXED, "comm=zero3", *BATCH)
    assert mean_s(even) / mean_s(uneven) > 1.3
    (counts,) = shares(uneven).values()
    assert sum(counts) == 32 * 8
    assert max(counts[:16]) < 8 < min(counts[16:])  # two nodes of V100 come first
    assert uneven.result["memory_bytes"]["activations"] > even.result["memory_bytes"]["activations"]


def test_memory_bounds_a_share():
    """The fast ones' memory has no place for all that they could compute."""
    record = run(*MIXED, "comm=zero3", *BATCH, "cluster.parts.1.device.memory_bytes=33e9")
    (counts,) = shares(record).values()
    assert set(counts) == {6, 10}  # 26 GB hold 8 sequences, each takes 3


# ---- stages

PIPELINE = (*COMPUTES, "parallel.pipeline=4", "batch.accumulation=16", "model.layers=28", "batch.micro=1")


def test_a_stage_at_half_speed_holds_half():
    equal, slow = run(*PIPELINE), run(*PIPELINE, HALF)
    split = run(*PIPELINE, HALF, "balance=layers")
    assert shares(split)[0] == (8, 8, 8, 4)
    # 16 micro-batches through 4 stages: bubbles take a share of their own
    assert mean_s(slow) / mean_s(equal) == pytest.approx(2, rel=0.12)
    assert mean_s(split) / mean_s(equal) == pytest.approx(8 / 7, rel=0.03)


def test_layers_that_stages_do_not_divide():
    layout = ("cluster.devices_per_node=3", "parallel.pipeline=3", "batch.accumulation=3", "model.layers=4")
    with pytest.raises(ValueError, match=r"model.layers=4.*parallel.stage_layers"):
        run(*COMPUTES, *layout)
    record = run(*COMPUTES, *layout, "balance=layers")
    assert sorted(shares(record)[0]) == [1, 1, 2]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_of_a_mixed_cluster(schedule):
    layout = (
        "parallel.pipeline=4",
        "parallel.tensor=8",
        "batch.accumulation=8",
        "batch.micro=4",
        "comm=ddp",
        "model.heads=16",
        "model.hidden=1536",
        "model.vocab=50304",
        f"parallel.pipeline_schedule={schedule}",
    )
    even, uneven = run(*MIXED, *layout), run(*MIXED, *layout, "balance=layers")
    assert mean_s(even) / mean_s(uneven) > 1.1
    counts = shares(uneven)[0]
    assert sum(counts) == 48
    assert max(counts[:2]) < min(counts[2:])


def test_memory_follows_the_blocks_of_a_stage():
    given = (*COMPUTES, "parallel.pipeline=2", "batch.accumulation=2", "model.layers=8")
    even, uneven = run(*given), run(*given, "parallel.stage_layers=[6,2]")
    for key in ("parameters", "optimizer", "activations"):
        assert uneven.result["memory_bytes"][key] > even.result["memory_bytes"][key], key
