"""What an experiment is: typed, validated specs. Converted once from Hydra's config, passed on as objects.

Every `__post_init__` checks what its own keys can tell; `check` in `conf.compose` checks them together.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from . import conditions


class Target(Enum):
    sim = "sim"
    runtime = "runtime"
    both = "both"


class Engine(Enum):
    """Whose order of collectives and computation is followed."""

    fsdp2 = "fsdp2"
    deepspeed_2023 = "deepspeed_2023"  # ZeRO-3 and ZeRO++ as first released, June 2023
    deepspeed = "deepspeed"  # as of today
    megatron = "megatron"


class Precision(Enum):
    """What parameters are gathered and gradients reduced in; master weights are always fp32."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"

    @property
    def element_bytes(self) -> int:
        return 4 if self is Precision.fp32 else 2


class Recompute(Enum):
    """What the backward pass computes again (conf.model_flop.recompute_flop)."""

    none = "none"
    selective = "selective"  # the attention core (Megatron; Korthikanti et al. 2022, section 5)
    selective_op = (
        "selective_op"  # all but every second linear product and flash attention (torchtitan's "op")
    )
    selective_layer = "selective_layer"  # every second block (torchtitan's "2")
    full = "full"  # every block


class Attention(Enum):
    flash = "flash"  # one kernel, scores never leave the chip (Dao 2023)
    unfused = "unfused"  # two batched products with a softmax between


class Fusion(Enum):
    """How the memory-bound part of a block is written."""

    eager = "eager"  # torch modules, one kernel an operation
    fused = "fused"  # Megatron's and apex' kernels: norm, masked softmax, bias with GELU or dropout, rotary


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


class Launch(Enum):
    local = "local"
    torchrun = "torchrun"
    slurm = "slurm"


class Backend(Enum):
    gloo = "gloo"
    nccl = "nccl"


class GradientPath(Enum):
    """How quantized gradients are summed (`comm.zero_quantized_gradients`)."""

    two_hop = "two_hop"  # qgZ: all-to-all in the node, then across nodes
    one_hop = "one_hop"  # rival: one all-to-all over the world
    ring = "ring"  # rival: ring that re-quantizes at each hop


class HpzLifetime(Enum):
    """How long the node copy of the weights is good."""

    micro_batch = "micro_batch"  # the paper: forward refreshes it, backward reads it
    step = "step"  # DeepSpeed since January 2024: until the optimizer changes the weights


# Beyond these nothing would ever end, or fit: they catch slips of the keyboard
MAX_STEPS = 10_000_000
MAX_LAYERS = 100_000
MAX_RANKS = 1_000_000
MAX_MICRO_BATCHES = 100_000
MAX_SEED = 2**63 - 1  # torch takes no larger one
MAX_LOSS_SCALE = 2.0**24  # apex' max_loss_scale: gradients above 65504 / scale overflow fp16
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 86_400.0


def _require(ok: bool, key: str, value: object, legal: str) -> None:
    if not ok:
        raise ValueError(f"{key}={value!r}: must be {legal}")


@dataclass(kw_only=True)
class DeviceConf:
    """One GPU (or one rank's share of a CPU)."""

    name: str = "cpu"
    flop_per_s: float = 1e12  # dense peak at the run's precision
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
            _require(0 < getattr(self, key) <= 1, f"cluster.device.{key}", getattr(self, key), "in (0, 1]")
        at_least_0 = ("matmul_fixed_tokens", "matmul_ramp", "sms", "collective_sms", "flash_ramp", "spread")
        for key in (*at_least_0, "host_ns", "idle_w"):
            _require(getattr(self, key) >= 0, f"cluster.device.{key}", getattr(self, key), ">= 0")
        _require(
            not self.collective_sms or self.collective_sms < self.sms,
            "cluster.device.collective_sms",
            self.collective_sms,
            "0, or fewer than cluster.device.sms",
        )
        _require(self.busy_slowdown >= 1, "cluster.device.busy_slowdown", self.busy_slowdown, ">= 1")
        _require(
            self.power_w is None or self.power_w >= max(self.idle_w, 1.0),
            "cluster.device.power_w",
            self.power_w,
            "null, or at least cluster.device.idle_w",
        )
        for key in ("flop_per_s", "memory_bytes", "memory_Bps"):
            _require(getattr(self, key) > 0, f"cluster.device.{key}", getattr(self, key), "> 0")
        _require(self.launch_ns >= 0, "cluster.device.launch_ns", self.launch_ns, ">= 0")
        price = self.price_per_hour
        _require(price is None or price >= 0, "cluster.device.price_per_hour", price, ">= 0 or null")


