"""NCCL's collectives: closed forms, the tuner's choices, other topologies, and folded against step by step."""

from dataclasses import replace

import pytest
import simpy

from twinbed.conf.schema import (
    Algorithm,
    Backend,
    ClusterConf,
    InterNodeConf,
    IntraNodeConf,
    NcclConf,
    NodeKind,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.machine import Machine
from twinbed.sim.nccl import Nccl
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.topology import Topology

MIB = 1 << 20
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_tree")


def cluster_of(nodes=8, ranks=8, *, inner=None, outer=None, **keys):
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


def transfer_of(op, mesh, nbytes, axis="world"):
    size = mesh.size(axis)
    message = nbytes // size if op in ("all_gather", "reduce_scatter", "all_to_all") else nbytes
    return Transfer(op, axis, size, nbytes, message, nbytes // 4, 4)


@pytest.fixture
def run(make_experiment, make_spec):
    """Nanoseconds until all ranks have run the transfers."""

    def _run(cluster, *transfers, fold=True):
        experiment = replace(make_experiment(), cluster=cluster)
        policy, _ = build_comm(
            experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
        )
        mesh = Mesh(cluster.num_ranks, cluster.devices_per_node)
        writer = Writer(merge=False)
        for stream, transfer in enumerate(transfers):
            worker = f"stream.{stream}" if stream else MAIN
            writer.transfer(worker, "gather", "forward", "block.0", transfer)
        costs = Costs(experiment, make_spec(), policy)
        machine = Machine(simpy.Environment(), costs, Topology(cluster), folded=fold)
        collectives = (Folded if fold else PerStep)(machine, mesh)
        ranks = [0] if fold else range(cluster.num_ranks)
        timings = Executor(machine, collectives, ranks).run([Segment(0, False, {0: writer.program})])
        return max(own[0].end_ns for own in timings.values())

    return _run


# ---- hand counts


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(("algorithm", "hops"), [(Algorithm.ring, 14), (Algorithm.direct, 2)])
def test_all_reduce_of_100_mb_on_8_ranks_through_one_switch(run, fold, algorithm, hops):
    """Each rank sends 7/8 of it twice at 50 GB/s: 3.5 ms. A ring has 14 hops of 10 ns one after the other."""
    cluster = cluster_of(
        1, 8, inner={"bandwidth_Bps": 50e9, "latency_ns": 10}, nccl=NcclConf(algorithm=algorithm)
    )
    transfer = transfer_of("all_reduce", Mesh(8, 8), 100_000_000)
    assert run(cluster, transfer, fold=fold) == pytest.approx(3_500_000 + hops * 10, abs=14)


def test_latency_of_a_ring_over_nodes_is_nccls(run):
    """24 nodes of 16: 360 hops inside, 23 outside; the begin of a call is 8.4 us."""
    cluster = cluster_of(24, 16, nccl=NcclConf(base_latency=True))
    transfer = transfer_of("all_gather", Mesh(384, 16), 384)
    assert run(cluster, transfer) == pytest.approx(368 * 3_400 + 23 * 14_000 - 8 * 3_400 + 8_400, abs=500)


def test_a_ring_is_bound_by_the_nic_and_a_group_in_a_node_by_its_own_links(run):
    cluster = cluster_of(outer={"latency_ns": 0}, inner={"latency_ns": 0})
    mesh = Mesh(64, 8)
    whole = 64 * MIB
    assert run(cluster, transfer_of("all_gather", mesh, whole)) == pytest.approx(
        whole * 63 / 64 / 100, rel=1e-6
    )
    local = run(cluster, transfer_of("all_gather", mesh, whole, "local"))
    assert local == pytest.approx(whole * 7 / 8 / 200, abs=1)
    # 8 rings across the nodes share each NIC
    node = run(cluster, transfer_of("all_gather", mesh, whole, "node"))
    assert node == pytest.approx(8 * whole * 7 / 8 / 100, abs=1)


def test_two_collectives_share_the_nic(run):
    cluster = cluster_of(outer={"latency_ns": 0}, inner={"latency_ns": 0})
    transfer = transfer_of("all_gather", Mesh(64, 8), 64 * MIB)
    other = transfer_of("reduce_scatter", Mesh(64, 8), 64 * MIB)
    assert run(cluster, transfer, other) == pytest.approx(2 * run(cluster, transfer), rel=1e-6)


def test_link_table_says_how_many_links_are_worth(run):
    transfer = transfer_of("all_gather", Mesh(64, 8), 1 << 30)
    table = {4: 8 / 3}
    plain = cluster_of(outer={"latency_ns": 0}, inner={"latency_ns": 0})
    fewer = cluster_of(outer={"latency_ns": 0, "link_table": table}, inner={"latency_ns": 0})
    assert run(fewer, transfer) == pytest.approx(1.5 * run(plain, transfer), rel=1e-6)
    other = cluster_of(outer={"latency_ns": 0, "link_table": table, "links": 2}, inner={"latency_ns": 0})
    assert run(other, transfer) == pytest.approx(2 * run(plain, transfer), rel=1e-6)


# ---- the tuner


def way(cluster, nbytes, op="all_reduce"):
    mesh = Mesh(cluster.num_ranks, cluster.devices_per_node)
    return Nccl(cluster, mesh, lambda work: 0).way(transfer_of(op, mesh, nbytes))


def test_small_all_reduces_take_a_tree_and_large_ones_a_ring():
    cluster = cluster_of(32, 8)
    assert [way(cluster, n).algorithm for n in (4096, 4 * MIB, 1 << 32)] == ["tree", "tree", "ring"]
    assert way(cluster_of(1, 8), 1 << 28).algorithm == "ring"  # one node: a chain gains nothing


def test_small_messages_take_a_protocol_of_less_latency():
    cluster = cluster_of(8, 8, nccl=NcclConf(protocols=["simple", "ll", "ll128"], base_latency=True))
    plain = cluster_of(8, 8, nccl=NcclConf(base_latency=True))
    for op in ("all_reduce", "all_gather"):
        assert way(cluster, 64 * 64, op).latency_ns < 0.4 * way(plain, 64 * 64, op).latency_ns
        assert way(cluster, 1 << 34, op) == way(plain, 1 << 34, op)


# ---- folded against step by step


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 20, 1 << 24, 1 << 30])
@pytest.mark.parametrize(("nodes", "ranks"), [(8, 8), (2, 2), (1, 8), (6, 1), (3, 5)])
def test_folded_agrees_with_step_by_step(run, op, nbytes, nodes, ranks):
    mesh, cluster = Mesh(nodes * ranks, ranks), cluster_of(nodes, ranks)
    nbytes = nbytes // mesh.num_ranks // 4 * 4 * mesh.num_ranks
    transfer = transfer_of(op, mesh, nbytes)
    assert run(cluster, transfer) == pytest.approx(run(cluster, transfer, fold=False), rel=0.01)


