"""Where ranks lie, nodes that differ, links that are slow or fail for a while: folded against step by step."""

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from twinbed.conf.compose import compose
from twinbed.conf.placement import Placement
from twinbed.conf.schema import (
    Backend,
    ClusterConf,
    DeviceConf,
    InterNodeConf,
    IntraNodeConf,
    NodeKind,
    PartConf,
    RankOrder,
)
from twinbed.policies import wire
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.conditions import Conditions
from twinbed.sim.costs import Costs, with_value
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.ledger import Ledger
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.reach import ring_peers
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import Topology

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
INNER = {
    Backend.nccl: IntraNodeConf(bandwidth_Bps=200e9, latency_ns=3_400),
    Backend.gloo: IntraNodeConf(bandwidth_Bps=2e9, latency_ns=0),
}
OUTER = {
    Backend.nccl: InterNodeConf(links=8, bandwidth_Bps=12.5e9, latency_ns=14_000),
    Backend.gloo: InterNodeConf(bandwidth_Bps=12.5e6),
}


def cluster_of(nodes, ranks, backend=Backend.nccl, order=RankOrder.cyclic, **keys):
    return ClusterConf(
        **{
            "name": "test",
            "nodes": nodes,
            "devices_per_node": ranks,
            "backend": backend,
            "device": DeviceConf(memory_Bps=1e15),
            "intra_node": INNER[backend],
            "inter_node": OUTER[backend],
            "rank_order": order,
        }
        | keys
    )


