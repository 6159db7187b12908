"""Whole experiments: volumes, order, overlap, memory, folding, determinism."""

import json
from dataclasses import dataclass, replace

import pytest

from twinbed.analysis.record import read_record, write_record
from twinbed.conf.model_spec import num_parameters, parameters
from twinbed.conf.schema import (
    Attention,
    Backend,
    BatchConf,
    DeviceConf,
    Fusion,
    GradientPath,
    HostConf,
    HpzLifetime,
    InterNodeConf,
    KernelsConf,
    OptimizerConf,
    Precision,
    Recompute,
    TrainConf,
)
from twinbed.policies.comm import GradientsReady, Placement, WeightsNeeded, build_comm, parse_event
from twinbed.policies.comm.memory import state_bytes
from twinbed.policies.plan import AllGather, AllToAll, Dequantize, Plan, Quantize, Reduce, ReduceOp
from twinbed.sim.ledger import RankClass
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import TCP_LATENCY_NS

SCALE8 = 1 + 4 / 2048  # bytes of codes and of one fp32 scale for each 2048 of them
SCALE4 = 1 + 4 / 128  # 256 codes of 4 bits lie in 128 bytes


@pytest.fixture
def round_spec(make_spec):
    """All sizes divide by 64 ranks times the blocks, so that nothing is padded."""
    return make_spec(layers=2, hidden=16384, vocab=16384, sequence=16384, heads=64)


def node_units(record, spec, *, ranks, steps):
    """NIC bytes of node 0 in one step, in units of the bf16 weights."""
    sent = sum(
        row.inter_node_bytes * row.count for row in record.ledger if row.rank < ranks and row.phase != "step"
    )
    return sent / steps / (2 * num_parameters(spec))


def expected_units(comm, *, ranks, nodes):
    """Gathers and ring reduce (P - 1) / P each; qwZ halves a gather, hpZ spares one, qgZ quarters."""
    ring, across = (ranks - 1) / ranks, (nodes - 1) / nodes
    gather = ring * (0.5 * SCALE8 if "qwz" in comm or comm == "zeropp" else 1)
    backward = 0 if "hpz" in comm or comm == "zeropp" else gather
    reduce = 0.25 * SCALE4 * across if "qgz" in comm or comm == "zeropp" else ring
    return gather + backward + reduce


TABLE = {  # comm: (2 nodes x 2 ranks, many nodes), scales left out
    "zero3": (2.25, 3.0),
    "qwz": (1.5, 2.0),
    "hpz": (1.5, 2.0),
    "qgz": (1.625, 2.25),
    "qwz+hpz": (1.125, 1.5),
    "qwz+qgz": (0.875, 1.25),
    "hpz+qgz": (0.875, 1.25),
    "zeropp": (0.5, 0.75),
}


@pytest.mark.parametrize("comm", TABLE)
def test_volume_between_nodes(make_experiment, round_spec, comm):
    record = simulate(make_experiment(comm, steps=1, warmup_steps=0), spec=round_spec)
    units = node_units(record, round_spec, ranks=2, steps=1)
    assert units == pytest.approx(expected_units(comm, ranks=4, nodes=2), rel=1e-12)
    assert units == pytest.approx(TABLE[comm][0], rel=0.03)  # scales are 0.2% of int8 and 3% of int4


@pytest.mark.parametrize("comm", TABLE)
def test_volume_towards_many_nodes(make_experiment, make_spec, comm):
    spec = make_spec(layers=1, hidden=1 << 18, vocab=1 << 18, sequence=1 << 18, heads=64)
    experiment = make_experiment(
        comm, nodes=64, ranks=2, cluster_backend=Backend.nccl, steps=1, warmup_steps=0
    )
    record = simulate(experiment, spec=spec)
    (inner,) = (c for c in record.result["classes"] if 0 in RankClass(**c).members())
    assert record.result["folded"]
    sent = record.result["comm"]["inter_node_bytes"] * 128 / 64  # a node's share of all ranks' mean
    units = (sent - clipping_bytes(record, 64)) / (2 * num_parameters(spec))
    assert units == pytest.approx(expected_units(comm, ranks=128, nodes=64), rel=1e-12)
    assert units == pytest.approx(TABLE[comm][1], rel=0.04)
    assert inner["rank"] == 0


