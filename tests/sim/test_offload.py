"""Offload in simulated time: bytes moved and times against hand counts, sharing of links, memory, refusals."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import simpy

import twinbed.sim.validate
from twinbed.conf.compose import compose
from twinbed.conf.model_spec import num_parameters, parameters
from twinbed.conf.schema import (
    Backend,
    ClusterConf,
    DeviceConf,
    DiskConf,
    Engine,
    HostConf,
    OffloadConf,
    OffloadKind,
    Precision,
    TrainConf,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.offload import describe_offload_actions, parse_offload_event
from twinbed.sim.costs import Costs
from twinbed.sim.engines import Fsdp2, Setup
from twinbed.sim.far import FarMemory, Move, Way
from twinbed.sim.network import Network
from twinbed.sim.simulate import simulate
from twinbed.sim.validate.evaluated import Evaluator
from twinbed.sim.validate.rows import read_rows

FAST = 1e15
ADAMW_BYTES = 28  # gradient, weight and two moments read, weight and moments written, 4 each


@pytest.fixture
def on_gpus(make_experiment):
    """offload=cpu on one GPU, or several, whose computation takes what `compute_ns` says."""

    def make(offload, *, ranks=1, nodes=1, host=None, compute=1_000_000, disk=None, **changes):
        keys = {"pcie_Bps": 1e9, "memory_Bps": FAST, "step_cores": ranks, "core_Bps": 4e9, "copy_ns": 0}
        compute_ns = {f"{p}/{unit}": compute for p in ("forward", "backward") for unit in ("root", "block")}
        return make_experiment(
            nodes=nodes,
            ranks=ranks,
            cluster_backend=Backend.nccl,
            cluster_host=HostConf(compute_ns=compute_ns, **(keys | (host or {}))),
            cluster_disk=disk or DiskConf(),
            cluster_device=DeviceConf(memory_Bps=FAST),
            train=TrainConf(gradient_clipping=0.0),
            offload=offload,
            **({"steps": 4, "warmup_steps": 3} | changes),
        )

    return make


def seconds(record):
    return record.result["iteration_s"]["mean"]


def sizes(spec):
    return {unit.name: sum(t.numel for t in unit.tensors) for unit in parameters(spec)}


def test_two_and_two_bytes_a_parameter(on_gpus, make_spec):
    """ZeRO-Offload: gradients down and weights up, both in 16 bits, and 28 bytes of host memory each."""
    spec = make_spec()
    n = num_parameters(spec)
    conf = OffloadConf(name="cpu", parameters=0.0, fp32=False)
    record = simulate(on_gpus(conf), spec=spec)
    assert record.result["moved_bytes"] == {"fetch": 2 * n, "evict": 2 * n, "host_step": ADAMW_BYTES * n}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("fp32", "each"), [(True, 4), (False, 2)])
def test_weights_outside_come_in_for_each_gather(on_gpus, make_spec, fp32, each, prefetch):
    """FSDP2's CPU offload: fp32 weights go up for both gathers of a micro-batch, and gradients go down."""
    spec = make_spec(layers=3)
    n, micro_batches = num_parameters(spec), 2
    conf = OffloadConf(name="cpu", fp32=fp32, prefetch=prefetch)
    moved = simulate(on_gpus(conf, accumulation=micro_batches), spec=spec).result["moved_bytes"]
    assert moved["evict"] == micro_batches * each * n
    # the second micro-batch's gradients are added to the first's: two read, one written
    assert moved["host_step"] == (ADAMW_BYTES + 3 * each) * n
    if prefetch < 3:
        assert moved["fetch"] == micro_batches * 2 * each * n
    else:  # what forward used last is used again soon enough to stay
        assert moved["fetch"] < micro_batches * 2 * each * n


def test_clipping_reads_gradients_once_more_and_scales_them(on_gpus, make_spec):
    spec = make_spec()
    n = num_parameters(spec)
    experiment = on_gpus(OffloadConf(name="cpu"))
    experiment.train.gradient_clipping = 1.0
    assert simulate(experiment, spec=spec).result["moved_bytes"]["host_step"] == (ADAMW_BYTES + 4 + 8) * n


