"""Folded and step by step agree within 1%: any NCCL collective, whole iterations of every engine, and stragglers."""

from dataclasses import replace

import pytest
import simpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import (
    Algorithm,
    Backend,
    ClusterConf,
    CommConf,
    DataConf,
    DeviceConf,
    Engine,
    ExperimentConf,
    InterNodeConf,
    IntraNodeConf,
    ModelConf,
    NcclConf,
    NodeKind,
    OptimizerConf,
    ParallelConf,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import Topology

PARTED = ("all_gather", "reduce_scatter", "all_to_all")
OPS = (*PARTED, "all_reduce", "broadcast", "reduce", "reduce_tree")
SPEC = spec_from_keys({"family": "gpt", "layers": 1, "hidden": 64, "heads": 4, "vocab": 64, "sequence": 32})


def cluster_of(nodes, ranks, *, inner=None, outer=None, **keys):
    return ClusterConf(
        name="test",
        nodes=nodes,
        devices_per_node=ranks,
        backend=Backend.nccl,
        intra_node=IntraNodeConf(**({"bandwidth_Bps": 200e9, "latency_ns": 3_400} | (inner or {}))),
        inter_node=InterNodeConf(
            **({"bandwidth_Bps": 25e9, "latency_ns": 14_000, "links": 4} | (outer or {}))
        ),
        **keys,
    )


def transfer_of(op, mesh, nbytes, axis="world", root=0):
    """`nbytes`: the whole tensor, cut down to equal parts."""
    size = mesh.size(axis)
    nbytes = max(4, nbytes // size // 4 * 4) * size
    return Transfer(op, axis, size, nbytes, nbytes // size if op in PARTED else nbytes, nbytes // 4, 4, root)


def collective(cluster, *transfers, fold, count=None):
    """Nanoseconds until all ranks have run the transfers, each on a stream of its own.

    `count`: where the bytes that have passed each link are added up.
    """
    experiment = ExperimentConf(
        cluster=cluster,
        model=ModelConf(name="m"),
        comm=CommConf(name="zero3"),
        data=DataConf(name="synthetic"),
        optimizer=OptimizerConf(name="adamw"),
    )
    policy, _ = build_comm(
        experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
    )
    mesh = Mesh(cluster.num_ranks, cluster.devices_per_node)
    writer = Writer(merge=False)
    for stream, transfer in enumerate(transfers):
        worker = f"stream.{stream}" if stream else MAIN
        writer.transfer(worker, "gather", "forward", "block.0", transfer)
    machine = Machine(simpy.Environment(), Costs(experiment, SPEC, policy), Topology(cluster), folded=fold)
    if count is not None:
        begin = machine.network.flow

        def counted(amount, route, **keys):
            done = begin(amount, route, **keys)
            for link, weight in route:
                done.callbacks.append(
                    lambda _, name=link.name, nbytes=amount * weight: count.update(
                        {name: count.get(name, 0.0) + nbytes}
                    )
                )
            return done

        machine.network.flow = counted
    collectives = (Folded if fold else PerStep)(machine, mesh)
    ranks = [0] if fold else range(cluster.num_ranks)
    timings = Executor(machine, collectives, ranks).run([Segment(0, False, {0: writer.program})])
    return max(own[0].end_ns for own in timings.values())


def agree(cluster, *transfers):
    folded, stepwise = (collective(cluster, *transfers, fold=fold) for fold in (True, False))
    assert folded == pytest.approx(stepwise, rel=0.01)


# ---- collectives


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce"])
@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 20, 1 << 25, 1 << 30])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (8, 8), (16, 1), (1, 8), (3, 5)])
def test_trees_and_chains(op, nbytes, nodes, ranks):
    cluster = cluster_of(nodes, ranks, nccl=NcclConf(algorithm=Algorithm.tree))
    agree(cluster, transfer_of(op, Mesh(nodes * ranks, ranks), nbytes, root=1))


