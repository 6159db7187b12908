"""NCCL's topology XML and nvidia-smi's matrix: what is counted, what is guessed, and what is refused."""

import re
from pathlib import Path

import pytest

from twinbed.conf.importers.cluster_file import shipped
from twinbed.conf.importers.findings import Base, Imported
from twinbed.conf.importers.nccl_topology import read_topology
from twinbed.conf.importers.smi_topology import read_matrix
from twinbed.conf.importers.source import Source, read_source

BASE = Base(
    "some_base",
    {
        "intra_node": {"bandwidth_Bps": 235e9, "latency_ns": 3400},
        "inter_node": {"links": 8, "bandwidth_Bps": 25e9},
    },
)
GPU_PCI = '<pci busid="{0}" class="0x030200" link_speed="16 GT/s" link_width="16">{1}</pci>'


def values(imported: Imported) -> dict[str, object]:
    return {finding.key: finding.value for finding in imported.findings}


def spreads(imported: Imported) -> dict[str, tuple[float, float]]:
    return {finding.key: finding.spread for finding in imported.findings if finding.spread is not None}


def topology(text: str) -> Imported:
    return read_topology(Source("t.xml", text), BASE)


def gpus(
    links: list[list[tuple[int | str, int]]], *, vendor: str = "GenuineIntel", apart: bool = False
) -> str:
    """A topology of GPUs 0, 1, ...; `links[i]`: (peer or "switch", count). `apart`: each on a processor of its own."""
    found = []
    for i, row in enumerate(links):
        inner = "".join(
            f'<nvlink target="{"0000:c0:00.0" if peer == "switch" else f"0000:0{peer}:00.0"}" count="{count}" '
            f'tclass="{"0x068000" if peer == "switch" else "0x030200"}"/>'
            for peer, count in row
        )
        pci = GPU_PCI.format(f"0000:0{i}:00.0", f'<gpu dev="{i}" sm="70" rank="{i}" gdr="1">{inner}</gpu>')
        found.append(f'<cpu numaid="{i}" arch="x86_64" vendor="{vendor}">{pci}</cpu>' if apart else pci)
    body = "".join(found)
    return f'<system version="1">{body if apart else f"<cpu>{body}</cpu>"}</system>'


def test_counts_by_pci_class_alone(data: Path) -> None:
    found = read_topology(read_source(data / "four_cpus_ib.xml"), BASE)
    assert found.summary == "4 CPUs, 8 GPUs, 8 InfiniBand NICs"
    assert values(found) == {
        "devices_per_node": 8,
        "inter_node.links": 8,
        "inter_node.bandwidth_Bps": 25e9,  # the base's: within what the file leaves open
    }
    # up to what 16 lanes of 16 GT/s carry, as NCCL reckons, with a tenth for the protocol
    assert spreads(found) == {"inter_node.bandwidth_Bps": (12.5e9, 26.7e9)}
    assert found.notes == ("the file does not tell NVLinks: intra_node is that of some_base",)
    assert found.gpu is not None
    assert (found.gpu.cluster, found.gpu.guessed) == ("dgx_a100", True)


def test_a_file_without_classes_is_read_with_named_guesses(data: Path) -> None:
    found = read_topology(read_source(data / "no_classes.xml"), BASE)
    assert found.summary == "2 CPUs, 4 GPUs, 1 NIC"
    assert values(found)["devices_per_node"] == 4
    assert values(found)["inter_node.links"] == 1
    (guess,) = (note for note in found.notes if "no class attributes" in note)
    assert "GPUs (0000:00:16.0, 0000:00:17.0, 0000:00:18.0, 0000:00:19.0)" in guess
    assert "NICs (0000:00:15.0)" in guess
    assert found.gpu is None


def test_a_dump_tells_nvlinks_speeds_and_gpus(data: Path) -> None:
    found = read_topology(read_source(data / "nvswitch_dump.xml"), BASE)
    assert found.summary == "1 CPU, 2 GPUs, 3 Ethernet NICs"
    assert values(found) == {
        "devices_per_node": 2,
        "intra_node.kind": "nvswitch",
        "intra_node.bandwidth_Bps": 240e9,  # twelve links of 20 GB/s
        "inter_node.links": 2,
        "inter_node.bandwidth_Bps": 25e9,  # 200,000 Mbit/s
    }
    assert found.notes == ("mlx5_bond_0: far from all GPUs, not counted",)
    assert found.gpu is not None
    assert (found.gpu.cluster, found.gpu.how, found.gpu.guessed) == ("dgx_a100", "sm 80", False)