def test_a_step_by_hand(on_gpus, make_spec):
    """One GPU, 1 ns a byte of PCIe and 4 bytes a nanosecond of the host.

    Gradients go down beside the backward pass, but for those of the first block and the root, which come last; the
    host steps unit after unit, and a unit's weights go up while it steps the next.
    """
    spec = make_spec()
    unit = sizes(spec)
    n, last = sum(unit.values()), list(unit.values())[-1]
    record = simulate(on_gpus(OffloadConf(name="cpu", parameters=0.0, fp32=False)), spec=spec)
    computation = 2 * (1 + spec.layers) * 1_000_000
    tail = 2 * (unit["block.0"] + unit["root"]) + ADAMW_BYTES // 4 * n + 2 * last
    assert seconds(record) * 1e9 == computation + tail
    phases = record.result["phases_s"]
    assert phases["offload"] * 1e9 == pytest.approx(tail)
    assert phases["compute"] * 1e9 == pytest.approx(computation)


def test_fetches_hide_behind_gathers_once_the_order_is_known(on_gpus, make_spec):
    """The first iteration fetches when needed and the room of the last chunk is free, the next ones a chunk ahead."""
    spec = make_spec(layers=4)

    def run(prefetch, **changes):
        conf = OffloadConf(name="cpu", fp32=False, prefetch=prefetch)
        # a lane as slow as the network
        return simulate(
            on_gpus(conf, nodes=2, host={"pcie_Bps": 12.5e6}, compute=1_000, **changes), spec=spec
        )

    ahead, when_needed = (seconds(run(prefetch)) for prefetch in (1, 0))
    assert ahead < 0.8 * when_needed
    times = run(1, steps=3, warmup_steps=0).result["iteration_s"]
    assert (times["max"], times["min"]) == (when_needed, ahead)


def test_gpus_of_one_lane_share_it_and_all_share_the_host(on_gpus, make_spec):
    spec, conf = make_spec(), OffloadConf(name="cpu", fp32=False)

    def time(fold=None, **host):
        return seconds(simulate(on_gpus(conf, ranks=4, host=host), spec=spec, fold=fold))

    alone = time()
    assert time(pcie_ranks=2) == time(pcie_Bps=0.5e9) > alone
    assert time(pcie_ranks=4) == time(pcie_Bps=0.25e9)
    assert time(memory_Bps=4e9) > alone
    for host in ({}, {"pcie_ranks": 2}, {"memory_Bps": 6e9}):
        assert time(fold=False, **host) == pytest.approx(time(**host), rel=1e-6)


@pytest.mark.parametrize(
    ("pinned", "memory_Bps", "ns"),
    [
        (True, FAST, 3_000),  # PCIe, 1 ns a byte
        (True, 0.5e9, 6_000),  # the host's memory is read once
        (False, FAST, 4_000),  # through the driver's buffer, at most 0.75 bytes a nanosecond
        (False, 0.9e9, 10_000),  # read, written and read again: 0.3 bytes a nanosecond
    ],
)
def test_memory_that_is_not_pinned_is_slower_and_passed_three_times(pinned, memory_Bps, ns):
    host = HostConf(pcie_Bps=1e9, memory_Bps=memory_Bps, pageable_Bps=0.75e9, copy_ns=0)
    cluster = ClusterConf(name="t", nodes=1, devices_per_node=1, backend=Backend.nccl, host=host)
    env = simpy.Environment()
    conf = OffloadConf(name="cpu", pinned=pinned)
    far = FarMemory(cluster, conf, Network(env), per_host=1, shares=None)
    env.run(until=far.run(0, Move(Way.fetch, 3_000)))
    assert env.now == ns


def test_a_disk_is_shared_by_a_node_and_has_a_latency():
    disk = DiskConf(read_Bps=1e9, write_Bps=0.5e9, latency_ns=100)
    cluster = ClusterConf(name="t", nodes=2, devices_per_node=2, disk=disk)
    env = simpy.Environment()
    far = FarMemory(cluster, OffloadConf(name="disk"), Network(env), per_host=2, shares=None)
    ends = {}
    for rank, way in ((0, Way.fetch), (1, Way.fetch), (2, Way.fetch), (3, Way.evict)):
        far.run(rank, Move(way, 1_000)).callbacks.append(lambda _, rank=rank: ends.setdefault(rank, env.now))
    env.run()
    assert ends == {0: 2_100, 1: 2_100, 2: 1_100, 3: 2_100}


