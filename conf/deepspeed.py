"""Reads a DeepSpeed JSON into twinbed's own keys (`comm=deepspeed comm.config_json=PATH`).

Only what twinbed acts on is translated. Whatever else the file says is listed: nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .json_file import json_type, read_json_object

# DeepSpeed's name in lower case (it lowers it too) -> twinbed's. Its Adam decays weights as AdamW does.
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "sgd": "sgd"}

# Parameters of each that are plain numbers
_NUMBERS = {
    "adamw": ("lr", "eps", "weight_decay"),
    "lamb": ("lr", "eps", "weight_decay", "max_coeff", "min_coeff"),
    "sgd": ("lr", "weight_decay", "momentum"),
}

# What its FusedLamb does unless told otherwise, or always (ops/lamb/fused_lamb.py, csrc/lamb/fused_lamb_cuda_kernel.cu)
_FUSED_LAMB: dict[str, object] = {
    "optimizer.lr": 1e-3,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0,
    "optimizer.bias_correction": True,
    "optimizer.correction": "rate",
    "optimizer.max_coeff": 10.0,
    "optimizer.min_coeff": 0.01,
    "optimizer.exclude_1d": False,
}

# Of `zero_optimization`: keys of engine=deepspeed
LIMITS = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "reduce_bucket_size",
)

# Top-level keys of a DeepSpeed configuration (deepspeed/runtime/constants.py and the pages of its documentation):
# a file with none of them is something else
_NAMES = """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types disable_allgather
    dump_state eigenvalue elasticity flops_profiler fp16 gradient_accumulation_steps gradient_clipping
    gradient_predivide_factor hybrid_engine memory_breakdown monitor_config nebula optimizer pipeline
    prescale_gradients progressive_layer_drop scheduler seq_parallel_communication_data_type sparse_attention
    sparse_gradients steps_per_print tensor_parallel tensorboard torch_autocast train_batch_size
    train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
"""
_KNOWN = frozenset(_NAMES.split())


@dataclass(frozen=True, slots=True)
class DeepSpeedImport:
    """What a DeepSpeed JSON says, in twinbed's words."""

    overrides: dict[
        str, object
    ]  # "comm.zero_stage" -> 3; "optimizer" and "precision" name a choice of that group
    auto: tuple[str, ...]  # keys of the file set to "auto": twinbed's own values stand
    ignored: tuple[str, ...]  # keys of the file that have no effect here
    offload: str = ""  # what to type for the offload that the file asks for; "": it asks for none
    # Of overrides that the file does not spell out: why they are what DeepSpeed would do
    unsaid: dict[str, str] = field(default_factory=dict)


def read_deepspeed_config(path: str | Path) -> DeepSpeedImport:
    """Translates a DeepSpeed JSON, a whole one or a fragment.

    DeepSpeed's own rules hold: the ZeRO++ keys do nothing below stage 3 (they are then among the ignored), a
    `zero_hpz_partition_size` of 0 or 1 is off, a file without `zero_optimization` is stage 0, and one that
    enables neither fp16 nor bf16 trains in fp32.

    Raises:
        ValueError: The file cannot be read, or a key has a wrong type, an illegal value, or contradicts
            another; the message names the file, the key, its value and what would be legal.
    """
    path = Path(path)
    data = read_json_object(path, what="a DeepSpeed configuration")
    if data and not _KNOWN.intersection(data):
        raise ValueError(
            f"{path} holds no key of DeepSpeed, only {', '.join(map(repr, list(data)[:5]))}; give a DeepSpeed "
            "configuration, with zero_optimization, train_micro_batch_size_per_gpu, bf16 and so on"
        )
    reader = _Reader(path, data)
    overrides: dict[str, object] = {}
    overrides |= _zero(reader)
    overrides |= _limits(reader)
    overrides |= _batch(reader)
    overrides |= _precision(reader)
    overrides |= _optimizer(reader)
    overrides |= _scheduler(reader)
    clip = reader.number("gradient_clipping")
    if clip is not None:
        overrides["train.gradient_clipping"] = clip
    offload = _offload(reader)
    leaves = reader.leaves()
    ignored = tuple(key for key in leaves if key not in reader.used and key not in reader.auto)
    unsaid = {}
    if "comm.zero_stage" in overrides and "zero_optimization.stage" not in reader.used:
        unsaid["comm.zero_stage"] = "no zero_optimization.stage, which is 0 in DeepSpeed"
    if overrides.get("precision") == "fp32" and not any(key.endswith(".enabled") for key in reader.used):
        unsaid["precision"] = "neither fp16 nor bf16 is enabled, and DeepSpeed then trains in fp32"
    if overrides.get("optimizer") == "lamb":
        left = {
            key: value
            for key, value in _FUSED_LAMB.items()
            if key not in overrides and key.replace(".", ".params.") not in reader.auto
        }
        overrides |= left
        unsaid |= dict.fromkeys(left, "as DeepSpeed's FusedLamb has it")
    auto = tuple(key for key in leaves if key in reader.auto)
    return DeepSpeedImport(overrides, auto, ignored, offload, unsaid)


