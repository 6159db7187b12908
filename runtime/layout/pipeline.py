"""A stage's passes and messages, by torch.distributed.pipelining."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ...policies.layout.parallel import ParallelLayout
from ...policies.layout.schedule import Pass

_Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
Loss = Callable[[Tensor, object], Tensor]


class Watches(Protocol):
    """Told of each pass of a chunk on this rank."""

    def pass_begins(self, which: Pass) -> None: ...

    def pass_ends(self, which: Pass) -> None: ...


class WatchedStage(PipelineStage):
    """One chunk of this rank's stage.

    The module is put into another one, which torch does not take for one of FSDP2's: else it would switch off all
    reductions and reshard nothing before the end of the step, and reduce all units then, by hand
    (`_PipelineStageBase.perform_reduce_grad`). As it is, what the communication policy says of each micro-batch
    happens, as without a pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        part: int,
        chunk: int,
        parts: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        inputs: Tensor,
        outputs: Tensor,
        watch: Watches,
    ) -> None:
        self._chunk, self._watch = chunk, watch
        hidden = _Hidden(module)
        super().__init__(hidden, part, parts, device, input_args=inputs, output_args=outputs, group=group)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        which = Pass(fwd_chunk_id, self._chunk, backward=False)
        self._watch.pass_begins(which)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._watch.pass_ends(which)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        which = Pass(bwd_chunk_id, self._chunk, backward=True)
        self._watch.pass_begins(which)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._watch.pass_ends(which)


class Pipeline:
    """All passes of a step on this rank, and the messages between stages.

    Args:
        stages: The chunks of this rank, chunk 0 first.
        loss: Called with the last stage's output after each of its forwards: what backward begins with.
    """

    def __init__(self, stages: Sequence[WatchedStage], *, layout: ParallelLayout, loss: Loss) -> None:
        # FSDP2 warns of a part's output, a view at the border of its last unit: nobody changes it in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self._stages, self._layout = stages, layout
        count = layout.micro_batches
        self._schedule: _Schedule
        if layout.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(list(stages), count, loss_fn=loss, scale_grads=False)
        else:
            kind = ScheduleGPipe if layout.schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(stages[0], count, loss_fn=loss, scale_grads=False)

    def set_up(self, inputs: Tensor, targets: Tensor) -> None:
        """Agree with the other stages on shapes, before the first step. Sends a few bytes.

        Args:
            inputs, targets: Of one micro-batch.
        """
        for stage in self._stages:
            stage.has_backward = True
        arguments = ((inputs,), {"targets": targets}, targets)
        if isinstance(self._schedule, ScheduleInterleaved1F1B):
            self._schedule._initialize_stages(*arguments)
        else:
            self._schedule._initialize_stage(*arguments)  # type: ignore[no-untyped-call]

    def run(self, inputs: Tensor, targets: Tensor) -> None:
        """All passes of a step.

        Args:
            inputs, targets: Of all micro-batches, one behind the other.
        """
        self._schedule.step(inputs, target=targets, targets=targets, return_outputs=False)

    def check_order(self, stage: int, ran: Sequence[Pass]) -> None:
        """Refuse a step that was not run as the layout says, and so not as it is simulated.

        What ran is compared: `Schedule1F1B.pipeline_order`, which torch keeps for drawings, numbers forwards wrongly.

        Raises:
            RuntimeError: Naming both orders.
        """
        said = self._layout.passes(stage)
        if tuple(ran) != said:
            raise RuntimeError(
                f"layout {self._layout.name!r} has stage {stage} run {_shown(said)}, but torch {torch.__version__} ran "
                f"{_shown(ran)}"
            )


class _Hidden(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        output: Tensor = self.module(*args, **kwargs)
        return output


def _shown(passes: Sequence[Pass]) -> str:
    return " ".join(str(each) for each in passes)
