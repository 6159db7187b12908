"""What must hold for any cluster, collective and experiment."""

from dataclasses import replace
from itertools import pairwise

import pytest
import simpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twinbed.analysis.record import write_record
from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import (
    Backend,
    ClusterConf,
    CommConf,
    DataConf,
    DeviceConf,
    ExperimentConf,
    InterNodeConf,
    IntraNodeConf,
    ModelConf,
    NodeKind,
    OptimizerConf,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.ledger import Ledger
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import Topology

SPEC = spec_from_keys({"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "sequence": 32})
GATHERS = ("all_gather", "reduce_scatter", "all_to_all")
OPS = (*GATHERS, "all_reduce", "broadcast", "reduce", "reduce_tree")


def experiment_of(cluster, comm="zero3", **keys):
    quantized = {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": None,
    }
    stage = {"zero3": {}, "ddp": {"zero_stage": 0}, "zeropp": quantized}[comm]
    return ExperimentConf(
        cluster=cluster,
        model=ModelConf(name="m"),
        comm=CommConf(name=comm, **stage),
        data=DataConf(name="synthetic"),
        optimizer=OptimizerConf(name="adamw"),
        **({"steps": 3, "warmup_steps": 1} | keys),
    )


@st.composite
def clusters(draw, backends=(Backend.nccl, Backend.gloo), plain=False):
    nodes, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    assume(nodes * ranks > 1)
    backend = draw(st.sampled_from(backends))
    inner = {
        "bandwidth_Bps": draw(st.floats(1e9, 3e11)),
        "latency_ns": draw(st.integers(0, 50_000)),
    }
    outer = {
        "bandwidth_Bps": draw(st.floats(1e7, 5e10)),
        "latency_ns": draw(st.integers(0, 1_000_000)),
        "links": draw(st.integers(1, 8)),
    }
    keys = {}
    if not plain and backend is Backend.nccl:
        kind = draw(st.sampled_from(list(NodeKind)))
        inner |= {"kind": kind, "pcie_Bps": 12e9, "host_Bps": 60e9} if kind is not NodeKind.nvswitch else {}
        outer |= {"rails": draw(st.booleans())}
        if nodes % 2 == 0 and draw(st.booleans()):
            outer |= {"nodes_per_leaf": nodes // 2, "oversubscription": draw(st.floats(1, 8))}
        if nodes % 2 == 0 and draw(st.booleans()):
            keys = {"sites": 2, "wan_Bps": draw(st.floats(1e8, 1e10)), "wan_latency_ns": 1_000_000}
    return ClusterConf(
        name="c",
        nodes=nodes,
        devices_per_node=ranks,
        backend=backend,
        device=DeviceConf(flop_per_s=1e10, memory_Bps=1e11),
        intra_node=IntraNodeConf(**inner),
        inter_node=InterNodeConf(**outer),
        **keys,
    )


def transfer_of(op, mesh, axis, part_bytes):
    size = mesh.size(axis)
    whole = size * part_bytes
    return Transfer(op, axis, size, whole, part_bytes if op in GATHERS else whole, whole // 4, 4)


def collective_ns(cluster, op, axis, part_bytes, *, fold, count=None, repeats=1):
    """Nanoseconds of a collective alone. `count`: where bytes sent and received are added up."""
    experiment = experiment_of(cluster)
    policy, _ = build_comm(
        experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
    )
    mesh = Mesh(cluster.num_ranks, cluster.devices_per_node)
    machine = Machine(simpy.Environment(), Costs(experiment, SPEC, policy), Topology(cluster), folded=fold)
    machine.skew_ns = 0
    if count is not None:
        send = machine.send

        def counted(source, target, nbytes, **keys):
            count["sent"][source] = count["sent"].get(source, 0) + nbytes
            done = send(source, target, nbytes, **keys)

            def arrived(_):
                count["received"][target] = count["received"].get(target, 0) + nbytes

            done.callbacks.append(arrived)
            return done

        machine.send = counted
    writer = Writer(merge=False)
    for _ in range(repeats):
        writer.transfer(MAIN, "gather", "forward", "a", transfer_of(op, mesh, axis, part_bytes))
    collectives = (Folded if fold else PerStep)(machine, mesh)
    ranks = [0] if fold else range(mesh.num_ranks)
    timings = Executor(machine, collectives, ranks).run([Segment(0, False, {0: writer.program})])
    return max(own[0].end_ns for own in timings.values())


axes = st.sampled_from(["world", "local", "node"])
parts = st.integers(1, 1 << 16).map(lambda n: 4 * n)


def usable(cluster, axis):
    assume(Mesh(cluster.num_ranks, cluster.devices_per_node).size(axis) > 1)


@settings(deadline=None, max_examples=60)
@given(cluster=clusters(backends=(Backend.nccl,)), op=st.sampled_from(GATHERS), axis=axes, part=parts)
def test_nccls_bytes_sent_are_the_ledgers_and_all_arrive(cluster, op, axis, part):
    usable(cluster, axis)
    mesh, count = Mesh(cluster.num_ranks, cluster.devices_per_node), {"sent": {}, "received": {}}
    collective_ns(cluster, op, axis, part, fold=False, count=count)
    ledger, transfer = Ledger(mesh), transfer_of(op, mesh, axis, part)
    wire = {rank: ledger.sent(rank, transfer).wire_bytes for rank in range(mesh.num_ranks)}
    assert count["sent"] == pytest.approx(wire)
    assert sum(count["received"].values()) == pytest.approx(sum(wire.values()))


@settings(deadline=None, max_examples=100)
@given(cluster=clusters(), op=st.sampled_from(OPS), axis=axes, part=parts, factor=st.floats(1, 10))
def test_more_bandwidth_and_less_latency_are_never_slower(cluster, op, axis, part, factor):
    usable(cluster, axis)
    took = collective_ns(cluster, op, axis, part, fold=True)
    inner, outer = cluster.intra_node, cluster.inter_node
    for better in (
        replace(cluster, inter_node=replace(outer, bandwidth_Bps=outer.bandwidth_Bps * factor)),
        replace(cluster, intra_node=replace(inner, bandwidth_Bps=inner.bandwidth_Bps * factor)),
        replace(cluster, inter_node=replace(outer, latency_ns=int(outer.latency_ns / factor))),
        replace(cluster, intra_node=replace(inner, latency_ns=int(inner.latency_ns / factor))),
    ):
        assert collective_ns(better, op, axis, part, fold=True) <= took * (1 + 1e-9) + 3


@settings(deadline=None, max_examples=100)
@given(cluster=clusters(), op=st.sampled_from(GATHERS), axis=axes, part=parts, cuts=st.integers(2, 4))
def test_splitting_a_buffer_never_beats_the_bandwidth_bound(cluster, op, axis, part, cuts):
    usable(cluster, axis)
    part = part * cuts
    mesh = Mesh(cluster.num_ranks, cluster.devices_per_node)
    at_once = collective_ns(cluster, op, axis, part, fold=True)
    cut = collective_ns(cluster, op, axis, part // cuts, fold=True, repeats=cuts)
    assert cut >= at_once - cuts - 1
    # gloo's ranks have a connection to each peer, and so have GPUs wired in pairs; others have one way for all
    own_ways = cluster.backend is Backend.gloo or cluster.intra_node.kind is NodeKind.nvlink_pairs
    sent = part if op == "all_to_all" and own_ways else (mesh.size(axis) - 1) * part
    assert at_once >= sent / max(cluster.intra_node.bandwidth_Bps, cluster.inter_node.node_Bps) * 1e9 * (
        1 - 1e-9
    )


@settings(deadline=None, max_examples=80)
@given(cluster=clusters(backends=(Backend.nccl,)), op=st.sampled_from(OPS), axis=axes, part=parts)
def test_folded_is_unfolded(cluster, op, axis, part):
    usable(cluster, axis)
    folded = collective_ns(cluster, op, axis, part, fold=True)
    unfolded = collective_ns(cluster, op, axis, part, fold=False)
    assert folded == pytest.approx(unfolded, rel=0.01, abs=100)


@settings(deadline=None, max_examples=25)
@given(
    cluster=clusters(), comm=st.sampled_from(["zero3", "ddp", "zeropp"]), factor=st.sampled_from([1.0, 2.0])
)
def test_busy_and_idle_are_the_span(cluster, comm, factor):
    """Compute, codecs, exposed communication and waiting add up to the step, of every class of ranks."""
    cluster = replace(cluster, slowdown={0: factor} if factor > 1 else None)
    result = simulate(experiment_of(cluster, comm, steps=1, warmup_steps=0), spec=SPEC, fold=True).result
    for rank in result["ranks"]:
        parts_s = [rank[key] for key in ("compute", "quantize", "comm_exposed", "idle")]
        assert min(parts_s) >= 0
        assert sum(parts_s) == pytest.approx(result["iteration_s"]["mean"], rel=1e-6)
        assert rank["comm_exposed"] <= rank["comm_total"] + 1e-9


@settings(deadline=None, max_examples=25)
@given(
    cluster=clusters(backends=(Backend.nccl,)),
    comm=st.sampled_from(["zero3", "ddp", "zeropp"]),
    factor=st.floats(1.1, 4.0),
    data=st.data(),
)
def test_relabelling_equal_ranks_changes_nothing(cluster, comm, factor, data):
    # of an odd number of GPUs wired in pairs the last has none beside it: not an equal of the others
    paired = cluster.intra_node.kind is NodeKind.nvlink_pairs
    assume(not (paired and cluster.devices_per_node % 2))
    first, second = (data.draw(st.integers(0, cluster.num_ranks - 1)) for _ in range(2))
    means = [
        simulate(experiment_of(replace(cluster, slowdown={rank: factor}), comm), spec=SPEC).result[
            "iteration_s"
        ]["mean"]
        for rank in (first, second)
    ]
    assert means[0] == pytest.approx(means[1], rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    cluster=clusters(backends=(Backend.nccl,)),
    comm=st.sampled_from(["zero3", "ddp", "zeropp"]),
    factors=st.dictionaries(st.integers(0, 15), st.floats(1.0, 3.0), max_size=3),
)
def test_every_rank_apart_takes_as_long_as_its_class(cluster, comm, factors):
    slowdown = {rank: factor for rank, factor in factors.items() if rank < cluster.num_ranks}
    experiment = experiment_of(replace(cluster, slowdown=slowdown), comm, steps=4)
    folded = simulate(experiment, spec=SPEC).result
    apart = _apart(experiment)
    assert folded["iteration_s"]["mean"] == pytest.approx(apart["iteration_s"]["mean"], rel=1e-6)


def _apart(experiment):
    """Every rank a class of its own, collectives as flows."""
    from twinbed.sim import run

    limit = run.MAX_STEPWISE_RANKS
    try:
        run.MAX_STEPWISE_RANKS = 0
        return simulate(experiment, spec=SPEC, fold=False).result
    finally:
        run.MAX_STEPWISE_RANKS = limit


def test_slower_ranks_are_never_faster():
    cluster = ClusterConf(
        name="c",
        nodes=4,
        devices_per_node=4,
        backend=Backend.nccl,
        device=DeviceConf(flop_per_s=1e9, memory_Bps=1e11),
        inter_node=InterNodeConf(bandwidth_Bps=1e9),
    )
    means = [
        simulate(experiment_of(replace(cluster, slowdown={6: factor}), "zeropp"), spec=SPEC).result[
            "iteration_s"
        ]["mean"]
        for factor in (1.0, 1.2, 1.5, 2.0, 4.0)
    ]
    assert all(a <= b for a, b in pairwise(means))
    assert means[-1] > means[0]


def test_one_seed_gives_the_same_bytes(tmp_path):
    cluster = ClusterConf(
        name="c",
        nodes=4,
        devices_per_node=4,
        backend=Backend.nccl,
        slowdown={3: 2.0, 7: 1.5},
        failures={"mtbf_s": 0.05},
    )
    for name in ("a", "b"):
        record = simulate(experiment_of(cluster, "zeropp", steps=6, seed=5), spec=SPEC, git_commit="x")
        write_record(tmp_path / name, record)
    for file in ("result.json", "ledger.csv", "decisions.jsonl", "timeline.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
