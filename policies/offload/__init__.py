"""Offload policies: which chunks of parameters and optimizer states lie outside the memory that computes."""

from .build import build_offload
from .chunks import cut_chunks, spread_far
from .pager import AutoOffload, StaticOffload
from .policy import (
    Chunk,
    ChunkNeeded,
    ChunkOutdated,
    ChunkReleased,
    ChunkStep,
    Evict,
    Fetch,
    IterationBegins,
    Kind,
    OffloadAction,
    OffloadEvent,
    OffloadPolicy,
    Place,
    Prefetch,
    Step,
    describe_offload_actions,
    describe_offload_event,
    is_offload_event,
    parse_offload_event,
)

__all__ = [
    "AutoOffload",
    "Chunk",
    "ChunkNeeded",
    "ChunkOutdated",
    "ChunkReleased",
    "ChunkStep",
    "Evict",
    "Fetch",
    "IterationBegins",
    "Kind",
    "OffloadAction",
    "OffloadEvent",
    "OffloadPolicy",
    "Place",
    "Prefetch",
    "StaticOffload",
    "Step",
    "build_offload",
    "cut_chunks",
    "describe_offload_actions",
    "describe_offload_event",
    "is_offload_event",
    "parse_offload_event",
    "spread_far",
]