def test_nvlink_pairs_and_meshes() -> None:
    pairs = topology(gpus([[(1, 4)], [(0, 4)], [(3, 4)], [(2, 4)]]))
    assert values(pairs)["intra_node.kind"] == "nvlink_pairs"
    assert values(pairs)["intra_node.bandwidth_Bps"] == 80e9
    assert values(pairs)["intra_node.pcie_Bps"] == 24e9  # 16 lanes of 16 GT/s
    assert set(spreads(pairs)) > {"intra_node.pcie_Bps", "intra_node.host_Bps"}
    mesh = topology(gpus([[(j, 2) for j in range(4) if j != i] for i in range(4)]))
    assert values(mesh)["intra_node.kind"] == "nvswitch"
    assert values(mesh)["intra_node.bandwidth_Bps"] == 120e9
    assert not any("share an NVLink" in note for note in mesh.notes)
    ring = topology(gpus([[((i - 1) % 4, 2), ((i + 1) % 4, 2)] for i in range(4)]))
    assert values(ring)["intra_node.bandwidth_Bps"] == 80e9
    assert any("not every two GPUs share an NVLink" in note for note in ring.notes)
    odd = topology(gpus([[(1, 4)], [(0, 4)], [], []]))
    assert any("join only some of the GPUs" in note for note in odd.notes)


@pytest.mark.parametrize(
    ("vendor", "apart", "kind"),
    [
        # NVIDIA/nccl, src/graph/paths.cc: peer to peer across host bridges on AMD, not on Intel
        ("AuthenticAMD", True, "nvswitch"),
        ("GenuineIntel", True, "pcie"),
    ],
)
def test_without_nvlink_the_processor_tells_peer_to_peer(vendor: str, apart: bool, kind: str) -> None:
    found = topology(gpus([[], []], vendor=vendor, apart=apart))
    assert values(found)["intra_node.kind"] == kind
    assert values(found)["intra_node.bandwidth_Bps"] == 24e9
    assert ("intra_node.host_Bps" in values(found)) is (kind == "pcie")


@pytest.mark.parametrize(
    ("sm", "links", "cluster"),
    [
        (60, True, "p100_single"),
        (70, True, "dgx2_v100"),
        (80, False, "pcie_a100"),
        (90, True, "dgx_h100"),
        (75, True, ""),
    ],
)
def test_the_cluster_with_the_same_gpus(sm: int, links: bool, cluster: str) -> None:
    text = gpus([[("switch", 6)]] * 2 if links else [[], []]).replace('sm="70"', f'sm="{sm}"')
    likeness = topology(text).gpu
    assert (likeness.cluster if likeness else "") == cluster
    assert not cluster or cluster in shipped("cluster")


def test_a_nic_is_no_faster_than_its_pci_link() -> None:
    gpu = GPU_PCI.format("0000:01:00.0", "")
    nic = (
        '<pci busid="0000:02:00.0" class="0x020000" link_speed="8.0 GT/s PCIe" link_width="16">'
        '<nic><net name="a" speed="200000"/></nic></pci>'
    )
    found = topology(f"<system><cpu>{gpu}{nic}</cpu></system>")
    assert values(found)["inter_node.bandwidth_Bps"] == 12e9


def test_a_nic_that_does_not_know_its_speed() -> None:
    nic = '<pci class="0x020000"><nic><net name="a" speed="-1"/></nic></pci>'
    found = topology(f"<system><cpu>{GPU_PCI.format('0000:01:00.0', '')}{nic}</cpu></system>")
    assert values(found)["inter_node.bandwidth_Bps"] == 1.25e9
    assert "line 1: speed=-1, for which NCCL takes 10 Gbit/s" in found.notes


def test_the_fastest_nics_count() -> None:
    nics = "".join(
        f'<pci busid="0000:0{i}:00.0" class="0x020000"><nic><net name="{name}" speed="{speed}"/></nic></pci>'
        for i, (name, speed) in enumerate(
            [("eth0", 10_000), ("mlx5_0", 100_000), ("mlx5_1", 100_000)], start=2
        )
    )
    found = topology(f"<system><cpu>{GPU_PCI.format('0000:01:00.0', '')}{nics}</cpu></system>")
    assert values(found)["inter_node.links"] == 2
    assert values(found)["inter_node.bandwidth_Bps"] == 12.5e9
    assert "eth0: slower than the others, not counted" in found.notes


def test_a_graph_is_no_topology(data: Path) -> None:
    with pytest.raises(
        ValueError, match=r"graphs\.xml:2: <graphs> holds the rings and trees .* not a topology"
    ):
        read_topology(read_source(data / "graphs.xml"), BASE)


