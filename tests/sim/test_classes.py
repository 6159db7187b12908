"""Classes of ranks: who is simulated for whom, who waits for whom, and what goes wrong."""

import re

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.conf.schema import Backend, DeviceConf, InterNodeConf, PartConf
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.classes import Fold
from twinbed.sim.conditions import Conditions
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer, Work
from twinbed.sim.machine import Machine
from twinbed.sim.program import COMPUTE, MAIN, Writer
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import Topology


def fold_of(mesh, odd, *meetings, blocks=()):
    colours = np.zeros(mesh.num_ranks, dtype=np.int64)
    for rank, colour in odd.items():
        colours[rank] = colour
    return Fold(mesh, colours, [(axis, 0) for axis in meetings], blocks)


def members(fold):
    return sorted(tuple(np.flatnonzero(fold.of == c).tolist()) for c in range(len(fold)))


def test_a_slow_rank_that_meets_all_is_alone():
    fold = fold_of(Mesh(8, 4), {5: 1}, "world")
    assert members(fold) == [(0, 1, 2, 3, 4, 6, 7), (5,)]
    assert fold.ranks == (0, 5)
    assert fold.counts == (7, 1)
    assert fold.representative(6) == 0


def test_a_slow_rank_splits_those_that_meet_it():
    fold = fold_of(Mesh(12, 4), {5: 1}, "local")
    assert members(fold) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 6, 7), (5,)]
    # and over the nodes: ranks of its local index, and then their neighbours, which meet other neighbours
    fold = fold_of(Mesh(12, 4), {5: 1}, "local", "node")
    assert members(fold) == [(0, 2, 3, 8, 10, 11), (1, 9), (4, 6, 7), (5,)]


def test_messages_split_by_what_comes_in_too():
    mesh = Mesh(8, 1, dims=(("pipeline", 8),))
    fold = Fold(mesh, np.array([0, 0, 0, 0, 1, 0, 0, 0]), [("pipeline", 1)])
    assert len(fold) == 8  # each is another number of messages behind rank 4
    ends = Fold(mesh, np.array([0, 0, 0, 0, 1, 1, 1, 1]), [("pipeline", 4)])
    assert members(ends) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_equal_ranks_are_one_class_however_many():
    fold = fold_of(Mesh(100_000, 8), {}, "world", "local", "node")
    assert (len(fold), fold.counts) == (1, (100_000,))


@settings(deadline=None, max_examples=60)
@given(nodes=st.integers(1, 4), per_node=st.integers(1, 4), data=st.data())
def test_equal_ranks_meet_equal_classes(nodes, per_node, data):
    mesh = Mesh(nodes * per_node, per_node)
    odd = data.draw(st.dictionaries(st.integers(0, mesh.num_ranks - 1), st.integers(1, 2)))
    axes = data.draw(st.lists(st.sampled_from(["world", "local", "node"]), min_size=1, unique=True))
    fold = fold_of(mesh, odd, *axes)
    for axis in axes:
        met = {}
        for rank in range(mesh.num_ranks):
            seen = sorted(fold.of[list(mesh.group(axis, rank))].tolist())
            assert met.setdefault(fold.of[rank], seen) == seen
            assert fold.circle(axis, int(fold.of[rank])).classes == tuple(sorted(set(seen)))
    for rank in range(mesh.num_ranks):
        assert odd.get(rank, 0) == odd.get(fold.representative(rank), 0)


# ---- meetings


@pytest.fixture
def arrive(make_experiment, make_spec):
    """(starts, end) of a collective of ranks that come at these times; on one switch at 1 byte a ns."""

    def _arrive(arrivals_ns, nbytes):
        ranks = len(arrivals_ns)
        experiment = make_experiment(nodes=ranks, ranks=1, cluster_backend=Backend.nccl)
        cluster = experiment.cluster
        cluster.inter_node = InterNodeConf(bandwidth_Bps=1e9, latency_ns=0)
        policy, _ = build_comm(experiment.comm, num_ranks=ranks, ranks_per_node=1)
        mesh = Mesh(ranks, 1)
        costs = Costs(experiment, make_spec(), policy)
        machine = Machine(simpy.Environment(), costs, Topology(cluster), folded=True)
        message = nbytes // (ranks - 1)
        transfer = Transfer("all_gather", "world", ranks, ranks * message, message)
        programs = {}
        for rank, at_ns in enumerate(arrivals_ns):
            writer = Writer(merge=False)
            writer.local(MAIN, COMPUTE, "forward", "a", "wait", Work("fixed", "", 0, at_ns))
            writer.transfer(MAIN, "gather", "forward", "a", transfer, tag="a")
            programs[rank] = writer.program
        collectives = Folded(machine, mesh, Fold.apart(mesh), [transfer])
        timings = Executor(machine, collectives, range(ranks), classes=True).run(
            [Segment(0, False, programs)]
        )
        return [t[0].starts_ns[1] for t in timings.values()], {t[0].ends_ns[1] for t in timings.values()}

    return _arrive


