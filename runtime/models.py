"""The model of an experiment, made as it is to be trained: whole, or once for each part of it that a rank keeps."""

from collections.abc import Callable, Iterator

import torch

from ..conf.model_spec import ModelSpec
from ..conf.schema import ExperimentConf, Recompute
from .balance.straggle import Straggler
from .laps import Clock
from .stack import Stack, build_model


class Models:
    """Those that were made for one rank; whoever lays one out keeps of it what is the rank's.

    Args:
        straggler: Makes the rank slow.
        clock: Told when computation passes from unit to unit.
        synchronize: Waits for the device, where work runs asynchronously.
    """

    def __init__(
        self,
        experiment: ExperimentConf,
        spec: ModelSpec,
        *,
        device: torch.device,
        straggler: Straggler | None,
        clock: Clock,
        synchronize: Callable[[], None] | None,
    ) -> None:
        self._experiment, self._spec, self._device = experiment, spec, device
        self._sequence = experiment.batch.sequence or spec.sequence
        self._straggler, self._clock, self._synchronize = straggler, clock, synchronize
        self._made: list[Stack] = []

    def __iter__(self) -> Iterator[Stack]:
        return iter(self._made)

    def new(self) -> Stack:
        """The whole model, with the same first weights each time.

        It takes the time that the experiment says (`cluster.emulated_flops_per_s`, `cluster.slowdown`), unless it is
        laid out over ranks: then each of its products does.
        """
        experiment, straggler = self._experiment, self._straggler
        model = build_model(
            self._spec,
            seed=experiment.seed,
            recompute=experiment.recompute is Recompute.full,
            dropout=experiment.train.dropout,
        ).to(self._device)
        rate = experiment.cluster.emulated_flops_per_s
        if (rate is not None or straggler is not None) and experiment.parallel.ranks_a_replica == 1:
            model.emulate(
                rate,
                sequence=self._sequence,
                slow=None if straggler is None else lambda: straggler.stretch,
                synchronize=self._synchronize,
            )
        model.clock = self._clock
        self._made.append(model)
        return model

    def tell_dropout(self, *, step: int, first_sequence: int) -> None:
        """Before each forward: where the training is (`DropoutClock`)."""
        for model in self._made:
            model.dropout_clock.at(step=step, first_sequence=first_sequence)
