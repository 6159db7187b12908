"""engine=megatron as a whole: time, volumes, rates and memory of composed experiments."""

import json
from collections import Counter
from typing import Any

import pytest

from twinbed.analysis.record import Record
from twinbed.conf.compose import compose
from twinbed.conf.model_spec import num_parameters
from twinbed.sim.simulate import simulate

MEGATRON = ["target=sim", "engine=megatron", "comm=ddp", "steps=4", "warmup_steps=1"]
GPT_22B = ["model=gpt", "model.hidden=6144", "model.layers=48", "model.heads=64"]
SHAPE = ["model.vocab=51200", "model.sequence=2048", "model.tied_embeddings=true", "precision=fp16"]


def run(*overrides: str, slowdown: dict[int, float] | None = None) -> Record:
    composed = compose([*MEGATRON, "cluster=dgx_a100", *SHAPE, *overrides])
    cluster = composed.experiment.cluster
    cluster.guesses = {}  # the nominal case is enough here, and a third of the time
    if slowdown is not None:
        cluster.slowdown = slowdown
    return simulate(composed.experiment, spec=composed.spec)


def small(*overrides: str, slowdown: dict[int, float] | None = None) -> Record:
    sizes = ["model=gpt", "model.hidden=2048", "model.layers=8", "model.heads=16", "cluster.nodes=1"]
    return run(*sizes, *overrides, slowdown=slowdown)


def mean_s(record: Record) -> float:
    mean = record.result["iteration_s"]["mean"]
    assert isinstance(mean, float)
    return mean


@pytest.mark.parametrize(
    ("overrides", "paper_s"),
    [(["recompute=full"], 1.42), (["recompute=selective", "parallel.sequence=8"], 1.10)],
)
def test_22b_on_one_node(overrides: list[str], paper_s: float) -> None:
    """Korthikanti et al. 2022, table 5. Nothing is fitted on these rows; a tenth is what a change may cost."""
    record = run(*GPT_22B, "cluster.nodes=1", "parallel.tensor=8", "batch.micro=4", *overrides)
    assert record.result["status"] == "ok"
    assert mean_s(record) == pytest.approx(paper_s, rel=0.1)


def test_rates_count_replicas() -> None:
    """Two replicas of four ranks: 2 x 8 sequences of 2048 tokens a step, each rank a quarter of a replica's work."""
    record = small("parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=8")
    result = record.result
    assert result["tokens_per_s"] == pytest.approx(2 * 8 * 2048 / mean_s(record))
    composed = compose(
        [
            *MEGATRON,
            "cluster=dgx_a100",
            *SHAPE,
            "model=gpt",
            "model.hidden=2048",
            "model.layers=8",
            "model.heads=16",
        ]
    )
    per_token = 6 * (num_parameters(composed.spec) - 2048 * 2048) + 12 * 8 * 2048 * 2048  # without positions
    assert result["tflops_per_gpu"] * 1e12 == pytest.approx(per_token * result["tokens_per_s"] / 8, rel=0.01)


@pytest.mark.parametrize("until", [0.5, 1.5])
def test_a_link_that_is_slow_for_a_while_slows_its_passes_and_no_more(until: float) -> None:
    """Eight ranks in one tensor group: a slow NVLink of one of them costs what the steps in that time take longer."""
    keys = ["parallel.tensor=8", "batch.micro=4", "steps=3", "warmup_steps=0"]
    plain_s = mean_s(small(*keys))
    always = "cluster.link_slowdown=[{rank: 3, factor: 20}]"
    slow_s = mean_s(small(*keys, always))
    assert slow_s > 1.3 * plain_s
    a_while = f"cluster.link_slowdown=[{{rank: 3, factor: 20, until_s: {until * slow_s}}}]"
    share = until / 3 * slow_s + (3 - until) / 3 * plain_s
    assert mean_s(small(*keys, a_while)) == pytest.approx(share, rel=0.02)


def test_bubble_is_time_without_computation() -> None:
    """8 stages of one block: 7 / (m + 7) of the time, but for sends and the ends' own work."""
    keys = ["parallel.pipeline=8", "model.vocab=256", "batch.micro=16"]
    for sequences, share in ((8, 7 / 15), (56, 7 / 63)):
        record = small(*keys, f"batch.accumulation={sequences}")
        middle = record.result["ranks"][3]
        waits = middle["idle"] + middle["comm_exposed"]
        assert waits + middle["compute"] == pytest.approx(mean_s(record))
        assert waits / mean_s(record) == pytest.approx(share, abs=0.05)


def test_interleaving_shrinks_the_bubble() -> None:
    keys = ["parallel.pipeline=4", "batch.accumulation=8", "cluster.inter_node.latency_ns=0"]
    once = small(*keys)
    twice = small(*keys, "parallel.pipeline_schedule=interleaved", "parallel.virtual_stages=2")
    assert mean_s(twice) < mean_s(once)
    sends = [sum(r.count for r in x.ledger if r.op == "send" and r.iteration == 1) for x in (once, twice)]
    # 3 and 7 borders, both ways, 8 micro-batches, 2 replicas; the two ends of the tied embedding once each
    assert sends == [3 * 2 * 8 * 2 + 2 * 2, 7 * 2 * 8 * 2 + 2 * 2]


