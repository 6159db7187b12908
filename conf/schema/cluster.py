"""Machines: devices, the links within and between nodes, what a probe measured, what goes wrong."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from .. import conditions
from ..placement import Placement
from .limits import MAX_RANKS, require

NCCL_MAX_CHANNELS = 32  # MAXCHANNELS of 2.18


class NodeKind(Enum):
    """How the GPUs of a node are joined."""

    nvswitch = "nvswitch"  # each its own way to a switch
    pcie = "pcie"  # no peer-to-peer: all copies go through the host's memory
    nvlink_pairs = "nvlink_pairs"  # neighbours 2i and 2i + 1 by NVLink, all others through the host's memory


class Algorithm(Enum):
    """Of NCCL's all-reduce."""

    auto = "auto"  # ring or tree, whichever NCCL's tuner takes to end first
    ring = "ring"
    tree = "tree"
    direct = "direct"  # every rank with every other at once, two hops


class Backend(Enum):
    gloo = "gloo"
    nccl = "nccl"


class SlowdownBy(Enum):
    """How `cluster.slowdown` makes a rank slow."""

    device = "device"  # all that it computes: what a slower device does; the runtime takes `sleep` for it
    sleep = "sleep"  # products and attention, each slept out (layouts); else each unit
    repeat = "repeat"  # products of tensor-parallel layers, done over and over (SEMI's own way)
    quota = "quota"  # all that the rank's process does: it is stopped in turns, as a quota of a shared core stops it


class RankOrder(Enum):
    """How ranks are put on the nodes."""

    block = "block"  # node by node
    cyclic = "cyclic"  # rank r on node r % nodes, as Slurm's --distribution=cyclic


@dataclass(kw_only=True)
class DeviceConf:
    """One GPU (or one rank's share of a CPU)."""

    name: str = "cpu"
    flop_per_s: float = 1e12  # dense peak at the run's precision
    # the same with precision=fp32, without TF32, which torch leaves off for matmuls; null: flop_per_s
    flop_per_s_fp32: float | None = None
    matmul_efficiency: float = 0.5  # share of the peak that large matmuls reach within a tile
    matmul_fixed_tokens: float = 0.0  # each linear product takes as long as with so many tokens more
    matmul_ramp: int = 0  # products along k that a tile's start and end cost
    sustained: float = 1.0  # clock under a lasting load of matmuls, as a share of the peak's
    sms: int = 0  # multiprocessors that tiles of a product are dealt out to; 0: no tiles
    collective_sms: int = 0  # of these, the ones that a running collective takes from products
    busy_slowdown: float = 1.0  # of matmuls while a collective runs, beside collective_sms
    spread: float = 0.0  # standard deviation of the speed of equal devices; the slowest sets the pace
    flash_forward: float = 0.5  # share of the peak that flash attention reaches on long sequences
    flash_backward: float = 0.5
    flash_ramp: int = 0  # keys that a block of queries costs at its start and end
    memory_bytes: float = 24e9
    memory_Bps: float = 10e9  # bytes read plus written
    memory_efficiency: float = 1.0  # share of memory_Bps that streaming kernels reach
    launch_ns: int = 0  # fixed cost of one kernel on the device
    host_ns: int = 0  # time of the host to launch one kernel; it runs ahead of the device
    price_per_hour: float | None = None
    power_w: float | None = None  # under full load; null: energy_j is not given
    idle_w: float = 0.0  # while nothing runs

    def __post_init__(self) -> None:
        for key in ("matmul_efficiency", "sustained", "flash_forward", "flash_backward", "memory_efficiency"):
            require(0 < getattr(self, key) <= 1, f"cluster.device.{key}", getattr(self, key), "in (0, 1]")
        at_least_0 = ("matmul_fixed_tokens", "matmul_ramp", "sms", "collective_sms", "flash_ramp", "spread")
        for key in (*at_least_0, "host_ns", "idle_w"):
            require(getattr(self, key) >= 0, f"cluster.device.{key}", getattr(self, key), ">= 0")
        require(
            not self.collective_sms or self.collective_sms < self.sms,
            "cluster.device.collective_sms",
            self.collective_sms,
            "0, or fewer than cluster.device.sms",
        )
        require(self.busy_slowdown >= 1, "cluster.device.busy_slowdown", self.busy_slowdown, ">= 1")
        require(
            self.power_w is None or self.power_w >= max(self.idle_w, 1.0),
            "cluster.device.power_w",
            self.power_w,
            "null, or at least cluster.device.idle_w",
        )
        for key in ("flop_per_s", "memory_bytes", "memory_Bps"):
            require(getattr(self, key) > 0, f"cluster.device.{key}", getattr(self, key), "> 0")
        fp32 = self.flop_per_s_fp32
        require(fp32 is None or fp32 > 0, "cluster.device.flop_per_s_fp32", fp32, "> 0, or null")
        require(self.launch_ns >= 0, "cluster.device.launch_ns", self.launch_ns, ">= 0")
        price = self.price_per_hour
        require(price is None or price >= 0, "cluster.device.price_per_hour", price, ">= 0 or null")

    def peak_flop_per_s(self, element_bytes: int) -> float:
        """Dense peak on numbers of so many bytes."""
        if element_bytes >= 4 and self.flop_per_s_fp32 is not None:
            return self.flop_per_s_fp32
        return self.flop_per_s