@dataclass(slots=True)
class _Reader:
    """Values by dotted key, each checked; remembers which were used and which are "auto"."""

    path: Path
    data: Mapping[str, object]
    used: set[str] = field(default_factory=set)
    auto: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.auto.update(key for key, value in _flatten(self.data, "") if value == "auto")

    def leaves(self) -> list[str]:
        return [key for key, _ in _flatten(self.data, "")]

    def value(self, key: str) -> object:
        """The value, None where the key is absent, null or "auto"."""
        node: object = self.data
        parts = key.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(node, Mapping):
                parent = ".".join(parts[:depth])
                raise self.error(f"{parent!r} must be an object {{...}}, got {json_type(node)}")
            node = node.get(part)
            if node is None or node == "auto":
                return None
        self.used.add(key)
        return node

    def whole(self, key: str, *, least: int, most: int | None = None) -> int | None:
        value = self.value(key)
        if value is None:
            return None
        legal = f"a whole number >= {least}" if most is None else f"a whole number from {least} to {most}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f'{key!r} must be {legal} (or "auto"), got {json_type(value)}')
        if value < least or (most is not None and value > most):
            raise self.error(f"{key!r} must be {legal}, got {value}")
        return value

    def number(self, key: str) -> float | None:
        """A finite number >= 0."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.error(f'{key!r} must be a number >= 0 (or "auto"), got {json_type(value)}')
        return float(value)

    def elements(self, key: str) -> int | None:
        """A whole number >= 0, also where it is written as 5e8."""
        number = self.number(key)
        if number is not None and number != int(number):
            raise self.error(f'{key!r} must be a whole number >= 0 (or "auto"), got {number:g}')
        return None if number is None else int(number)

    def flag(self, key: str) -> bool | None:
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f'{key!r} must be true or false (or "auto"), got {json_type(value)}')
        return value

    def text(self, key: str) -> str | None:
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{key!r} must be a string, got {json_type(value)}")
        return value

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")


def _zero(reader: _Reader) -> dict[str, object]:
    section = "zero_optimization"
    if reader.data.get(section) is None:
        return {"comm.zero_stage": 0}
    if reader.data[section] == "auto":
        return {}
    overrides: dict[str, object] = {}
    stage = reader.whole(f"{section}.stage", least=0, most=3)
    found: dict[str, object] = {
        "zero_quantized_weights": reader.flag(f"{section}.zero_quantized_weights"),
        "zero_quantized_gradients": reader.flag(f"{section}.zero_quantized_gradients"),
        "zero_hpz_partition_size": reader.whole(f"{section}.zero_hpz_partition_size", least=0),
    }
    stage_is_auto = f"{section}.stage" in reader.auto
    if not stage_is_auto:
        overrides["comm.zero_stage"] = stage or 0  # DeepSpeed's default is 0
    for key, value in found.items():
        if value is None:
            continue
        if key == "zero_hpz_partition_size" and value == 0:
            value = 1
        if stage == 3 or stage_is_auto:
            overrides[f"comm.{key}"] = value
        else:
            reader.used.discard(f"{section}.{key}")
    return overrides


def _offload(reader: _Reader) -> str:
    """Overrides for the file's offload, or nothing. To be typed: whether ours can depends on the cluster too."""
    places = {}
    for key, section in (("parameters", "offload_param"), ("optimizer", "offload_optimizer")):
        place = reader.text(f"zero_optimization.{section}.device") if _is_section(reader, section) else None
        if place not in (None, "none"):
            places[key] = "disk" if place == "nvme" else "cpu"
    if not places:
        return ""
    farthest = "disk" if "disk" in places.values() else "cpu"
    near = [f"offload.{key}=0" for key in ("parameters", "optimizer") if key not in places]
    return " ".join([f"offload={farthest}", *near])


def _is_section(reader: _Reader, section: str) -> bool:
    zero = reader.data.get("zero_optimization")
    return isinstance(zero, Mapping) and isinstance(zero.get(section), Mapping)


def _limits(reader: _Reader) -> dict[str, object]:
    """Sizes in elements that engine=deepspeed follows."""
    section = "zero_optimization"
    found = {key: reader.elements(f"{section}.{key}") for key in LIMITS} if section in reader.data else {}
    return {f"deepspeed.{key}": value for key, value in found.items() if value is not None}


