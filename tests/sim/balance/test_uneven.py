"""Scatter and gather of unequal parts: who sends what, when it is there, and who is waited for."""

from collections.abc import Mapping

import pytest
import simpy

from twinbed.conf.schema import Backend, DeviceConf, InterNodeConf, IntraNodeConf
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import TENSOR, Mesh
from twinbed.sim.classes import Fold
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer, Work
from twinbed.sim.ledger import Ledger
from twinbed.sim.machine import Machine
from twinbed.sim.program import COMPUTE, MAIN, Writer
from twinbed.sim.topology import TCP_LATENCY_NS, Topology

L = 1_000  # nanoseconds
RANKS = 4


def uneven(op: str, root: int, parts: tuple[int, ...]) -> Transfer:
    return Transfer(op, TENSOR, len(parts), sum(parts), max(parts), root=root, parts=parts)


@pytest.fixture
def ends(make, spec_of):
    """Runs transfers one behind the other; of each rank that takes part in the last, when it has ended it."""

    def run(
        *transfers: Transfer,
        backend: Backend = Backend.nccl,
        fold: bool = False,
        per_node: int = RANKS,
        nic_Bps: float = 1e9,
        late_ns: Mapping[int, int] = {},
    ) -> dict[int, int]:
        experiment = make(
            RANKS,
            per_node=per_node,
            cluster_backend=backend,
            cluster_device=DeviceConf(memory_Bps=1e15),
            cluster_intra_node=IntraNodeConf(bandwidth_Bps=1e9, latency_ns=L),
            cluster_inter_node=InterNodeConf(bandwidth_Bps=nic_Bps, latency_ns=L),
        )
        cluster, spec = experiment.cluster, spec_of()
        policy, _ = build_comm(experiment.comm, num_ranks=1, ranks_per_node=1)
        mesh = Mesh(RANKS, per_node, dims=((TENSOR, RANKS),))
        programs = {}
        for rank in range(RANKS):
            writer = Writer(merge=False)
            delay = Work("fixed", "", 0, late_ns.get(rank, 0))
            writer.local(MAIN, COMPUTE, "forward", "", "late", delay)
            for number, transfer in enumerate(transfers):
                if rank == transfer.root or transfer.parts[rank]:
                    writer.transfer(MAIN, "lend", "forward", "block.0", transfer, tag=("t", number))
            programs[rank] = writer.program
        machine = Machine(
            simpy.Environment(),
            Costs(experiment, spec, policy),
            Topology(cluster),
            folded=fold,
            shares=dict.fromkeys(range(RANKS), 1 / RANKS) if fold else None,
        )
        machine.skew_ns = 0
        if fold:
            kinds = [Transfer("send", TENSOR, RANKS, 0, 0, peer=shift) for shift in range(1, RANKS)]
            collectives = Folded(machine, mesh, Fold.apart(mesh), kinds)
        else:
            collectives = PerStep(machine, mesh)
        timings = Executor(machine, collectives, range(RANKS)).run([Segment(0, False, programs)])
        last = transfers[-1]
        return {r: t[0].end_ns for r, t in timings.items() if r == last.root or last.parts[r]}

    return run


@pytest.mark.parametrize("fold", [False, True])
def test_messages_of_a_scatter_share_the_roots_link(ends, fold):
    # both at half the rate until the short one is there; then the long one alone
    assert ends(uneven("scatter", 0, (0, 1_000, 3_000, 0)), fold=fold) == {
        0: L + 4_000,
        1: L + 2_000,
        2: L + 4_000,
    }


@pytest.mark.parametrize("fold", [False, True])
def test_messages_of_a_gather_share_the_link_into_the_root(ends, fold):
    assert ends(uneven("gather", 2, (500, 500, 0, 2_000)), fold=fold) == {
        0: L + 1_500,
        1: L + 1_500,
        2: L + 3_000,
        3: L + 3_000,
    }


@pytest.mark.parametrize("fold", [False, True])
def test_a_late_helper_delays_the_root_and_nobody_else(ends, fold):
    found = ends(uneven("scatter", 0, (0, 1_000, 1_000, 0)), late_ns={2: 5_000}, fold=fold)
    assert found == {0: 5_000 + L + 1_000, 1: L + 1_000, 2: 5_000 + L + 1_000}