@pytest.mark.parametrize("name", ["four_cpus_ib.xml", "nvswitch_dump.xml"])
def test_xml_cut_anywhere_names_file_and_line(data: Path, name: str) -> None:
    text = (data / name).read_text().rstrip()
    for end in range(1, len(text), 7):
        with pytest.raises(ValueError, match=r"^t\.xml:\d+: \S"):
            topology(text[:end])
    half = text[: len(text) // 2]
    with pytest.raises(
        ValueError, match=rf"^t\.xml:{half.count(chr(10)) + 1}: the file is cut off: <\w+> of line \d+"
    ):
        topology(half)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html><body/></html>", "t.xml:1: <html> is not a topology of NCCL"),
        ("<system><cpu/></system>", "t.xml:1: the topology has no GPU"),
        ("<system>\n<cpu>\n</system>", "t.xml:3: is not valid XML: mismatched tag"),
        ('<system><cpu>\n<pci class="many"/></cpu></system>', "t.xml:2: class='many' must be a PCI class"),
        (
            '<system>\n<pci class="0x030200" link_speed="fast"/></system>',
            "t.xml:2: link_speed='fast' must be a speed",
        ),
        (
            '<system>\n<pci class="0x030200" link_speed="8 GT/s" link_width="x16"/></system>',
            "t.xml:2: link_width='x16' of <pci> must be a whole number",
        ),
        (
            '<system><pci class="0x0302"/><pci class="0x0200"><nic>\n<net speed="fast"/></nic></pci></system>',
            "t.xml:2: speed='fast' of <net> must be a whole number",
        ),
        (
            '<system>\n<pci class="0x0302"><gpu dev="0" sm="-80"/></pci></system>',
            "t.xml:2: sm=-80 of <gpu> must be in [0, 1000000000)",
        ),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "t.xml:1: declares a document type"),
    ],
)
def test_bad_xml_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        topology(text)


def test_a_matrix_with_a_switch_and_a_legend(data: Path) -> None:
    found = read_matrix(read_source(data / "smi_nvswitch.txt"), BASE)
    assert found.summary == "8 GPUs, 10 NICs"
    assert values(found) == {
        "devices_per_node": 8,
        "intra_node.kind": "nvswitch",
        "intra_node.bandwidth_Bps": 240e9,  # NV12 to each of seven: twelve links to a switch
        "inter_node.links": 8,
        "inter_node.bandwidth_Bps": 25e9,
    }
    assert "NIC8 (mlx5_8), NIC9 (mlx5_9): far from all GPUs, not counted" in found.notes
    assert set(spreads(found)) == {"intra_node.bandwidth_Bps", "inter_node.bandwidth_Bps"}


def test_a_matrix_of_pcie_only(data: Path) -> None:
    found = read_matrix(read_source(data / "smi_pcie.txt"), BASE)
    assert values(found)["intra_node.kind"] == "pcie"
    assert values(found)["inter_node.links"] == 1
    assert any("does not name the processors" in note for note in found.notes)


@pytest.mark.parametrize(
    ("cells", "kind", "bandwidth_Bps"),
    [
        (["X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"], "nvlink_pairs", 80e9),
        (["X NV4 NV4 NV4", "NV4 X NV4 NV4", "NV4 NV4 X NV4", "NV4 NV4 NV4 X"], "nvswitch", 240e9),
        (["X PIX PXB PXB", "PIX X PXB PXB", "PXB PXB X PIX", "PXB PXB PIX X"], "nvswitch", 24e9),
        (["X PHB NODE SYS", "PHB X SYS SYS", "NODE SYS X SYS", "SYS SYS SYS X"], "pcie", 24e9),
    ],
)
def test_kinds_of_nodes_in_a_matrix(cells: list[str], kind: str, bandwidth_Bps: float) -> None:
    head = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
    rows = "".join(f"GPU{i}\t" + row.replace(" ", "\t") + "\t0-23\t0\n" for i, row in enumerate(cells))
    found = read_matrix(Source("m.txt", head + rows), BASE)
    assert values(found)["intra_node.kind"] == kind
    assert values(found)["intra_node.bandwidth_Bps"] == bandwidth_Bps


def _edited(data: Path, old: str, new: str) -> Source:
    text = (data / "smi_pcie.txt").read_text()
    assert old in text
    return Source("m.txt", text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GPU1    PIX", "GPU1    PAX", "m.txt:3: GPU1 to GPU0 is 'PAX': must be X, NV#, PIX"),
        ("GPU1    PIX", "GPU1    PXB", "m.txt:2: GPU0 to GPU1 is PIX, but line 3 has PXB for the way back"),
        ("GPU1    PIX", "GPU9    PIX", "m.txt:3: row GPU9 is not in the header"),
        ("GPU1    PIX", "GPU0    PIX", "m.txt:3: row GPU0 stands there twice"),
        ("GPU1    GPU2", "GPU1    GPU1", "m.txt:1: the header names GPU1 twice"),
        (
            "GPU1    PIX      X ",
            "GPU1    PIX     PIX",
            "m.txt:3: GPU1 to GPU1 is PIX: X is for a device and itself",
        ),
    ],
)
def test_bad_matrices_are_named(data: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        read_matrix(_edited(data, old, new), BASE)


def test_a_matrix_cut_anywhere_names_file_and_line(data: Path) -> None:
    text = (data / "smi_pcie.txt").read_text()
    whole = text.index("\n\nLegend")
    last = text.rindex("X", 0, whole)
    for end in range(len("        GPU0 "), last):
        with pytest.raises(ValueError, match=r"^m\.txt:\d+: \S"):
            read_matrix(Source("m.txt", text[:end]), BASE)
    with pytest.raises(ValueError, match=r"m\.txt:3: row GPU1 has 2 of 5 cells: the file is cut off here"):
        read_matrix(Source("m.txt", text[: text.index("GPU1    PIX") + len("GPU1    PIX      X")]), BASE)
