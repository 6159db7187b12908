"""One experiment, whole."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from omegaconf import MISSING

from .balance import BalanceConf
from .cluster import ClusterConf
from .comm import CommConf, DeepSpeedConf, HpzLifetime
from .limits import MAX_SEED, MAX_STEPS, require
from .model import KernelsConf, ModelConf, Precision, Recompute
from .offload import OffloadConf
from .parallel import ParallelConf
from .training import BatchConf, DataConf, GoodputConf, OptimizerConf, TrainConf


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


class Launch(Enum):
    local = "local"
    torchrun = "torchrun"
    slurm = "slurm"


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
    offload: OffloadConf = field(default_factory=OffloadConf)
    balance: BalanceConf = field(default_factory=BalanceConf)
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
        require(self.steps >= 1, "steps", self.steps, ">= 1")
        require(self.steps <= MAX_STEPS, "steps", self.steps, f"<= {MAX_STEPS}")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, ">= 0")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in [0, {MAX_SEED}]")
        if self.engine in (Engine.deepspeed_2023, Engine.deepspeed):
            self.comm = self._as_the_release()

    def _as_the_release(self) -> CommConf:
        """`comm` with what DeepSpeed does where it is null."""
        comm = self.comm
        found: dict[str, Any] = {}
        if comm.zero_hpz_partition_size == 1:
            return comm
        if comm.hpz_lifetime is None and self.engine is Engine.deepspeed:
            found["hpz_lifetime"] = HpzLifetime.step  # PR #4906, January 2024
        if comm.quantize_node_copy is None and comm.zero_quantized_weights:
            found["quantize_node_copy"] = True
        return replace(comm, **found)