def test_early_ranks_wait_for_the_last(arrive):
    """Arrivals 0, 1, 2 and 5 ms, a transfer of 3 ms: it begins at 5 ms, and they have waited 5, 4, 3 and 0 ms."""
    starts_ns, ends_ns = arrive([0, 1_000_000, 2_000_000, 5_000_000], 3_000_000)
    assert ends_ns == {8_000_000}
    assert [8_000_000 - 3_000_000 - start for start in starts_ns] == [5_000_000, 4_000_000, 3_000_000, 0]


# ---- whole runs


SLOW = {"cluster_backend": Backend.nccl, "cluster_device": DeviceConf(flop_per_s=2e9, memory_Bps=1e10)}


@pytest.mark.parametrize("comm", ["zero3", "zeropp", "ddp", "qgz"])
@pytest.mark.parametrize("slowdown", [{3: 2.0}, {0: 1.5, 6: 3.0}, {5: 2.5}, {1: 1.02, 7: 1.3, 4: 1.1}])
@pytest.mark.parametrize(("ranks", "steps"), [(2, 6), (4, 2)])
def test_folded_stragglers_agree_with_every_message(make_experiment, make_spec, comm, slowdown, ranks, steps):
    keys = {"cluster_slowdown": slowdown, "steps": steps, "warmup_steps": 1}
    experiment = make_experiment(comm, nodes=4, ranks=ranks, **keys, **SLOW)
    folded, stepwise = (simulate(experiment, spec=make_spec(hidden=128), fold=fold) for fold in (True, False))
    a, b = folded.result["iteration_s"]["mean"], stepwise.result["iteration_s"]["mean"]
    assert a == pytest.approx(b, rel=0.01)
    assert sum(entry["count"] for entry in folded.result["ranks"]) == 4 * ranks


def test_one_straggler_slows_all_and_they_wait_for_it(make_experiment, make_spec):
    spec = make_spec(hidden=128)
    plain = simulate(make_experiment(nodes=4, ranks=2, **SLOW), spec=spec).result
    result = simulate(make_experiment(nodes=4, ranks=2, cluster_slowdown={5: 2.0}, **SLOW), spec=spec).result
    ranks = {entry["rank"]: entry for entry in result["ranks"]}
    assert ranks[5]["count"] == 1
    assert ranks[5]["compute"] == pytest.approx(2 * ranks[0]["compute"], rel=1e-6)
    assert ranks[0]["comm_exposed"] > ranks[5]["comm_exposed"]
    slower = result["iteration_s"]["mean"] - plain["iteration_s"]["mean"]
    assert 0.5 * ranks[0]["compute"] < slower <= ranks[0]["compute"]  # the rest hides behind gathers


def test_which_of_equal_ranks_is_slow_does_not_matter(make_experiment, make_spec):
    spec = make_spec(hidden=128)
    means = {
        simulate(
            make_experiment("zeropp", nodes=4, ranks=2, cluster_slowdown={rank: 1.7}, **SLOW), spec=spec
        ).result["iteration_s"]["mean"]
        for rank in range(8)
    }
    assert len(means) == 1


def test_ranks_that_are_all_slow_are_one_class(make_experiment, make_spec):
    spec = make_spec(hidden=128)
    record = simulate(
        make_experiment(nodes=4, ranks=2, cluster_slowdown=dict.fromkeys(range(8), 2.0), **SLOW), spec=spec
    )
    half = DeviceConf(flop_per_s=1e9, memory_Bps=5e9)
    keys = SLOW | {"cluster_device": half}
    expected = simulate(make_experiment(nodes=4, ranks=2, **keys), spec=spec)
    assert {s.rank for s in record.spans} == {0}
    mean = record.result["iteration_s"]["mean"]
    assert mean == pytest.approx(expected.result["iteration_s"]["mean"], rel=1e-6)