def transfer_of(op, mesh, nbytes, axis="world"):
    size = mesh.size(axis)
    nbytes = nbytes // size // 4 * 4 * size
    message = nbytes if op == "all_reduce" else nbytes // size
    return Transfer(op, axis, size, nbytes, message, nbytes // 4, 4)


@pytest.fixture
def run(make_experiment, make_spec):
    """Nanoseconds until all ranks have run a transfer."""

    def _run(cluster, transfer, *, fold):
        experiment = make_experiment()
        experiment.cluster = cluster
        policy, _ = build_comm(
            experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
        )
        mesh = Mesh.of(cluster)
        writer = Writer(merge=False)
        writer.transfer(MAIN, "gather", "forward", "block.0", transfer)
        costs = Costs(experiment, make_spec(), policy)
        machine = Machine(simpy.Environment(), costs, Topology(cluster), folded=fold)
        machine.skew_ns = 0
        collectives = Folded(machine, mesh, None, [transfer]) if fold else PerStep(machine, mesh)
        timings = Executor(machine, collectives, [0] if fold else range(cluster.num_ranks)).run(
            [Segment(0, False, {0: writer.program})]
        )
        return max(t[0].end_ns for t in timings.values())

    return _run


# ---- the rule


@given(nodes=st.integers(1, 6), per_node=st.integers(1, 6), cyclic=st.booleans())
def test_each_slot_holds_one_rank(nodes, per_node, cyclic):
    places, ranks = Placement(nodes, per_node, cyclic), np.arange(nodes * per_node)
    slots = places.slot(ranks)
    assert sorted(slots) == list(ranks)
    assert (places.rank_at(slots) == ranks).all()
    assert (places.node(ranks) * per_node + places.local(ranks) == slots).all()
    for node in range(nodes):
        assert [places.node(rank) for rank in places.ranks_on(node)] == [node] * per_node


def test_cyclic_ranks_are_dealt_out_like_cards():
    places = Placement(3, 2, cyclic=True)
    assert [places.node(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [places.local(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_nccl_goes_through_a_node_before_it_leaves_it_and_gloo_by_number():
    nccl, gloo = (Mesh.of(cluster_of(2, 2, backend)) for backend in (Backend.nccl, Backend.gloo))
    assert list(nccl.ring((0, 1, 2, 3))) == [0, 2, 1, 3]
    assert list(gloo.ring((0, 1, 2, 3))) == [0, 1, 2, 3]
    for mesh in (nccl, gloo):
        for axis in ("world", "local", "node"):
            for rank in range(4):
                ring = list(mesh.ring(mesh.group(axis, rank)))
                after = ring[(ring.index(rank) + 1) % len(ring)]
                assert ring_peers(mesh, axis)[rank] == after
    sent = [wire.all_gather(mesh, 0, range(4), 100).inter_node_bytes for mesh in (nccl, gloo)]
    assert sent == [0, 300]  # to rank 2 beside it, and to rank 1 on the other node


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("op", [*OPS, "broadcast", "reduce", "reduce_tree"])
def test_ranks_of_one_ledger_class_send_alike(backend, op):
    from twinbed.sim.ledger import rank_classes

    mesh = Mesh.of(cluster_of(3, 4, backend))
    for axis in ("world", "local", "node"):
        transfer, writer, ledger = transfer_of(op, mesh, 4_800, axis), Writer(merge=False), Ledger(mesh)
        writer.transfer(MAIN, "gather", "forward", "block.0", transfer)
        classes = rank_classes(mesh, [{0: writer.program}])
        assert sorted(rank for each in classes for rank in each.members()) == list(range(12))
        for each in classes:
            assert len({ledger.sent(rank, transfer) for rank in each.members()}) == 1


# ---- cyclic ranks, folded against step by step


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (4, 4), (8, 8)])
@pytest.mark.parametrize("axis", ["world", "local", "node"])
def test_cyclic_folded_agrees_with_step_by_step(run, backend, op, nodes, ranks, axis):
    cluster = cluster_of(nodes, ranks, backend)
    transfer = transfer_of(op, Mesh.of(cluster), 1 << 22, axis)
    assert run(cluster, transfer, fold=True) == pytest.approx(run(cluster, transfer, fold=False), rel=0.01)


SHAPES = {
    "leaf and spine": {
        "inter_node": InterNodeConf(
            links=8, bandwidth_Bps=12.5e9, latency_ns=14_000, nodes_per_leaf=2, oversubscription=4.0
        )
    },
    "rails": {"inter_node": InterNodeConf(links=4, bandwidth_Bps=12.5e9, latency_ns=14_000, rails=True)},
    "no peer-to-peer": {
        "intra_node": IntraNodeConf(kind=NodeKind.pcie, bandwidth_Bps=12e9, host_Bps=80e9, latency_ns=10_000)
    },
    "two sites": {"sites": 2, "wan_Bps": 5e9, "wan_latency_ns": 5_000_000},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", ["world", "local", "node"])
def test_cyclic_folded_agrees_on_other_topologies(run, shape, op, axis):
    cluster = cluster_of(8, 4, **SHAPES[shape])
    transfer = transfer_of(op, Mesh.of(cluster), 1 << 26, axis)
    assert run(cluster, transfer, fold=True) == pytest.approx(run(cluster, transfer, fold=False), rel=0.01)


def test_consecutive_ranks_on_other_nodes_pay_the_network(run):
    """8 nodes of 8: in block order a local group is inside its node; cyclic, each of its 8 rings' edges leaves one."""
    block, cyclic = (
        cluster_of(
            8,
            8,
            order=order,
            intra_node=IntraNodeConf(bandwidth_Bps=200e9, latency_ns=0),
            inter_node=InterNodeConf(bandwidth_Bps=100e9, latency_ns=0),
        )
        for order in RankOrder
    )
    transfer = transfer_of("all_gather", Mesh.of(block), 1 << 26, "local")
    chunks = (1 << 26) * 7 / 8
    assert run(block, transfer, fold=True) == pytest.approx(chunks / 200, abs=2)
    assert run(cyclic, transfer, fold=True) == pytest.approx(8 * chunks / 100, abs=2)
    world = transfer_of("all_gather", Mesh.of(block), 1 << 26)
    assert run(block, world, fold=True) == run(cyclic, world, fold=True)  # NCCL's ring leaves each node once


SMALL = (
    "target=sim",
    "model=gpt",
    "model.layers=3",
    "model.hidden=1024",
    "model.heads=16",
    "model.vocab=8000",
    "model.sequence=512",
    "steps=3",
)


def mean_s(*keys, fold=True):
    composed = compose((*SMALL, *keys))
    result = simulate(composed.experiment, spec=composed.spec, fold=fold).result
    assert result["status"] == "ok", result["error"]
    return result["iteration_s"]["mean"]


@pytest.mark.parametrize("comm", ["zero3", "hpz", "zeropp"])
def test_a_bad_placement_shows_where_policies_rely_on_nodes(comm):
    keys = ("cluster=dgx_a100", "cluster.nodes=4", f"comm={comm}")
    block, cyclic = (mean_s(*keys, f"cluster.rank_order={order}") for order in ("block", "cyclic"))
    if comm == "zero3":
        assert cyclic == block  # one world, and NCCL orders its ring itself
    else:
        assert cyclic > 1.2 * block
    stepwise = mean_s(*keys, "cluster.rank_order=cyclic", fold=False)
    assert cyclic == pytest.approx(stepwise, rel=0.01)


def test_slow_things_lie_on_the_nodes_of_their_ranks():
    cluster = cluster_of(2, 3, link_slowdown=[{"node": 1, "factor": 2.0}])
    assert [int(c > 0) for c in Conditions(cluster).colours()] == [0, 1, 0, 1, 0, 1]
    fast, slow = DeviceConf(name="fast"), DeviceConf(name="slow")
    parts = [PartConf(nodes=1, device=fast), PartConf(nodes=1, device=slow)]
    mixed = cluster_of(2, 2, parts=parts)
    assert [mixed.device_of(rank).name for rank in range(4)] == ["fast", "slow", "fast", "slow"]


# ---- nodes that differ

OLD = {
    "nvswitch": IntraNodeConf(bandwidth_Bps=100e9, latency_ns=5_000),
    "pcie": IntraNodeConf(kind=NodeKind.pcie, bandwidth_Bps=12e9, host_Bps=80e9, latency_ns=10_000),
    "nvlink_pairs": IntraNodeConf(
        kind=NodeKind.nvlink_pairs, bandwidth_Bps=100e9, pcie_Bps=12e9, host_Bps=80e9, latency_ns=10_000
    ),
}


@pytest.mark.parametrize("order", list(RankOrder))
@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", ["world", "local", "node"])
def test_mixed_nodes_agree_folded_and_step_by_step(run, order, old, op, axis):
    few = InterNodeConf(links=2, bandwidth_Bps=12.5e9, latency_ns=20_000)
    parts = [PartConf(nodes=2, intra_node=OLD[old], inter_node=few), PartConf(nodes=2)]
    cluster = cluster_of(4, 4, order=order, parts=parts)
    transfer = transfer_of(op, Mesh.of(cluster), 1 << 26, axis)
    assert run(cluster, transfer, fold=True) == pytest.approx(run(cluster, transfer, fold=False), rel=0.01)


@pytest.mark.parametrize("comm", ["zero3", "hpz", "zeropp"])
def test_the_mixed_preset_agrees_folded_and_step_by_step(comm):
    keys = ("cluster=mixed_v100_a100", f"comm={comm}")
    assert mean_s(*keys) == pytest.approx(mean_s(*keys, fold=False), rel=0.01)


def test_the_slower_nodes_links_hold_all_up_and_each_their_own_groups(run):
    """A ring over all nodes goes at 50 GB/s, that of the old NICs; within nodes each kind at its own 100 and 200."""
    none = {"latency_ns": 0}
    parts = [
        PartConf(
            nodes=1,
            intra_node=IntraNodeConf(bandwidth_Bps=100e9, **none),
            inter_node=InterNodeConf(bandwidth_Bps=50e9, **none),
        ),
        PartConf(nodes=1),
    ]
    new = {
        "intra_node": IntraNodeConf(bandwidth_Bps=200e9, **none),
        "inter_node": InterNodeConf(bandwidth_Bps=100e9, **none),
    }
    cluster = cluster_of(2, 4, order=RankOrder.block, parts=parts, **new)
    mesh, whole = Mesh.of(cluster), 1 << 26
    world = run(cluster, transfer_of("all_gather", mesh, whole), fold=True)
    assert world == pytest.approx(whole * 7 / 8 / 50, abs=2)
    local = run(cluster, transfer_of("all_gather", mesh, whole, "local"), fold=True)
    assert local == pytest.approx(whole * 3 / 4 / 100, abs=2)
    topology = Topology(cluster)
    assert [topology.path(a, b).links[0][0].capacity for a, b in ((0, 1), (4, 5))] == [100.0, 200.0]


def test_a_guess_in_a_part_is_that_parts_alone():
    cluster = compose(("target=sim", "cluster=mixed_v100_a100")).experiment.cluster
    changed = with_value(cluster, "parts.0.intra_node.bandwidth_Bps", 1e9)
    assert [inner.bandwidth_Bps for inner in changed.insides] == [1e9, 235e9]
    assert [inner.bandwidth_Bps for inner in cluster.insides] == [120e9, 235e9]
    with pytest.raises(ValueError, match=r"parts.1.intra_node.bandwidth_Bps.*no key"):
        with_value(cluster, "parts.1.intra_node.bandwidth_Bps", 1e9)


def test_a_range_of_a_part_widens_the_prediction():
    composed = compose((*SMALL, "cluster=mixed_v100_a100", "comm=zero3"))
    cluster = composed.experiment.cluster
    cluster.guesses = {"parts.0.inter_node.efficiency": [0.4, 0.95]}
    iteration = simulate(composed.experiment, spec=composed.spec).result["iteration_s"]
    assert iteration["low"] < iteration["mean"] < iteration["high"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"parts": [PartConf(nodes=4, inter_node=InterNodeConf(rails=True))]},
            r"cluster.parts.0.inter_node.rails=True: must be left out: leaves and rails are the cluster's",
        ),
        (
            {"parts": [PartConf(nodes=4, inter_node=InterNodeConf(nodes_per_leaf=2))]},
            r"cluster.parts.0.inter_node.nodes_per_leaf=2: must be left out",
        ),
        (
            {
                "inter_node": InterNodeConf(links=8, rails=True),
                "parts": [PartConf(nodes=4, inter_node=InterNodeConf(links=4))],
            },
            r"cluster.parts.0.inter_node.links=4: must be 8 with cluster.inter_node.rails=true",
        ),
        (
            {"backend": Backend.gloo, "link_slowdown": [{"rank": 0, "factor": 2.0}]},
            r"cluster.link_slowdown=.*must be of nodes with cluster.backend=gloo",
        ),
        (
            {"link_slowdown": [{"rank": 0, "node": 0, "factor": 2.0}]},
            r"cluster.link_slowdown\[0\]=.*must name a rank or a node",
        ),
        (
            {"link_slowdown": [{"rank": 16, "factor": 2.0}]},
            r"link_slowdown\[0\].rank=16: must be in \[0, 16\)",
        ),
        (
            {"failures": [{"node": 0, "at_s": 2.0, "until_s": 1.0}]},
            r"cluster.failures\[0\].until_s=1.0: must be later than at_s",
        ),
        (
            {"failures": [{"rank": 0, "at_s": 2.0, "until_s": 3.0}]},
            r"cluster.failures\[0\].until_s=3.0: a rank that failed does not come back",
        ),
    ],
)
def test_bad_input_names_the_key(keys, message):
    with pytest.raises(ValueError, match=message):
        cluster_of(4, 4, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("launch=torchrun", "target=runtime"), r"rank_order=cyclic with launch=torchrun.*use launch=slurm"),
        (("target=both",), r"rank_order=cyclic with target=both.*use target=runtime and target=sim"),
    ],
)
def test_what_cannot_place_ranks_cyclically_says_what_can(keys, message):
    with pytest.raises(ValueError, match=message):
        compose((*keys, "cluster.rank_order=cyclic"))


