"""Chunks in a pipeline and kernels that are not fused, in simulated time, against what can be counted by hand."""

from itertools import pairwise

import pytest

from twinbed.conf.schema import Backend, DeviceConf, HostConf, InterNodeConf, IntraNodeConf
from twinbed.sim.simulate import simulate

INSIDE_BPS, NODE_BPS = 2e7, 2e7
FAST = DeviceConf(memory_Bps=1e15)
KERNELS = ("encode4", "decode4", "own", "reduce", "reorder")


@pytest.fixture
def run(make_experiment, make_spec):
    """A step of qgZ whose gradients take as long within a node as between nodes, and kernels nothing."""

    def simulated(*, chunks=1, fused=True, **changes):
        given = {
            "cluster_device": FAST,
            "cluster_intra_node": IntraNodeConf(bandwidth_Bps=INSIDE_BPS, latency_ns=0),
            "cluster_inter_node": InterNodeConf(bandwidth_Bps=NODE_BPS),
        }
        experiment = make_experiment(
            "qgz",
            comm_keys={"gradient_chunks": chunks, "fused_kernels": fused},
            **(given | changes),
        )
        return simulate(experiment, spec=make_spec(layers=1, hidden=512))

    return simulated


def reduction_ns(record):
    """From the begin of the first step's reductions to their end, rank 0, unit by unit."""
    total = 0
    for unit in ("block.0", "root"):
        own = [
            s
            for s in record.spans
            if s.rank == 0 and s.name.endswith(f" {unit}") and s.stream.startswith(("reduce", "quantize"))
        ]
        steps = len({row.iteration for row in record.ledger})
        total += sum(b - a for a, b in merged(own)) / min(steps, 3)
    return total


def merged(spans):
    found = []
    for span in sorted(spans, key=lambda s: s.start_ns):
        if found and span.start_ns <= found[-1][1]:
            found[-1][1] = max(found[-1][1], span.end_ns)
        else:
            found.append([span.start_ns, span.end_ns])
    return found


def hops_ns(record):
    """Of a rank's bytes within the node, and between nodes, where two ranks share the link."""
    sent = {"local": 0, "node": 0}
    for row in record.ledger:
        if row.rank == 0 and row.iteration == 0 and row.op == "all_to_all":
            sent[row.axis] += row.wire_bytes
    return sent["local"] / INSIDE_BPS * 1e9, sent["node"] / (NODE_BPS / 2) * 1e9


def test_of_two_equal_hops_in_c_chunks_one_shows_only_one_chunk(run):
    inside, outside = hops_ns(run())
    assert inside == pytest.approx(outside, rel=1e-3)
    for chunks in (1, 2, 4, 8):
        record = run(chunks=chunks)
        assert hops_ns(record) == (inside, outside)  # the same bytes, however they are cut
        assert reduction_ns(record) == pytest.approx(inside + outside / chunks, rel=0.04)


def test_each_stream_keeps_the_order_of_chunks(run):
    record = run(chunks=4)
    for stream in ("reduce_local", "reduce_node"):
        ends = [s.end_ns for s in record.spans if s.rank == 0 and s.stream == stream]
        assert len(ends) == 3 * 2 * 4  # steps, units, chunks
        assert all(a <= b for a, b in pairwise(ends))


def test_on_nccl_hops_and_kernels_run_beside_each_other(run):
    slow = DeviceConf(memory_Bps=1e9)
    took = [
        run(chunks=chunks, cluster_backend=Backend.nccl, cluster_device=slow).result["iteration_s"]["mean"]
        for chunks in (1, 2, 4)
    ]
    assert took[0] > took[1] > took[2]


@pytest.mark.parametrize("backend", [Backend.gloo, Backend.nccl])
def test_kernels_that_are_not_fused_are_charged(run, backend):
    slow = DeviceConf(memory_Bps=1e8)
    fused, apart = (
        run(fused=fused, cluster_device=slow, cluster_backend=backend).result for fused in (True, False)
    )
    assert apart["phases_s"]["quantize"] > 1.2 * fused["phases_s"]["quantize"]
    assert apart["iteration_s"]["mean"] > fused["iteration_s"]["mean"]
    assert apart["comm"] == fused["comm"]


def test_passes_that_a_fused_kernel_spares_by_hand(run):
    """Two ranks a node, two nodes; n elements of a slice, bf16. Reorder: 4 slices read and written. First hop: 2 of 4
    slices decoded to fp32 and 2 own ones copied, then 4 read and 2 written. Second hop: 1 decoded, 1 own, 2 read and
    1 written. All else is there with fused kernels too.
    """
    host = HostConf(codec_ns_per_element={"encode4": 0.5, "decode4": 0.25})
    device = DeviceConf(memory_Bps=1e9)  # 1 ns a byte
    fused, apart = (run(fused=f, cluster_device=device, cluster_host=host) for f in (True, False))
    reduced = sum(
        r.payload_bytes for r in fused.ledger if r.rank == 0 and r.iteration == 0 and r.axis == "local"
    )
    n = reduced / (4 * 2)  # elements of a slice, all units
    passes = 2 * 4 * 2 * n + (2 * (2 + 4) + 4 * 4 + 2 * 4) * n + (1 * (2 + 4) + 2 * 4 + 4) * n
    difference = apart.result["phases_s"]["quantize"] - fused.result["phases_s"]["quantize"]
    assert difference * 1e9 == pytest.approx(passes, rel=1e-3)


def test_a_fused_kernel_reads_and_writes_only_its_ends(run):
    """n elements of a slice, bf16, 4 bits. Encoding: 2 of 4 slices read and written as codes. First hop: 2 slices of
    codes and 2 own ones are read, 1 of 2 sums written as codes, the other in fp32. Second hop: 1 slice of codes and
    that one are read, the sum is written in fp32.
    """
    device = DeviceConf(memory_Bps=1e9)  # 1 ns a byte
    record = run(cluster_device=device)
    n = (
        sum(r.payload_bytes for r in record.ledger if r.rank == 0 and r.iteration == 0 and r.axis == "local")
        / 8
    )
    encode, first, second = 2 * (2 + 0.5), 2 * 0.5 + 2 * 2 + 0.5 + 4, 0.5 + 4 + 4
    assert record.result["phases_s"]["quantize"] * 1e9 == pytest.approx(
        (encode + first + second) * n, rel=1e-3
    )


def test_a_probed_fused_kernel_is_charged_by_its_own_figures(run):
    each = {"encode4": 8.0, "decode4": 4.0}
    fused = each | {"requantize_encode4": 1.0, "requantize_decode4": 0.5}
    plain, own = (run(cluster_host=HostConf(codec_ns_per_element=figures)) for figures in (each, fused))
    n = (
        sum(r.payload_bytes for r in plain.ledger if r.rank == 0 and r.iteration == 0 and r.axis == "local")
        / 8
    )
    spared = 2 * n * 3.5 + n * 7.0  # the first hop decodes 2 slices, and encodes 1
    difference = plain.result["phases_s"]["quantize"] - own.result["phases_s"]["quantize"]
    assert difference * 1e9 == pytest.approx(spared, rel=1e-3)


def test_another_kernels_figure_spares_nothing(run):
    slow = DeviceConf(memory_Bps=1e9)
    plain, other = (
        run(cluster_device=slow, cluster_host=HostConf(codec_ns_per_element=figures)).result["phases_s"]
        for figures in ({}, {"decode8": 1e-9})
    )
    assert other["quantize"] == plain["quantize"]