def _batch(reader: _Reader) -> dict[str, object]:
    total = reader.whole("train_batch_size", least=1)
    micro = reader.whole("train_micro_batch_size_per_gpu", least=1)
    accumulation = reader.whole("gradient_accumulation_steps", least=1)
    per_rank = (micro or 1) * (accumulation or 1)
    if total is not None and total % per_rank:
        raise reader.error(
            f"'train_batch_size' ({total}) must be a multiple of train_micro_batch_size_per_gpu x"
            f" gradient_accumulation_steps ({micro or 1} x {accumulation or 1})"
        )
    overrides: dict[str, object] = {}
    if micro is not None:
        overrides["batch.micro"] = micro
    if accumulation is not None:
        overrides["batch.accumulation"] = accumulation
    if total is not None:
        if micro is not None and accumulation is not None:
            # the third follows from the two and the number of ranks, which here is the cluster's
            reader.used.discard("train_batch_size")
        else:
            overrides["batch.global_sequences"] = total
    return overrides


def _precision(reader: _Reader) -> dict[str, object]:
    bf16_key = "bfloat16" if "bfloat16" in reader.data else "bf16"  # the older spelling is still read
    bf16, fp16 = reader.flag(f"{bf16_key}.enabled"), reader.flag("fp16.enabled")
    if bf16 and fp16:
        raise reader.error(f"'{bf16_key}.enabled' and 'fp16.enabled' are both true; enable one of them")
    overrides: dict[str, object] = {}
    if bf16:
        overrides["precision"] = "bf16"
    elif fp16:
        overrides["precision"] = "fp16"
        scale = reader.number("fp16.loss_scale")
        if scale is not None:
            overrides["train.loss_scale"] = scale  # 0 is dynamic in both
    elif not {bf16_key, f"{bf16_key}.enabled", "fp16", "fp16.enabled"} & reader.auto:
        overrides["precision"] = "fp32"
    return overrides


def _optimizer(reader: _Reader) -> dict[str, object]:
    if reader.data.get("optimizer") in (None, "auto"):
        return {}
    kind = reader.text("optimizer.type")
    if kind is None:
        if "optimizer.type" in reader.auto:
            return {}
        raise reader.error(f"'optimizer.type' is missing; it must be one of {_spelled()}")
    name = _OPTIMIZERS.get(kind.lower())
    if name is None:
        raise reader.error(f"'optimizer.type' {kind!r} is not supported; use one of {_spelled()}")
    overrides: dict[str, object] = {"optimizer": name}
    if kind.lower() == "adam" and reader.flag("optimizer.params.adam_w_mode") is False:
        raise reader.error(
            "'optimizer.params.adam_w_mode' is false, but only AdamW's decay is there; set true or omit it"
        )
    for key in _NUMBERS[name]:
        value = reader.number(f"optimizer.params.{key}")
        if value is not None:
            overrides[f"optimizer.{key}"] = value
    if name == "sgd":
        return overrides
    betas = reader.value("optimizer.params.betas")
    if betas is not None:
        overrides["optimizer.betas"] = _betas(reader, betas)
    if name == "lamb":
        corrected = reader.flag("optimizer.params.bias_correction")
        if corrected is not None:
            overrides["optimizer.bias_correction"] = corrected
    return overrides


def _betas(reader: _Reader, value: object) -> list[float]:
    legal = "'optimizer.params.betas' must be a list of two numbers in [0, 1)"
    if not isinstance(value, list) or len(value) != 2:
        raise reader.error(f"{legal}, got {json_type(value)}")
    for beta in value:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
            raise reader.error(f"{legal}, got {json_type(beta)} in it")
    return [float(beta) for beta in value]


def _scheduler(reader: _Reader) -> dict[str, object]:
    """The warm-up's length; it rises from 0 to the optimizer's rate, so the scheduler's are ignored."""
    if reader.data.get("scheduler") in (None, "auto") or reader.text("scheduler.type") not in (
        "WarmupLR",
        "WarmupDecayLR",
    ):
        reader.used.discard("scheduler.type")
        return {}
    overrides: dict[str, object] = {}
    if reader.value("scheduler.type") == "WarmupDecayLR":
        overrides["train.lr_schedule"] = "linear"
        overrides["train.lr_min_fraction"] = 0.0
    warmup = reader.whole("scheduler.params.warmup_num_steps", least=0)
    if warmup is not None:
        overrides["train.warmup_lr_steps"] = warmup
    return overrides


def _spelled() -> str:
    return "Adam, AdamW, Lamb, SGD"


def _flatten(node: Mapping[str, object], prefix: str) -> list[tuple[str, object]]:
    """Leaves by dotted key, in the file's order; a list is a leaf, and so is an empty object."""
    leaves: list[tuple[str, object]] = []
    for key, value in node.items():
        if isinstance(value, dict) and value:
            leaves += _flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
