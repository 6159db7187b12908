"""Collectives step by step against hand counts, and folded against step by step."""

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.conf.schema import (
    Backend,
    ClusterConf,
    DeviceConf,
    ExperimentConf,
    HostConf,
    InterNodeConf,
    IntraNodeConf,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded, reach
from twinbed.sim.interpreter import Transfer
from twinbed.sim.ledger import Ledger
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.topology import TCP_LATENCY_NS, Topology

B = 12.5e6  # bytes a second of a node's NIC
MIB = 1 << 20


def cluster_of(
    nodes, ranks, *, backend=Backend.gloo, latency_ns=0, intra_Bps=1e15, intra_ns=0, bandwidth=B, host=None
):
    return ClusterConf(
        name="test",
        nodes=nodes,
        devices_per_node=ranks,
        backend=backend,
        device=DeviceConf(memory_Bps=1e15),
        intra_node=IntraNodeConf(bandwidth_Bps=intra_Bps, latency_ns=intra_ns),
        inter_node=InterNodeConf(bandwidth_Bps=bandwidth, latency_ns=latency_ns),
        host=host or HostConf(),
    )


def transfer_of(op, mesh, nbytes, axis="world", root=0):
    """`nbytes`: the whole tensor (all_gather: the output)."""
    size = mesh.size(axis)
    message = nbytes // size if op in ("all_gather", "reduce_scatter", "all_to_all") else nbytes
    return Transfer(op, axis, size, nbytes, message, nbytes // 4, 4, root)


def run_ns(cluster, transfers, experiment, spec, *, fold=False, ranks=None):
    """Nanoseconds until all ranks have run `transfers`, and the network's machine."""
    experiment = ExperimentConf(
        cluster=cluster,
        model=experiment.model,
        comm=experiment.comm,
        data=experiment.data,
        optimizer=experiment.optimizer,
    )
    policy, _ = build_comm(
        experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
    )
    mesh = Mesh(cluster.num_ranks, cluster.devices_per_node, policy.hpz_size)
    writer = Writer(merge=False)
    for transfer in transfers:
        writer.transfer(MAIN, "gather", "forward", "block.0", transfer)
    env = simpy.Environment()
    machine = Machine(env, Costs(experiment, spec, policy), Topology(cluster), folded=fold)
    collectives = (Folded if fold else PerStep)(machine, mesh)
    simulated = [0] if fold else range(cluster.num_ranks)
    timings = Executor(machine, collectives, simulated if ranks is None else ranks).run(
        [Segment(0, False, writer.program)]
    )
    return max(t[0].end_ns for t in timings.values())


@pytest.fixture
def run(make_experiment, make_spec):
    def _run(cluster, *transfers, **keys):
        return run_ns(cluster, transfers, make_experiment(), make_spec(), **keys)

    return _run


def seconds_at_nic(nbytes):
    return nbytes / B * 1e9


def test_ring_all_gather_on_2x2_is_three_quarters_of_the_output_over_the_nic(run):
    mesh = Mesh(4, 2)
    took = run(cluster_of(2, 2), transfer_of("all_gather", mesh, 4 * MIB))
    assert took == pytest.approx(seconds_at_nic(0.75 * 4 * MIB) + 3 * TCP_LATENCY_NS, abs=10)


def test_ring_reduce_scatter_moves_as_much_as_the_all_gather(run):
    mesh = Mesh(4, 2)
    took = run(cluster_of(2, 2), transfer_of("reduce_scatter", mesh, 4 * MIB))
    assert took == pytest.approx(seconds_at_nic(0.75 * 4 * MIB) + 3 * TCP_LATENCY_NS, abs=10)


def test_ring_all_reduce_is_twice_that(run):
    mesh = Mesh(4, 2)
    took = run(cluster_of(2, 2), transfer_of("all_reduce", mesh, 4 * MIB))
    assert took == pytest.approx(seconds_at_nic(1.5 * 4 * MIB) + 6 * TCP_LATENCY_NS, rel=1e-3)


@pytest.mark.parametrize(("nodes", "ranks", "times"), [(4, 2, 6), (2, 2, 2), (2, 1, 1), (4, 1, 3), (2, 4, 4)])
def test_broadcast_stores_and_forwards(run, nodes, ranks, times):
    """4x2: four flows share node 0's NIC, then two another's: 6 S / B, where the bytes say 4."""
    mesh = Mesh(nodes * ranks, ranks)
    took = run(cluster_of(nodes, ranks), transfer_of("broadcast", mesh, 4 * MIB))
    assert took == pytest.approx(seconds_at_nic(times * 4 * MIB), rel=1e-3)


def test_reduce_is_a_reduce_scatter_and_a_gather_to_the_root(run):
    mesh = Mesh(4, 2)
    took = run(cluster_of(2, 2), transfer_of("reduce", mesh, 4 * MIB))
    assert took == pytest.approx(seconds_at_nic((0.75 + 0.5) * 4 * MIB), rel=1e-3)


def test_all_to_all_shares_the_nic_among_the_ranks_of_a_node(run):
    mesh = Mesh(4, 2)
    took = run(cluster_of(2, 2), transfer_of("all_to_all", mesh, 4 * MIB))
    assert took == pytest.approx(
        seconds_at_nic(4 * MIB) + TCP_LATENCY_NS, abs=10
    )  # 2 ranks x 2 peers x S / 4
    across = run(cluster_of(2, 2), transfer_of("all_to_all", mesh, 4 * MIB, "node"))
    assert across == pytest.approx(seconds_at_nic(4 * MIB) + TCP_LATENCY_NS, abs=10)  # 2 ranks x S / 2


def test_a_message_within_a_node_runs_at_the_connections_rate(run):
    mesh = Mesh(2, 2)
    took = run(cluster_of(1, 2, intra_Bps=1e9, intra_ns=20_000), transfer_of("all_gather", mesh, 2 * MIB))
    assert took == pytest.approx(MIB + 20_000, abs=2)


def test_copies_within_a_node_share_the_cores(run):
    """Four ranks on two cores: a probe saw each copy at half a core, and alone they do not go faster."""
    mesh = Mesh(4, 4)
    plain = cluster_of(1, 4, intra_Bps=1e9)
    shared = cluster_of(1, 4, intra_Bps=1e9, host=HostConf(cores=2))
    transfer = transfer_of("all_gather", mesh, 4 * MIB)
    assert run(shared, transfer) == pytest.approx(run(plain, transfer), rel=1e-6)
    assert run(plain, transfer) == pytest.approx(3 * MIB, rel=1e-6)


def test_fixed_cost_of_an_operation_comes_before_it(run):
    mesh = Mesh(4, 2)
    transfer = transfer_of("all_gather", mesh, 4 * MIB)
    plain = run(cluster_of(2, 2), transfer)
    assert (
        run(cluster_of(2, 2, host=HostConf(op_ns={"all_gather/world": 3_000_000})), transfer)
        == plain + 3_000_000
    )
    assert run(cluster_of(2, 2, host=HostConf(op_ns={"all_gather/local": 3_000_000})), transfer) == plain


CASES = [
    ("all_gather", "world"),
    ("all_gather", "local"),
    ("reduce_scatter", "world"),
    ("reduce_scatter", "local"),
    ("all_reduce", "world"),
    ("all_to_all", "world"),
    ("all_to_all", "local"),
    ("all_to_all", "node"),
    ("broadcast", "world"),
    ("reduce", "world"),
]


@pytest.mark.parametrize(("op", "axis"), CASES)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (4, 4), (1, 4), (8, 1)])
def test_folded_agrees_with_step_by_step_on_gloo(run, nodes, ranks, op, axis):
    mesh = Mesh(nodes * ranks, ranks)
    if mesh.size(axis) == 1:
        pytest.skip("a group of one rank leaves no collective")
    cluster = cluster_of(nodes, ranks, latency_ns=100_000, intra_Bps=2e9, intra_ns=20_000)
    transfer = transfer_of(op, mesh, 16 * MIB, axis)
    assert run(cluster, transfer, fold=True) == pytest.approx(run(cluster, transfer), rel=0.01)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_folded_agrees_with_step_by_step_on_nccl_at_64_ranks(run, op):
    mesh = Mesh(64, 8)
    cluster = cluster_of(
        8, 8, backend=Backend.nccl, bandwidth=25e9, intra_Bps=200e9, latency_ns=1_000, intra_ns=500
    )
    transfer = transfer_of(op, mesh, 1 << 30)
    assert run(cluster, transfer, fold=True) == pytest.approx(run(cluster, transfer), rel=0.01)