# ---- links that are slow or fail for a while


@pytest.mark.parametrize("comm", ["zero3", "hpz", "zeropp", "ddp"])
@pytest.mark.parametrize(
    "keys",
    [
        "cluster.link_slowdown=[{rank: 5, factor: 20}]",
        "cluster.link_slowdown=[{rank: 5, factor: 50, from_s: 0.005, until_s: 0.02}]",
        "cluster.failures=[{node: 1, at_s: 0.005, until_s: 0.03}]",
    ],
)
def test_slow_and_failing_links_agree_folded_and_step_by_step(comm, keys):
    keys = ("cluster=dgx_a100", f"comm={comm}", "warmup_steps=0", keys)
    folded = mean_s(*keys)
    assert folded == pytest.approx(mean_s(*keys, fold=False), rel=0.01)
    assert folded > mean_s(*keys[:-1])


@pytest.mark.parametrize("fold", [True, False])
def test_a_slow_link_of_one_rank_holds_up_its_groups(run, fold):
    """One node, a ring at 200 bytes a ns; the link of rank 3 a tenth of it. With pairs of GPUs both its ways."""
    none = {"latency_ns": 0}
    slow = {"link_slowdown": [{"rank": 3, "factor": 10.0}], "order": RankOrder.block}
    cluster = cluster_of(1, 4, intra_node=IntraNodeConf(bandwidth_Bps=200e9, **none), **slow)
    transfer = transfer_of("all_gather", Mesh.of(cluster), 1 << 26)
    assert run(cluster, transfer, fold=fold) == pytest.approx((1 << 26) * 3 / 4 / 20, rel=1e-5)
    pairs = IntraNodeConf(
        kind=NodeKind.nvlink_pairs, bandwidth_Bps=200e9, pcie_Bps=20e9, host_Bps=1e15, **none
    )
    cluster = cluster_of(1, 4, intra_node=pairs, **slow)
    assert run(cluster, transfer, fold=fold) == pytest.approx((1 << 26) * 3 / 4 / 2, rel=1e-5)


