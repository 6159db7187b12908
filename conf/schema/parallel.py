"""How a model is laid out over ranks."""

from dataclasses import dataclass

from .limits import require

# Text and no Enum: names of an Enum cannot begin with a digit, and OmegaConf takes an Enum by its names
TENSOR_MODES = ("1d", "2d", "2.5d", "3d")
SEQUENCE_MODES = ("megatron", "ring", "ulysses")
PIPELINE_SCHEDULES = ("1f1b", "interleaved", "gpipe")


@dataclass(kw_only=True)
class ParallelConf:
    """How the model is laid out over ranks: data * tensor * pipeline is their number."""

    data: int = -1  # replicas of the model; -1: the rest of the ranks
    pipeline: int = 1  # stages
    virtual_stages: int = 1  # parts of the model that one stage holds, with pipeline_schedule=interleaved
    pipeline_schedule: str = "1f1b"
    # sends and receives beside computation (Megatron-LM since 2023, there with interleaved only)
    pipeline_overlap: bool = False
    tensor: int = 1
    tensor_mode: str = "1d"
    # a column product's input gradient is reduced beside its weights' product: Megatron-LM's default, and with
    # sequence parallelism what it always does
    tensor_overlap: bool = True
    sequence: int = 1  # sequence_mode=megatron: 1 or the same as tensor
    sequence_mode: str = "megatron"

    def __post_init__(self) -> None:
        require(self.data == -1 or self.data >= 1, "parallel.data", self.data, "-1 (the rest) or >= 1")
        for key in ("pipeline", "virtual_stages", "tensor", "sequence"):
            require(getattr(self, key) >= 1, f"parallel.{key}", getattr(self, key), ">= 1")
        for key, legal in (
            ("tensor_mode", TENSOR_MODES),
            ("sequence_mode", SEQUENCE_MODES),
            ("pipeline_schedule", PIPELINE_SCHEDULES),
        ):
            value = getattr(self, key)
            require(value in legal, f"parallel.{key}", value, f"one of {list(legal)}")
