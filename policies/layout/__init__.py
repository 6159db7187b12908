"""Layout policies: how a model is cut over ranks, and in which order the parts run."""

from .border import Border, Cut, num_parts, part_index
from .build import build_layout, data_size
from .layers import Kind, Layer, LayerRuns, Role, describe_layer_event, is_layer_event, parse_layer_event
from .megatron import MegatronLayout
from .parallel import ParallelLayout, build_parallel
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
from .replicas import layout_of, replicas_of
from .schedule import Pass, num_warm_up, stage_passes

__all__ = [
    "Border",
    "Cut",
    "Direction",
    "Kind",
    "Layer",
    "LayerRuns",
    "LayoutEvent",
    "LayoutPolicy",
    "MegatronLayout",
    "ParallelLayout",
    "Part",
    "PartRuns",
    "Pass",
    "PassEnded",
    "Role",
    "StepGradientsReady",
    "build_layout",
    "build_parallel",
    "data_size",
    "describe_layer_event",
    "describe_layout_event",
    "is_layer_event",
    "layout_of",
    "num_parts",
    "num_warm_up",
    "parse_layer_event",
    "parse_layout_event",
    "part_index",
    "replicas_of",
    "stage_passes",
]