SHAPES = {
    "leaf and spine": {"outer": {"nodes_per_leaf": 2, "oversubscription": 4.0}},
    "rails": {"outer": {"rails": True, "links": 4}},
    "no peer-to-peer": {"inner": {"kind": NodeKind.pcie, "bandwidth_Bps": 12e9, "host_Bps": 80e9}},
    "pairs": {"inner": {"kind": NodeKind.nvlink_pairs, "pcie_Bps": 12e9, "host_Bps": 80e9}},
    "two sites": {"sites": 2, "wan_Bps": 5e9, "wan_latency_ns": 5_000_000},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", ["world", "local", "node"])
def test_trees_on_other_topologies(shape, axis):
    cluster = cluster_of(4, 4, nccl=NcclConf(algorithm=Algorithm.tree), **SHAPES[shape])
    agree(cluster, transfer_of("all_reduce", Mesh(16, 4), 1 << 28, axis))


@settings(deadline=None, max_examples=60)
@given(
    nodes=st.integers(1, 8),
    ranks=st.integers(1, 8),
    op=st.sampled_from(OPS),
    axis=st.sampled_from(["world", "local", "node"]),
    power=st.floats(10, 30),
    algorithm=st.sampled_from(list(Algorithm)),
    protocols=st.sampled_from([["simple"], ["simple", "ll", "ll128"]]),
    root=st.integers(0, 63),
)
def test_any_collective(nodes, ranks, op, axis, power, algorithm, protocols, root):
    mesh = Mesh(nodes * ranks, ranks)
    assume(mesh.size(axis) > 1)
    nccl = NcclConf(algorithm=algorithm, protocols=protocols, base_latency=True)
    cluster = cluster_of(nodes, ranks, nccl=nccl)
    agree(cluster, transfer_of(op, mesh, int(2**power), axis, root % mesh.size(axis)))


@settings(deadline=None, max_examples=25)
@given(
    nodes=st.integers(2, 4),
    ranks=st.integers(1, 4),
    ops=st.lists(st.sampled_from(PARTED), min_size=2, max_size=2),
    powers=st.tuples(st.floats(18, 30), st.floats(18, 30)),
)
def test_two_that_share_the_links(nodes, ranks, ops, powers):
    mesh = Mesh(nodes * ranks, ranks)
    transfers = [transfer_of(op, mesh, int(2**power)) for op, power in zip(ops, powers, strict=True)]
    agree(cluster_of(nodes, ranks), *transfers)


def received_bytes(op, mesh, transfer):
    """What has come into each rank at the end, counted from the collective's meaning alone. [num_ranks]"""
    whole, size = transfer.payload_bytes, transfer.group_size
    if op in PARTED:
        return [whole * (size - 1) / size] * size
    if op == "all_reduce":
        return [2 * whole * (size - 1) / size] * size
    # a broadcast comes to all but the root, a sum of those before to all but the one behind the root
    spared = transfer.root if op == "broadcast" else (transfer.root + 1) % size
    return [0.0 if place == spared else float(whole) for place in range(size)]


@settings(deadline=None, max_examples=60)
@given(
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 4),
    op=st.sampled_from(OPS),
    part=st.integers(1, 1 << 14),
    algorithm=st.sampled_from([Algorithm.ring, Algorithm.direct]),
    root=st.integers(0, 15),
)
def test_all_bytes_that_leave_a_rank_come_to_another(nodes, ranks, op, part, algorithm, root):
    """Counted at the links, out of each rank and into each, as the flows on them end."""
    num = nodes * ranks
    assume(num > 1)
    mesh, count = Mesh(num, ranks), {}
    transfer = transfer_of(op, mesh, 4 * part * num, root=root % num)
    collective(
        cluster_of(nodes, ranks, nccl=NcclConf(algorithm=algorithm)), transfer, fold=False, count=count
    )
    into = [count.get(f"rank.{rank}.in", 0.0) for rank in range(num)]
    assert into == pytest.approx(received_bytes(op, mesh, transfer))
    assert sum(count.get(f"rank.{rank}.out", 0.0) for rank in range(num)) == pytest.approx(sum(into))
    nics = [[count.get(f"nic.{node}.{way}", 0.0) for node in range(nodes)] for way in ("out", "in")]
    assert sum(nics[0]) == pytest.approx(sum(nics[1]))