def test_a_slow_spell_costs_its_part_and_no_more(make_experiment, make_spec):
    spec, quiet = make_spec(hidden=128), make_experiment(nodes=4, ranks=2, steps=8, **SLOW)
    mean_s = simulate(quiet, spec=spec).result["iteration_s"]["mean"]
    spell = [{"rank": 3, "factor": 2.0, "from_s": 2.5 * mean_s, "until_s": 3.5 * mean_s}]
    keys = {"cluster_slowdown": spell, "steps": 8, "warmup_steps": 0} | SLOW
    result = simulate(make_experiment(nodes=4, ranks=2, **keys), spec=spec).result
    assert result["iteration_s"]["min"] == pytest.approx(mean_s, rel=1e-6)
    assert result["iteration_s"]["p50"] == pytest.approx(mean_s, rel=1e-6)
    total_s = result["iteration_s"]["mean"] * 8
    assert 8 * mean_s + 0.2 * mean_s < total_s <= 8 * mean_s + 0.51 * mean_s


@given(start=st.integers(0, 3_000), ns=st.integers(0, 5_000))
def test_time_stretches_in_the_spell_alone(start, ns):
    from twinbed.conf.schema import ClusterConf

    spell = [{"rank": 0, "factor": 3.0, "from_s": 1e-6, "until_s": 2e-6}]
    conditions = Conditions(ClusterConf(name="a", nodes=1, devices_per_node=1, slowdown=spell))
    end = conditions.end_ns(0, start, ns)
    inside = max(0, min(end, 2_000) - max(start, 1_000))
    assert (end - start) - inside * 2 / 3 == pytest.approx(ns, abs=1)


@pytest.mark.parametrize("fold", [True, False])
def test_slow_links_of_one_node_slow_the_ring(make_experiment, make_spec, fold):
    spec, network = make_spec(hidden=256), {"cluster_inter_node": InterNodeConf(bandwidth_Bps=1e8)}
    fast = {"cluster_backend": Backend.nccl, "cluster_device": DeviceConf(flop_per_s=1e15, memory_Bps=1e15)}

    def mean(**keys):
        experiment = make_experiment(nodes=4, ranks=2, **fast, **network, **keys)
        return simulate(experiment, spec=spec, fold=fold).result["iteration_s"]["mean"]

    slow = mean(cluster_link_slowdown=[{"node": 2, "factor": 4.0}])
    assert slow == pytest.approx(4 * mean(), rel=0.01)
    short = mean(cluster_link_slowdown=[{"node": 2, "factor": 4.0, "until_s": 1e-6}])
    assert short == pytest.approx(mean(), rel=1e-6)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("backend", [Backend.nccl, Backend.gloo])
def test_a_failed_rank_ends_the_run_and_names_who_waits(make_experiment, make_spec, fold, backend):
    spec = make_spec(hidden=128)
    keys = SLOW | {"cluster_backend": backend, "steps": 8, "warmup_steps": 0}
    mean_s = simulate(make_experiment(nodes=2, ranks=2, **keys), spec=spec).result["iteration_s"]["mean"]
    failures = [{"rank": 2, "at_s": 2.5 * mean_s}]
    record = simulate(
        make_experiment(nodes=2, ranks=2, cluster_failures=failures, **keys), spec=spec, fold=fold
    )
    assert record.result["status"] == "failed"
    assert record.result["error"].startswith(f"rank 2 failed at {2.5 * mean_s:g} s: ")
    assert "waits for rank 2" in record.result["error"]
    assert "iteration 2" in record.result["error"]
    stands = "(each stands for ranks that behave alike: rank 0 for 3)"  # zero3: all but the one that failed
    assert (stands in record.result["error"]) == fold
    assert record.result["iteration_s"]["n"] == 2
    assert {row.iteration for row in record.ledger} == {0, 1}


@pytest.mark.parametrize("fold", [True, False])
def test_a_failed_link_ends_the_run(make_experiment, make_spec, fold):
    failures = [{"node": 1, "at_s": 0.0}]
    keys = SLOW | {"cluster_failures": failures}
    record = simulate(make_experiment(nodes=4, ranks=2, **keys), spec=make_spec(), fold=fold)
    assert record.result["status"] == "failed"
    assert "the links of node 1 failed at 0 s" in record.result["error"]
    assert re.search(r"rank \d waits for rank \d", record.result["error"])
    assert "all_gather over world" in record.result["error"]
    assert record.result["iteration_s"]["n"] == 0


def test_a_failure_after_the_end_changes_nothing(make_experiment, make_spec):
    plain = simulate(make_experiment(**SLOW), spec=make_spec()).result
    late = simulate(make_experiment(cluster_failures=[{"rank": 1, "at_s": 1e6}], **SLOW), spec=make_spec())
    assert late.result["status"] == "ok"
    assert late.result["iteration_s"]["mean"] == pytest.approx(plain["iteration_s"]["mean"], rel=1e-9)


