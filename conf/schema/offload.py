"""Model states outside the memory that computes: in the host's, or on disk."""

from dataclasses import dataclass
from enum import Enum

from .limits import require

PLACES = ("none", "cpu", "disk")


class OffloadKind(Enum):
    """Which policy decides what lies where (`policies.offload`)."""

    static = "static"  # stated shares of parameters and optimizer states
    auto = "auto"  # chunks, moved by the order of use that the first iteration records


@dataclass(kw_only=True)
class OffloadConf:
    """Where states lie that are not being computed with."""

    name: str = "none"  # none, cpu (the host's memory, whose cores step what lies there) or disk
    policy: OffloadKind = OffloadKind.static  # what decides
    parameters: float = 1.0  # share that lies outside; auto: all do, and what fits comes in
    optimizer: float = 1.0  # share of the optimizer states that lies outside
    chunk_bytes: int | None = None  # largest chunk, the unit of moves; null: a unit of the model is one
    # of one rank, for chunks that are near; gathered weights and activations have the share below left free, and are
    # not held to it. null: static no limit, auto the device's
    memory_bytes: float | None = None
    activations: float = 0.3  # share of memory_bytes kept for all but chunks
    warmup_activations: float = 0.8  # the same while an order of use is recorded, as far as it goes (auto)
    prefetch: int = 1  # chunks fetched ahead of their use, once the order of use is known
    # cpu: what crosses is fp32, as FSDP2's own; false: in the run's precision, as ZeRO-Offload's
    fp32: bool = True
    pinned: bool = True  # host memory that GPUs reach by themselves (cpu)
    path: str | None = None  # disk: a folder for the files; null: one in the run's own folder
    io_threads: int = 4  # disk: requests in flight of one rank
    direct: bool = True  # disk: past the page cache, where the file system can; false: through it
    commit_every: int = 1  # disk: steps between states that a killed run can go on from; 0: none
    resume: bool = False  # disk: go on from what a killed run committed in path

    def __post_init__(self) -> None:
        require(self.name in PLACES, "offload.name", self.name, f"one of {list(PLACES)}")
        for key in ("parameters", "optimizer"):
            require(0 <= getattr(self, key) <= 1, f"offload.{key}", getattr(self, key), "in [0, 1]")
        for key in ("activations", "warmup_activations"):
            require(0 <= getattr(self, key) < 1, f"offload.{key}", getattr(self, key), "in [0, 1)")
        least = self.activations
        require(
            self.warmup_activations >= least,
            "offload.warmup_activations",
            self.warmup_activations,
            f">= offload.activations={least:g}",
        )
        chunk, memory = self.chunk_bytes, self.memory_bytes
        require(chunk is None or chunk >= 1, "offload.chunk_bytes", chunk, ">= 1 or null")
        require(memory is None or memory > 0, "offload.memory_bytes", memory, "> 0 or null")
        require(self.prefetch >= 0, "offload.prefetch", self.prefetch, ">= 0")
        require(1 <= self.io_threads <= 64, "offload.io_threads", self.io_threads, "in [1, 64]")
        require(self.commit_every >= 0, "offload.commit_every", self.commit_every, ">= 0")

    @property
    def active(self) -> bool:
        """Whether anything lies outside."""
        return self.name != "none"
