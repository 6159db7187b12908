"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE): the node that it describes.

Elements and attributes: NVIDIA/nccl, src/graph/xml.cc; kinds of PCI devices by class: topo.cc.
"""

import re
from itertools import combinations

from . import node as nodes
from .findings import Base, Imported, Likeness
from .node import Gpu, Nic, Node
from .source import Source
from .xml_tree import Element, parse

FORMAT = "NCCL topology"

_GPU, _NIC, _BRIDGE, _OTHER, _UNKNOWN = "gpu", "nic", "bridge", "other", "unknown"
_INFINIBAND = "0x0207"
_NVSWITCH = "0x0680"  # class of what an <nvlink> leads to; 0x068001 is a POWER processor
_POWER_CPU = "0x068001"
# Mbit/s of payload a lane by GT/s; what NCCL does not know counts as the third generation, 16 lanes
_LANE_Mbps = {2.5: 1_500, 5.0: 3_000, 8.0: 6_000, 16.0: 12_000, 32.0: 24_000, 64.0: 48_000}
_LANES = 16
# Clusters of ours by compute capability, and by the PCI generation of the GPUs where that is all there is
_BY_SM = {60: "p100_single", 70: "dgx2_v100", 80: "dgx_a100", 90: "dgx_h100"}
_WITHOUT_NVLINK = {80: "pcie_a100"}
_BY_GTps = {8.0: "dgx2_v100", 16.0: "dgx_a100", 32.0: "dgx_h100"}


def is_topology(source: Source) -> bool:
    return source.text.lstrip().startswith("<")


def read_topology(source: Source, base: Base) -> Imported:
    """The node in a topology file.

    Raises:
        ValueError: Naming file and line: no XML, cut off, a graph or something else, no GPU, or text for a number.
    """
    root = parse(source)
    if root.tag in ("graphs", "graph"):
        raise source.error(
            root.line,
            f"<{root.tag}> holds the rings and trees that NCCL found (NCCL_GRAPH_DUMP_FILE), not a topology; give the "
            "file that NCCL_TOPO_DUMP_FILE writes",
        )
    if root.tag != "system":
        raise source.error(
            root.line, f"<{root.tag}> is not a topology of NCCL, whose first element is <system>"
        )
    reader = _Reader(source, root)
    node = reader.node()
    if not node.gpus:
        raise source.error(root.line, "the topology has no GPU: no PCI device of class 0x03 and no <gpu>")
    found, notes = nodes.findings(node, base, source.name)
    return Imported(
        source=source.path,
        format=FORMAT,
        summary=_summary(root, node),
        findings=tuple(found),
        notes=tuple(notes),
        gpu=reader.likeness(),
    )


def _summary(root: Element, node: Node) -> str:
    kinds = {True: "InfiniBand NIC", False: "Ethernet NIC", None: "NIC"}
    counts = {"CPU": len(root.under("cpu")), "GPU": len(node.gpus)}
    counts |= {
        words: sum(nic.infiniband is infiniband for nic in node.nics) for infiniband, words in kinds.items()
    }
    return ", ".join(nodes.counted(count, words) for words, count in counts.items() if count)


class _Reader:
    def __init__(self, source: Source, root: Element) -> None:
        self._source = source
        self._devices = root.under("pci")
        self._kinds = {id(device): self._kind(device) for device in self._devices}
        self._notes: list[str] = []
        self._guess_unknown(root)
        self._gpus = [device for device in self._devices if self._kinds[id(device)] == _GPU]
        self._root = root

    def node(self) -> Node:
        busids = {device.attributes.get("busid", "").lower(): i for i, device in enumerate(self._gpus)}
        gpus = [self._gpu(device, busids) for device in self._gpus]
        far = {
            (i, j)
            for i, j in combinations(range(len(gpus)), 2)
            if not _share_switch(self._gpus[i], self._gpus[j])
        }
        return Node(
            gpus=gpus,
            nics=self._nics(),
            links_told=bool(self._root.under("gpu")),
            far=far,
            peers_through_cpu=self._peers_through_cpu(),
            notes=self._notes,
        )

    def likeness(self) -> Likeness | None:
        capabilities = [sm for device in self._gpus if (sm := self._sm(device)) is not None]
        if capabilities:
            sm = capabilities[0]
            linked = any(device.under("nvlink") for device in self._gpus)
            name = (_BY_SM if linked else _BY_SM | _WITHOUT_NVLINK).get(sm)
            return None if name is None else Likeness(name, f"sm {sm}" if linked else f"sm {sm}, no NVLink")
        speeds = [speed for device in self._gpus if (speed := self._GTps(device)) is not None]
        name = _BY_GTps.get(speeds[0]) if speeds else None
        how = f"by the GPUs' PCI links of {speeds[0]:g} GT/s" if speeds else ""
        return None if name is None else Likeness(name, how, guessed=True)

    def _kind(self, device: Element) -> str:
        text = device.attributes.get("class")
        children = {child.tag for child in device.children}
        if "gpu" in children:
            return _GPU
        if "nic" in children:
            return _NIC
        if text is None:
            return _BRIDGE if "pci" in children else _UNKNOWN
        match = re.fullmatch(r"(?:0x)?([0-9a-f]{2})[0-9a-f]{2}(?:[0-9a-f]{2})?", text.lower())
        if match is None:
            raise self._source.error(device.line, f"class={text!r} must be a PCI class such as 0x030200")
        return {"03": _GPU, "02": _NIC, "06": _BRIDGE}.get(match.group(1), _OTHER)

    def _guess_unknown(self, root: Element) -> None:
        """Devices without a class: of each processor the first are GPUs, equally many on all; the rest are NICs."""
        unknown = [device for device in self._devices if self._kinds[id(device)] == _UNKNOWN]
        if not unknown:
            return
        if _GPU in self._kinds.values():
            for device in unknown:
                self._kinds[id(device)] = _OTHER
            names = ", ".join(device.attributes.get("busid", "?") for device in unknown)
            self._notes.append(f"{names}: no class in the file, left out")
            return
        groups: dict[int, list[Element]] = {}
        for device in unknown:
            above = next((e for e in device.ancestors() if e.tag == "cpu"), root)
            groups.setdefault(id(above), []).append(device)
        fewest = min(map(len, groups.values()))
        for group in groups.values():
            for i, device in enumerate(group):
                self._kinds[id(device)] = _GPU if i < fewest else _NIC
        taken = {
            kind: ", ".join(d.attributes.get("busid", "?") for d in unknown if self._kinds[id(d)] == kind)
            for kind in (_GPU, _NIC)
        }
        self._notes.append(
            f"the file has no class attributes: equally many devices of each CPU are taken for GPUs ({taken[_GPU]}), "
            + (f"the rest for NICs ({taken[_NIC]})" if taken[_NIC] else "and none for a NIC")
        )

    def _gpu(self, device: Element, busids: dict[str, int]) -> Gpu:
        links: dict[int | None, int] = {}
        for link in device.under("nvlink"):
            target_class = link.attributes.get("tclass", "").lower()
            if target_class.startswith(_POWER_CPU):
                continue
            target = busids.get(link.attributes.get("target", "").lower())
            if target is None and not target_class.startswith(_NVSWITCH):
                continue  # a GPU that the file does not have
            links[target] = links.get(target, 0) + self._whole(link, "count", 1)
        return Gpu(
            name=device.attributes.get("busid", ""),
            line=device.line,
            sm=self._sm(device),
            pci_Bps=self._way_Bps(device),
            nvlinks=tuple(links.items()),
        )

    def _nics(self) -> list[Nic]:
        found = []
        for device in self._devices:
            if self._kinds[id(device)] != _NIC:
                continue
            text = device.attributes.get("class")
            infiniband = None if text is None else text.lower().startswith(_INFINIBAND)
            near = any(_share_switch(device, gpu) for gpu in self._gpus)
            ports: list[Element | None] = [*device.under("net")]
            for port in ports or [None]:
                element = port or device
                found.append(
                    Nic(
                        name=element.attributes.get("name", device.attributes.get("busid", "")),
                        line=element.line,
                        speed_Bps=self._speed_Bps(port),
                        pci_Bps=self._way_Bps(device),
                        infiniband=infiniband,
                        near=near,
                    )
                )
        return found

    def _speed_Bps(self, port: Element | None) -> float | None:
        if port is None or "speed" not in port.attributes:
            return None
        speed_Mbps = self._whole(port, "speed", 0, least=-1)
        if speed_Mbps <= 0:  # "some NICs define speed = -1" (NVIDIA/nccl, src/graph/topo.cc)
            self._notes.append(f"line {port.line}: speed={speed_Mbps}, for which NCCL takes 10 Gbit/s")
            speed_Mbps = 10_000
        return speed_Mbps * 1e6 / 8

    def _sm(self, device: Element) -> int | None:
        for gpu in device.under("gpu"):
            if "sm" in gpu.attributes:
                return self._whole(gpu, "sm", 0)
        return None

    def _way_Bps(self, device: Element) -> float | None:
        """Of the narrowest PCI link up to the processor, as far as the file tells."""
        way = [device, *(above for above in device.ancestors() if above.tag == "pci")]
        rates = [rate for link in way if (rate := self._link_Bps(link)) is not None]
        return min(rates) if rates else None

    def _link_Bps(self, device: Element) -> float | None:
        speed = self._GTps(device)
        if speed is None:
            return None
        lanes = self._whole(device, "link_width", _LANES) or _LANES
        return _LANE_Mbps.get(speed, _LANE_Mbps[8.0]) * lanes * 1e6 / 8

    def _GTps(self, device: Element) -> float | None:
        text = device.attributes.get("link_speed", "").strip()
        if not text or text.lower().startswith("unknown"):
            return None
        match = re.match(r"([0-9.]+)\s*GT/s", text)
        try:
            return float(match.group(1)) if match else float(text)
        except ValueError as err:
            raise self._source.error(
                device.line, f"link_speed={text!r} must be a speed such as '16 GT/s'"
            ) from err

    def _whole(self, element: Element, key: str, default: int, *, least: int = 0) -> int:
        text = element.attributes.get(key)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError as err:
            raise self._source.error(
                element.line, f"{key}={text!r} of <{element.tag}> must be a whole number"
            ) from err
        if not least <= value < 1_000_000_000:
            raise self._source.error(
                element.line, f"{key}={value} of <{element.tag}> must be in [{least}, 1000000000)"
            )
        return value

    def _peers_through_cpu(self) -> bool | None:
        """NVIDIA/nccl, src/graph/paths.cc, ncclTopoCheckP2p: across AMD's host bridges, not across others'."""
        vendors = {cpu.attributes.get("vendor") for cpu in self._root.under("cpu")} - {None}
        return None if not vendors else vendors == {"AuthenticAMD"}


def _share_switch(a: Element, b: Element) -> bool:
    above = {id(element) for element in a.ancestors() if element.tag == "pci"}
    return any(id(element) in above for element in b.ancestors())
