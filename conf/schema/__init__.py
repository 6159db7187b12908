"""What an experiment is: typed, validated specs. Converted once from Hydra's config, passed on as objects.

Every `__post_init__` checks what its own keys can tell; `check` in `conf.compose` checks them together.
"""

from .balance import BALANCES, BalanceConf, Goal, Imputation, PrunedState, Selection, Way
from .cluster import (
    Algorithm,
    Backend,
    ClusterConf,
    DeviceConf,
    DiskConf,
    HostConf,
    InterNodeConf,
    IntraNodeConf,
    NcclConf,
    NodeKind,
    PartConf,
    RankOrder,
    SlowdownBy,
)
from .comm import CommConf, DeepSpeedConf, GradientPath, HpzLifetime, NodeCopyRule
from .experiment import Engine, ExperimentConf, Launch, Target
from .model import Attention, Fusion, KernelsConf, ModelConf, Precision, Recompute
from .offload import OffloadConf, OffloadKind
from .parallel import PIPELINE_SCHEDULES, SEQUENCE_MODES, TENSOR_MODES, ParallelConf
from .training import (
    BatchConf,
    DataConf,
    GoodputConf,
    LambCorrection,
    MomentumOrder,
    OptimizerConf,
    TrainConf,
)

__all__ = [
    "BALANCES",
    "PIPELINE_SCHEDULES",
    "SEQUENCE_MODES",
    "TENSOR_MODES",
    "Algorithm",
    "Attention",
    "Backend",
    "BalanceConf",
    "BatchConf",
    "ClusterConf",
    "CommConf",
    "DataConf",
    "DeepSpeedConf",
    "DeviceConf",
    "DiskConf",
    "Engine",
    "ExperimentConf",
    "Fusion",
    "Goal",
    "GoodputConf",
    "GradientPath",
    "HostConf",
    "HpzLifetime",
    "Imputation",
    "InterNodeConf",
    "IntraNodeConf",
    "KernelsConf",
    "LambCorrection",
    "Launch",
    "ModelConf",
    "MomentumOrder",
    "NcclConf",
    "NodeCopyRule",
    "NodeKind",
    "OffloadConf",
    "OffloadKind",
    "OptimizerConf",
    "ParallelConf",
    "PartConf",
    "Precision",
    "PrunedState",
    "RankOrder",
    "Recompute",
    "Selection",
    "SlowdownBy",
    "Target",
    "TrainConf",
    "Way",
]
