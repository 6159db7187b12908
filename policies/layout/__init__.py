"""Layout policies: how a model is cut over ranks, and in which order the parts run."""

from .build import build_layout, data_size
from .megatron import MegatronLayout
from .policy import (
    Direction,
    LayoutEvent,
    LayoutPolicy,
    Part,
    PartRuns,
    PassEnded,
    StepGradientsReady,
    describe_layout_event,
    parse_layout_event,
)
from .schedule import Pass, num_warm_up, stage_passes

__all__ = [
    "Direction",
    "LayoutEvent",
    "LayoutPolicy",
    "MegatronLayout",
    "Part",
    "PartRuns",
    "Pass",
    "PassEnded",
    "StepGradientsReady",
    "build_layout",
    "data_size",
    "describe_layout_event",
    "num_warm_up",
    "parse_layout_event",
    "stage_passes",
]
