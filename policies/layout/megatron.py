"""Tensor, sequence and pipeline parallelism as Megatron-LM lays a transformer out."""

from dataclasses import dataclass, field

from ..mesh import PIPELINE, TENSOR
from ..plan import AllGather, AllReduce, Plan, Reduce, ReduceOp, SendRecv, Slice, Step
from .policy import LayoutEvent, PartRuns, PassEnded
from .schedule import Pass, check_schedule, stage_passes
from .tensor import TensorPlans

PIPELINE_STREAM = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """One layout of one model.

    Args:
        tied: Whether input and output embedding are one matrix: the first and the last stage then hold a copy
            each, and add their gradients up after the backward passes.
        split_sends: Without sequence parallelism all tensor ranks hold the same activation: each sends a part
            of it to the next stage, whose ranks gather them (Narayanan et al. 2021, section 4.1).
    """

    name: str
    num_layers: int
    micro_batches: int
    stages: int
    chunks: int
    schedule: str
    tensor: int
    sequence: bool
    overlap: bool
    recompute: str
    tied: bool
    split_sends: bool = True
    _plans: TensorPlans = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_schedule(
            self.schedule, stages=self.stages, chunks=self.chunks, micro_batches=self.micro_batches
        )
        if self.num_layers % (self.stages * self.chunks):
            raise ValueError(
                f"parallel.pipeline={self.stages} times parallel.virtual_stages={self.chunks} must divide "
                f"model.layers={self.num_layers}"
            )
        plans = TensorPlans(
            size=self.tensor, sequence=self.sequence, overlap=self.overlap, recompute=self.recompute
        )
        object.__setattr__(self, "_plans", plans)

    def layers(self, stage: int, chunk: int) -> range:
        """Part chunk * stages + stage of as many equal runs of blocks."""
        each = self.num_layers // (self.stages * self.chunks)
        first = (chunk * self.stages + stage) * each
        return range(first, first + each)

    def passes(self, stage: int) -> tuple[Pass, ...]:
        return stage_passes(
            self.schedule,
            stage=stage,
            stages=self.stages,
            chunks=self.chunks,
            micro_batches=self.micro_batches,
        )

    def decide(self, event: LayoutEvent) -> Plan | None:
        if isinstance(event, PartRuns):
            return self._plans.plan(event.part, event.direction)
        if isinstance(event, PassEnded):
            return self._send(event)
        if event.what == "embedding":
            return self._tied_gradient(event.stage)
        if event.what == "replicated" and self.sequence and self.tensor > 1:
            # norms and biases of a rank have seen its own tokens only
            return Plan((AllReduce(axis=TENSOR, op=ReduceOp.sum),), PIPELINE_STREAM)
        return None

    def _send(self, event: PassEnded) -> Plan | None:
        part = event.chunk * self.stages + event.stage
        last = 0 if event.backward else self.stages * self.chunks - 1
        if part == last or self.stages == 1:
            return None
        shift = -1 if event.backward else 1
        steps: tuple[Step, ...] = (SendRecv(axis=PIPELINE, shift=shift),)
        if self.split_sends and self.tensor > 1 and not self.sequence:
            steps = (Slice(axis=TENSOR), *steps, AllGather(axis=TENSOR))
        return Plan(steps, PIPELINE_STREAM)

    def _tied_gradient(self, stage: int) -> Plan | None:
        """The two stages exchange what they have and add it up."""
        if not self.tied or self.stages == 1 or stage not in (0, self.stages - 1):
            return None
        shift = self.stages - 1 if stage == 0 else 1 - self.stages
        return Plan((SendRecv(axis=PIPELINE, shift=shift), Reduce(op=ReduceOp.sum)), PIPELINE_STREAM)
