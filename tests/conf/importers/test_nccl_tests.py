"""Tables of nccl-tests: bandwidths as they define them, a line that no single row moves, and what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.conf.importers.calibration import calibrate
from twinbed.conf.importers.cluster_file import shipped
from twinbed.conf.importers.findings import Base
from twinbed.conf.importers.line_fit import fit_line
from twinbed.conf.importers.nccl_tests import bus_factor, read_table
from twinbed.conf.importers.source import Source, read_source
from twinbed.conf.schema import Algorithm, Backend, ClusterConf, InterNodeConf, IntraNodeConf, NcclConf
from twinbed.policies.mesh import WORLD, Mesh
from twinbed.sim.interpreter import Transfer
from twinbed.sim.nccl import Nccl

BASE = Base(
    "some_base",
    {
        "devices_per_node": 8,
        "intra_node": {"bandwidth_Bps": 235e9, "latency_ns": 3400},
        "inter_node": {"links": 8, "bandwidth_Bps": 25e9, "latency_ns": 14000, "efficiency": 0.9},
    },
)
SIZES = [1024 << (2 * i) for i in range(11)]


def values(text: str, base: Base = BASE, **given: object) -> dict[str, object]:
    imported = calibrate(read_table(Source("t.txt", text), **given), base)  # type: ignore[arg-type]
    return {finding.key: finding.value for finding in imported.findings}


def test_bandwidths_of_an_all_gather() -> None:
    text = (
        "# Collective test starting: all_gather_perf\n"
        "#  Rank  0 Group  0 Pid 11 on a device  0 [0x00] NVIDIA A100-SXM4-80GB\n"
        "#  Rank  1 Group  0 Pid 11 on a device  1 [0x01] NVIDIA A100-SXM4-80GB\n"
        "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
        "   16777216  2097152  float  none  -1  108.8  154.20  77.10  0  108.8  154.20  77.10  0\n"
    )
    table = read_table(Source("t.txt", text))
    row = table.rows[0]
    assert (table.op, table.num_ranks, table.hosts) == ("all_gather", 2, 1)
    assert row.algorithm_Bps / 1e9 == pytest.approx(154.20, abs=0.005)
    assert table.bus_Bps(row) / 1e9 == pytest.approx(77.10, abs=0.005)
    assert "154.20 GB/s algorithm, 77.10 GB/s bus" in calibrate(table, BASE).summary


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("broadcast", 1.0)],
)
def test_bus_factors(op: str, factor: float) -> None:
    assert bus_factor(op, 8) == factor
    assert bus_factor(op, 2) == pytest.approx({1.75: 1.0, 0.875: 0.5, 1.0: 1.0}[factor])


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("named", [True, False])
def test_a_straight_line_is_found(tables: SimpleNamespace, op: str, named: bool) -> None:
    times = tables.line_times(op, ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=SIZES)
    found = values(tables.table(op, times, ranks=8, named=named))
    hops = 14 if op == "all_reduce" else 7
    assert found["intra_node.bandwidth_Bps"] == pytest.approx(
        200e9, rel=0.002
    )  # times are printed with 4 digits
    assert found["intra_node.latency_ns"] == pytest.approx(28_000 / hops, rel=0.002)
    assert (found["nccl.protocols"], found["nccl.base_latency"]) == (["simple"], False)


@pytest.mark.parametrize("factor", [0.02, 30.0])
def test_one_wrong_row_does_not_matter(tables: SimpleNamespace, factor: float) -> None:
    times = tables.line_times("all_reduce", ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=SIZES)
    right = values(tables.table("all_reduce", times, ranks=8))
    for i in range(len(times)):
        wrong = [(size, time_us * (factor if i == j else 1)) for j, (size, time_us) in enumerate(times)]
        found = values(tables.table("all_reduce", wrong, ranks=8))
        for key in ("intra_node.bandwidth_Bps", "intra_node.latency_ns"):
            assert found[key] == pytest.approx(right[key], rel=0.005), (key, times[i])


@given(
    latency_us=st.floats(5, 200),
    bus_GBps=st.floats(1, 500),
    noise=st.lists(st.floats(-0.03, 0.03), min_size=22, max_size=22),
    wrong=st.integers(0, 21),
    by=st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(deadline=None)
def test_noise_and_one_wrong_row(
    latency_us: float, bus_GBps: float, noise: list[float], wrong: int, by: float
) -> None:
    sent = [float(8 << (i + i // 2)) for i in range(22)]
    times = [
        (latency_us * 1e3 + x / bus_GBps) * (1 + e) * (by if i == wrong else 1)
        for i, (x, e) in enumerate(zip(sent, noise, strict=True))
    ]
    line = fit_line(sent, times)
    assert line.latency_ns == pytest.approx(latency_us * 1e3, rel=0.15)
    assert line.bandwidth_Bps == pytest.approx(bus_GBps * 1e9, rel=0.15)


def test_between_nodes_the_hops_within_are_taken_off(tables: SimpleNamespace) -> None:
    latency_us = (
        14 * 3400 + 14_000
    ) / 1e3  # an all-gather over 16 ranks: 14 hops within two nodes, one between
    times = tables.line_times("all_gather", ranks=16, latency_us=latency_us, bus_GBps=180.0, sizes=SIZES)
    found = values(tables.table("all_gather", times, ranks=16, hosts=2))
    assert found["inter_node.latency_ns"] == pytest.approx(14_000, rel=0.01)
    assert found["inter_node.bandwidth_Bps"] == pytest.approx(180e9 / 8, rel=0.002)
    assert found["inter_node.efficiency"] == 1.0
    assert "intra_node.bandwidth_Bps" not in found


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize(("ranks", "hosts"), [(8, 1), (16, 2), (32, 4)])
def test_the_simulator_tells_the_table_back(tables: SimpleNamespace, op: str, ranks: int, hosts: int) -> None:
    # the largest is long enough for a line's bandwidth, and for a ring to beat a tree
    sizes = [1024, 8192, 65_536, 1 << 28, 1 << 29, 1 << 30, 1 << 31, 1 << 32]
    times = tables.line_times(op, ranks=ranks, latency_us=150.0, bus_GBps=90.0, sizes=sizes)
    found = values(tables.table(op, times, ranks=ranks, hosts=hosts))
    cluster = ClusterConf(
        name="imported",
        nodes=hosts,
        devices_per_node=ranks // hosts,
        backend=Backend.nccl,
        intra_node=IntraNodeConf(
            bandwidth_Bps=float(str(found.get("intra_node.bandwidth_Bps", 235e9))),
            latency_ns=int(str(found.get("intra_node.latency_ns", 3400))),
        ),
        inter_node=InterNodeConf(
            links=8,
            bandwidth_Bps=float(str(found.get("inter_node.bandwidth_Bps", 25e9))),
            latency_ns=int(str(found.get("inter_node.latency_ns", 14_000))),
            efficiency=float(str(found.get("inter_node.efficiency", 0.9))),
        ),
        nccl=NcclConf(algorithm=Algorithm.auto, protocols=["simple"], base_latency=False),
    )
    nccl = Nccl(cluster, Mesh(ranks, ranks // hosts, ranks // hosts), lambda work: 0)
    for size, time_us in times:
        message = size // ranks if op in ("all_gather", "reduce_scatter") else size
        transfer = Transfer(op, WORLD, ranks, size, message, numel=size // 4, element_bytes=4)
        told_us = nccl.alone_ns(nccl.way(transfer)) / 1e3
        assert told_us == pytest.approx(time_us, rel=0.05), size


def test_one_size_gives_a_bandwidth_with_the_latency_of_the_base(tables: SimpleNamespace) -> None:
    found = values(tables.table("all_gather", [(1 << 24, 108.8)], ranks=2))
    assert "intra_node.latency_ns" not in found
    assert found["intra_node.bandwidth_Bps"] == pytest.approx((1 << 23) / (108.8e3 - 3400) * 1e9, rel=0.001)


def test_short_messages_tell_no_bandwidth(tables: SimpleNamespace) -> None:
    times = tables.line_times("all_reduce", ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=SIZES[:4])
    imported = calibrate(read_table(Source("t.txt", tables.table("all_reduce", times, ranks=8))), BASE)
    keys = {finding.key for finding in imported.findings}
    assert "intra_node.latency_ns" in keys
    assert "intra_node.bandwidth_Bps" not in keys
    assert any("the bandwidth is that of some_base" in note for note in imported.notes)


def test_long_messages_tell_no_latency(tables: SimpleNamespace) -> None:
    sizes = [1 << i for i in range(30, 35)]
    times = tables.line_times("all_reduce", ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=sizes)
    imported = calibrate(read_table(Source("t.txt", tables.table("all_reduce", times, ranks=8))), BASE)
    assert {finding.key for finding in imported.findings} == {"intra_node.bandwidth_Bps"}
    assert any("the latency" in note for note in imported.notes)


@pytest.mark.parametrize(
    ("gpu", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx_h100"),
        ("NVIDIA A100-SXM4-40GB", "dgx_a100"),
        ("NVIDIA A100-PCIE-40GB", "pcie_a100"),
        ("NVIDIA A100 80GB PCIe", "pcie_a100"),
        ("Tesla V100-SXM3-32GB", "dgx2_v100"),
        ("Tesla P100-PCIE-16GB", "p100_single"),
        ("NVIDIA GeForce RTX 4090", ""),
    ],
)
def test_the_cluster_with_the_same_gpus(tables: SimpleNamespace, gpu: str, cluster: str) -> None:
    times = tables.line_times("all_reduce", ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=SIZES)
    text = tables.table("all_reduce", times, ranks=8, gpu=gpu)
    likeness = calibrate(read_table(Source("t.txt", text)), BASE).gpu
    assert (likeness.cluster if likeness else "") == cluster
    assert not cluster or cluster in shipped("cluster")


def test_a_table_of_one_rank_is_no_source(tables: SimpleNamespace) -> None:
    times = tables.line_times("broadcast", ranks=2, latency_us=5.0, bus_GBps=600.0, sizes=SIZES)
    with pytest.raises(ValueError, match=r"^t\.txt:\d+: the table is of one rank, which sends nothing"):
        read_table(Source("t.txt", tables.table("broadcast", times, ranks=1)))
    with pytest.raises(ValueError, match="num_ranks=1: must be at least 2"):
        bus_factor("all_reduce", 1)


def test_a_table_without_its_list_of_ranks(tables: SimpleNamespace) -> None:
    times = tables.line_times("all_reduce", ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=SIZES)
    text = tables.table("all_reduce", times, ranks=8, listed=False)
    with pytest.raises(ValueError, match=r"^t\.txt:\d+: the file has no list of ranks .* --ranks"):
        read_table(Source("t.txt", text))
    table = read_table(Source("t.txt", text), num_ranks=8)
    assert (table.num_ranks, table.hosts) == (8, 1)
    assert any("does not name hosts" in note for note in table.notes)
    with pytest.raises(ValueError, match=r"busbw / algbw is 1\.750, but 1\.500 for all_reduce over 4 ranks"):
        read_table(Source("t.txt", text), num_ranks=4)


def test_counts_are_of_one_rank_where_the_buffer_is_divided(data: Path) -> None:
    text = (data / "all_gather_2x8.txt").read_text()
    wrong = re.sub(r"^( +1048576 +)16384", r"\g<1>262144", text, flags=re.M)
    with pytest.raises(ValueError, match=r"size is 1048576, but count 262144 of 4 bytes on each of 16 ranks"):
        read_table(Source("t.txt", wrong))


def test_labels_and_log_lines_are_passed_over(data: Path) -> None:
    source = read_source(data / "all_reduce_8.txt")
    logged = "".join(
        f"[1,0]<stdout>:{line}\nnode-0:17:42 [0] NCCL INFO Channel 00/0 : 7[7] -> 0[0] via P2P/CUMEM read here it is\n"
        for line in source.lines
    )
    found = read_table(Source("t.txt", logged))
    assert [row.time_ns for row in found.rows] == [row.time_ns for row in read_table(source).rows]


def test_layouts_of_older_versions() -> None:
    text = (
        "nThread 1 nGpus 2 minBytes 8\n"
        "#   Rank  0 Pid   11 on a device  0 [0x00] Tesla V100-SXM2-16GB\n"
        "#   Rank  1 Pid   11 on a device  1 [0x01] Tesla V100-SXM2-16GB\n"
        "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error\n"
        "           0             0   float    10.00    0.00    0.00  0e+00    10.00    0.00    0.00  0e+00\n"
        "     1048576        131072   float    50.00   10.49   10.49  0e+00    50.00   10.49   10.49  0e+00\n"
        "    16777216       2097152   float   429.00   19.55   19.55    N/A   429.00   19.55   19.55    N/A\n"
    )
    table = read_table(Source("t.txt", text))  # until 2020 algbw of an all-gather held its factor
    assert (table.op, len(table.rows), table.gpu) == ("all_gather", 4, "Tesla V100-SXM2-16GB")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("   61.62 ", "   fast  ", "time is 'fast': must be a number"),
        ("  112.61 ", "   n/a   ", "algbw is 'n/a': must be a number"),
        ("16777216 ", "16777216B ", "size is '16777216B': must be a whole number"),
        ("   61.62 ", "     nan ", "time is nan: must be a number >= 0"),
        ("   61.62 ", "       0 ", "time is 0: must be > 0"),
        (" 16384 ", " -4 ", "size is -4: must be >= 0"),
        (" float ", " fp32 ", "type is 'fp32': must be one of int8"),
        ("    1460 ", "     ", "has 12 of 13 columns: the table is cut off or has been edited here"),
    ],
)
def test_text_for_a_number_names_file_and_line(data: Path, old: str, new: str, message: str) -> None:
    text = (data / "all_gather_2x8.txt").read_text()
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(ValueError, match=f"^{re.escape(f't.txt:{line}: {message}')}"):
        read_table(Source("t.txt", text.replace(old, new, 1)))


def test_a_table_cut_within_a_row_is_refused(data: Path) -> None:
    text = (data / "all_gather_2x8.txt").read_text()
    begin = text.index("   67108864")
    for end in range(begin + len("   67108864 "), text.index("\n", begin) - 1):
        with pytest.raises(ValueError, match=r"^t\.txt:\d+: (has \d+ of 13 columns|size is)"):
            read_table(Source("t.txt", text[:end]))
    whole_rows = text[:begin]
    assert any("Avg bus bandwidth" in note for note in read_table(Source("t.txt", whole_rows)).notes)
    titles = text[: text.index("        1024 ")]
    with pytest.raises(ValueError, match="no rows below the header"):
        read_table(Source("t.txt", titles))


def test_two_tables_in_one_file(data: Path) -> None:
    text = (data / "all_reduce_8.txt").read_text()
    with pytest.raises(ValueError, match=r"^t\.txt:\d+: a second table \(the first is at line 16\)"):
        read_table(Source("t.txt", text + text))


def test_a_header_without_bandwidths(data: Path) -> None:
    text = (data / "all_gather_2x8.txt").read_text()
    with pytest.raises(ValueError, match=r"^t\.txt:\d+: the header has time 2 times, busbw 1"):
        read_table(Source("t.txt", text.replace("busbw", "bw", 1)))


def test_rows_with_wrong_values_are_left_out(tables: SimpleNamespace) -> None:
    times = tables.line_times("all_reduce", ranks=8, latency_us=28.0, bus_GBps=200.0, sizes=SIZES)
    text = tables.table("all_reduce", times, ranks=8)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("65536 "))
    lines[at] = re.sub(r"0$", "7", lines[at])
    table = read_table(Source("t.txt", "\n".join(lines)))
    assert len(table.rows) == 2 * len(SIZES) - 1
    assert f"line {at + 1}: 7 wrong values, left out" in table.notes