def test_a_rank_that_never_comes_is_named(run):
    mesh = Mesh(4, 2)
    with pytest.raises(RuntimeError, match="all_gather over world.*rank 0 waits for rank 3"):
        run(cluster_of(2, 2), transfer_of("all_gather", mesh, 4 * MIB), ranks=[0, 1, 2])


def test_a_pipelined_tree_of_nccl_has_no_steps_here(run):
    mesh = Mesh(4, 2)
    with pytest.raises(ValueError, match="simulated folded only"):
        run(cluster_of(2, 2, backend=Backend.nccl), transfer_of("broadcast", mesh, MIB))


@settings(deadline=None, max_examples=25)
@given(
    op=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"]),
    nodes=st.integers(1, 3),
    ranks=st.integers(1, 3),
    kib=st.integers(1, 64),
)
def test_bytes_sent_are_the_ledgers_and_all_arrive(op, nodes, ranks, kib):
    if nodes * ranks == 1:
        return
    from twinbed.conf.model_spec import spec_from_keys

    mesh = Mesh(nodes * ranks, ranks)
    keys = {"family": "gpt", "layers": 1, "hidden": 8, "heads": 1, "vocab": 8, "sequence": 8}
    transfer = transfer_of(op, mesh, kib * 1024 * mesh.num_ranks)
    sent, received = _count_bytes(cluster_of(nodes, ranks), mesh, transfer, spec_from_keys(keys))
    assert sum(sent.values()) == sum(received.values())
    ledger = Ledger(mesh)
    assert sent == {rank: ledger.sent(rank, transfer).wire_bytes for rank in range(mesh.num_ranks)}


