"""What a training holds of its rank's memory, by class, counted between steps."""

from collections.abc import Iterable

import torch

from ..policies.offload import Kind
from .memory import local_bytes, optimizer_bytes
from .offload.disk import DiskOffload
from .saved import SavedTensors
from .stack import Stack
from .wrap import CommEngine


class HeldMemory:
    """Of one rank.

    Args:
        optimizer: None: another rank steps the weights.
        offload: Has some of the parameters and states elsewhere.

    Attributes:
        gradient_bytes: 0 until they are counted.
        saved: What autograd keeps; None: no step was watched.
    """

    def __init__(
        self,
        engine: CommEngine,
        optimizer: torch.optim.Optimizer | None,
        offload: DiskOffload | None = None,
    ) -> None:
        self._engine, self._optimizer, self._offload = engine, optimizer, offload
        self.gradient_bytes = 0
        self.saved: SavedTensors | None = None

    def count_gradients(self) -> None:
        """Once, when they are complete; they are as large in every step."""
        if self.gradient_bytes == 0:
            self.gradient_bytes = local_bytes(p.grad for p in self._engine.parameters())

    def watch(self, models: Iterable[Stack]) -> SavedTensors:
        """A context for the step that is to be watched: what it keeps for backward."""
        self.saved = SavedTensors(models)
        return self.saved

    @property
    def num_bytes(self) -> dict[str, int]:
        """Between steps, by class."""
        offload = self._offload
        if offload is not None:
            parameters, states = offload.near_bytes(Kind.parameters), offload.near_bytes(Kind.optimizer)
        else:
            parameters, states = local_bytes(self._engine.parameters()), optimizer_bytes(self._optimizer)
        return {
            "parameters": parameters,
            "gradients": self.gradient_bytes,
            "optimizer": states,
            "secondary_shard": self._engine.secondary_bytes(),
        }