@dataclass(kw_only=True)
class IntraNodeConf:
    """Between two ranks of a node, each direction."""

    bandwidth_Bps: float = 2e9
    latency_ns: int = 20_000
    kind: NodeKind = NodeKind.nvswitch
    pcie_Bps: float | None = None  # kind=nvlink_pairs: a GPU's way to the host
    host_Bps: float | None = None  # kind=pcie or nvlink_pairs: of the host's memory, written plus read

    def __post_init__(self) -> None:
        _require(self.bandwidth_Bps > 0, "cluster.intra_node.bandwidth_Bps", self.bandwidth_Bps, "> 0")
        _require(self.latency_ns >= 0, "cluster.intra_node.latency_ns", self.latency_ns, ">= 0")
        for key, needed in (
            ("pcie_Bps", self.kind is NodeKind.nvlink_pairs),
            ("host_Bps", self.kind is not NodeKind.nvswitch),
        ):
            value = getattr(self, key)
            if value is None:
                legal = f"given with cluster.intra_node.kind={self.kind.value}: the GPUs are not connected"
                _require(not needed, f"cluster.intra_node.{key}", None, legal)
            else:
                _require(value > 0, f"cluster.intra_node.{key}", value, "> 0")


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
        _require(self.links >= 1, "cluster.inter_node.links", self.links, ">= 1")
        _require(self.bandwidth_Bps > 0, "cluster.inter_node.bandwidth_Bps", self.bandwidth_Bps, "> 0")
        _require(self.latency_ns >= 0, "cluster.inter_node.latency_ns", self.latency_ns, ">= 0")
        _require(0 < self.efficiency <= 1, "cluster.inter_node.efficiency", self.efficiency, "in (0, 1]")
        table = conditions.link_table(self.link_table)
        # text as keys: a record is JSON
        self.link_table = None if table is None else {str(links): worth for links, worth in table.items()}
        _require(self.nodes_per_leaf >= 0, "cluster.inter_node.nodes_per_leaf", self.nodes_per_leaf, ">= 0")
        _require(
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
    channels: int = 1  # of a ring: where it shares links with other traffic it counts as so many flows

    def __post_init__(self) -> None:
        legal = ("ll", "ll128", "simple")
        _require(
            len(self.protocols) > 0 and all(p in legal for p in self.protocols),
            "cluster.nccl.protocols",
            list(self.protocols),
            f"some of {list(legal)}",
        )
        _require(self.channels >= 1, "cluster.nccl.channels", self.channels, ">= 1")


@dataclass(kw_only=True)
class PartConf:
    """Nodes with another device, in a mixed cluster."""

    name: str = ""
    nodes: int = MISSING
    device: DeviceConf = field(default_factory=DeviceConf)

    def __post_init__(self) -> None:
        _require(self.nodes >= 1, "cluster.parts.nodes", self.nodes, ">= 1")


@dataclass(kw_only=True)
class HostConf:
    """Costs that a probe measures on a CPU cluster, where ranks share cores and codecs are not free."""

    cores: int = 0  # cores that the ranks of one host share; 0: each rank has its own device
    all_nodes: bool = False  # one machine hosts all nodes: all ranks share its cores
    op_ns: dict[str, int] = field(default_factory=dict)  # fixed cost of one collective: "all_gather/world"
    # a whole small collective, by kind and message bytes: "all_gather/world/512"; the simulator takes off what the
    # network needs and has op_ns
    op_measured_ns: dict[str, int] = field(default_factory=dict)
    codec_ns: dict[str, int] = field(default_factory=dict)  # fixed cost of one codec call: "encode8"
    codec_ns_per_element: dict[str, float] = field(default_factory=dict)  # "encode8", "decode4", ...
    # all codec work of one optimizer step, where it was measured in its place: the simulator scales the two above to
    # it (a probe's buffers are warm, a run's are not)
    codec_step_ns: int = 0
    # wall time of one rank while all compute: "forward/root", "forward/block.0", "backward/block.0", "step"; empty:
    # the device's roofline
    compute_ns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.cores >= 0, "cluster.host.cores", self.cores, ">= 0")