@pytest.mark.parametrize("fold", [False, True])
def test_a_rank_without_a_part_is_not_waited_for(ends, fold):
    late = ends(uneven("scatter", 0, (0, 1_000, 0, 0)), late_ns={2: 10**9, 3: 10**9}, fold=fold)
    assert late == {0: L + 1_000, 1: L + 1_000}


@pytest.mark.parametrize("fold", [False, True])
def test_between_nodes_the_nic_counts(ends, fold):
    # ranks 0, 1 | 2, 3; the NIC carries a fifth of what the own link does
    found = ends(uneven("scatter", 0, (0, 1_000, 1_000, 1_000)), per_node=2, nic_Bps=2e8, fold=fold)
    assert found[2] == found[3] == found[0] == L + 10_000
    assert found[1] == pytest.approx(L + 1_250, abs=1)  # the others take a fifth of the root's own link


def test_on_gloo_a_receivers_notice_comes_first_and_the_sender_is_done_when_all_has_left(ends):
    found = ends(uneven("scatter", 0, (0, 1_000, 3_000, 0)), backend=Backend.gloo)
    # a node's connections are apart: each of two ranks has its own
    assert found == {0: L + 3_000, 1: 2 * L + 1_000, 2: 2 * L + 3_000}


def test_on_gloo_between_nodes_messages_share_the_nic(ends):
    hop = L + TCP_LATENCY_NS
    found = ends(uneven("gather", 0, (0, 0, 1_000, 3_000)), backend=Backend.gloo, per_node=2)
    assert found == {2: hop + 2_000, 3: hop + 4_000, 0: 2 * hop + 4_000}


def test_folded_gloo_is_near_every_message(ends):
    transfer = uneven("scatter", 1, (400_000, 0, 900_000, 100_000))
    apart, folded = (
        max(ends(transfer, backend=Backend.gloo, per_node=2, fold=fold).values()) for fold in (False, True)
    )
    assert folded == pytest.approx(apart, rel=0.01)


@pytest.mark.parametrize("root", range(RANKS))
@pytest.mark.parametrize("op", ["scatter", "gather"])
def test_bytes_sent_are_bytes_received(op, root):
    mesh = Mesh(RANKS, 2, dims=((TENSOR, RANKS),))
    parts = tuple(0 if place == root else 100 * (place + 1) for place in range(RANKS))
    ledger, transfer = Ledger(mesh), uneven(op, root, parts)
    sent = [ledger.sent(rank, transfer) for rank in range(RANKS)]
    assert sum(each.wire_bytes for each in sent) == sum(parts)
    elsewhere = [place for place in range(RANKS) if place // 2 != root // 2]
    assert sum(each.inter_node_bytes for each in sent) == sum(parts[place] for place in elsewhere)
    if op == "scatter":
        assert [each.wire_bytes for each in sent] == [sum(parts) if r == root else 0 for r in range(RANKS)]
    else:
        assert [each.wire_bytes for each in sent] == list(parts)


@pytest.mark.parametrize("fold", [False, True])
def test_who_waits_for_whom_is_told(make, spec_of, fold):
    """A helper that never comes."""
    experiment = make(RANKS, cluster_backend=Backend.nccl, cluster_device=DeviceConf())
    policy, _ = build_comm(experiment.comm, num_ranks=1, ranks_per_node=1)
    mesh = Mesh(RANKS, RANKS, dims=((TENSOR, RANKS),))
    machine = Machine(
        simpy.Environment(), Costs(experiment, spec_of(), policy), Topology(experiment.cluster), folded=fold
    )
    kinds = [Transfer("send", TENSOR, RANKS, 0, 0, peer=shift) for shift in range(1, RANKS)]
    collectives = Folded(machine, mesh, Fold.apart(mesh), kinds) if fold else PerStep(machine, mesh)
    programs = {rank: Writer(merge=False) for rank in range(RANKS)}
    for rank in (0, 1):
        transfer = uneven("scatter", 0, (0, 8, 8, 0))
        programs[rank].transfer(MAIN, "lend", "forward", "block.0", transfer, tag=("t",))
    segment = Segment(0, False, {rank: writer.program for rank, writer in programs.items()})
    with pytest.raises(RuntimeError, match=r"scatter over tensor of block.0.*rank 0 waits for rank 2"):
        Executor(machine, collectives, range(RANKS)).run([segment])
