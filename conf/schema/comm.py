"""The family of communication policies, and DeepSpeed's own keys."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from .limits import MAX_CHUNKS, require


class GradientPath(Enum):
    """How quantized gradients are summed (`comm.zero_quantized_gradients`)."""

    two_hop = "two_hop"  # qgZ: all-to-all in the node, then across nodes
    one_hop = "one_hop"  # rival: one all-to-all over the world
    ring = "ring"  # rival: ring that re-quantizes at each hop


class HpzLifetime(Enum):
    """How long the node copy of the weights is good."""

    micro_batch = "micro_batch"  # the paper: forward refreshes it, backward reads it
    step = "step"  # DeepSpeed since January 2024: until the optimizer changes the weights


@dataclass(kw_only=True)
class CommConf:
    """One parametrised family of communication policies, with DeepSpeed's key names."""

    name: str = MISSING
    zero_stage: int = 3  # 0: plain data parallelism
    parameter_server: bool = False
    zero_quantized_weights: bool = False  # qwZ
    zero_hpz_partition_size: int | None = 1  # hpZ; 1: off, null: the node's size
    # qwZ quantizes gathers from the node copy too; null: as DeepSpeed does with its engines, else not
    quantize_node_copy: bool | None = None
    zero_quantized_gradients: bool = False  # qgZ
    # hpZ: how long the node copy of the weights is good; null: step with engine=deepspeed, else micro_batch
    hpz_lifetime: HpzLifetime | None = None
    weight_bits: int = 8
    weight_block: int = 2048
    gradient_path: GradientPath = GradientPath.two_hop
    gradient_bits: list[int] = field(default_factory=lambda: [4, 4])  # one for each hop
    gradient_block: int = 256  # 0: one scale for a whole tensor
    gradient_chunks: int = 1  # qgZ: pieces in a pipeline, one within the nodes while another is between them
    # qgZ: reorder, sum and quantize in one pass; false: a pass over memory for each
    fused_kernels: bool = True
    overlap: bool = False  # gloo: a communication thread; NCCL overlaps by itself
    config_json: str | None = None  # comm=deepspeed: a DeepSpeed JSON
    policy: str | None = None  # a policy of your own: "package.module:Class" or "file.py:Class"

    def __post_init__(self) -> None:
        require(self.zero_stage in (0, 1, 2, 3), "comm.zero_stage", self.zero_stage, "one of [0, 1, 2, 3]")
        require(self.weight_bits in (2, 4, 6, 8), "comm.weight_bits", self.weight_bits, "one of [2, 4, 6, 8]")
        for key, block in (("weight_block", self.weight_block), ("gradient_block", self.gradient_block)):
            require(block >= 0 and block % 4 == 0, f"comm.{key}", block, "a multiple of 4, or 0")
        hops = 2 if self.gradient_path is GradientPath.two_hop else 1
        require(
            len(self.gradient_bits) in (hops, 2) and all(b in (2, 4, 6, 8) for b in self.gradient_bits),
            "comm.gradient_bits",
            list(self.gradient_bits),
            f"{hops} of [2, 4, 6, 8], one for each hop of gradient_path={self.gradient_path.value}",
        )
        few = 1 <= self.gradient_chunks <= MAX_CHUNKS
        require(few, "comm.gradient_chunks", self.gradient_chunks, f"in [1, {MAX_CHUNKS}]")
        if self.zero_hpz_partition_size is not None:
            require(
                self.zero_hpz_partition_size >= 1,
                "comm.zero_hpz_partition_size",
                self.zero_hpz_partition_size,
                ">= 1 (1: off, null: the node's size)",
            )
        if self.parameter_server:
            require(self.zero_stage == 0, "comm.zero_stage", self.zero_stage, "0 with parameter_server=true")
        if self.zero_stage < 3:
            for key in ("zero_quantized_weights", "zero_quantized_gradients"):
                require(not getattr(self, key), f"comm.{key}", True, "false unless comm.zero_stage=3")
            require(
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
            require(getattr(self, key) >= 0, f"deepspeed.{key}", getattr(self, key), ">= 0")
        for key in (
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "reduce_bucket_size",
            "max_fetch_events",
            "max_reduce_events",
        ):
            require(getattr(self, key) >= 1, f"deepspeed.{key}", getattr(self, key), ">= 1")