def clipping_bytes(record, nodes):
    return sum(row.inter_node_bytes * row.count for row in record.ledger if row.stream == "library") / nodes


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("comm", "keys", "volume"),
    [
        ("ddp", {}, lambda k: 2.0),
        ("zero1", {}, lambda k: 2.0),
        ("zero2", {}, lambda k: k + 1.0),
        ("zero3", {}, lambda k: 3.0 * k),
        ("zeropp", {}, lambda k: (0.5 * SCALE8 * 4 / 3 * 0.75 + 0.25 * SCALE4 * 2 / 3) * k),
        (
            "zeropp",
            {"hpz_lifetime": HpzLifetime.step},
            lambda k: 0.5 * SCALE8 * 4 / 3 * 0.75 + 0.25 * SCALE4 * 2 / 3 * k,
        ),
    ],
)
def test_micro_batches(make_experiment, round_spec, comm, keys, volume, k):
    """`ZeroComm`'s volumes are those of many nodes: on 2x2 a ring has 3/4 of one, an all-to-all 1/2."""
    experiment = make_experiment(comm, accumulation=k, comm_keys=keys, steps=1, warmup_steps=0)
    units = node_units(simulate(experiment, spec=round_spec), round_spec, ranks=2, steps=1)
    assert units == pytest.approx(volume(k) * 0.75, rel=1e-12)


def test_order_of_a_zero3_step(make_experiment, make_spec):
    record = simulate(make_experiment(steps=1, warmup_steps=0), spec=make_spec(layers=2))
    mine = [row for row in record.ledger if row.rank == 0]
    assert [(r.phase, r.layer) for r in mine if r.stream == "gather"] == [
        *(("forward", unit) for unit in ("root", "block.0", "block.1")),
        *(("backward", unit) for unit in ("root", "block.1", "block.0")),
    ]
    assert [r.layer for r in mine if r.stream == "reduce"] == ["block.1", "block.0", "root"]
    events = [parse_event(d.event) for d in record.decisions]
    assert [(type(e).__name__, e.unit) for e in events] == [
        ("WeightsNeeded", "root"),
        ("WeightsNeeded", "block.0"),
        ("WeightsNeeded", "block.1"),
        ("WeightsNeeded", "root"),
        ("WeightsNeeded", "block.1"),
        ("WeightsNeeded", "block.0"),
        ("GradientsReady", "block.1"),
        ("GradientsReady", "block.0"),
        ("GradientsReady", "root"),
        ("WeightsChanged", "root"),
        ("WeightsChanged", "block.0"),
        ("WeightsChanged", "block.1"),
    ]
    (clip,) = (r for r in mine if r.stream == "library")
    # one fp32 scalar; each of the 2 * 3 rounds sends a chunk of it, padded to one element
    clipping = (clip.phase, clip.layer, clip.op, clip.payload_bytes, clip.wire_bytes)
    assert clipping == ("step", "", "all_reduce", 4, 2 * 3 * 4)


def test_gathers_once_a_step_without_resharding(make_experiment, make_spec):
    record = simulate(
        make_experiment("zero2", accumulation=3, steps=1, warmup_steps=0), spec=make_spec(layers=2)
    )
    mine = [row for row in record.ledger if row.rank == 0]
    assert [(r.phase, r.layer) for r in mine if r.stream == "gather"] == [
        ("forward", unit) for unit in ("root", "block.0", "block.1")
    ]
    assert len([r for r in mine if r.stream == "reduce"]) == 9