def _count_bytes(cluster, mesh, transfer, spec):
    from twinbed.conf.schema import CommConf, DataConf, ModelConf, OptimizerConf

    experiment = ExperimentConf(
        cluster=cluster,
        model=ModelConf(name="m"),
        comm=CommConf(name="zero3"),
        data=DataConf(name="synthetic"),
        optimizer=OptimizerConf(name="adamw"),
    )
    policy, _ = build_comm(experiment.comm, num_ranks=mesh.num_ranks, ranks_per_node=mesh.ranks_per_node)
    env = simpy.Environment()
    machine = Machine(env, Costs(experiment, spec, policy), Topology(cluster), folded=False)
    sent = dict.fromkeys(range(mesh.num_ranks), 0)
    received = dict.fromkeys(range(mesh.num_ranks), 0)
    send = machine.send

    def counted(source, target, nbytes):
        sent[source] += nbytes
        done = send(source, target, nbytes)
        done.callbacks.append(lambda _: received.__setitem__(target, received[target] + nbytes))
        return done

    machine.send = counted
    writer = Writer(merge=False)
    writer.transfer(MAIN, "gather", "forward", "root", transfer)
    Executor(machine, PerStep(machine, mesh), range(mesh.num_ranks)).run([Segment(0, False, writer.program)])
    return sent, received


@pytest.mark.parametrize(("nodes", "ranks", "hpz"), [(2, 4, 2), (3, 4, 6), (2, 4, 8), (4, 3, 2), (4, 2, 4)])
@pytest.mark.parametrize("axis", ["world", "local", "node", "hpz"])
def test_reach_counts_what_leaves_a_node(nodes, ranks, hpz, axis):
    mesh = Mesh(nodes * ranks, ranks, hpz)
    at = reach(mesh, axis)
    leaving = [0] * nodes
    outside = 0
    for rank in range(mesh.num_ranks):
        group = mesh.group(axis, rank)
        here = mesh.node_of(rank)
        leaving[here] += mesh.node_of(group[(group.index(rank) + 1) % len(group)]) != here
        outside = max(outside, sum(mesh.node_of(peer) != here for peer in group))
    assert (at.size, at.ring_crossings, at.peers_outside) == (mesh.size(axis), max(leaving), outside)