def test_the_first_failure_is_drawn_by_the_seed(make_experiment, make_spec):
    cluster = make_experiment(nodes=4, ranks=2, cluster_failures={"mtbf_s": 1000.0}).cluster
    drawn = [Conditions(cluster, seed=seed).dies_ns for seed in range(400)]
    assert drawn[0] == Conditions(cluster, seed=0).dies_ns
    times = [next(iter(d.values())) / 1e9 for d in drawn]
    assert np.mean(times) == pytest.approx(1000 / 8, rel=0.2)
    assert {next(iter(d)) for d in drawn} == set(range(8))


def test_links_fail_by_the_seed_too(make_experiment, make_spec):
    cluster = make_experiment(nodes=4, ranks=2, cluster_failures={"link_mtbf_s": 1000.0}).cluster
    drawn = [Conditions(cluster, seed=seed) for seed in range(400)]
    assert not any(d.dies_ns for d in drawn)
    assert np.mean([next(iter(d.cuts.values()))[0][0] / 1e9 for d in drawn]) == pytest.approx(
        1000 / 4, rel=0.2
    )
    assert {next(iter(d.cuts)) for d in drawn} == set(range(4))
    both = make_experiment(cluster_failures={"mtbf_s": 1.0, "link_mtbf_s": 1.0}).cluster
    assert Conditions(both).dies_ns
    assert Conditions(both).cuts


def test_mixed_devices_are_classes_of_their_own(make_experiment, make_spec):
    fast, slow = (DeviceConf(flop_per_s=f, memory_Bps=1e15) for f in (4e9, 2e9))
    keys = {"cluster_backend": Backend.nccl, "nodes": 4, "ranks": 2}
    parts = [PartConf(nodes=1, device=fast), PartConf(nodes=3, device=slow)]
    spec = make_spec(hidden=128)
    mixed = simulate(make_experiment(cluster_device=fast, cluster_parts=parts, **keys), spec=spec).result
    alone = simulate(make_experiment(cluster_device=slow, **keys), spec=spec).result
    ranks = {entry["rank"]: entry for entry in mixed["ranks"]}
    assert ranks[2]["compute"] == pytest.approx(2 * ranks[0]["compute"], rel=1e-6)
    assert mixed["iteration_s"]["mean"] == pytest.approx(alone["iteration_s"]["mean"], rel=1e-3)
    with pytest.raises(ValueError, match=r"cluster.parts=\[1, 3\]: must be 3 nodes"):
        make_experiment(cluster_parts=parts, **(keys | {"nodes": 3}))


def test_ranks_of_one_program_each_pass_a_message_on(make_experiment, make_spec):
    """Two stages of two ranks on two nodes: 1 ms of work, a message of 1 ms from both ranks of a node at once, 1 ms."""
    experiment = make_experiment(nodes=2, ranks=2, cluster_backend=Backend.nccl)
    cluster = experiment.cluster
    cluster.inter_node = InterNodeConf(bandwidth_Bps=1e9, latency_ns=7)
    cluster.intra_node.bandwidth_Bps = 1e15
    policy, _ = build_comm(experiment.comm, num_ranks=4, ranks_per_node=2)
    mesh = Mesh(4, 2, dims=(("data", 2), ("pipeline", 2)))
    costs = Costs(experiment, make_spec(), policy)
    work, nbytes = Work("fixed", "", 0, 1_000_000), 500_000
    first, second = Writer(merge=False), Writer(merge=False)
    done = first.local(MAIN, COMPUTE, "forward", "a", "work", work)
    send = Transfer("send", "pipeline", 2, nbytes, nbytes, peer=1)
    first.transfer("send_next", "send", "forward", "a", send, (done,), tag="a")
    recv = Transfer("recv", "pipeline", 2, nbytes, nbytes, peer=-1)
    got = second.transfer("recv_prev", "recv", "forward", "a", recv, tag="a")
    second.local(MAIN, COMPUTE, "forward", "a", "work", work, (got,))
    segment = Segment(0, False, {0: first.program, 2: second.program})
    fold = Fold(mesh, np.array([0, 0, 1, 1]), [("pipeline", 1)])
    machine = Machine(simpy.Environment(), costs, Topology(cluster), folded=True)
    collectives = Folded(machine, mesh, fold, [send, recv])
    timings = Executor(machine, collectives, fold.ranks, classes=True).run([segment])
    assert fold.ranks == (0, 2)
    assert timings[2][0].end_ns == 3_000_000 + 7
    assert timings[0][0].ends_ns == [1_000_000, 2_000_000 + 7]