@pytest.mark.parametrize(
    ("comm", "clipping", "precision", "rows"),
    [
        ("zero3", 1.0, Precision.bf16, 1),
        ("zero3", 0.0, Precision.bf16, 0),
        ("zero3", 0.0, Precision.fp16, 1),
        ("ddp", 1.0, Precision.fp16, 0),
        ("ps", 1.0, Precision.bf16, 0),
    ],
)
def test_clipping_leaves_a_row_where_gradients_are_sharded(
    make_experiment, make_spec, comm, clipping, precision, rows
):
    experiment = make_experiment(
        comm, train=TrainConf(gradient_clipping=clipping), precision=precision, steps=1, warmup_steps=0
    )
    record = simulate(experiment, spec=make_spec())
    assert len([r for r in record.ledger if r.stream == "library" and r.rank == 0]) == rows


def test_parameter_server_publishes_after_the_step(make_experiment, make_spec):
    record = simulate(make_experiment("ps", steps=1, warmup_steps=0), spec=make_spec(layers=2))
    mine = [(r.phase, r.op, r.layer) for r in record.ledger if r.rank == 0]
    assert mine == [
        *(("backward", "reduce", unit) for unit in ("block.1", "block.0", "root")),
        *(("step", "broadcast", unit) for unit in ("root", "block.0", "block.1")),
    ]
    spans = [s for s in record.spans if s.name == "step"]
    assert {s.rank for s in spans} == {0}


def test_validation_gathers_and_averages_the_loss(make_experiment, make_spec):
    train = TrainConf(eval_every=2, eval_batches=2)
    record = simulate(make_experiment("hpz", train=train, steps=4), spec=make_spec(layers=1))
    rows = [r for r in record.ledger if r.rank == 0 and r.phase == "eval"]
    assert [(r.iteration, r.op, r.layer, r.axis) for r in rows] == [
        (iteration, *what)
        for iteration in (1, 3)
        for what in [("all_gather", unit, "world") for unit in ("root", "block.0")] * 2
        + [("all_reduce", "", "world")]
    ]
    # with a copy that lives until the weights change, the second batch and the next step's forward use it
    experiment = make_experiment("hpz", train=train, steps=4, comm_keys={"hpz_lifetime": HpzLifetime.step})
    rows = [
        r
        for r in simulate(experiment, spec=make_spec(layers=1)).ledger
        if r.rank == 0 and r.stream == "gather"
    ]
    axes = {
        (i, p): [r.axis for r in rows if (r.iteration, r.phase) == (i, p)]
        for i in (1, 2)
        for p in ("eval", "forward")
    }
    assert axes[1, "eval"] == ["world"] * 2 + ["hpz"] * 2
    assert axes[1, "forward"] == ["world"] * 2
    assert axes[2, "forward"] == ["hpz"] * 2


@dataclass(frozen=True)
class OneHop8:
    """One-hop 8-bit gradients in two chunks: a policy that no engine knows."""

    name: str = "one_hop8"
    placement: Placement = Placement.sharded
    reshard_after_forward: bool = True
    hpz_size: int = 1
    copy_outlives_micro_batch: bool = False
    streams: tuple[str, str, str] = ("", "", "")

    def decide(self, event):
        if isinstance(event, WeightsNeeded):
            return Plan((AllGather(axis="world"),), "gather")
        if isinstance(event, GradientsReady):
            before, wire, behind = self.streams
            return Plan(
                (
                    Quantize(bits=8, block=256, exact_own="world", chunks=2, stream=before),
                    AllToAll(axis="world", chunks=2, stream=wire),
                    Dequantize(chunks=2, stream=behind),
                    Reduce(op=ReduceOp.mean, chunks=2, stream=behind),
                ),
                "reduce",
            )
        return None


def test_a_policy_of_ones_own_runs_on_every_engine(make_experiment, make_spec):
    for changes in ({}, {"comm_keys": {"overlap": True}}, {"cluster_backend": Backend.nccl}):
        record = simulate(make_experiment(**changes), spec=make_spec(), policy=OneHop8())
        rows = [r for r in record.ledger if r.rank == 0 and r.iteration == 0 and r.stream == "reduce"]
        assert [r.op for r in rows] == ["all_to_all"] * 6  # two chunks for each of three units
        assert record.result["status"] == "ok"