@pytest.mark.parametrize("fold", [True, False])
def test_a_link_that_comes_back_costs_the_time_between(make_experiment, make_spec, fold):
    """A network alone: the run stands still from the failure on, and goes on where it was."""
    fast = {"cluster_backend": Backend.nccl, "cluster_device": DeviceConf(flop_per_s=1e15, memory_Bps=1e15)}
    keys = fast | {"cluster_inter_node": InterNodeConf(bandwidth_Bps=1e8), "nodes": 4, "ranks": 2, "steps": 4}
    keys |= {"warmup_steps": 0}
    spec = make_spec(hidden=256)

    def total_s(**more):
        result = simulate(make_experiment(**keys, **more), spec=spec, fold=fold).result
        assert result["status"] == "ok", result["error"]
        return result["iteration_s"]["mean"] * 4

    plain = total_s()
    cut = [{"node": 2, "at_s": 0.3 * plain, "until_s": 0.3 * plain + 7.0}]
    again = [{"node": 2, "at_s": 0.5 * plain + 7.0, "until_s": 0.5 * plain + 10.0}]
    assert total_s(cluster_failures=cut) == pytest.approx(plain + 7.0, rel=1e-3)
    assert total_s(cluster_failures=cut + again) == pytest.approx(plain + 10.0, rel=1e-3)
    late = [{"node": 2, "at_s": 2 * plain, "until_s": 3 * plain}]
    assert total_s(cluster_failures=late) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("fold", [True, False])