@dataclass(kw_only=True)
class IntraNodeConf:
    """Between two ranks of a node, each direction."""

    bandwidth_Bps: float = 2e9
    latency_ns: int = 20_000
    kind: NodeKind = NodeKind.nvswitch
    pcie_Bps: float | None = None  # kind=nvlink_pairs: a GPU's way to the host
    host_Bps: float | None = None  # kind=pcie or nvlink_pairs: of the host's memory, written plus read

    def __post_init__(self) -> None:
        require(self.bandwidth_Bps > 0, "cluster.intra_node.bandwidth_Bps", self.bandwidth_Bps, "> 0")
        require(self.latency_ns >= 0, "cluster.intra_node.latency_ns", self.latency_ns, ">= 0")
        for key, needed in (
            ("pcie_Bps", self.kind is NodeKind.nvlink_pairs),
            ("host_Bps", self.kind is not NodeKind.nvswitch),
        ):
            value = getattr(self, key)
            if value is None:
                legal = f"given with cluster.intra_node.kind={self.kind.value}: the GPUs are not connected"
                require(not needed, f"cluster.intra_node.{key}", None, legal)
            else:
                require(value > 0, f"cluster.intra_node.{key}", value, "> 0")


@dataclass(kw_only=True)
class InterNodeConf:
    """A node's way to the others: `links` equal links, each direction."""

    links: int = 1
    bandwidth_Bps: float = 12.5e6  # of one link, in each direction: bytes, not bits
    latency_ns: int = 0  # one traversal, node to node
    efficiency: float = 1.0  # share of the nominal bandwidth that payload gets
    link_table: Any = None  # {links: how many links' worth they deliver}; null, or not in it: all
    rails: bool = False  # GPUs of equal local index talk on a NIC of their own, others change rails by NVLink
    nodes_per_leaf: int = 0  # nodes below one leaf switch, leaves joined by a spine; 0: one switch for all
    oversubscription: float = 1.0  # links down from a leaf for each one up

    def __post_init__(self) -> None:
        require(self.links >= 1, "cluster.inter_node.links", self.links, ">= 1")
        require(self.bandwidth_Bps > 0, "cluster.inter_node.bandwidth_Bps", self.bandwidth_Bps, "> 0")
        require(self.latency_ns >= 0, "cluster.inter_node.latency_ns", self.latency_ns, ">= 0")
        require(0 < self.efficiency <= 1, "cluster.inter_node.efficiency", self.efficiency, "in (0, 1]")
        table = conditions.link_table(self.link_table)
        # text as keys: a record is JSON
        self.link_table = None if table is None else {str(links): worth for links, worth in table.items()}
        require(self.nodes_per_leaf >= 0, "cluster.inter_node.nodes_per_leaf", self.nodes_per_leaf, ">= 0")
        require(
            self.oversubscription >= 1, "cluster.inter_node.oversubscription", self.oversubscription, ">= 1"
        )

    @property
    def node_Bps(self) -> float:
        """Payload bytes a second of all links of one node, one direction."""
        worth: float = (self.link_table or {}).get(str(self.links), float(self.links))
        return worth * self.bandwidth_Bps * self.efficiency


