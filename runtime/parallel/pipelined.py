"""A model whose blocks lie on the stages of a pipeline: a step works on several micro-batches at a time."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...policies.comm import Placement
from ...policies.mesh import PIPELINE
from ..layout.engine import LayoutEngine, ModelPart
from ..layout.stages import tied_name
from ..micro_batches import MicroBatches
from ..wrap import PassEngine
from .model import ParallelModel, Part
from .replicas import local_part


class PipelinedModel(ParallelModel):
    """As `ParallelModel`, with `forward_backward` in place of a forward and a backward."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        placement: Placement,
        device: torch.device,
        dtype: torch.dtype,
        **given: Any,
    ) -> None:
        super().__init__(parts, **given)
        self._placement, self._device, self._dtype = placement, device, dtype
        self._engine: tuple[tuple[int, int], LayoutEngine] | None = None
        self._weight = 1.0  # of the micro-batch that is computed
        for part in parts:
            if part.stack.is_last:
                part.stack.__dict__["behind_blocks"] = self._weighted(part.stack.behind_blocks)

    def forward(self, *args: Any, **given: Any) -> Any:
        """Refused."""
        raise RuntimeError(
            f"parallel.pipeline={self._layout.stages}: stages work on several micro-batches at a time, so a forward "
            "alone cannot be run; call loss = model.forward_backward(...) in place of the forward and loss.backward()"
        )

    def forward_backward(self, *args: Any, **given: Any) -> Tensor:
        """Forward and backward of the whole batch, in `batch.accumulation` micro-batches of each replica.

        Returns:
            The loss of the whole batch, without a gradient.

        Raises:
            ValueError: If the call or the batch's sizes cannot be served, by name.
            RuntimeError: Gradients of an earlier step are still there, and an embedding is tied: both stages that hold
                it would add them up again.
        """
        inputs, targets = self._caller.read_batch(args, given)
        count = self._layout.micro_batches
        self._check_gradients()
        shares = self._take(inputs, targets, count=count)
        self._begin_forward()
        for part in self._parts:
            part.replicas.forward_begins()

        def begins(index: int) -> None:
            self._weight = shares[index].weight
            self._set_clock(shares[index].first)

        batches = MicroBatches(
            count=count, read=lambda i: (shares[i].inputs, shares[i].targets), begins=begins
        )
        losses = self._engine_of_sizes().run_step(batches)
        self._count_forward()
        return self.mean_of_replicas(losses.sum())

    def clip_grad_norm_(self, max_norm: float) -> float:
        norm = self._engine_of_sizes().clip_gradients(max_norm)
        assert norm is not None
        return norm

    def _weighted(self, behind_blocks: Any) -> Any:
        def call(x_BTD: Tensor, targets: Tensor) -> Tensor:
            return cast(Tensor, behind_blocks(x_BTD, targets) * self._weight)

        return call

    def _check_gradients(self) -> None:
        name = tied_name(self._layout)
        for found, parameter in self.named_parameters():
            if found == name and parameter.grad is not None and bool(local_part(parameter.grad).any()):
                raise RuntimeError(
                    f"{name} is on the first and the last stage, and has a gradient already: zero_grad before each "
                    "forward_backward, and set batch.accumulation for more micro-batches"
                )

    def _engine_of_sizes(self) -> LayoutEngine:
        """Of the sizes that were told last: activations between stages have one shape."""
        assert self._sizes is not None, "after a forward_backward"
        if self._engine is None or self._engine[0] != self._sizes:
            micro, tokens = self._sizes
            made = LayoutEngine(
                [
                    ModelPart(part.chunk, part.stack, cast(PassEngine, _Passes(part)), part.laid)
                    for part in self._parts
                ],
                layout=self._layout,
                groups=self._groups,
                ledger=self.ledger,
                placement=self._placement,
                micro=micro,
                tokens=tokens,
                dtype=self._dtype,
                device=self._device,
            )
            self._engine = (self._sizes, made)
        return self._engine[1]

    def _of_all_stages(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        group = self._groups[PIPELINE]
        stages: list[dict[str, Tensor]] = [{} for _ in range(group.size)]
        dist.all_gather_object(stages, found, group=group.handle)
        return {name: whole for stage in stages for name, whole in stage.items()}


class _Passes:
    """What a pipeline asks of the engine of a part (`wrap.PassEngine`), in a script's own loop."""

    def __init__(self, part: Part) -> None:
        self._part = part

    @property
    def model(self) -> nn.Module:
        return self._part.stack

    def begin_micro_batch(self, index: int, count: int) -> None:
        self._part.replicas.begin_micro_batch(index, count)

    def end_micro_batch(self) -> None:
        """Nothing: there is no record that holds decisions."""

    def finish_gradients(self) -> None:
        self._part.replicas.finish_gradients()

    def gradients(self) -> dict[str, Tensor]:
        found = self._part.stack.named_parameters()
        return {name: local_part(p.grad) for name, p in found if p.grad is not None}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._part.stack.named_parameters())