@dataclass(kw_only=True)
class ClusterConf:
    name: str = MISSING
    nodes: int = MISSING
    devices_per_node: int = MISSING
    backend: Backend = Backend.gloo
    shaped: bool = False  # nodes are namespaces of this machine, joined by shaped links
    device: DeviceConf = field(default_factory=DeviceConf)
    intra_node: IntraNodeConf = field(default_factory=IntraNodeConf)
    inter_node: InterNodeConf = field(default_factory=InterNodeConf)
    host: HostConf = field(default_factory=HostConf)
    nccl: NcclConf = field(default_factory=NcclConf)
    parts: list[PartConf] = field(default_factory=list)  # in the order of nodes; empty: all have `device`
    sites: int = 1  # equal numbers of consecutive nodes, joined by a WAN
    wan_Bps: float | None = None  # of one site's way to the others, each direction
    wan_latency_ns: int = 0  # one traversal, site to site
    slowdown: Any = None  # {rank: factor}, or a list of {rank, factor, from_s, until_s}
    link_slowdown: Any = None  # a list of {node, factor, from_s, until_s}
    failures: Any = None  # a list of {rank | node, at_s}, or {mtbf_s}: of a rank, drawn by `seed`
    emulated_flops_per_s: float | None = None  # the runtime sleeps each unit's matmuls out to this rate
    guesses: dict[str, Any] = field(default_factory=dict)  # guessed key -> [worst, best]
    fitted: dict[str, str] = field(default_factory=dict)  # key that was fitted -> on which published rows
    source: str = ""  # where the figures come from

    def __post_init__(self) -> None:
        _require(self.nodes >= 1, "cluster.nodes", self.nodes, ">= 1")
        _require(self.devices_per_node >= 1, "cluster.devices_per_node", self.devices_per_node, ">= 1")
        size = f"{self.nodes} * {self.devices_per_node}"
        _require(self.num_ranks <= MAX_RANKS, "cluster.nodes * devices_per_node", size, f"<= {MAX_RANKS}")
        if self.emulated_flops_per_s is not None:
            _require(
                self.emulated_flops_per_s > 0,
                "cluster.emulated_flops_per_s",
                self.emulated_flops_per_s,
                "> 0, or null for real compute",
            )
        self._check_network()
        ranks = self.num_ranks
        conditions.rank_slowdowns(self.slowdown, ranks)
        conditions.link_slowdowns(self.link_slowdown, self.nodes)
        conditions.failures(self.failures, num_ranks=ranks, nodes=self.nodes)
        if self.parts:
            total = sum(part.nodes for part in self.parts)
            _require(
                total == self.nodes, "cluster.parts", [p.nodes for p in self.parts], f"{self.nodes} nodes"
            )

    def _check_network(self) -> None:
        per_leaf = self.inter_node.nodes_per_leaf
        _require(
            not per_leaf or per_leaf >= self.nodes or self.nodes % per_leaf == 0,
            "cluster.inter_node.nodes_per_leaf",
            per_leaf,
            f"a divisor of cluster.nodes={self.nodes}, or 0",
        )
        divides = self.sites >= 1 and self.nodes % self.sites == 0
        _require(divides, "cluster.sites", self.sites, f"a divisor of cluster.nodes={self.nodes}")
        if self.sites > 1:
            given = self.wan_Bps is not None and self.wan_Bps > 0
            _require(
                given, "cluster.wan_Bps", self.wan_Bps, "> 0 with cluster.sites > 1: they are not connected"
            )
        _require(self.wan_latency_ns >= 0, "cluster.wan_latency_ns", self.wan_latency_ns, ">= 0")

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(kw_only=True)
class ModelConf:
    """Keys of a model; `conf.model_spec` turns them into shapes."""

    name: str = MISSING
    family: str = "gpt"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None  # null: as many as heads
    ffn: int | None = None  # null: 4 hidden
    vocab: int | None = None
    sequence: int | None = None  # positions, and the default of batch.sequence
    tied_embeddings: bool = False
    config_json: str | None = None  # model=hf: a Hugging Face config.json
    extra: dict[str, Any] = field(default_factory=dict)  # what only some families have

    def __post_init__(self) -> None:
        few = self.layers is None or self.layers <= MAX_LAYERS
        _require(few, "model.layers", self.layers, f"<= {MAX_LAYERS}")