@dataclass(kw_only=True)
class NcclConf:
    """How NCCL carries a collective out."""

    algorithm: Algorithm = Algorithm.auto  # of an all-reduce
    protocols: list[str] = field(default_factory=lambda: ["simple"])  # that the tuner chooses from
    base_latency: bool = False  # NCCL's own constants for the begin of a call come on top of the hops
    # of a ring: where it shares links with other traffic it counts as so many flows; null: 2 for each link of a node,
    # as NCCL makes them (2.18, src/graph: its search gives each NIC a ring, ncclTopoPostset doubles what was found)
    channels: int | None = None

    def __post_init__(self) -> None:
        legal = ("ll", "ll128", "simple")
        require(
            len(self.protocols) > 0 and all(p in legal for p in self.protocols),
            "cluster.nccl.protocols",
            list(self.protocols),
            f"some of {list(legal)}",
        )
        channels = self.channels
        require(channels is None or channels >= 1, "cluster.nccl.channels", channels, ">= 1, or null")


@dataclass(kw_only=True)
class PartConf:
    """Nodes of another machine, in a mixed cluster.

    All nodes have `devices_per_node` ranks: of a machine with more GPUs so many are used."""

    name: str = ""
    nodes: int = MISSING
    device: DeviceConf = field(default_factory=DeviceConf)
    intra_node: IntraNodeConf | None = None  # of these nodes, all of it; null: the cluster's
    inter_node: InterNodeConf | None = None  # of these nodes, but for leaves and rails; null: the cluster's

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "cluster.parts.nodes", self.nodes, ">= 1")


CODEC_KERNELS = (
    "copy",
    *(
        f"{kernel}{bits}"
        for kernel in ("encode", "decode", "requantize_encode", "requantize_decode")
        for bits in (2, 4, 6, 8)
    ),
)


@dataclass(kw_only=True)
class HostConf:
    """Costs that a probe measures on a CPU cluster, where ranks share cores and codecs are not free."""

    cores: int = 0  # cores that the ranks of one host share; 0: each rank has its own device
    all_nodes: bool = False  # one machine hosts all nodes: all ranks share its cores
    # fixed cost of one collective: "all_gather/world", or by message bytes: "all_gather/world/512"
    op_ns: dict[str, int] = field(default_factory=dict)
    # a whole collective, by kind and message bytes: "all_gather/world/512"; the simulator takes off what the network
    # needs and has op_ns
    op_measured_ns: dict[str, int] = field(default_factory=dict)
    # fixed cost of one codec call: "encode8", "decode4"; "requantize_decode4", "requantize_encode4": of the kernel that
    # decodes, adds up and encodes in one pass
    codec_ns: dict[str, int] = field(default_factory=dict)
    codec_ns_per_element: dict[str, float] = field(default_factory=dict)  # "encode8", "decode4", ...
    # all codec work of one optimizer step, where it was measured in its place: the simulator scales the two above to
    # it (a probe's buffers are warm, a run's are not)
    codec_step_ns: int = 0
    # wall time of one rank while all compute: "forward/root", "forward/block.0", "backward/block.0", "step"; empty:
    # the device's roofline
    compute_ns: dict[str, int] = field(default_factory=dict)
    memory_bytes: float | None = None  # of one node; null: not compared with what is offloaded
    memory_Bps: float | None = None  # that cores of one node and copies read plus write
    step_cores: int = 0  # of one node, that step optimizer states in host memory; its ranks share them
    core_Bps: float = 10e9  # that one of them reads plus writes
    pcie_Bps: float | None = None  # of a GPU's way to the host's memory, each direction, pinned memory
    pcie_ranks: int = 1  # GPUs of a node that share one such way
    pageable_Bps: float = 6e9  # the most that one rank's copy reaches where host memory is not pinned
    copy_ns: int = 10_000  # fixed cost of a copy between near and far memory

    def __post_init__(self) -> None:
        require(self.cores >= 0, "cluster.host.cores", self.cores, ">= 0")
        for key in ("step_cores", "copy_ns"):
            require(getattr(self, key) >= 0, f"cluster.host.{key}", getattr(self, key), ">= 0")
        for key in ("codec_ns", "codec_ns_per_element"):
            for kernel, value in getattr(self, key).items():
                known = kernel in CODEC_KERNELS
                require(known, f"cluster.host.{key}", kernel, f"made of {list(CODEC_KERNELS)}")
                require(value >= 0, f"cluster.host.{key}.{kernel}", value, ">= 0")
        require(self.pcie_ranks >= 1, "cluster.host.pcie_ranks", self.pcie_ranks, ">= 1")
        for key in ("core_Bps", "pageable_Bps"):
            require(getattr(self, key) > 0, f"cluster.host.{key}", getattr(self, key), "> 0")
        for key in ("memory_bytes", "memory_Bps", "pcie_Bps"):
            value = getattr(self, key)
            require(value is None or value > 0, f"cluster.host.{key}", value, "> 0 or null")