def test_sequence_parallelism_moves_as_much() -> None:
    """An all-reduce is a reduce-scatter and an all-gather: only backward's gathers of inputs come on top."""

    def moved(record: Record) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in record.ledger:
            if row.iteration == 1 and row.axis == "tensor":
                found[row.phase] += row.wire_bytes * row.count // 8
        return found

    plain = moved(small("parallel.tensor=8", "train.gradient_clipping=0"))
    shared = moved(small("parallel.tensor=8", "parallel.sequence=8", "train.gradient_clipping=0"))
    border = 7 * 2048 * 2048 * 2 // 8
    assert shared["forward"] - plain["forward"] == border  # the head's gather
    # a block gathers two inputs again, the embedding its gradient; what the ranks hold alike is summed
    extra = shared["backward"] - plain["backward"] - border * (2 * 8 + 1)
    norms_and_biases = 8 * 6 * 2048 + 2048 * 2 + 2048 * 2048
    assert extra == pytest.approx(2 * 7 * norms_and_biases * 4 / 8, rel=0.01)


def test_full_recomputation_costs_a_forward() -> None:
    times = {
        r: mean_s(small("parallel.tensor=8", "batch.micro=4", f"recompute={r}"))
        for r in ("none", "selective", "full")
    }
    assert times["none"] < times["selective"] < times["full"]
    assert times["full"] / times["none"] == pytest.approx(4 / 3, rel=0.06)


def test_memory_of_a_stage() -> None:
    """Korthikanti et al. 2022, section 4: s b h (34 + 5 a s / h) / t a layer, and p of them in flight."""
    record = small("parallel.tensor=4", "parallel.sequence=4", "parallel.pipeline=2", "batch.accumulation=4")
    held = record.result["memory_bytes"]
    layer = 2048 * 2048 * (34 + 5 * 16 * 2048 / 2048) / 4
    in_flight = 2 * 4 * layer
    assert held["activations"] == pytest.approx(in_flight, rel=0.05)
    # fp16: 2 bytes of weights, 2 of gradients, 12 of optimizer states and 4 of the gradients' fp32 copies
    assert held["gradients"] == held["parameters"]
    assert held["optimizer"] == 8 * held["parameters"]
    shared = small("comm=zero1", "parallel.tensor=2", "parallel.pipeline=2", "batch.accumulation=4")
    held = shared.result["memory_bytes"]
    assert held["optimizer"] == pytest.approx(4 * held["parameters"], rel=1e-6)


def test_a_slow_rank_slows_its_pipeline() -> None:
    keys = ("parallel.pipeline=4", "parallel.tensor=2", "batch.accumulation=8", "model.vocab=1024")
    slow = mean_s(small(*keys, slowdown={2: 2.0}))
    assert 1.5 < slow / mean_s(small(*keys)) < 2.2


def test_overlap_of_the_tensor_sum_saves_time() -> None:
    keys = ("parallel.tensor=8", "batch.micro=4")
    assert mean_s(small(*keys)) < mean_s(small(*keys, "parallel.tensor_overlap=false"))


def test_two_runs_are_the_same_to_the_byte() -> None:
    keys = ("parallel.pipeline=4", "parallel.tensor=2", "batch.accumulation=4")
    a, b = (json.dumps(small(*keys).result, sort_keys=True) for _ in range(2))
    assert a == b


def test_steps_on_gloo_are_simulated_one_by_one() -> None:
    keys = ["model=gpt_tiny", "cluster=local_2x2", "data=synthetic"]
    composed = compose([*MEGATRON, *keys, "parallel.pipeline=2", "parallel.tensor=2", "batch.accumulation=4"])
    record = simulate(composed.experiment, spec=composed.spec)
    assert record.result["status"] == "ok"
    forward = [r for r in record.ledger if r.rank == 0 and r.iteration == 0 and r.axis == "tensor"]
    assert all(r.count == 1 for r in forward)
    # stage 0 holds 2 of 4 blocks: 4 micro-batches of 2 sums a block both ways, and the embedding's
    assert sum(r.op == "all_reduce" and r.phase != "step" for r in forward) == 4 * (2 * 2 * 2 + 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine=deepspeed", "parallel.tensor=2"],
            r"parallel\.tensor=2 needs engine=fsdp2 or megatron, got engine=deepspeed",
        ),
        (["target=both", "data=synthetic"], r"engine=megatron needs target=sim, got target=both"),
        (
            ["parallel.tensor=3"],
            r"parallel\.tensor=3 times parallel\.pipeline=1 must divide the number of ranks, 16",
        ),
        (
            ["parallel.tensor=2", "parallel.data=4"],
            r"parallel\.data=4 times parallel\.tensor=2 .* is 8, .* 16 .*can be -1 or 8",
        ),
        (
            ["parallel.tensor=8", "batch.global_sequences=3"],
            r"must be a multiple of batch\.micro times the replicas of the model: 1 \* 2 = 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_when_composed(overrides: list[str], message: str) -> None:
    given: list[Any] = [*MEGATRON, "cluster=dgx_a100", "model=gpt_tiny", *overrides]
    with pytest.raises(ValueError, match=message):
        compose(given)
