"""One node as a topology file shows it, and what follows from it for the keys of a cluster.

Rates are those that NCCL itself reckons with: NVIDIA/nccl, src/graph/topo.h (NVLink) and topo.cc (PCI).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .findings import Base, Finding

# GB/s of one NVLink, each direction, by compute capability (topo.h: SM60_NVLINK_BW and so on)
_NVLINK_GBps = ((100, 40.1), (90, 20.6), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
_NVLINK_GBps_UNKNOWN = 20.0  # NCCL's own for what it does not know
# Most NVLinks of one GPU up to Blackwell: more of them to single peers than this is what a switch shows to each
_MOST_NVLINKS = 18
# A ring reaches most of what NCCL reckons with: 230 to 240 GB/s of 240 on A100 (nccl-tests)
_NVLINK_WORST = 0.95

PCIE_LATENCY_NS = 5_700  # NCCL's tuning constant for rings over PCIe (src/graph/tuning.cc)
_PCIE_LATENCY_SPREAD = (20_000, 4_000)
_PCIE4_X16_Bps = 24e9  # topo.cc: 12 Gbit/s of payload a lane
_PCIE_SPREAD = (12e9, 48e9)  # generations 3 to 5
# Written plus read: two sockets of eight channels DDR4-3200 are 409 GB/s, copies through both reach a third
_HOST_Bps = 150e9
_HOST_SPREAD = (80e9, 250e9)
_NIC_Bps = 25e9
_NIC_SPREAD = (12.5e9, 50e9)  # ports of 100 to 400 Gbit/s

NEAR = ("PIX", "PXB")  # without crossing a host bridge: what NCCL uses peer to peer on every processor


@dataclass(frozen=True, slots=True)
class Gpu:
    """`nvlinks`: to whom and how many: the position of another GPU, or None for a switch."""

    name: str
    line: int
    sm: int | None = None
    pci_Bps: float | None = None
    nvlinks: tuple[tuple[int | None, int], ...] = ()

    @property
    def num_nvlinks(self) -> int:
        return sum(count for _, count in self.nvlinks)


@dataclass(frozen=True, slots=True)
class Nic:
    """`near`: it shares a PCI switch with a GPU (None: not told). `infiniband`: by its PCI class."""

    name: str
    line: int
    speed_Bps: float | None = None
    pci_Bps: float | None = None
    infiniband: bool | None = None
    near: bool | None = None


@dataclass(slots=True)
class Node:
    """`links_told`: the file says which NVLinks there are. `far`: pairs of GPUs (positions) behind a host bridge.

    `peers_through_cpu`: NCCL uses peer to peer across its processors; None: the file does not name them.
    """

    gpus: list[Gpu]
    nics: list[Nic]
    links_told: bool
    far: set[tuple[int, int]] = field(default_factory=set)
    peers_through_cpu: bool | None = None
    notes: list[str] = field(default_factory=list)


def findings(node: Node, base: Base, where: str) -> tuple[list[Finding], list[str]]:
    """Keys of a cluster, and the guesses that are no key's value.

    Args:
        node: At least one GPU.
        base: What is taken where the file is silent.
        where: How remarks name the file.
    """
    found = [Finding("devices_per_node", len(node.gpus), f"{where}: {_lines(node.gpus)}")]
    notes = list(node.notes)
    found += _inside(node, base, where, notes)
    found += _outside(node, base, where, notes)
    return found, notes


def _inside(node: Node, base: Base, where: str, notes: list[str]) -> list[Finding]:
    if not node.links_told:
        notes.append(f"the file does not tell NVLinks: intra_node is that of {base.name}")
        known = base.get("intra_node.bandwidth_Bps")
        if not base.guessed or known is None:
            return []
        reason = f"guess: {base.name}'s; the file does not tell NVLinks"
        return [Finding("intra_node.bandwidth_Bps", known, reason, (min(_PCIE4_X16_Bps, known), known))]
    if len(node.gpus) == 1:
        return []
    joined = _joined(node)
    each = {gpu.num_nvlinks for gpu in node.gpus}
    if joined == "pairs":
        return _pairs(node, where)
    if joined == "all":
        if len(each) > 1:
            notes.append(f"GPUs have {sorted(each)} NVLinks: the fewest are taken for all")
        direct = {len([peer for peer, _ in gpu.nvlinks if peer is not None]) for gpu in node.gpus}
        if direct != {0} and direct != {len(node.gpus) - 1}:
            notes.append(
                "not every two GPUs share an NVLink: they are taken to reach each other over all their links, as "
                "NCCL's rings do"
            )
        return [
            Finding("intra_node.kind", "nvswitch", f"{where}: NVLink joins all GPUs"),
            *_nvlink_Bps(node, min(each), where),
        ]
    if each != {0}:
        notes.append("NVLinks join only some of the GPUs and are left out: the slowest pair sets the pace")
    return _pcie(node, where, notes)


def _joined(node: Node) -> str:
    """By NVLink: "all", neighbouring "pairs", or "none"."""
    seen, queue = {0}, [0]
    switched = {i for i, gpu in enumerate(node.gpus) if any(peer is None for peer, _ in gpu.nvlinks)}
    for i in queue:
        peers = {peer for peer, _ in node.gpus[i].nvlinks if peer is not None}
        if i in switched:
            peers |= switched
        queue += sorted(peers - seen)
        seen |= peers
    if len(seen) == len(node.gpus):
        return "all"
    pairs = [{peer for peer, _ in gpu.nvlinks} == {i ^ 1} for i, gpu in enumerate(node.gpus)]
    return "pairs" if all(pairs) else "none"


def _nvlink_Bps(node: Node, count: int, where: str) -> list[Finding]:
    capabilities = [gpu.sm for gpu in node.gpus if gpu.sm is not None]
    if capabilities:
        each = next((GBps for sm, GBps in _NVLINK_GBps if min(capabilities) >= sm), _NVLINK_GBps_UNKNOWN)
        known, best = f"sm {min(capabilities)}", 1.0
    else:
        each, known, best = _NVLINK_GBps_UNKNOWN, "the GPU is not named", 1.25
    nbytes = round(count * each * 1e9)
    return [
        Finding(
            "intra_node.bandwidth_Bps",
            float(nbytes),
            f"guess: {where}: {count} NVLinks of {each:g} GB/s, as NCCL reckons ({known})",
            (round(nbytes * (_NVLINK_WORST if capabilities else 0.6), -7), round(nbytes * best, -7)),
        )
    ]


def _pairs(node: Node, where: str) -> list[Finding]:
    nvlinks = min(gpu.num_nvlinks for gpu in node.gpus)
    pci, reason, spread = _pci_rate(node, where)
    return [
        Finding("intra_node.kind", "nvlink_pairs", f"{where}: NVLink joins GPUs 2i and 2i + 1"),
        *_nvlink_Bps(node, nvlinks, where),
        Finding("intra_node.pcie_Bps", pci, reason, spread),
        Finding("intra_node.host_Bps", _HOST_Bps, "guess: two sockets", _HOST_SPREAD),
    ]


def _pcie(node: Node, where: str, notes: list[str]) -> list[Finding]:
    peers = not node.far or node.peers_through_cpu is True
    if node.far and node.peers_through_cpu is None:
        notes.append(
            "the file does not name the processors: GPUs behind different host bridges are taken to copy through the "
            "host's memory, as NCCL does on Intel"
        )
    pci, reason, spread = _pci_rate(node, where)
    latency = Finding(
        "intra_node.latency_ns",
        PCIE_LATENCY_NS,
        "guess: NCCL's tuning constant for PCIe",
        _PCIE_LATENCY_SPREAD,
    )
    rate = Finding("intra_node.bandwidth_Bps", pci, reason, spread)
    if peers:
        notes.append("GPUs copy to each other over PCIe; links that several of them share are left out")
        kind = Finding("intra_node.kind", "nvswitch", f"{where}: PCIe peer to peer, each GPU its own way")
        return [kind, rate, latency]
    return [
        Finding("intra_node.kind", "pcie", f"{where}: no NVLink, and no peer to peer across host bridges"),
        rate,
        Finding("intra_node.host_Bps", _HOST_Bps, "guess: two sockets", _HOST_SPREAD),
        latency,
    ]


def _pci_rate(node: Node, where: str) -> tuple[float, str, tuple[float, float]]:
    rates = [gpu.pci_Bps for gpu in node.gpus if gpu.pci_Bps is not None]
    if rates:
        rate = min(rates)
        return rate, f"guess: {where}: the slowest GPU's PCI link, as NCCL reckons", (0.75 * rate, rate)
    return _PCIE4_X16_Bps, "guess: PCIe 4 x16; the file does not tell", _PCIE_SPREAD


def _outside(node: Node, base: Base, where: str, notes: list[str]) -> list[Finding]:
    nics = _used(node.nics, notes)
    if not nics:
        notes.append(f"the file shows no NIC: inter_node is that of {base.name}")
        return []
    found = [Finding("inter_node.links", len(nics), f"{where}: {_lines(nics)}")]
    if base.get("inter_node.link_table"):
        found.append(Finding("inter_node.link_table", None, f"{base.name}'s is of other links"))
    speeds = [nic.speed_Bps for nic in nics if nic.speed_Bps is not None]
    ways = [nic.pci_Bps for nic in nics if nic.pci_Bps is not None]
    key = "inter_node.bandwidth_Bps"
    if speeds:
        speed, reason = min(speeds), f"{where}: speed of line {nics[0].line}"
        # 24 of 25 GB/s are no bottleneck that a payload would see
        if ways and min(ways) < 0.9 * speed:
            speed, reason = min(ways), f"{where}: the NIC's PCI link, which is slower than its port"
        return [*found, Finding(key, speed, reason)]
    speed = float(base.get(key, _NIC_Bps))
    if ways and min(ways) < 0.9 * speed:
        speed = min(ways)
    low, high = _NIC_SPREAD
    if ways:  # no port is faster than its way to it, but for the protocol's share
        high = max(speed, min(high, min(ways) / 0.9))
    low = min(low, speed)
    high = max(high, speed)
    reason = f"guess: {base.name}'s; the file does not tell the speed"
    return [*found, Finding(key, speed, reason, (low, float(f"{high:.3g}")))]


def _used(nics: Sequence[Nic], notes: list[str]) -> list[Nic]:
    """The NICs that collectives take: InfiniBand before Ethernet, near a GPU before far from all, the fastest."""
    used = _kept(nics, [nic.infiniband is True for nic in nics], "Ethernet beside InfiniBand", notes)
    used = _kept(used, [nic.near is True for nic in used], "far from all GPUs", notes)
    top = max((nic.speed_Bps or 0.0 for nic in used), default=0.0)
    return _kept(used, [top > 0 and nic.speed_Bps == top for nic in used], "slower than the others", notes)


def _kept(nics: Sequence[Nic], wanted: Sequence[bool], why_not: str, notes: list[str]) -> list[Nic]:
    if not any(wanted) or all(wanted):
        return list(nics)
    left = [nic.name for nic, want in zip(nics, wanted, strict=True) if not want]
    notes.append(f"{', '.join(left)}: {why_not}, not counted")
    return [nic for nic, want in zip(nics, wanted, strict=True) if want]


def _lines(items: Sequence[Gpu] | Sequence[Nic]) -> str:
    lines = sorted({item.line for item in items})
    return f"line {lines[0]}" if len(lines) == 1 else f"lines {lines[0]} to {lines[-1]}"


def direct_or_switch(counts: Sequence[Sequence[int]]) -> list[tuple[tuple[int | None, int], ...]]:
    """A GPU's NVLinks from a matrix of NV#, [num_gpus, num_gpus]: a switch shows all of a GPU's links to each peer."""
    links: list[tuple[tuple[int | None, int], ...]] = []
    for row in counts:
        told = [(peer, count) for peer, count in enumerate(row) if count]
        if len(told) > 1 and sum(count for _, count in told) > _MOST_NVLINKS:
            links.append(((None, max(count for _, count in told)),))
        else:
            links.append(tuple(told))
    return links


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