@dataclass(kw_only=True)
class DiskConf:
    """Where one node keeps what is offloaded to disk; its ranks share it."""

    read_Bps: float | None = None  # of one node, large reads
    write_Bps: float | None = None  # of one node, large writes
    latency_ns: int = 100_000  # of one read or write
    # of offload=disk, with its checksums and the memory's page faults, as a probe measures it
    fetch_ns: int | None = None  # of a chunk from disk, whatever its size; null: latency_ns
    fetch_Bps: float | None = None  # of one rank's chunks from disk, at most; null: the disk's
    evict_ns: int | None = None  # of a chunk to disk, whatever its size; null: latency_ns
    evict_Bps: float | None = None  # of one rank's chunks to disk, at most; null: the disk's
    capacity_bytes: float | None = None  # of one node; null: not known, and not compared

    def __post_init__(self) -> None:
        for key in ("read_Bps", "write_Bps", "fetch_Bps", "evict_Bps", "capacity_bytes"):
            value = getattr(self, key)
            require(value is None or value > 0, f"cluster.disk.{key}", value, "> 0 or null")
        for key in ("fetch_ns", "evict_ns"):
            value = getattr(self, key)
            require(value is None or value >= 0, f"cluster.disk.{key}", value, ">= 0 or null")
        require(self.latency_ns >= 0, "cluster.disk.latency_ns", self.latency_ns, ">= 0")


