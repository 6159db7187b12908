"""What an experiment is: typed, validated specs. Converted once from Hydra's config, passed on as objects.

Every `__post_init__` checks what its own keys can tell; `check` in `conf.compose` checks them together.
"""

from .cluster import (
    Algorithm,
    Backend,
    ClusterConf,
    DeviceConf,
    HostConf,
    InterNodeConf,
    IntraNodeConf,
    NcclConf,
    NodeKind,
    PartConf,
    RankOrder,
)
from .comm import CommConf, DeepSpeedConf, GradientPath, HpzLifetime, NodeCopyRule
from .experiment import Engine, ExperimentConf, Launch, Target
from .model import Attention, Fusion, KernelsConf, ModelConf, Precision, Recompute
from .parallel import PIPELINE_SCHEDULES, SEQUENCE_MODES, TENSOR_MODES, ParallelConf
from .training import BatchConf, DataConf, GoodputConf, OptimizerConf, TrainConf

__all__ = [
    "PIPELINE_SCHEDULES",
    "SEQUENCE_MODES",
    "TENSOR_MODES",
    "Algorithm",
    "Attention",
    "Backend",
    "BatchConf",
    "ClusterConf",
    "CommConf",
    "DataConf",
    "DeepSpeedConf",
    "DeviceConf",
    "Engine",
    "ExperimentConf",
    "Fusion",
    "GoodputConf",
    "GradientPath",
    "HostConf",
    "HpzLifetime",
    "InterNodeConf",
    "IntraNodeConf",
    "KernelsConf",
    "Launch",
    "ModelConf",
    "NcclConf",
    "NodeCopyRule",
    "NodeKind",
    "OptimizerConf",
    "ParallelConf",
    "PartConf",
    "Precision",
    "RankOrder",
    "Recompute",
    "Target",
    "TrainConf",
]
