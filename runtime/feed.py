"""The micro-batches of a rank as its engine takes them: on its device, of each sequence the tokens that it holds."""

import torch
from torch import Tensor

from ..conf.model_spec import ModelSpec
from ..conf.schema import ExperimentConf
from ..policies.layout import ParallelLayout
from ..policies.mesh import DATA, Mesh
from .data import Batches, Tokens, build_batches
from .images import ImageBatches, Images
from .layout.tokens import token_index


class Feed:
    """Of one rank.

    Args:
        batches: Of the rank's replica.
        tokens: [T] int64, which of a sequence's tokens are here; None: all.
    """

    def __init__(
        self, batches: Batches | ImageBatches, *, device: torch.device, tokens: Tensor | None = None
    ) -> None:
        self._batches, self._device, self._tokens = batches, device, tokens

    def train(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return self._here(self._batches.train(step, micro_batch))

    def validation(self, batch: int) -> tuple[Tensor, Tensor]:
        """As `train`; the same at every validation."""
        return self._here(self._batches.validation(batch))

    def take(self, share: range) -> None:
        """From now on train on those of the sequences of all replicas' micro-batches."""
        self._batches.take(share)

    def num_counted(self, batches: int) -> int:
        """Sequences of a validation of so many batches, on all replicas; what only fills up the last ones is none."""
        return self._batches.num_counted(batches)

    def _here(self, batch: tuple[Tokens, Tokens] | tuple[Images, Tokens]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(part.copy()).to(self._device) for part in batch)
        if self._tokens is not None:
            return inputs[:, self._tokens], targets[:, self._tokens]
        return inputs, targets


def build_feed(
    experiment: ExperimentConf,
    spec: ModelSpec,
    *,
    layout: ParallelLayout | None,
    mesh: Mesh,
    rank: int,
    device: torch.device,
) -> Feed:
    """
    Args:
        layout: None: the rank has the whole model.

    Raises:
        ValueError: As `build_batches`.
    """
    tokens = None
    if layout is not None and layout.sequence > 1:
        tokens = token_index(layout, mesh, rank, experiment.batch.sequence or spec.sequence)
    batches = build_batches(experiment, spec, rank=mesh.index(DATA, rank), num_ranks=mesh.data)
    return Feed(batches, device=device, tokens=tokens)
