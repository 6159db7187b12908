"""How long a layout's own works take on one cluster: whole passes, single steps of a plan, the optimizer."""

import simpy

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf, Precision
from ...policies.layout import Direction, Part
from ..costs import CLIP_PASS_BYTES, Costs
from ..device import Tally
from ..folded import Folded
from ..interpreter import Transfer, Work
from ..machine import Machine
from ..optimizer import pass_bytes
from ..topology import Topology
from .model import LayoutModel
from .timing import PassKind, PassTimes

CAST_PASS_BYTES = 6  # fp32 weight read, 16-bit weight written
UNSCALE_PASS_BYTES = 8  # fp32 gradient read and written
ZERO_PASS_BYTES = 4  # fp32 gradient written


class LayoutCosts:
    """Durations of `Work("layout", key)`.

    Keys: "pass/" and what `PassKind.key` says; "local/part/direction/i", step i of a plan; "step/stage".

    Args:
        costs: Of the same cluster.
    """

    def __init__(self, experiment: ExperimentConf, spec: ModelSpec, costs: Costs) -> None:
        self._experiment = experiment
        self._model = LayoutModel(experiment, spec, costs.device, costs.kernels)
        self._costs = costs
        self._collectives: dict[Transfer, int] = {}
        self._times = PassTimes(self._model.steps, costs.device, self.collective_ns)
        self._kinds = self._all_kinds()

    def ns(self, work: Work) -> float:
        """Wall time of `work` on one rank."""
        what, _, key = work.key.partition("/")
        if what == "pass":
            return self._times.ns(self._kinds[key])
        if what == "local":
            part, direction, index = key.split("/")
            step = self._model.steps.of(Part(part), Direction(direction))[int(index)]
            assert isinstance(step.what, Tally)
            return self._costs.device.time_ns(step.what)
        return self._step_ns(int(key))

    def collective_ns(self, transfer: Transfer) -> int:
        """A collective of a tensor group whose ranks arrive together, alone on its links."""
        known = self._collectives.get(transfer)
        if known is None:
            env = simpy.Environment()
            machine = Machine(env, self._costs, Topology(self._costs.cluster), folded=True)
            folded = Folded(machine, self._model.mesh, transfers=[transfer])
            env.run(until=env.process(folded.run(0, transfer, ("alone",))))
            known = self._collectives[transfer] = int(env.now)
        return known

    def _all_kinds(self) -> dict[str, PassKind]:
        layout = self._model.layout
        kinds = [
            self._model.kind(stage, chunk, backward)
            for stage in range(layout.stages)
            for chunk in range(layout.chunks)
            for backward in (False, True)
        ]
        return {kind.key: kind for kind in kinds}

    def _step_ns(self, stage: int) -> float:
        """The optimizer on what one rank steps: all of its stage, or with ZeRO-1 its part.

        Bytes of a parameter, as Megatron's kernels move them: the optimizer's pass over fp32; the norm and the
        scaling of gradients; weights in 16 bits from the fp32 ones (6); gradients set to zero (4); under fp16
        gradients unscaled and looked through (8).
        """
        experiment = self._experiment
        per_parameter = pass_bytes(experiment.optimizer)
        if experiment.train.gradient_clipping:
            per_parameter += CLIP_PASS_BYTES
        if experiment.precision is not Precision.fp32:
            per_parameter += CAST_PASS_BYTES
        if experiment.precision is Precision.fp16:
            per_parameter += UNSCALE_PASS_BYTES
        numel = self._model.num_parameters(stage)
        owned = -(-numel // self._model.mesh.data) if experiment.comm.zero_stage else numel
        return self._costs.device.memory_ns(float(owned * per_parameter + numel * ZERO_PASS_BYTES))