@dataclass(kw_only=True)
class ClusterConf:
    name: str = MISSING
    nodes: int = MISSING
    devices_per_node: int = MISSING
    backend: Backend = Backend.gloo
    # which rank lies on which node; the groups of a policy stay those of consecutive ranks
    rank_order: RankOrder = RankOrder.block
    shaped: bool = False  # nodes are namespaces of this machine, joined by shaped links
    device: DeviceConf = field(default_factory=DeviceConf)
    intra_node: IntraNodeConf = field(default_factory=IntraNodeConf)
    inter_node: InterNodeConf = field(default_factory=InterNodeConf)
    host: HostConf = field(default_factory=HostConf)
    disk: DiskConf = field(default_factory=DiskConf)
    nccl: NcclConf = field(default_factory=NcclConf)
    parts: list[PartConf] = field(default_factory=list)  # in the order of nodes; empty: all have `device`
    sites: int = 1  # equal numbers of consecutive nodes, joined by a WAN
    wan_Bps: float | None = None  # of one site's way to the others, each direction
    wan_latency_ns: int = 0  # one traversal, site to site
    # {rank: factor}, or a list of {rank, factor, from_s, until_s} or, by optimizer steps, {.., from_step, until_step}
    slowdown: Any = None
    # what of a slow rank's work is slow, and how the runtime makes it so
    slowdown_by: SlowdownBy = SlowdownBy.device
    # a list of {node | rank, factor, from_s, until_s}: of a node's links to the others, or of a rank's own to its node
    link_slowdown: Any = None
    # a list of {rank, at_s} or {node, at_s, until_s} (of a node: its links, which carry nothing until then, or never
    # again), or {mtbf_s, link_mtbf_s}: the first of a rank and of a node's links, drawn by `seed`
    failures: Any = None
    # the runtime sleeps matmuls out to it, a unit's or (layouts) each
    emulated_flops_per_s: float | None = None
    guesses: dict[str, Any] = field(default_factory=dict)  # guessed key -> [worst, best]
    fitted: dict[str, str] = field(default_factory=dict)  # key that was fitted -> on which published rows
    source: str = ""  # where the figures come from

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "cluster.nodes", self.nodes, ">= 1")
        require(self.devices_per_node >= 1, "cluster.devices_per_node", self.devices_per_node, ">= 1")
        size = f"{self.nodes} * {self.devices_per_node}"
        require(self.num_ranks <= MAX_RANKS, "cluster.nodes * devices_per_node", size, f"<= {MAX_RANKS}")
        if self.emulated_flops_per_s is not None:
            require(
                self.emulated_flops_per_s > 0,
                "cluster.emulated_flops_per_s",
                self.emulated_flops_per_s,
                "> 0, or null for real compute",
            )
        self._check_network()
        ranks = self.num_ranks
        conditions.rank_slowdowns(self.slowdown, ranks)
        links = conditions.link_slowdowns(self.link_slowdown, nodes=self.nodes, num_ranks=ranks)
        require(
            self.backend is Backend.nccl or not any(slow.own for slow in links),
            "cluster.link_slowdown",
            self.link_slowdown,
            "of nodes with cluster.backend=gloo, whose ranks have no links of their own",
        )
        conditions.failures(self.failures, num_ranks=ranks, nodes=self.nodes)
        if self.parts:
            total = sum(part.nodes for part in self.parts)
            require(
                total == self.nodes, "cluster.parts", [p.nodes for p in self.parts], f"{self.nodes} nodes"
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """What the nodes of all parts must share."""
        ours = self.inter_node
        for i, part in enumerate(self.parts):
            own, key = part.inter_node, f"cluster.parts.{i}.inter_node"
            if own is None:
                continue
            usual = InterNodeConf()
            for name in ("nodes_per_leaf", "oversubscription", "rails"):
                value, legal = getattr(own, name), getattr(ours, name)
                require(
                    value in (legal, getattr(usual, name)),
                    f"{key}.{name}",
                    value,
                    f"left out: leaves and rails are the cluster's (cluster.inter_node.{name}={legal})",
                )
            if ours.rails:
                what = f"{ours.links} with cluster.inter_node.rails=true, as cluster.inter_node.links"
                require(own.links == ours.links, f"{key}.links", own.links, what)

    def _check_network(self) -> None:
        per_leaf = self.inter_node.nodes_per_leaf
        require(
            not per_leaf or per_leaf >= self.nodes or self.nodes % per_leaf == 0,
            "cluster.inter_node.nodes_per_leaf",
            per_leaf,
            f"a divisor of cluster.nodes={self.nodes}, or 0",
        )
        divides = self.sites >= 1 and self.nodes % self.sites == 0
        require(divides, "cluster.sites", self.sites, f"a divisor of cluster.nodes={self.nodes}")
        if self.sites > 1:
            given = self.wan_Bps is not None and self.wan_Bps > 0
            require(
                given, "cluster.wan_Bps", self.wan_Bps, "> 0 with cluster.sites > 1: they are not connected"
            )
        require(self.wan_latency_ns >= 0, "cluster.wan_latency_ns", self.wan_latency_ns, ">= 0")

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def ring_channels(self) -> int:
        """The flows that a ring of NCCL counts as where it shares links."""
        if self.nccl.channels is not None:
            return self.nccl.channels
        return min(NCCL_MAX_CHANNELS, 2 * self.inter_node.links)

    @property
    def kinds(self) -> list[tuple[str, DeviceConf, int]]:
        """Each kind of device: the key that holds it, what it is, and how many ranks have it."""
        if not self.parts:
            return [("device", self.device, self.num_ranks)]
        return [
            (f"parts.{i}.device", part.device, part.nodes * self.devices_per_node)
            for i, part in enumerate(self.parts)
        ]

    @property
    def placement(self) -> Placement:
        return Placement(self.nodes, self.devices_per_node, self.rank_order is RankOrder.cyclic)

    def part_of(self, node: int) -> PartConf | None:
        """The part that a node belongs to; None: the cluster is not mixed."""
        first = 0
        for part in self.parts:
            first += part.nodes
            if node < first:
                return part
        return None

    def inside(self, node: int) -> IntraNodeConf:
        """How the ranks of a node are joined."""
        part = self.part_of(node)
        return self.intra_node if part is None or part.intra_node is None else part.intra_node

    def outside(self, node: int) -> InterNodeConf:
        """A node's links to the others; leaves and rails are the cluster's."""
        part = self.part_of(node)
        return self.inter_node if part is None or part.inter_node is None else part.inter_node

    @property
    def insides(self) -> list[IntraNodeConf]:
        """Each kind of node's, once for each part."""
        return [part.intra_node or self.intra_node for part in self.parts] or [self.intra_node]

    @property
    def outsides(self) -> list[InterNodeConf]:
        return [part.inter_node or self.inter_node for part in self.parts] or [self.inter_node]

    def device_of(self, rank: int) -> DeviceConf:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is none of the {self.num_ranks} ranks")
        part = self.part_of(self.placement.node(rank))
        return self.device if part is None else part.device