@dataclass(kw_only=True)
class CommConf:
    """One parametrised family of communication policies, with DeepSpeed's key names."""

    name: str = MISSING
    zero_stage: int = 3  # 0: plain data parallelism
    parameter_server: bool = False
    zero_quantized_weights: bool = False  # qwZ
    zero_hpz_partition_size: int | None = 1  # hpZ; 1: off, null: the node's size
    quantize_node_copy: bool = False  # qwZ quantizes gathers from the node copy too, as DeepSpeed
    zero_quantized_gradients: bool = False  # qgZ
    hpz_lifetime: HpzLifetime = HpzLifetime.micro_batch
    weight_bits: int = 8
    weight_block: int = 2048
    gradient_path: GradientPath = GradientPath.two_hop
    gradient_bits: list[int] = field(default_factory=lambda: [4, 4])  # one for each hop
    gradient_block: int = 256  # 0: one scale for a whole tensor
    overlap: bool = False  # gloo: a communication thread; NCCL overlaps by itself
    config_json: str | None = None  # comm=deepspeed: a DeepSpeed JSON
    policy: str | None = None  # a policy of your own: "package.module:Class" or "file.py:Class"

    def __post_init__(self) -> None:
        _require(self.zero_stage in (0, 1, 2, 3), "comm.zero_stage", self.zero_stage, "one of [0, 1, 2, 3]")
        _require(
            self.weight_bits in (2, 4, 6, 8), "comm.weight_bits", self.weight_bits, "one of [2, 4, 6, 8]"
        )
        for key, block in (("weight_block", self.weight_block), ("gradient_block", self.gradient_block)):
            _require(block >= 0 and block % 4 == 0, f"comm.{key}", block, "a multiple of 4, or 0")
        hops = 2 if self.gradient_path is GradientPath.two_hop else 1
        _require(
            len(self.gradient_bits) in (hops, 2) and all(b in (2, 4, 6, 8) for b in self.gradient_bits),
            "comm.gradient_bits",
            list(self.gradient_bits),
            f"{hops} of [2, 4, 6, 8], one for each hop of gradient_path={self.gradient_path.value}",
        )
        if self.zero_hpz_partition_size is not None:
            _require(
                self.zero_hpz_partition_size >= 1,
                "comm.zero_hpz_partition_size",
                self.zero_hpz_partition_size,
                ">= 1 (1: off, null: the node's size)",
            )
        if self.parameter_server:
            _require(self.zero_stage == 0, "comm.zero_stage", self.zero_stage, "0 with parameter_server=true")
        if self.zero_stage < 3:
            for key in ("zero_quantized_weights", "zero_quantized_gradients"):
                _require(not getattr(self, key), f"comm.{key}", True, "false unless comm.zero_stage=3")
            _require(
                self.zero_hpz_partition_size == 1,
                "comm.zero_hpz_partition_size",
                self.zero_hpz_partition_size,
                "1 unless comm.zero_stage=3",
            )


class NodeCopyRule(Enum):
    """Which gathers of DeepSpeed may read the node copy of hpZ."""

    backward_hook = "backward_hook"  # first release: those that a backward hook asks for; recompute goes out
    exists = "exists"  # since PR #4906 (January 2024): all while there is a copy


@dataclass(kw_only=True)
class DeepSpeedConf:
    """engine=deepspeed*: `zero_optimization` of its JSON, by its names and defaults, and how its streams meet."""

    stage3_prefetch_bucket_size: int = 50_000_000  # elements that a hook gathers ahead of their use
    stage3_max_live_parameters: int = 1_000_000_000  # elements that may be gathered at a time
    stage3_max_reuse_distance: int = 1_000_000_000  # a weight used again within so many elements is kept
    stage3_param_persistence_threshold: int = 100_000  # tensors up to this size are never dropped in a step
    reduce_bucket_size: int = 500_000_000  # elements whose gradients are reduced together
    # null: as the release does (2023: backward_hook and false; today: exists and true)
    node_copy: NodeCopyRule | None = None
    overlap_gathers: bool | None = None  # false: no gather runs beside a computation
    # What runs on the host. The two limits are constants in DeepSpeed's source, the time is a guess.
    hook_ns: int = 60_000  # of one module's hooks around one call
    max_fetch_events: int = 2  # gathers that the host leaves unfinished before it waits for the oldest
    max_reduce_events: int = 2  # reductions, likewise

    def __post_init__(self) -> None:
        for key in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "hook_ns"):
            _require(getattr(self, key) >= 0, f"deepspeed.{key}", getattr(self, key), ">= 0")
        for key in (
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "reduce_bucket_size",
            "max_fetch_events",
            "max_reduce_events",
        ):
            _require(getattr(self, key) >= 1, f"deepspeed.{key}", getattr(self, key), ">= 1")


