"""Times by hand: a SUMMA product with and without what runs beside it, a shared NIC, pipelines, a probed unit."""

from dataclasses import replace

import pytest

from twinbed.conf.schema import (
    Algorithm,
    Backend,
    DeviceConf,
    HostConf,
    InterNodeConf,
    IntraNodeConf,
    NcclConf,
)
from twinbed.policies.layout import Direction
from twinbed.sim.costs import Costs
from twinbed.sim.interpreter import Transfer
from twinbed.sim.layout.shapes import BEHIND, BLOCK
from twinbed.sim.run import Run
from twinbed.sim.simulate import make_engine, simulate

ELEMENT = 4
B, S = 4, 16


@pytest.fixture
def timed(make, spec_of):
    """Items of one layer's forward on rank 0: (op or "work", stream, start, end) from the layer's beginning."""

    def run(layer, *, nic_Bps=1e9, per_node=4, matmul_s=None, fold=True, backend=Backend.nccl, **keys):
        inner = IntraNodeConf(bandwidth_Bps=1e9, latency_ns=0)
        device = DeviceConf(memory_Bps=1e15, launch_ns=0, host_ns=0, flop_per_s=1e15)
        experiment = make(
            4,
            per_node=per_node,
            micro=B,
            tensor=4,
            tensor_mode="2d",
            steps=1,
            cluster_backend=backend,
            cluster_intra_node=inner,
            cluster_inter_node=InterNodeConf(bandwidth_Bps=nic_Bps, latency_ns=0),
            cluster_device=device,
            cluster_nccl=NcclConf(algorithm=Algorithm.ring, base_latency=False),
            cluster_emulated_flops_per_s=None if matmul_s is None else 1.0 / matmul_s,
            **keys,
        )
        run = Run(experiment, spec_of(), None, fold, make_engine)
        simulated = run.simulate(experiment.cluster)
        timing, program = simulated.timings[0][0], run.segments[0].program(0)
        found = []
        for item in program.items:
            path = item.unit if item.transfer is not None else item.parts[0].name
            if layer in path and item.phase == "forward":
                what = item.transfer.op if item.transfer is not None else "work"
                at = timing.starts_ns[item.index], timing.ends_ns[item.index]
                found.append((what, item.stream, *at))
        begin = min(start for _, _, start, _ in found)
        return [(what, stream, start - begin, end - begin) for what, stream, start, end in found]

    return run


def test_a_summa_product_waits_for_its_first_blocks_alone(timed):
    """2 x 2, x [2, 16, 32] and weight [96, 32] of a rank: 4096 and 12288 bytes a broadcast, at 1 byte a nanosecond and
    rank. Both streams send at once over one link, so each has half of it until the shorter two are through; all four
    are there after 2 (4096 + 12288) ns in any case.

    The first product begins with the first block of both, at 24576 ns less what the streams still owe each other.
    """
    x, w = 2 * S * 32 * ELEMENT, 96 * 32 * ELEMENT
    items = timed("block.0.qkv", matmul_s=0.0001 / (2 * 32 * 96 * 32))
    work = [(start, end) for what, _, start, end in items if what == "work"]
    ends = {(stream, i % 2): 0 for stream in ("row", "column") for i in range(2)}
    for stream in ("row", "column"):
        for i, (_, _, _, end) in enumerate(each for each in items if each[1] == stream):
            ends[stream, i] = end
    assert ends["row", 0] == pytest.approx(2 * x, abs=8)  # both streams halve the link
    assert ends["row", 1] == pytest.approx(4 * x, abs=8)
    # by then column has sent 2 x; the rest of its first block has the link alone
    assert ends["column", 0] == pytest.approx(4 * x + (w - 2 * x), abs=8)
    assert ends["column", 1] == pytest.approx(2 * (x + w), abs=8)
    assert work[0][0] == ends["column", 0]
    assert work[0][1] - work[0][0] == pytest.approx(100_000, abs=2)
    # the second blocks come beside the first product
    assert work[1][0] == work[0][1] > ends["column", 1]
    assert work[2][0] == work[1][1]


def test_a_product_shorter_than_its_blocks_waits_for_the_second_ones(timed):
    x, w = 2 * S * 32 * ELEMENT, 96 * 32 * ELEMENT
    items = timed("block.0.qkv", matmul_s=0.000001 / (2 * 32 * 96 * 32))
    work = [(start, end) for what, _, start, end in items if what == "work"]
    assert work[0][0] == pytest.approx(2 * x + w, abs=8)
    assert work[1][0] == pytest.approx(2 * (x + w), abs=8)
    assert work[1][0] > work[0][1]