def test_chunks_on_several_streams_overlap(make_experiment, make_spec):
    """Streams are first in, first out: on three, a chunk is encoded while the one before travels."""
    probed = HostConf(codec_ns_per_element={"encode8": 10.0, "decode8": 10.0})
    changes = {"cluster_backend": Backend.nccl, "cluster_host": probed}
    inter = InterNodeConf(bandwidth_Bps=2e8)

    def took(streams):
        experiment = make_experiment(cluster_inter_node=inter, **changes)
        return simulate(experiment, spec=make_spec(hidden=512), policy=OneHop8(streams=streams)).result[
            "iteration_s"
        ]

    assert took(("encode", "wire", "decode"))["mean"] < 0.95 * took(("", "", ""))["mean"]


@dataclass(frozen=True)
class Broken(OneHop8):
    def decide(self, event):
        if isinstance(event, GradientsReady):
            return Plan((AllToAll(axis="world"),), "reduce")
        return super().decide(event)


def test_a_plan_that_misses_its_goal_is_refused(make_experiment, make_spec):
    with pytest.raises(ValueError, match=r"AllToAll.* ends with 4 part\(s\) of 1 plain slice"):
        simulate(make_experiment(), spec=make_spec(), policy=Broken())


def test_blocking_time_is_the_sum_of_its_parts(make_experiment, make_spec):
    """A step's time runs from the end of the last rank to the next such end. Two ranks end at once with the
    arrival of their last message; the two that sent them were done one latency before, start that much earlier,
    and count it too.
    """
    host = HostConf(
        compute_ns={
            "forward/block": 3_000_000,
            "backward/block": 6_000_000,
            "forward/root": 2_000_000,
            "backward/root": 4_000_000,
            "step": 1_000_000,
        }
    )
    record = simulate(make_experiment(cluster_host=host, steps=6), spec=make_spec(layers=2))
    result = record.result
    compute = 2 * 3 + 2 * 6 + 2 + 4 + 1
    assert result["phases_s"]["compute"] == pytest.approx(compute / 1e3)
    early_s = []
    for rank in result["ranks"]:
        parts = rank["compute"] + rank["comm_exposed"] + rank["quantize"] + rank["idle"]
        early_s.append(parts - result["iteration_s"]["mean"])
        assert rank["comm_exposed"] == rank["comm_total"]
    latency_s = TCP_LATENCY_NS / 1e9 + InterNodeConf().latency_ns / 1e9
    assert sorted(early_s) == pytest.approx([0, 0, latency_s, latency_s], abs=1e-9)


def test_sharing_cores_slows_only_what_overlaps(make_experiment, make_spec):
    compute = {"forward/block": 40_000_000, "backward/block": 80_000_000}

    def mean(cores, **keys):
        host = HostConf(
            compute_ns=compute,
            cores=cores,
            all_nodes=True,
            codec_ns_per_element={"encode8": 100.0, "decode8": 100.0},
        )
        experiment = make_experiment("qwz", cluster_host=host, comm_keys=keys, steps=6)
        return simulate(experiment, spec=make_spec()).result["iteration_s"]["mean"]

    assert mean(2, overlap=True) < mean(2)  # the thread hides something
    assert mean(0, overlap=True) < mean(2, overlap=True)  # but takes cores from the computation


def test_emulated_compute_sleeps_exactly(make_experiment, make_spec):
    spec = make_spec(layers=2)
    record = simulate(
        make_experiment(nodes=1, ranks=1, cluster_emulated_flops_per_s=1e9, cluster_host=HostConf(cores=1)),
        spec=spec,
    )
    forward = next(s for s in record.spans if s.name == "forward/block.0")
    tokens, h = 32, 64
    flop = 2 * tokens * 12 * h * h + 2 * 2 * tokens * tokens * h
    assert forward.end_ns - forward.start_ns == flop


