"""Communication policies: which collectives move weights and gradients, and how they are quantized."""

from .build import build_comm
from .policy import (
    CommEvent,
    CommPolicy,
    GradientsReady,
    Phase,
    Placement,
    WeightsChanged,
    WeightsNeeded,
    check_copy,
    check_reduced,
    describe_action,
    describe_event,
    parse_event,
)
from .zero import ZeroComm

__all__ = [
    "CommEvent",
    "CommPolicy",
    "GradientsReady",
    "Phase",
    "Placement",
    "WeightsChanged",
    "WeightsNeeded",
    "ZeroComm",
    "build_comm",
    "check_copy",
    "check_reduced",
    "describe_action",
    "describe_event",
    "parse_event",
]