def test_a_link_that_stays_failed_after_one_that_came_back_ends_the_run(make_experiment, make_spec, fold):
    failures = [{"node": 0, "at_s": 0.0, "until_s": 1e-6}, {"node": 1, "at_s": 2e-6}]
    experiment = make_experiment(nodes=4, ranks=2, cluster_backend=Backend.nccl, cluster_failures=failures)
    result = simulate(experiment, spec=make_spec(), fold=fold).result
    assert result["status"] == "failed"
    assert "the links of node 1 failed at 2e-06 s" in result["error"]
    assert "node 0" not in result["error"]


# ---- the shipped networks, whole runs


# fewer nodes, so that every message can be followed; leaves of two nodes
NETWORKS = {
    "leaf_spine_a100": ("cluster.nodes=4", "cluster.inter_node.nodes_per_leaf=2"),
    "rail_h100": ("cluster.nodes=4",),
    "two_sites_a100": ("cluster.nodes=4",),
}


@pytest.mark.parametrize("comm", ["zero3", "zeropp", "ddp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_shipped_networks_agree_folded_and_step_by_step(name, comm):
    keys = (f"cluster={name}", *NETWORKS[name], f"comm={comm}")
    assert mean_s(*keys) == pytest.approx(mean_s(*keys, fold=False), rel=0.01)


@pytest.mark.parametrize("wan_ns", [6_000_000, 30_000_000])
def test_collectives_that_overlap_over_a_slow_wan_agree(wan_ns):
    """ZeRO-3's gathers and reductions share the WAN, each in the pauses of the other."""
    keys = ("cluster=two_sites_a100", "cluster.nodes=4", f"cluster.wan_latency_ns={wan_ns}", "comm=zero3")
    keys += ("model.layers=6", "model.hidden=2048")
    assert mean_s(*keys) == pytest.approx(mean_s(*keys, fold=False), rel=0.01)


def test_oversubscription_slows_down_what_crosses_the_spine():
    keys = ("cluster=leaf_spine_a100", "comm=zero3")
    flat, full, half, eighth = (
        mean_s(
            *keys, f"cluster.inter_node.nodes_per_leaf={leaf}", f"cluster.inter_node.oversubscription={over}"
        )
        for leaf, over in ((0, 1), (4, 1), (4, 2), (4, 32))
    )
    # a ring crosses the spine once a leaf, whose ways up carry four nodes' traffic, halved: still enough for one
    assert flat == full == half < eighth
    pairwise = [
        mean_s("cluster=leaf_spine_a100", "comm=qgz", f"cluster.inter_node.oversubscription={over}")
        for over in (1, 2, 4)
    ]
    assert pairwise[0] < pairwise[1] < pairwise[2]


def test_two_sites_are_slower_than_one_and_a_slower_wan_slower_still():
    keys = ("cluster=two_sites_a100", "comm=zero3")
    one = mean_s(*keys, "cluster.sites=1", "cluster.wan_Bps=null", "cluster.wan_latency_ns=0")
    nearer, shipped = (mean_s(*keys, f"cluster.wan_latency_ns={ns}") for ns in (1_000_000, 6_000_000))
    narrow = mean_s(*keys, "cluster.wan_Bps=1e9")
    assert one < nearer < shipped < narrow


def test_rails_carry_what_one_switch_does_where_all_use_their_own():
    """Groups of equal local index: each has its NIC to itself, with rails or without."""
    railed, plain = (
        mean_s("cluster=rail_h100", "comm=zero3", f"cluster.inter_node.rails={rails}")
        for rails in ("true", "false")
    )
    assert railed == plain  # a ring's channels use all of a node's NICs either way
    slow = (
        "cluster=rail_h100",
        "comm=zeropp",
        "comm.gradient_path=one_hop",
        "cluster.intra_node.bandwidth_Bps=6e10",
    )
    exchanged, straight = (mean_s(*slow, f"cluster.inter_node.rails={rails}") for rails in ("true", "false"))
    assert exchanged > straight  # messages to another local index pass through two more NVLinks
