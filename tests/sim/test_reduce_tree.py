"""Sums up a binomial tree: bytes, times by hand, and folded against step by step."""

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

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
    OptimizerConf,
)
from twinbed.policies import wire
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.ledger import Ledger, rank_classes
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.topology import TCP_LATENCY_NS, Topology

NIC_BPS = 12.5e6
MIB = 1 << 20


def took_ns(spec, nodes, ranks, op, nbytes, *, root=0, backend=Backend.gloo, fold=False, memory_Bps=1e15):
    cluster = ClusterConf(
        name="test",
        nodes=nodes,
        devices_per_node=ranks,
        backend=backend,
        device=DeviceConf(memory_Bps=memory_Bps),
        intra_node=IntraNodeConf(bandwidth_Bps=1e15, latency_ns=0),
        inter_node=InterNodeConf(bandwidth_Bps=NIC_BPS, latency_ns=0),
    )
    experiment = ExperimentConf(
        cluster=cluster,
        model=ModelConf(name="m"),
        comm=CommConf(name="zero3"),
        data=DataConf(name="synthetic"),
        optimizer=OptimizerConf(name="adamw"),
    )
    policy, _ = build_comm(experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=ranks)
    mesh = Mesh(cluster.num_ranks, ranks)
    writer = Writer(merge=False)
    transfer = Transfer(op, "world", mesh.num_ranks, nbytes, nbytes, nbytes // 4, 4, root)
    writer.transfer(MAIN, "layer", "backward", "block.0", transfer)
    machine = Machine(simpy.Environment(), Costs(experiment, spec, policy), Topology(cluster), folded=fold)
    machine.skew_ns = 0
    collectives = (Folded if fold else PerStep)(machine, mesh)
    simulated = [0] if fold else range(cluster.num_ranks)
    timings = Executor(machine, collectives, simulated).run([Segment(0, False, {0: writer.program})])
    return max(own[0].end_ns for own in timings.values())


@pytest.mark.parametrize(("nodes", "levels"), [(2, 1), (4, 2), (8, 3)])
def test_each_level_of_the_tree_sends_the_whole_once(make_spec, nodes, levels):
    """Notices of all receipts are there after L. The leaves send (s, L); what has come in goes on, whose receiver was
    ready long ago: L + levels (s + L).
    """
    took = took_ns(make_spec(), nodes, 1, "reduce_tree", MIB)
    each_ns = MIB / NIC_BPS * 1e9 + TCP_LATENCY_NS
    assert took == pytest.approx(TCP_LATENCY_NS + levels * each_ns, abs=10)


def test_every_arrival_is_added_before_it_goes_on(make_spec):
    """Four ranks: two additions one after the other, each reading two operands and writing one."""
    plain, adding = (took_ns(make_spec(), 4, 1, "reduce_tree", MIB, memory_Bps=rate) for rate in (1e15, 1e9))
    each_ns = 3 * MIB / DeviceConf(memory_Bps=1e9).memory_efficiency
    assert adding - plain == pytest.approx(2 * each_ns, rel=1e-3)


@pytest.mark.parametrize("backend", [Backend.gloo, Backend.nccl])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (4, 1), (2, 2), (4, 2), (8, 1)])
def test_folded_equals_step_by_step(make_spec, backend, nodes, ranks):
    apart, folded = (
        took_ns(make_spec(), nodes, ranks, "reduce_tree", MIB, backend=backend, fold=fold)
        for fold in (False, True)
    )
    assert folded == pytest.approx(apart, rel=0.02)


def test_on_nccl_it_is_the_librarys_reduce(make_spec):
    tree, own = (
        took_ns(make_spec(), 4, 2, op, MIB, backend=Backend.nccl, root=3) for op in ("reduce_tree", "reduce")
    )
    assert tree == own


@given(size=st.integers(2, 33), root=st.integers(0, 32))
def test_the_tree_is_a_broadcasts(size, root):
    """Who sends to whom is turned round, so that all but the root send the whole once."""
    group, root = tuple(range(size)), root % size
    down = {(child, rank) for rank in group for child in wire.binomial_children(group, root, rank)}
    assert down == {(rank, wire.binomial_parent(group, root, rank)) for rank in group if rank != root}
    mesh = Mesh(size, 1)
    sent = [wire.reduce_tree(mesh, rank, group, root, 8).wire_bytes for rank in group]
    assert sent == [0 if rank == root else 8 for rank in group]


@given(
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 4),
    root=st.integers(0, 15),
    axis=st.sampled_from(["world", "node"]),
)
def test_ranks_of_a_class_send_the_same(nodes, ranks, root, axis):
    mesh = Mesh(nodes * ranks, ranks)
    size = mesh.size(axis)
    writer = Writer(merge=False)
    transfer = Transfer("reduce_tree", axis, size, 64, 64, 16, 4, root % size)
    writer.transfer(MAIN, "layer", "backward", "block.0", transfer)
    ledger = Ledger(mesh)
    for each in rank_classes(mesh, [{0: writer.program}]):
        assert len({ledger.sent(rank, transfer) for rank in each.members()}) == 1
