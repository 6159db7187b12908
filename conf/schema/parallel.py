"""How a model is laid out over ranks."""

from dataclasses import dataclass, field

from .limits import require

# Text and no Enum: names of an Enum cannot begin with a digit, and OmegaConf takes an Enum by its names
TENSOR_MODES = ("1d", "2d", "2.5d", "3d")
SEQUENCE_MODES = ("megatron", "ring", "ulysses", "rsa")
PIPELINE_SCHEDULES = ("1f1b", "interleaved", "gpipe")
AXES = ("tensor", "sequence", "data", "pipeline")


@dataclass(kw_only=True)
class ParallelConf:
    """How the model is laid out over ranks: their number is data * tensor * pipeline, times sequence where it is an
    axis of its own (ring, ulysses, rsa).
    """

    data: int = -1  # replicas of the model; -1: the rest of the ranks
    pipeline: int = 1  # stages
    virtual_stages: int = 1  # parts of the model that one stage holds, with pipeline_schedule=interleaved
    # blocks of each stage, the first one's first, with engine=fsdp2; null: equal numbers, or what balance=layers finds
    stage_layers: list[int] | None = None
    pipeline_schedule: str = "1f1b"
    # sends and receives beside computation (Megatron-LM since 2023, there with interleaved only)
    pipeline_overlap: bool = False
    tensor: int = 1
    # or file.py:Class, package.module:Class, of a mode of your own
    tensor_mode: str = "1d"
    depth: int = 1  # copies of the matrices, with tensor_mode=2.5d: tensor is q * q * depth
    # a column product's input gradient is reduced beside its weights' product: Megatron-LM's default, and with
    # sequence parallelism what it always does
    tensor_overlap: bool = True
    sequence: int = 1  # sequence_mode=megatron: 1 or the same as tensor
    # rsa: ring self-attention as first published, of models whose tokens see all others
    sequence_mode: str = "megatron"
    # sequence_mode=ring: a rank has two pieces of each sequence, an early and a late one, so that all have the same
    # work where a token sees only those before it; else one piece
    zigzag: bool = True
    # axes, those of consecutive ranks first; data and sequence are neighbours
    order: list[str] = field(default_factory=lambda: list(AXES))

    def __post_init__(self) -> None:
        require(self.data == -1 or self.data >= 1, "parallel.data", self.data, "-1 (the rest) or >= 1")
        for key in ("pipeline", "virtual_stages", "tensor", "depth", "sequence"):
            require(getattr(self, key) >= 1, f"parallel.{key}", getattr(self, key), ">= 1")
        for key, legal in (
            ("sequence_mode", SEQUENCE_MODES),
            ("pipeline_schedule", PIPELINE_SCHEDULES),
        ):
            value = getattr(self, key)
            require(value in legal, f"parallel.{key}", value, f"one of {list(legal)}")
        given = self.stage_layers
        require(
            given is None or (len(given) == self.pipeline and all(n >= 1 for n in given)),
            "parallel.stage_layers",
            given,
            f"null or parallel.pipeline={self.pipeline} numbers >= 1",
        )
        require(
            given is None or self.virtual_stages == 1,
            "parallel.stage_layers",
            given,
            f"null with parallel.virtual_stages={self.virtual_stages}",
        )
        require(
            self.tensor_mode in TENSOR_MODES or ":" in self.tensor_mode,
            "parallel.tensor_mode",
            self.tensor_mode,
            f"one of {list(TENSOR_MODES)}, or 'file.py:Class' or 'package.module:Class' of your own",
        )
        require(
            self.tensor_mode == "2.5d" or self.depth == 1,
            "parallel.depth",
            self.depth,
            f"1 with parallel.tensor_mode={self.tensor_mode}: only 2.5d keeps copies",
        )
        require(
            sorted(self.order) == sorted(AXES),
            "parallel.order",
            list(self.order),
            f"an order of {list(AXES)}",
        )
        beside = abs(self.order.index("sequence") - self.order.index("data")) == 1
        require(
            beside, "parallel.order", list(self.order), "an order with data and sequence beside each other"
        )

    @property
    def ranks_a_replica(self) -> int:
        """Ranks that share the work of one replica of the model."""
        apart = self.sequence if self.sequence_mode != "megatron" else 1  # megatron's are the tensor group
        return self.tensor * self.pipeline * apart