def test_two_broadcasts_of_a_stream_are_under_way_at_once_on_gloo(timed):
    """Each of its groups has two threads; of two ranks one sends and the other answers, in both directions of the link.
    A stream of NCCL has one after the other.
    """
    for backend, at_once in ((Backend.nccl, False), (Backend.gloo, True)):
        items = timed("block.0.qkv", matmul_s=1e-15, backend=backend, per_node=1)
        for stream in ("row", "column"):
            (_, _, start, end), (_, _, other, _) = (each for each in items if each[1] == stream)
            assert (other < end) == at_once, (backend, stream)
            assert not at_once or other == start


def test_row_and_column_broadcasts_of_a_rank_share_its_nic(timed):
    """On four nodes of one rank each both streams leave by one NIC, on one node they share a rank's link alike; with
    rows inside a node only columns leave it, two ranks' at once.
    """
    x, w = 2 * S * 32 * ELEMENT, 96 * 32 * ELEMENT
    keys = {"matmul_s": 1e-15, "nic_Bps": 1e8}
    apart = timed("block.0.qkv", per_node=1, **keys)
    assert max(end for what, _, _, end in apart if what == "broadcast") == pytest.approx(
        20 * (x + w), rel=1e-3
    )
    pairs = timed("block.0.qkv", per_node=2, **keys)
    rows = max(end for what, stream, _, end in pairs if stream == "row" and what == "broadcast")
    columns = max(end for what, stream, _, end in pairs if stream == "column" and what == "broadcast")
    assert columns == pytest.approx(2 * 2 * w * 10, rel=1e-3)  # two roots a node, two blocks each
    assert rows < 4 * x + 10


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_step_by_step_shares_links_as_folded_does(timed, per_node):
    keys = {"matmul_s": 1e-12, "nic_Bps": 1e8, "per_node": per_node}
    apart, folded = (
        max(end for _, _, _, end in timed("block.0.fc1", fold=fold, **keys)) for fold in (False, True)
    )
    assert folded == pytest.approx(apart, rel=0.25 if per_node == 2 else 0.02)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 8},
        {"tensor": 4, "sequence": 4},
        {"tensor": 4, "tensor_mode": "2d"},
        {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
        {"tensor": 8, "tensor_mode": "3d"},
        {"tensor": 2, "sequence": 2, "sequence_mode": "ulysses"},
        {"tensor": 2, "pipeline": 2},
    ],
)
@pytest.mark.parametrize("backend", [Backend.nccl, Backend.gloo])
@pytest.mark.parametrize("comm", ["ddp", "zero3"])
def test_folded_equals_step_by_step(make, spec_of, layout, backend, comm):
    """Links so slow that latencies and arrivals do not show. On gloo a rank that has sent its part along a tree goes
    on, and its next sum runs beside the last one's end; folded, all wait for all.
    """
    outer = InterNodeConf(bandwidth_Bps=2e5, latency_ns=0)
    inner = IntraNodeConf(bandwidth_Bps=1e6, latency_ns=0)
    experiment = make(
        8,
        per_node=4,
        micro=8,
        comm=comm,
        accumulation=4,
        cluster_backend=backend,
        cluster_inter_node=outer,
        cluster_intra_node=inner,
        steps=1,
        **layout,
    )
    spec = spec_of(layers=2)
    apart, folded = (simulate(experiment, spec=spec, fold=fold).result for fold in (False, True))
    trees = layout.get("tensor_mode") in ("2d", "2.5d")
    near = 1e-6 if backend is Backend.nccl else 0.2 if trees else 0.03
    assert folded["iteration_s"]["mean"] == pytest.approx(apart["iteration_s"]["mean"], rel=near)
    assert folded["comm"] == apart["comm"]


def test_a_pipeline_has_its_bubble(make, spec_of):
    """1F1B without any time for messages: (m + p - 1) of the m that a stage computes (Narayanan et al. 2021)."""
    fast = IntraNodeConf(bandwidth_Bps=1e15, latency_ns=0)
    device = DeviceConf(launch_ns=0, memory_Bps=1e15)
    keys = {"cluster_intra_node": fast, "cluster_device": device, "cluster_emulated_flops_per_s": 1e9}
    keys |= {"cluster_backend": Backend.nccl, "accumulation": 8, "steps": 1, "pipeline": 4}
    # blocks alone take time that counts: a short vocabulary
    spec = spec_of(layers=4, vocab=2)
    for schedule in ("1f1b", "gpipe"):
        experiment = make(4, pipeline_schedule=schedule, **keys)
        costs = Costs(experiment, spec, None)
        each = sum(costs.laid.model.flop(BLOCK, way) for way in (Direction.forward, Direction.backward))
        head = sum(costs.laid.model.flop(BEHIND, way) for way in (Direction.forward, Direction.backward))
        took = simulate(experiment, spec=spec).result["iteration_s"]["mean"]
        assert (8 + 3) * each / 1e9 <= took <= ((8 + 3) * each + 8 * head) / 1e9 * 1.001, schedule