def test_chunks_of_one_rank_share_what_its_store_moves():
    """Measured moves: a fixed time each, and a rate of the rank's own below the disk's."""
    disk = DiskConf(read_Bps=4e9, write_Bps=4e9, fetch_ns=50, fetch_Bps=1e9, evict_ns=30, evict_Bps=0.5e9)
    cluster = ClusterConf(name="t", nodes=1, devices_per_node=2, disk=disk)
    env = simpy.Environment()
    far = FarMemory(cluster, OffloadConf(name="disk"), Network(env), per_host=2, shares=None)
    ends = []
    for rank, way in ((0, Way.fetch), (0, Way.fetch), (1, Way.fetch), (0, Way.evict)):
        far.run(rank, Move(way, 1_000)).callbacks.append(lambda _: ends.append(env.now))
    env.run()
    assert sorted(ends) == [1_050, 2_030, 2_050, 2_050]


def test_a_faster_lane_is_never_slower(on_gpus, make_spec):
    spec = make_spec(layers=3)
    for conf in (
        OffloadConf(name="cpu"),
        OffloadConf(name="cpu", parameters=0.4, optimizer=0.7, prefetch=2),
        OffloadConf(name="cpu", policy=OffloadKind.auto, memory_bytes=2e6, activations=0.1),
    ):
        times = [
            seconds(simulate(on_gpus(conf, ranks=2, host={"pcie_Bps": rate}), spec=spec))
            for rate in (1e8, 1e9, 1e10, 1e11)
        ]
        assert all(slow >= fast for slow, fast in pairwise(times))


def test_disk_on_a_cpu_machine_by_bytes(make_experiment, make_spec):
    """Weights are read for two gathers and the step, moments for the step; both are written back."""
    spec = make_spec()
    n = num_parameters(spec)
    experiment = make_experiment(
        nodes=1,
        ranks=1,
        cluster_disk=DiskConf(read_Bps=1e9, write_Bps=1e9),
        offload=OffloadConf(name="disk", prefetch=0),
    )
    plain = simulate(make_experiment(nodes=1, ranks=1), spec=spec)
    record = simulate(experiment, spec=spec)
    assert record.result["moved_bytes"] == {"fetch": 20 * n, "evict": 12 * n, "commit": 0}
    # a single thread, nothing fetched ahead: all reads are waited for, the last write too
    assert seconds(record) >= seconds(plain) + 20 * n / 1e9
    assert record.result["far_memory_bytes"]["total"] == 12 * n


@pytest.mark.parametrize("comm", ["zero1", "zero2", "zero3", "zeropp"])
def test_collectives_are_those_without_offload(make_experiment, make_spec, comm):
    disk, spec = DiskConf(read_Bps=1e9, write_Bps=1e9), make_spec()
    plain, record = (
        simulate(make_experiment(comm, cluster_disk=disk, offload=OffloadConf(name=name)), spec=spec)
        for name in ("none", "disk")
    )
    assert record.ledger == plain.ledger
    assert seconds(record) > seconds(plain)


def test_a_slower_disk_is_slower_in_proportion(make_experiment, make_spec):
    spec, times = make_spec(), []
    for rate in (1e8, 1e7):
        disk = DiskConf(read_Bps=rate, write_Bps=rate, latency_ns=0)
        experiment = make_experiment(
            nodes=1, ranks=1, cluster_disk=disk, offload=OffloadConf(name="disk", prefetch=0)
        )
        times.append(seconds(simulate(experiment, spec=spec)))
    plain = seconds(simulate(make_experiment(nodes=1, ranks=1), spec=spec))
    assert (times[1] - plain) / (times[0] - plain) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("memory_bytes", [1e9, None])