def test_nccl_hides_gathers_behind_compute(make_experiment, make_spec):
    """Compute-bound: only the first gathers and the last reduction show."""
    spec = make_spec(layers=8, hidden=1024, sequence=128)
    fast = InterNodeConf(bandwidth_Bps=50e9, latency_ns=1_000)
    device = DeviceConf(flop_per_s=5e11, memory_Bps=1e12)
    record = simulate(
        make_experiment(cluster_backend=Backend.nccl, cluster_inter_node=fast, cluster_device=device),
        spec=spec,
    )
    phases = record.result["phases_s"]
    assert phases["comm_total"] > 0
    assert phases["comm_exposed"] < 0.35 * phases["comm_total"]
    spans = [s for s in record.spans if s.rank == 0]
    backward = next(s for s in spans if s.name == "backward/block.5")
    prefetch = [s for s in spans if s.name == "all_gather block.4"][1]
    assert backward.start_ns <= prefetch.start_ns < backward.end_ns


@pytest.mark.parametrize("comm", ["zero3", "zeropp", "ddp", "qgz"])
def test_folded_run_agrees_with_one_rank_at_a_time(make_experiment, make_spec, comm):
    spec = make_spec(layers=2, hidden=512)
    for nodes, ranks in ((2, 2), (4, 2)):
        experiment = make_experiment(comm, nodes=nodes, ranks=ranks, steps=5)
        folded, stepwise = (
            simulate(experiment, spec=spec, fold=True),
            simulate(experiment, spec=spec, fold=False),
        )
        a, b = folded.result["iteration_s"]["mean"], stepwise.result["iteration_s"]["mean"]
        assert a == pytest.approx(b, rel=0.01)
        assert expanded(folded) == expanded(stepwise)


def expanded(record):
    """Every rank's rows, in its order."""
    rows = {}
    for entry in record.result["classes"]:
        own = [replace(row, rank=0, count=1) for row in record.ledger if row.rank == entry["rank"]]
        for rank in RankClass(**entry).members():
            rows[rank] = own
    return rows


def test_steady_state_is_found_and_continued_exactly(make_experiment, make_spec):
    """20 steps, of which a few are simulated, equal 20 steps whose history is never compared."""
    from twinbed.sim.executor import Executor

    experiment, spec = make_experiment("zeropp", steps=20), make_spec()
    short = simulate(experiment, spec=spec)
    repeats = Executor._repeats
    try:
        Executor._repeats = lambda self, now: False
        whole = simulate(experiment, spec=spec)
    finally:
        Executor._repeats = repeats
    assert short == whole


