"""What an experiment is: typed, validated specs. Converted once from Hydra's config, passed on as objects.

Every `__post_init__` checks what its own keys can tell; `check` in `conf.compose` checks them together.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Target(Enum):
    sim = "sim"
    runtime = "runtime"
    both = "both"


class Engine(Enum):
    """Whose order of collectives and computation is followed."""

    fsdp2 = "fsdp2"


class Precision(Enum):
    """What parameters are gathered and gradients reduced in; master weights are always fp32."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"

    @property
    def element_bytes(self) -> int:
        return 4 if self is Precision.fp32 else 2


class Recompute(Enum):
    none = "none"
    full = "full"  # every block


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


def _require(ok: bool, key: str, value: object, legal: str) -> None:
    if not ok:
        raise ValueError(f"{key}={value!r}: must be {legal}")


@dataclass(kw_only=True)
class DeviceConf:
    """One GPU (or one rank's share of a CPU)."""

    name: str = "cpu"
    flop_per_s: float = 1e12  # dense peak at the run's precision
    matmul_efficiency: float = 0.5  # share of the peak that large matmuls reach
    memory_bytes: float = 24e9
    memory_Bps: float = 10e9  # bytes read plus written
    launch_ns: int = 0  # fixed cost of one kernel
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for key in ("flop_per_s", "memory_bytes", "memory_Bps"):
            _require(getattr(self, key) > 0, f"cluster.device.{key}", getattr(self, key), "> 0")
        _require(
            0 < self.matmul_efficiency <= 1,
            "cluster.device.matmul_efficiency",
            self.matmul_efficiency,
            "in (0, 1]",
        )
        _require(self.launch_ns >= 0, "cluster.device.launch_ns", self.launch_ns, ">= 0")


@dataclass(kw_only=True)
class IntraNodeConf:
    """Between two ranks of a node, each direction."""

    bandwidth_Bps: float = 2e9
    latency_ns: int = 20_000

    def __post_init__(self) -> None:
        _require(self.bandwidth_Bps > 0, "cluster.intra_node.bandwidth_Bps", self.bandwidth_Bps, "> 0")
        _require(self.latency_ns >= 0, "cluster.intra_node.latency_ns", self.latency_ns, ">= 0")


@dataclass(kw_only=True)
class InterNodeConf:
    """A node's way to the others: `links` equal links, each direction."""

    links: int = 1
    bandwidth_Bps: float = 12.5e6  # of one link, in each direction: bytes, not bits
    latency_ns: int = 0  # one traversal, node to node
    efficiency: float = 1.0  # share of the nominal bandwidth that payload gets

    def __post_init__(self) -> None:
        _require(self.links >= 1, "cluster.inter_node.links", self.links, ">= 1")
        _require(self.bandwidth_Bps > 0, "cluster.inter_node.bandwidth_Bps", self.bandwidth_Bps, "> 0")
        _require(self.latency_ns >= 0, "cluster.inter_node.latency_ns", self.latency_ns, ">= 0")
        _require(0 < self.efficiency <= 1, "cluster.inter_node.efficiency", self.efficiency, "in (0, 1]")

    @property
    def node_Bps(self) -> float:
        """Payload bytes a second of all links of one node, one direction."""
        return self.links * self.bandwidth_Bps * self.efficiency


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
    emulated_flops_per_s: float | None = None  # the runtime sleeps each unit's matmuls out to this rate
    guesses: dict[str, Any] = field(default_factory=dict)  # guessed key -> [worst, best]
    source: str = ""  # where the figures come from

    def __post_init__(self) -> None:
        _require(self.nodes >= 1, "cluster.nodes", self.nodes, ">= 1")
        _require(self.devices_per_node >= 1, "cluster.devices_per_node", self.devices_per_node, ">= 1")
        if self.emulated_flops_per_s is not None:
            _require(
                self.emulated_flops_per_s > 0,
                "cluster.emulated_flops_per_s",
                self.emulated_flops_per_s,
                "> 0, or null for real compute",
            )

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


@dataclass(kw_only=True)
class CommConf:
    """One parametrised family of communication policies, with DeepSpeed's key names."""

    name: str = MISSING
    zero_stage: int = 3  # 0: plain data parallelism
    parameter_server: bool = False
    zero_quantized_weights: bool = False  # qwZ
    zero_hpz_partition_size: int | None = 1  # hpZ; 1: off, null: the node's size
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


@dataclass(kw_only=True)
class BatchConf:
    micro: int = 1  # sequences of one rank in one forward
    accumulation: int = 1  # micro-batches a step
    global_sequences: int | None = None  # given: accumulation follows
    sequence: int | None = None  # tokens of a sequence; null: the model's

    def __post_init__(self) -> None:
        for key in ("micro", "accumulation"):
            _require(getattr(self, key) >= 1, f"batch.{key}", getattr(self, key), ">= 1")
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
        for key in ("warmup_lr_steps", "eval_every", "save_every", "loss_scale"):
            _require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), ">= 0")
        _require(self.eval_batches >= 1, "train.eval_batches", self.eval_batches, ">= 1")
        _require(self.timeout_s > 0, "train.timeout_s", self.timeout_s, "> 0")


@dataclass(kw_only=True)
class ParallelConf:
    data: int = -1  # -1: the rest of the ranks

    def __post_init__(self) -> None:
        _require(self.data == -1 or self.data >= 1, "parallel.data", self.data, "-1 (the rest) or >= 1")


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
    recompute: Recompute = Recompute.none
    precision: Precision = Precision.bf16
    launch: Launch = Launch.local
    steps: int = 10
    warmup_steps: int = 2  # left out of iteration_s
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", self.steps, ">= 1")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, ">= 0")
        _require(self.seed >= 0, "seed", self.seed, ">= 0")
