"""From a table of nccl-tests to the latency and bandwidth of a cluster's links.

A ring passes the data on once a hop: its time is the hops' latencies and, for what one rank sends, the bandwidth of
the slowest link: within a node that of a GPU, between nodes that of all NICs of a node together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .findings import Base, Finding, Imported, Likeness
from .line_fit import Line, fit_line
from .nccl_tests import FORMAT, Row, Table, bus_factor
from .node import counted

# A hop of a tree within a node, against one of a ring: NCCL's tuning constants for NVLink (src/graph/tuning.cc)
_TREE_HOP = 4.0 / 3.4
# Clusters of ours by what CUDA calls the GPU
_BY_NAME = (
    ("H100 80GB HBM3", "dgx_h100"),
    ("A100-SXM", "dgx_a100"),
    ("A100-PCI", "pcie_a100"),
    ("A100 80GB PCIe", "pcie_a100"),
    ("V100-SXM", "dgx2_v100"),
    ("P100-PCI", "p100_single"),
)


@dataclass(frozen=True, slots=True)
class _Hops:
    """Latencies that a small message pays one after the other."""

    inside: float
    outside: int


def calibrate(table: Table, base: Base) -> Imported:
    """Keys of a cluster that make the simulator's ring (or tree) cost what the table says.

    One host: `intra_node`; several: `inter_node`, where what `base` has within a node is taken as known.
    """
    factor = bus_factor(table.op, table.num_ranks)
    line = fit_line([row.size_bytes * factor for row in table.rows], [row.time_ns for row in table.rows])
    notes = list(table.notes)
    hops = _hops(table)
    latency_ns, bandwidth_Bps = line.latency_ns, line.bandwidth_Bps
    if len({row.size_bytes for row in table.rows}) == 1:
        latency_ns, bandwidth_Bps = None, _of_one_size(table, base, hops, factor)
        notes.append(f"one size only: the latency is that of {base.name}")
    elif latency_ns is None:
        notes.append(f"no message is short enough to show the latency: it is that of {base.name}")
    if bandwidth_Bps is None:
        longest = max(row.size_bytes for row in table.rows)
        notes.append(
            f"latency is a good part of the time even at {longest:,} bytes: the bandwidth is that of {base.name}; "
            "measure up to a size where it no longer grows (-e 1G)"
        )
    where = table.source.name
    inside = table.hosts == 1
    a_host, a_node = table.num_ranks // table.hosts, base.get("devices_per_node", 0)
    if a_host != a_node:
        notes.append(
            f"{where} has {a_host} ranks a host, {base.name} {a_node} GPUs a node: taken to make no difference"
        )
    found: list[Finding] = []
    if latency_ns is not None:
        found += _latency(latency_ns, hops, base, where, inside, notes)
        # it is one protocol's, and holds what a call's begin costs
        found.append(Finding("nccl.protocols", ["simple"], f"{where}: of the latency"))
        found.append(Finding("nccl.base_latency", False, f"{where}: in the latency"))
    if bandwidth_Bps is not None:
        found += _bandwidth(bandwidth_Bps, table, base, line, notes)
    return Imported(
        source=table.source.path,
        format=FORMAT,
        summary=_summary(table),
        findings=tuple(found),
        notes=tuple(notes),
        gpu=next((Likeness(name, table.gpu) for words, name in _BY_NAME if words in table.gpu), None),
    )


def _summary(table: Table) -> str:
    row = max(table.rows, key=lambda row: (row.size_bytes, -row.time_ns))
    hosts = "one host" if table.hosts == 1 else f"{table.hosts} hosts"
    return (
        f"{table.op} over {table.num_ranks} ranks on {hosts}; {row.size_bytes:,} B in {row.time_ns / 1e3:g} us: "
        f"{row.algorithm_Bps / 1e9:.2f} GB/s algorithm, {table.bus_Bps(row) / 1e9:.2f} GB/s bus"
    )


def _hops(table: Table) -> _Hops:
    ranks, hosts = table.num_ranks, table.hosts
    if table.op == "all_to_all":
        return _Hops(0 if hosts > 1 else 1, 1 if hosts > 1 else 0)
    if table.op == "all_reduce" and hosts > 1:  # short ones go up and down a tree over the nodes
        return _Hops(2 * (ranks // hosts - 1) * _TREE_HOP, 2 * math.ceil(math.log2(hosts)))
    times = 2 if table.op == "all_reduce" else 1
    return _Hops(times * (ranks - hosts), times * (hosts - 1))


def _latency(
    latency_ns: float, hops: _Hops, base: Base, where: str, inside: bool, notes: list[str]
) -> list[Finding]:
    key = "intra_node.latency_ns" if inside else "inter_node.latency_ns"
    if inside:
        reason = f"{where}: {latency_ns / 1e3:.1f} us over {hops.inside:g} hops"
        return [Finding(key, round(latency_ns / hops.inside), reason)]
    known = hops.inside * float(base.get("intra_node.latency_ns", 0))
    if known < latency_ns:
        between = counted(hops.outside, "hop")
        reason = f"{where}: {latency_ns / 1e3:.1f} us, less {known / 1e3:.1f} within nodes, over {between}"
        return [Finding(key, round((latency_ns - known) / hops.outside), reason)]
    each = round(latency_ns / (hops.inside + hops.outside))
    notes.append(
        f"{where}: {latency_ns / 1e3:.1f} us are less than the hops within nodes take in {base.name}: all hops are "
        "taken to be alike"
    )
    reason = f"{where}: {latency_ns / 1e3:.1f} us over {hops.inside + hops.outside:g} hops"
    return [Finding(key, each, reason), Finding("intra_node.latency_ns", each, reason)]


def _bandwidth(bandwidth_Bps: float, table: Table, base: Base, line: Line, notes: list[str]) -> list[Finding]:
    where = table.source.name
    rate = float(f"{bandwidth_Bps:.4g}")
    reason = f"{where}: bus bandwidth of long messages{_agreement(table.rows, line)}"
    if table.hosts == 1:
        return [Finding("intra_node.bandwidth_Bps", rate, reason)]
    ranks_a_host = table.num_ranks // table.hosts
    all_links = rate * (ranks_a_host if table.op == "all_to_all" else 1)
    links = int(base.get("inter_node.links", 1))
    found = [
        Finding(
            "inter_node.bandwidth_Bps",
            float(f"{all_links / links:.4g}"),
            f"{reason}, over {counted(links, 'link')}",
        ),
        Finding("inter_node.efficiency", 1.0, f"{where}: in the bandwidth"),
        Finding("inter_node.link_table", None, f"{where}: in the bandwidth"),
    ]
    if ranks_a_host > 1 and rate > float(base.get("intra_node.bandwidth_Bps", math.inf)):
        notes.append(f"{where}: faster than {base.name} is within a node, which is raised to it")
        found.append(Finding("intra_node.bandwidth_Bps", rate, f"{where}: at least what leaves a node"))
    return found


def _of_one_size(table: Table, base: Base, hops: _Hops, factor: float) -> float:
    """Bandwidth with `base`'s latency, or with none where that is longer than the measured time."""
    inside = float(base.get("intra_node.latency_ns", 0))
    outside = float(base.get("inter_node.latency_ns", 0))
    latency_ns = hops.inside * inside + hops.outside * outside
    time_ns = float(np.median([row.time_ns for row in table.rows]))
    left_ns = time_ns - latency_ns if latency_ns < time_ns else time_ns
    return table.rows[0].size_bytes * factor / left_ns * 1e9


def _agreement(rows: Sequence[Row], line: Line) -> str:
    """How well the line tells the table."""
    if not line.errors:
        return ""
    worst = int(np.argmax(line.errors))
    return (
        f"; rows differ from the line by {np.median(line.errors):.0%} (median), most at line {rows[worst].line} "
        f"({line.errors[worst]:.0%})"
    )