SHAPES = {
    "leaf and spine": {"outer": {"nodes_per_leaf": 2, "oversubscription": 4.0}},
    "one leaf is one switch": {"outer": {"nodes_per_leaf": 8, "oversubscription": 4.0}},
    "rails": {"outer": {"rails": True, "links": 8}},
    "no peer-to-peer": {"inner": {"kind": NodeKind.pcie, "bandwidth_Bps": 12e9, "host_Bps": 80e9}},
    "pairs": {"inner": {"kind": NodeKind.nvlink_pairs, "pcie_Bps": 12e9, "host_Bps": 80e9}},
    "two sites": {"sites": 2, "wan_Bps": 5e9, "wan_latency_ns": 5_000_000},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", ["world", "local", "node"])
def test_folded_agrees_with_step_by_step_on_other_topologies(run, shape, op, axis):
    mesh, cluster = Mesh(32, 4), cluster_of(8, 4, **SHAPES[shape])
    transfer = transfer_of(op, mesh, 1 << 28, axis)
    assert run(cluster, transfer) == pytest.approx(run(cluster, transfer, fold=False), rel=0.01)


def test_every_topology_gives_a_time_of_its_own(run):
    transfers = [transfer_of(op, Mesh(64, 8), 1 << 28) for op in ("all_to_all", "all_reduce")]
    took = {}
    for shape, keys in ({"one switch": {}} | SHAPES).items():
        if shape == "one leaf is one switch":
            keys = {}
        took[shape] = tuple(run(cluster_of(8, 8, **keys), t) for t in transfers)
    del took["one leaf is one switch"]
    assert len(set(took.values())) == len(took), took


def test_oversubscription_slows_what_crosses_the_spine_alone(run):
    def took(axis, **outer):
        outer |= {"latency_ns": 0}
        return run(
            cluster_of(outer=outer, inner={"latency_ns": 0}),
            transfer_of("all_to_all", Mesh(64, 8), 1 << 28, axis),
        )

    assert took("local", nodes_per_leaf=2, oversubscription=8.0) == took("local")
    # of 63 peers, 56 are on other nodes and 48 behind the spine, of which 16 ranks share 1/8 of the bandwidth
    spine_ns = 16 * 48 / 63 * (1 << 28) * 63 / 64 / (2 * 100 / 8)
    assert took("world", nodes_per_leaf=2, oversubscription=8.0) == pytest.approx(spine_ns, rel=1e-6)
    assert took("world", nodes_per_leaf=2, oversubscription=1.0) == took("world")


def test_copies_through_the_host_share_its_memory(run):
    """8 ranks, each edge of a ring written and read once: 16 bytes of the memory's for each one of a chunk's."""
    transfer = transfer_of("all_gather", Mesh(8, 8), 1 << 28)
    inner = {"kind": NodeKind.pcie, "bandwidth_Bps": 12e9, "latency_ns": 0}
    chunks = (1 << 28) * 7 / 8
    slow = cluster_of(1, 8, inner=inner | {"host_Bps": 40e9})
    fast = cluster_of(1, 8, inner=inner | {"host_Bps": 400e9})
    assert run(slow, transfer) == pytest.approx(16 * chunks / 40, rel=1e-6)
    assert run(fast, transfer) == pytest.approx(chunks / 12, rel=1e-6)


# ---- bad input


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sites": 2}, r"cluster.wan_Bps=None: must be > 0 with cluster.sites > 1: they are not connected"),
        ({"sites": 3}, r"cluster.sites=3: must be a divisor of cluster.nodes=8"),
        ({"outer": {"nodes_per_leaf": 3}}, r"cluster.inter_node.nodes_per_leaf=3: must be a divisor"),
        ({"outer": {"oversubscription": 0.5}}, r"oversubscription=0.5: must be >= 1"),
        ({"outer": {"link_table": {4: 5}}}, r"link_table\[4\]=5: must be at most 4"),
        ({"outer": {"bandwidth_Bps": 0.0}}, r"cluster.inter_node.bandwidth_Bps=0.0: must be > 0"),
        ({"inner": {"latency_ns": -1}}, r"cluster.intra_node.latency_ns=-1: must be >= 0"),
        ({"inner": {"kind": NodeKind.pcie}}, r"cluster.intra_node.host_Bps=None.*not connected"),
        ({"slowdown": {64: 2.0}}, r"cluster.slowdown\[0\].rank=64: must be in \[0, 64\)"),
        ({"slowdown": {1: 0.0}}, r"cluster.slowdown\[0\].factor=0.0: must be a number > 0"),
        ({"slowdown": [{"rank": 1, "factor": 2, "to_s": 1}]}, r"cluster.slowdown\[0\] has \['to_s'\]"),
        ({"failures": [{"rank": 1, "node": 1, "at_s": 0}]}, r"must name a rank or a node, and not both"),
        (
            {"link_slowdown": [{"node": 0, "factor": 2, "from_s": 3, "until_s": 3}]},
            r"until_s=3: must be later",
        ),
    ],
)
def test_bad_input_names_the_key(keys, message):
    with pytest.raises(ValueError, match=message):
        cluster_of(**keys)