def test_what_fits_stays_near_after_the_first_iteration(make_experiment, make_spec, memory_bytes):
    conf = OffloadConf(name="disk", policy=OffloadKind.auto, memory_bytes=memory_bytes)
    spec = make_spec()
    moved, took = {}, {}
    for every in (0, 1, 2):
        given = replace(conf, commit_every=every)
        disk = DiskConf(read_Bps=1e9, write_Bps=1e9)
        record = simulate(
            make_experiment(nodes=1, ranks=2, cluster_disk=disk, offload=given, steps=4), spec=spec
        )
        moved[every], took[every] = record.result["moved_bytes"], record.result["iteration_s"]["max"]
    shard = -(-num_parameters(spec) // 2)
    assert moved[0] == moved[2] | {"commit": 0} == {"fetch": 0, "evict": 0, "commit": 0}
    assert moved[1]["commit"] == pytest.approx(
        12 * shard, rel=0.01
    )  # each step writes all that it has changed
    assert took[1] > took[0] + 2 * 12 * shard / 1e9 * 0.9  # both ranks, one disk


def test_auto_moves_less_with_more_memory(make_experiment, make_spec):
    spec = make_spec(layers=6)
    n = num_parameters(spec)
    fetched = []
    for share in (0.6, 0.8, 1.0):
        conf = OffloadConf(name="disk", policy=OffloadKind.auto, memory_bytes=share * 12 * n, activations=0.0)
        experiment = make_experiment(
            nodes=1, ranks=1, cluster_disk=DiskConf(read_Bps=1e9, write_Bps=1e9), offload=conf, steps=5
        )
        result = simulate(experiment, spec=spec).result
        fetched.append(result["moved_bytes"]["fetch"])
        states = result["memory_bytes"]["parameters"] + result["memory_bytes"]["optimizer"]
        assert states <= share * 12 * n
    assert fetched[0] > fetched[1] > fetched[2] == 0


def test_states_leave_the_gpu_for_the_host(on_gpus, make_spec):
    """fp32 weights 4, their gradients 4 and moments 8: what is not on the GPU is in the host."""
    spec = make_spec(layers=8)
    n, ranks = num_parameters(spec), 2
    plain = simulate(on_gpus(OffloadConf(), ranks=ranks), spec=spec).result
    record = simulate(on_gpus(OffloadConf(name="cpu", prefetch=0), ranks=ranks), spec=spec).result
    held, far = record["memory_bytes"], record["far_memory_bytes"]
    largest = max(sizes(spec).values())
    assert plain["memory_bytes"]["optimizer"] == pytest.approx(8 * n / ranks, rel=0.01)
    assert held["optimizer"] == 0
    assert held["parameters"] == held["gradients"] == pytest.approx(4 * largest / ranks, rel=0.01)
    assert far == {
        key: pytest.approx(each * n, rel=0.01)
        for key, each in {"parameters": 4, "gradients": 4, "optimizer": 8, "total": 16}.items()
    }
    assert held["activations"] == plain["memory_bytes"]["activations"]
    assert held["peak"] < plain["memory_bytes"]["peak"]


def test_zero_offload_keeps_2_bytes_a_parameter_on_the_gpu(on_gpus, make_spec):
    spec = make_spec()
    n = num_parameters(spec)
    conf = OffloadConf(name="cpu", parameters=0.0, fp32=False)
    record = simulate(on_gpus(conf, precision=Precision.fp16), spec=spec).result
    assert record["memory_convention"] == "2+14"
    assert record["memory_bytes"]["parameters"] == 2 * n
    assert record["far_memory_bytes"]["optimizer"] == 12 * n


def test_a_full_host_is_said(on_gpus, make_spec):
    experiment = on_gpus(OffloadConf(name="cpu"), host={"memory_bytes": 1e3})
    result = simulate(experiment, spec=make_spec()).result
    assert result["status"] == "oom"
    assert "host memory" in result["error"]
    assert "cluster.host.memory_bytes is 1e-06 GB" in result["error"]


def test_a_disk_holds_two_generations(make_experiment, make_spec):
    spec = make_spec()
    need = 2 * 12 * num_parameters(spec)
    for capacity, status in ((need * 1.01, "ok"), (need * 0.99, "oom")):
        disk = DiskConf(read_Bps=1e9, write_Bps=1e9, capacity_bytes=capacity)
        experiment = make_experiment(nodes=1, ranks=1, cluster_disk=disk, offload=OffloadConf(name="disk"))
        result = simulate(experiment, spec=spec).result
        assert result["status"] == status
    assert "two generations" in result["error"]


def test_too_many_chunks_are_refused(on_gpus, make_spec):
    conf = OffloadConf(name="cpu", chunk_bytes=1)
    with pytest.raises(
        ValueError, match=r"offload.chunk_bytes=1 cuts the parameters of one rank into \d+ chunks"
    ):
        simulate(on_gpus(conf), spec=make_spec(hidden=128))


def test_decisions_replay(on_gpus, make_spec):
    """The log's events, given to a new policy, give the log's actions."""
    spec = make_spec(layers=3)
    conf = OffloadConf(name="cpu", policy=OffloadKind.auto, memory_bytes=5e5, activations=0.2)
    experiment = on_gpus(conf, ranks=2)
    record = simulate(experiment, spec=spec)
    comm, _ = build_comm(experiment.comm, num_ranks=2, ranks_per_node=2)
    policy = Fsdp2(Setup(experiment, spec, comm, Costs(experiment, spec, comm))).offload.policy
    replayed = 0
    for decision in record.decisions:
        if decision.event.startswith(("Weights", "Gradients")):
            continue
        answer = policy.decide(parse_offload_event(decision.event))
        assert describe_offload_actions(answer) == decision.action
        replayed += 1
    assert replayed > 50


def test_a_validation_fetches_weights_too(on_gpus, make_spec):
    experiment = on_gpus(OffloadConf(name="cpu"), steps=2, warmup_steps=0)
    experiment.train.eval_every = 1
    record = simulate(experiment, spec=make_spec())
    events = [d.event for d in record.decisions if d.event.startswith("IterationBegins")]
    assert events == [f"IterationBegins(kind={kind})" for kind in ("train", "eval")] * 2
    assert {span.stream for span in record.spans} >= {"fetch", "evict", "host_step"}


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["engine=deepspeed", "cluster=dgx_a100"], r"offload=cpu .*engine=fsdp2 only, got engine=deepspeed"),
        (["engine=megatron", "cluster=dgx_a100", "comm=ddp"], r"got engine=megatron"),
        (["cluster=dgx_a100", "comm=ddp"], r"comm=ddp replicates"),
        (["cluster=local_2x2"], r"offload=cpu needs GPUs"),
        (["cluster=mixed_v100_a100"], r"cluster\.host\.pcie_Bps=None: must be given for cluster=mixed"),
        (["cluster=dgx_a100", "cluster.host.step_cores=0"], r"cluster\.host\.step_cores=None"),
        (["cluster=dgx_a100", "optimizer=lamb"], r"optimizer=lamb with offload=cpu"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(overrides, match):
    with pytest.raises(ValueError, match=match):
        compose(["target=sim", "offload=cpu", *overrides])


def test_an_engine_without_offload_refuses_it_without_hydra_too(on_gpus, make_spec):
    experiment = on_gpus(OffloadConf(name="cpu"), engine=Engine.deepspeed)
    with pytest.raises(ValueError, match="engine=fsdp2 only"):
        simulate(experiment, spec=make_spec())


def test_keys_without_effect_are_named():
    warnings = compose(["target=sim", "offload.prefetch=2", "offload.chunk_bytes=1000"]).warnings
    assert "offload.prefetch=2 has no effect with offload=none" in warnings
    assert "offload.chunk_bytes=1000 has no effect with offload=none" in warnings
    warnings = compose(
        ["target=sim", "cluster=dgx_a100", "comm=zero3", "offload=cpu", "offload.activations=0.1"]
    ).warnings
    assert "offload.activations=0.1 has no effect with offload=cpu and offload.policy=static" in warnings
    warnings = compose(
        ["target=sim", "offload=disk", "offload.io_threads=1", "offload.path=/nowhere"]
    ).warnings
    assert "offload.io_threads=1 has no effect with target=sim" in warnings
    assert "offload.path=/nowhere has no effect with target=sim" in warnings


def test_a_peak_above_the_budget_of_chunks_is_said(on_gpus, make_spec):
    conf = OffloadConf(name="cpu", activations=0.0)
    peak = simulate(on_gpus(conf), spec=make_spec()).result["memory_bytes"]["peak"]
    for budget, said in ((peak - 1, True), (peak, False)):
        record = simulate(on_gpus(replace(conf, memory_bytes=float(budget))), spec=make_spec())
        assert record.result["memory_bytes"]["peak"] == peak
        warned = [warning for warning in record.result["warnings"] if "chunks keep to it" in warning]
        assert len(warned) == said
        assert all(warning.startswith("offload.memory_bytes=") for warning in warned)


def test_the_published_row_runs():
    """GPT-3 on 64 GPUs: shown with its error, and held to nothing."""
    rows = read_rows(Path(twinbed.sim.validate.__file__).parent / "rows" / "colossal.csv")
    (row,) = [row for row in rows if row.row_id == "gpt3_colossal_64"]
    found = Evaluator().evaluate(row)
    assert found.reason == ""
    assert found.ours is not None
    assert found.low <= found.ours <= found.high