def test_a_tree_brings_all_of_the_data_up_and_down():
    """Each of two trees carries half: so with 12 ranks there are 11 ways, for all of the data, up and down."""
    cluster, whole = cluster_of(3, 4, nccl=NcclConf(algorithm=Algorithm.tree)), 1 << 30
    count = {}
    collective(cluster, transfer_of("all_reduce", Mesh(12, 4), whole), fold=False, count=count)
    whole = whole // 12 // 4 * 4 * 12
    share = 0.92  # of a link's bandwidth, as NCCL's tuner has it for a tree of this size
    into = sum(count[f"rank.{rank}.in"] for rank in range(12))
    assert into == pytest.approx(2 * 11 * whole / share)
    assert into == pytest.approx(sum(count[f"rank.{rank}.out"] for rank in range(12)))


# ---- whole iterations of 64 ranks


COMM = {
    "zero3": {},
    "ddp": {"zero_stage": 0},
    "ps": {"zero_stage": 0, "parameter_server": True},
    "hpz": {"zero_hpz_partition_size": None},
    "qgz": {"zero_quantized_gradients": True},
    "zeropp": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": None,
    },
}


def experiment_of(comm, *, nodes=8, ranks=8, slowdown=None, **keys):
    device = DeviceConf(flop_per_s=20e12, memory_Bps=1e12)
    return ExperimentConf(
        cluster=cluster_of(nodes, ranks, device=device, slowdown=slowdown),
        model=ModelConf(name="m"),
        comm=CommConf(name=comm, **COMM[comm]),
        data=DataConf(name="synthetic"),
        optimizer=OptimizerConf(name="adamw"),
        **({"steps": 1, "warmup_steps": 0} | keys),
    )


def spec_of(layers=1, hidden=1024):
    keys = {"family": "gpt", "layers": layers, "hidden": hidden, "heads": 16, "vocab": 512, "sequence": 128}
    return spec_from_keys(keys)


def iterations_agree(experiment, spec):
    results = [simulate(experiment, spec=spec, fold=fold).result for fold in (True, False)]
    assert [result["folded"] for result in results] == [True, False]
    folded, stepwise = (result["iteration_s"]["mean"] for result in results)
    assert folded == pytest.approx(stepwise, rel=0.01)


@pytest.mark.parametrize("comm", COMM)
def test_fsdp2(comm):
    iterations_agree(experiment_of(comm), spec_of())


@pytest.mark.parametrize("engine", [Engine.deepspeed, Engine.deepspeed_2023])
@pytest.mark.parametrize("comm", ["zero3", "zeropp"])
def test_deepspeed(engine, comm):
    iterations_agree(experiment_of(comm, engine=engine, nodes=8, ranks=4), spec_of())


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 8, "pipeline": 2},
        {"tensor": 4, "sequence": 4, "pipeline": 4},
        {"tensor": 2, "pipeline": 2},
    ],
)
def test_megatron(parallel):
    experiment = experiment_of("ddp", engine=Engine.megatron, parallel=ParallelConf(**parallel))
    iterations_agree(replace(experiment, batch=replace(experiment.batch, accumulation=4)), spec_of(layers=4))


@pytest.mark.parametrize("comm", ["zero3", "qgz", "ddp"])
@pytest.mark.parametrize("slowdown", [{3: 2.0}, {0: 1.5, 21: 3.0, 22: 1.1}])
def test_stragglers_among_64(comm, slowdown):
    iterations_agree(experiment_of(comm, slowdown=slowdown), spec_of(hidden=512))