@dataclass(kw_only=True)
class BatchConf:
    micro: int = 1  # sequences of one rank in one forward
    accumulation: int = 1  # micro-batches a step
    global_sequences: int | None = None  # given: accumulation follows
    sequence: int | None = None  # tokens of a sequence; null: the model's

    def __post_init__(self) -> None:
        _require(self.micro >= 1, "batch.micro", self.micro, ">= 1")
        few = 1 <= self.accumulation <= MAX_MICRO_BATCHES
        _require(few, "batch.accumulation", self.accumulation, f"in [1, {MAX_MICRO_BATCHES}]")
        for key in ("global_sequences", "sequence"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"batch.{key}", value, ">= 1 or null")


@dataclass(kw_only=True)
class DataConf:
    name: str = MISSING  # text or synthetic
    path: str | None = None  # text: a file of your own; null: the standard library's documentation
    validation_fraction: float = 0.1

    def __post_init__(self) -> None:
        _require(self.name in ("text", "synthetic"), "data.name", self.name, "one of ['text', 'synthetic']")
        _require(
            0 <= self.validation_fraction < 1,
            "data.validation_fraction",
            self.validation_fraction,
            "in [0, 1)",
        )


@dataclass(kw_only=True)
class OptimizerConf:
    name: str = MISSING  # adamw or sgd
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _require(self.name in ("adamw", "sgd"), "optimizer.name", self.name, "one of ['adamw', 'sgd']")
        _require(self.lr > 0, "optimizer.lr", self.lr, "> 0")
        for key in ("eps", "weight_decay", "momentum"):
            _require(getattr(self, key) >= 0, f"optimizer.{key}", getattr(self, key), ">= 0")
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "optimizer.betas",
            list(self.betas),
            "two numbers in [0, 1)",
        )


@dataclass(kw_only=True)
class TrainConf:
    gradient_clipping: float = 1.0  # global L2 norm; 0: off
    warmup_lr_steps: int = 0
    lr_schedule: str = "constant"  # constant, linear or cosine, down to lr_min_fraction at `steps`
    lr_min_fraction: float = 0.1
    loss_scale: float = 0.0  # fp16: 0 is dynamic
    eval_every: int = 0  # steps between validations; 0: none
    eval_batches: int = 4
    save_every: int = 0  # steps between checkpoints; 0: none
    resume_from: str | None = None  # a checkpoint folder
    tensorboard: bool | None = None  # write TensorBoard's files beside metrics.csv; null: if it is installed
    tokens: float | None = None  # gives time_to_train_s, gpu_hours and cost
    timeout_s: float = 20.0  # a collective that waits longer fails the run

    def __post_init__(self) -> None:
        _require(self.gradient_clipping >= 0, "train.gradient_clipping", self.gradient_clipping, ">= 0")
        _require(
            self.lr_schedule in ("constant", "linear", "cosine"),
            "train.lr_schedule",
            self.lr_schedule,
            "one of ['constant', 'linear', 'cosine']",
        )
        for key in ("warmup_lr_steps", "eval_every", "save_every"):
            _require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), ">= 0")
        _require(
            0 <= self.loss_scale <= MAX_LOSS_SCALE,
            "train.loss_scale",
            self.loss_scale,
            f"in [0, {MAX_LOSS_SCALE:.0f}] (0: dynamic)",
        )
        lowest = self.lr_min_fraction
        _require(0 <= lowest <= 1, "train.lr_min_fraction", lowest, "in [0, 1], a share of optimizer.lr")
        few = 1 <= self.eval_batches <= MAX_MICRO_BATCHES
        _require(few, "train.eval_batches", self.eval_batches, f"in [1, {MAX_MICRO_BATCHES}]")
        _require(self.tokens is None or self.tokens > 0, "train.tokens", self.tokens, "> 0 or null")
        _require(
            MIN_TIMEOUT_S <= self.timeout_s <= MAX_TIMEOUT_S,
            "train.timeout_s",
            self.timeout_s,
            f"in [{MIN_TIMEOUT_S:.0f}, {MAX_TIMEOUT_S:.0f}]",
        )