def test_interleaving_shortens_the_bubble(make, spec_of):
    fast = IntraNodeConf(bandwidth_Bps=1e15, latency_ns=0)
    keys = {"cluster_intra_node": fast, "cluster_emulated_flops_per_s": 1e9, "pipeline": 4}
    keys |= {"cluster_backend": Backend.nccl, "accumulation": 8, "steps": 1}
    spec = spec_of(layers=8, vocab=2)
    plain = simulate(make(4, **keys), spec=spec).result["iteration_s"]["mean"]
    keys |= {"virtual_stages": 2, "pipeline_schedule": "interleaved"}
    interleaved = simulate(make(4, **keys), spec=spec).result["iteration_s"]["mean"]
    assert interleaved / plain == pytest.approx((8 + 3 / 2) / (8 + 3), rel=0.01)


def test_a_probed_unit_is_shared_out_over_its_steps(make, spec_of):
    """What was measured is the sum of the unit's local steps, in the proportion that the device's model has them."""
    measured = {"forward/block": 1_000_000, "backward/block": 3_000_000, "forward/root": 500_000}
    measured |= {"backward/root": 700_000, "step": 10_000}
    experiment = make(
        4, tensor=4, tensor_mode="2d", cluster_host=HostConf(compute_ns=measured), accumulation=2
    )
    spec = spec_of()
    run = Run(experiment, spec, None, False, make_engine)
    costs = run.simulate(experiment.cluster).costs
    totals = {}
    for item in run.segments[0].program(0).items:
        for part in item.parts:
            if part.work.kind in ("compute", "step"):
                key = part.work.key.partition("#")[0] or "step"
                totals[key] = totals.get(key, 0) + costs.ns(part.work)
    assert totals["forward/block.0"] == pytest.approx(2 * 1_000_000, abs=50)
    assert totals["backward/block.1"] == pytest.approx(2 * 3_000_000, abs=100)
    assert totals["forward/embed"] + totals["forward/head"] == pytest.approx(2 * 500_000, abs=50)
    assert totals["backward/embed"] + totals["backward/head"] == pytest.approx(2 * 700_000, abs=50)
    model = costs.laid.model
    own = [s for s in model.steps(BLOCK, Direction.forward) if not isinstance(s.what, Transfer)]
    alone = [costs.device.time_ns(s.what) for s in own]
    steps = model.steps(BLOCK, Direction.forward)
    for step, ns in zip(own, alone, strict=True):
        key = f"forward/block.0#{steps.index(step)}"
        assert costs.laid.ns(key, slept_ns=0) == pytest.approx(1_000_000 * ns / sum(alone))


def test_an_emulated_rate_counts_local_operations(make, spec_of):
    """Four ranks sleep a quarter each of what one rank sleeps for the whole model."""
    spec, rate = spec_of(), 1e9
    keys = {"cluster_emulated_flops_per_s": rate, "steps": 1}
    whole = simulate(make(1, **keys), spec=spec).result["phases_s"]["compute"]
    for layout in ({"tensor": 4}, {"tensor": 4, "tensor_mode": "2d"}):
        cut = simulate(make(4, **layout, **keys), spec=spec).result["phases_s"]["compute"]
        assert cut == pytest.approx(whole / 4, rel=0.05)


def test_a_straggler_holds_up_its_tensor_group_only(make, spec_of):
    """Data parallelism waits at the end of a step; others' layers do not."""
    spec = spec_of(layers=4)
    keys = {"cluster_emulated_flops_per_s": 1e8, "steps": 1, "cluster_backend": Backend.nccl}
    experiment = make(4, tensor=2, **keys)
    slow = replace(experiment, cluster=replace(experiment.cluster, slowdown={3: 2.0}))
    plain, held = (simulate(each, spec=spec) for each in (experiment, slow))
    assert held.result["iteration_s"]["mean"] == pytest.approx(
        2 * plain.result["iteration_s"]["mean"], rel=0.1
    )
    idle = {rank["rank"]: rank["comm_exposed"] for rank in held.result["ranks"]}
    assert idle[0] > 0.4 * held.result["iteration_s"]["mean"]
