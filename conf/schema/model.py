"""What is trained: shapes, what the backward pass computes again, kernels."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from .limits import MAX_LAYERS, require


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
        require(few, "model.layers", self.layers, f"<= {MAX_LAYERS}")


@dataclass(kw_only=True)
class KernelsConf:
    """The kernels that a block is made of; null: what the engine's programs use."""

    attention: Attention | None = None  # megatron and deepspeed_2023: unfused, else flash
    fusion: Fusion | None = None  # fsdp2: eager, else fused
    # on unfused probabilities and both sublayers' outputs; null: megatron, or where train.dropout > 0
    dropout: bool | None = None
    reduce_fp32: bool = False  # gradients are summed in fp32 (torchtitan's default)