# Text and no Enum: names of an Enum cannot begin with a digit, and OmegaConf takes an Enum by its names
TENSOR_MODES = ("1d", "2d", "2.5d", "3d")
SEQUENCE_MODES = ("megatron", "ring", "ulysses")
PIPELINE_SCHEDULES = ("1f1b", "interleaved", "gpipe")


@dataclass(kw_only=True)
class GoodputConf:
    """What gives the share of a training that is progress; node_mtbf_h null: not asked for."""

    node_mtbf_h: float | None = None  # mean hours between failures of one node
    checkpoint_s: float = 60.0  # that training stands still for a checkpoint
    interval_s: float | None = None  # of work between two; null: the best (Young, Daly)
    restart_s: float = 300.0  # from a failure until training goes on

    def __post_init__(self) -> None:
        for key in ("node_mtbf_h", "interval_s"):
            value = getattr(self, key)
            _require(value is None or value > 0, f"goodput.{key}", value, "> 0 or null")
        for key in ("checkpoint_s", "restart_s"):
            _require(getattr(self, key) >= 0, f"goodput.{key}", getattr(self, key), ">= 0")


@dataclass(kw_only=True)
class KernelsConf:
    """The kernels that a block is made of; null: what the engine's programs use."""

    attention: Attention | None = None  # megatron and deepspeed_2023: unfused, else flash
    fusion: Fusion | None = None  # fsdp2: eager, else fused
    dropout: bool | None = None  # on probabilities and both sublayers' outputs; null: megatron only
    reduce_fp32: bool = False  # gradients are summed in fp32 (torchtitan's default)


@dataclass(kw_only=True)
class ParallelConf:
    """How the model is laid out over ranks: data * tensor * pipeline is their number."""

    data: int = -1  # replicas of the model; -1: the rest of the ranks
    pipeline: int = 1  # stages
    virtual_stages: int = 1  # parts of the model that one stage holds, with pipeline_schedule=interleaved
    pipeline_schedule: str = "1f1b"
    pipeline_overlap: bool = False  # sends and receives beside computation (Megatron-LM since 2023)
    tensor: int = 1
    tensor_mode: str = "1d"
    tensor_overlap: bool = True  # a column product's input gradient is reduced beside its weights' product
    sequence: int = 1  # sequence_mode=megatron: 1 or the same as tensor
    sequence_mode: str = "megatron"

    def __post_init__(self) -> None:
        _require(self.data == -1 or self.data >= 1, "parallel.data", self.data, "-1 (the rest) or >= 1")
        for key in ("pipeline", "virtual_stages", "tensor", "sequence"):
            _require(getattr(self, key) >= 1, f"parallel.{key}", getattr(self, key), ">= 1")
        for key, legal in (
            ("tensor_mode", TENSOR_MODES),
            ("sequence_mode", SEQUENCE_MODES),
            ("pipeline_schedule", PIPELINE_SCHEDULES),
        ):
            value = getattr(self, key)
            _require(value in legal, f"parallel.{key}", value, f"one of {list(legal)}")


@dataclass(kw_only=True)
class ExperimentConf:
    target: Target = Target.both
    cluster: ClusterConf = MISSING
    model: ModelConf = MISSING
    comm: CommConf = MISSING
    parallel: ParallelConf = field(default_factory=ParallelConf)
    batch: BatchConf = field(default_factory=BatchConf)
    data: DataConf = MISSING
    optimizer: OptimizerConf = MISSING
    train: TrainConf = field(default_factory=TrainConf)
    engine: Engine = Engine.fsdp2
    deepspeed: DeepSpeedConf = field(default_factory=DeepSpeedConf)
    recompute: Recompute = Recompute.none
    kernels: KernelsConf = field(default_factory=KernelsConf)
    goodput: GoodputConf = field(default_factory=GoodputConf)
    precision: Precision = Precision.bf16
    launch: Launch = Launch.local
    steps: int = 10
    warmup_steps: int = 2  # left out of iteration_s
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", self.steps, ">= 1")
        _require(self.steps <= MAX_STEPS, "steps", self.steps, f"<= {MAX_STEPS}")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, ">= 0")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in [0, {MAX_SEED}]")