def test_same_seed_same_files(make_experiment, make_spec, tmp_path):
    experiment = make_experiment("zeropp", steps=6)
    for name in ("a", "b"):
        write_record(tmp_path / name, simulate(experiment, spec=make_spec(), git_commit="abc"))
    for file in ("result.json", "ledger.csv", "decisions.jsonl", "timeline.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert read_record(tmp_path / "a").result["git_commit"] == "abc"


def test_more_bandwidth_is_never_slower(make_experiment, make_spec):
    for comm in ("zero3", "zeropp", "ps"):
        means = []
        for bandwidth in (5e6, 1e7, 2e7, 1e8, 1e9):
            inter = InterNodeConf(bandwidth_Bps=bandwidth)
            experiment = make_experiment(comm, cluster_inter_node=inter)
            means.append(simulate(experiment, spec=make_spec()).result["iteration_s"]["mean"])
        assert means == sorted(means, reverse=True)


def test_guessed_inputs_give_the_range(make_experiment, make_spec):
    guesses = {"device.matmul_efficiency": [0.25, 1.0], "inter_node.efficiency": [0.5, 1.0]}
    record = simulate(
        make_experiment(cluster_guesses=guesses, cluster_device=DeviceConf(flop_per_s=1e9)), spec=make_spec()
    )
    stats = record.result["iteration_s"]
    assert stats["low"] < stats["mean"] < stats["high"]
    assert [g["key"] for g in record.result["guessed_inputs"]] == [
        "cluster.device.matmul_efficiency",
        "cluster.inter_node.efficiency",
    ]
    with pytest.raises(ValueError, match=r"cluster.guesses has 'device.speed'"):
        simulate(make_experiment(cluster_guesses={"device.speed": [1, 2]}), spec=make_spec())


def test_flop_counts(make_experiment, make_spec):
    spec = make_spec(layers=2)
    record = simulate(make_experiment(recompute=Recompute.full, accumulation=2), spec=spec)
    result = record.result
    tokens, h, seconds = 2 * 32, 64, result["iteration_s"]["mean"]
    block = 2 * (2 * tokens * 12 * h * h + 2 * 2 * tokens * 32 * h)
    head = 2 * tokens * 256 * h
    assert result["tflops_per_gpu"] == pytest.approx(3 * (block + head) / seconds / 1e12)
    assert result["tflops_per_gpu_hardware"] == pytest.approx((4 * block + 3 * head) / seconds / 1e12)
    assert result["tokens_per_s"] == pytest.approx(4 * tokens / seconds)


def test_time_and_cost_of_a_training(make_experiment, make_spec):
    device = DeviceConf(price_per_hour=2.0)
    record = simulate(make_experiment(train=TrainConf(tokens=1e9), cluster_device=device), spec=make_spec())
    result = record.result
    assert result["time_to_train_s"] == pytest.approx(1e9 / result["tokens_per_s"])
    assert (
        result["cost"]
        == pytest.approx(2 * result["gpu_hours"])
        == pytest.approx(8 * result["time_to_train_s"] / 3600)
    )


def test_out_of_memory_is_a_result(make_experiment, make_spec):
    small = DeviceConf(memory_bytes=1e5)
    result = simulate(make_experiment(cluster_device=small), spec=make_spec()).result
    assert result["status"] == "oom"
    assert "cluster.device.memory_bytes" in result["error"]
    assert result["iteration_s"]["mean"] > 0
    json.dumps(result, allow_nan=False)


def test_states_of_zero_stages(make_experiment, make_spec):
    """16 bytes a parameter with Adam; ZeRO cuts optimizer states, then gradients, then weights."""
    spec = make_spec()
    parameters_ = num_parameters(spec)

    def states(comm, **changes):
        held = simulate(make_experiment(comm, steps=1, **changes), spec=spec).result["memory_bytes"]
        return tuple(
            held[key] / parameters_ for key in ("parameters", "gradients", "optimizer", "secondary_shard")
        )

    assert states("ddp") == (2, 2, 12, 0)
    assert states("zero1") == (2, 2, 3, 0)
    assert states("zero2") == (2, 0.5, 3, 0)
    # FSDP2 shards the fp32 weights themselves: the master copy is the parameter, its gradient fp32 too
    assert states("zero3") == (1, 1, 2, 0)
    assert states("hpz") == (1, 1, 2, 1)
    assert states("ddp", precision=Precision.fp32) == (4, 4, 8, 0)
    momentum = OptimizerConf(name="sgd", momentum=0.9)
    assert states("ddp", optimizer=momentum) == (2, 2, 8, 0)
    assert states("ddp", optimizer=OptimizerConf(name="sgd")) == (2, 2, 4, 0)


def test_recompute_keeps_fewer_activations_and_takes_longer(make_experiment, make_spec):
    spec = make_spec(layers=8)
    keys = {
        "cluster_device": DeviceConf(flop_per_s=1e9),
        "kernels": KernelsConf(attention=Attention.unfused, fusion=Fusion.fused, dropout=True),
    }
    kept = simulate(make_experiment(**keys), spec=spec).result
    again = simulate(make_experiment(recompute=Recompute.full, **keys), spec=spec).result
    assert again["memory_bytes"]["activations"] < kept["memory_bytes"]["activations"] / 3
    assert again["phases_s"]["compute"] == pytest.approx(kept["phases_s"]["compute"] * 4 / 3, rel=0.1)
    # s b h (34 + 5 a s / h) a block, input of the head and logits twice, and as much for their gradients
    block = 32 * 64 * (34 + 5 * 4 * 32 / 64)
    assert kept["memory_bytes"]["activations"] == 8 * block + 2 * (32 * 64 * 2 + 32 * 256 * 6)


def test_a_probe_without_a_block_is_refused(make_experiment, make_spec):
    host = HostConf(compute_ns={"forward/block": 1, "step": 1})
    with pytest.raises(ValueError, match=r"lacks 'backward/block.0'"):
        simulate(make_experiment(cluster_host=host), spec=make_spec())


def test_one_rank_has_no_collectives(make_experiment, make_spec):
    record = simulate(make_experiment(nodes=1, ranks=1), spec=make_spec())
    assert record.ledger == []
    assert record.result["iteration_s"]["mean"] > 0


def test_odd_sizes_pad_up_to_the_world(make_experiment, make_spec):
    spec = make_spec(layers=1, hidden=36, vocab=61, sequence=19)
    record = simulate(make_experiment(nodes=2, ranks=4, steps=1, batch=BatchConf(sequence=19)), spec=spec)
    root = next(r for r in record.ledger if r.layer == "root")
    rows = [-(-t.shape[0] // 8) * (t.numel // t.shape[0]) for t in parameters(spec)[0].tensors]
    assert root.payload_bytes == 8 * sum(rows) * 2
    assert root.wire_bytes == 7 * sum(rows) * 2


def test_time_does_not_grow_with_equal_ranks(make_experiment, make_spec):
    """The same number of items, events and classes at 384 and at 16,384 ranks."""
    counts = []
    for nodes in (24, 1024):
        experiment = make_experiment("zeropp", nodes=nodes, ranks=16, cluster_backend=Backend.nccl)
        record = simulate(experiment, spec=make_spec(layers=4))
        counts.append((len(record.ledger), len(record.spans), len(record.result["classes"])))
        assert sum(c["count"] for c in record.result["classes"]) == nodes * 16
    assert counts[0] == counts[1]


def test_states_of_a_hundred_billion_parameters_on_1024_gpus(make_experiment):
    """ZeRO-3 1.5625 GB; hpZ adds 12.5 (9.0 times); plain data parallelism 1,600 (113.8 times hpZ)."""
    held = {}
    for comm in ("zero3", "hpz", "ddp"):
        conf = make_experiment(comm).comm
        policy, _ = build_comm(conf, num_ranks=1024, ranks_per_node=16)
        held[comm] = state_bytes(policy, num_parameters=100 * 10**9, num_ranks=1024)
    assert held["zero3"].total / 1e9 == pytest.approx(1.5625, abs=1e-6)
    assert held["hpz"].secondary_shard / 1e9 == 12.5
    assert held["hpz"].total / held["zero3"].total == pytest.approx(9.0, abs=0.01)
    assert held["ddp"].total == 1_600 * 10**9
    assert held["ddp"].total / held["hpz"].total == pytest.approx(113.8, abs=0.05)


def test_a_ring_that_requantizes_pays_for_each_hop(make_experiment, make_spec):
    """Encoding before the first send, and decoding, adding and encoding on the way: 3 hops on 4 ranks."""
    host = HostConf(codec_ns={"encode4": 1_000_000, "decode4": 1_000_000})
    keys = {"gradient_path": GradientPath.ring}
    runs = [
        simulate(
            make_experiment("qgz", nodes=4, ranks=1, cluster_host=h, comm_keys=keys), spec=make_spec(layers=1)
        )
        for h in (HostConf(), host)
    ]
    sent = next(r for r in runs[0].ledger if r.rank == 0 and r.stream == "reduce")
    assert sent.op == "reduce_scatter"
    assert sent.wire_bytes < 0.4 * sent.payload_bytes * 3 / 4
    slower = runs[1].result["iteration_s"]["mean"] - runs[0].result["iteration_s"]["mean"]
    assert slower == pytest.approx(2 * 6e-3, rel=0.05)  # two units, three encodings and three decodings
