"""A matrix that the first and the last stage of a pipeline both hold."""

import torch
import torch.distributed as dist
from torch import Tensor

from ...policies.plan import Plan, Reduce, SendRecv
from ..groups import Group
from ..ledger import Ledger

_TAG = 2_000  # apart from torch's 0


def exchange(plan: Plan, gradient: Tensor, *, group: Group, ledger: Ledger, layer: str) -> None:
    """Add the other stage's gradient to this one's.

    Args:
        plan: What the layout answers to `StepGradientsReady`.
        group: The stages.

    Raises:
        TypeError: If the plan has another step than a message and a sum.
    """
    if not gradient.numel():
        return
    theirs = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    for step in plan.steps:
        match step:
            case SendRecv():
                peer = group.ranks[group.index + step.shift]
                row = ledger.collective(
                    op="send",
                    axis=step.axis,
                    group=group.ranks,
                    payload_bytes=gradient.numel() * gradient.element_size(),
                    stream=plan.stream,
                    layer=layer,
                )
                with row:
                    works = [
                        dist.irecv(theirs, peer, group=group.handle, tag=_TAG),
                        dist.isend(gradient.contiguous(), peer, group=group.handle, tag=_TAG),
                    ]
                    for work in works:
                        assert work is not None, "both ranks are in the group"
                        work.wait()
            case Reduce():
                gradient.add_(theirs)
            case _:
                raise TypeError(
                    f"plan '{plan.describe()}': {type(step).__name__} cannot add up the gradients of two stages"
                )
