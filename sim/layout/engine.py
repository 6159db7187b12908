"""FSDP2 over the replicas of a layout: its order of gathers and reductions, with each unit's computation shared out."""

from collections.abc import Mapping

from ...conf.schema import Backend, ExperimentConf, Precision, Recompute
from ...policies.comm import Placement
from ...policies.mesh import Mesh
from ..engine import Decisions, Engine, Weights
from ..engines import Setup, State, Written
from ..offload import Offload
from ..optimizer import num_norms
from ..program import Writer
from ..rules import Blocking, CommThread, Streams
from .computation import LayersOf

RECOMPUTES = (Recompute.none, Recompute.full)


class LayoutEngine:
    """All ranks run one program: what differs by their place in a group is which part of a tensor they hold.

    Raises:
        ValueError: If the layout does not fit, or the experiment asks for what it does not do.
    """

    def __init__(self, setup: Setup) -> None:
        experiment, policy = setup.experiment, setup.policy
        check_layout(experiment)
        laid = setup.costs.laid
        assert laid is not None, "a layout"
        self._experiment = experiment
        self._model = model = laid.model
        self.mesh = Mesh.of(experiment.cluster, policy.hpz_size, model.layout.dims)
        self._replicas = self.mesh.of_replicas()
        self._sharded = policy.placement is Placement.sharded and self._replicas.num_ranks > 1
        self._decisions = Decisions(policy)
        self.offload: Offload | None = None
        units, train = model.units(), experiment.train
        # whether a rank lacks some of the gradients
        shared = self._sharded or model.layout.tensor * model.layout.stages > 1
        self._engine = Engine(
            decisions=self._decisions,
            mesh=self._replicas,
            units=units,
            precision=experiment.precision,
            num_micro_batches=experiment.batch.accumulation,
            eval_batches=train.eval_batches,
            clip=shared and (train.gradient_clipping > 0 or experiment.precision is Precision.fp16),
            num_norms=num_norms(experiment.optimizer, units) if shared else 0,
            num_figures=2 if setup.spec.classifies else 1,
            gradient_bytes=Precision.fp32.element_bytes if experiment.kernels.reduce_fp32 else None,
            world=self.mesh,
        )
        parts = self._replicas.num_ranks if self._sharded else 1
        element = experiment.precision.element_bytes
        self.unit_bytes: Mapping[str, int] = {
            unit.name: parts * sum(self._engine.segments(unit)) * element for unit in units
        }
        self._copies = self.unit_bytes if self._sharded and setup.costs.engine_copies else {}

    def write(self, *, validation: bool, before: State) -> Written:
        self._decisions.log = []
        weights = Weights(before)
        write = self._engine.validation if validation else self._engine.training_step
        program = write(self._rules(), weights)
        return Written({0: program}, [*self._model.decided, *self._decisions.log], weights.key())

    def _rules(self) -> Blocking:
        experiment, layers = self._experiment, LayersOf(self._model)
        writer = Writer(merge=not experiment.cluster.host.cores)
        if experiment.cluster.backend is Backend.nccl:
            return Streams(writer, self._copies, layers, sharded=self._sharded)
        return (CommThread if experiment.comm.overlap else Blocking)(writer, self._copies, layers)


def check_layout(experiment: ExperimentConf) -> None:
    """Refuse what is not done under a layout.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    if experiment.offload.active:
        raise ValueError(
            f"offload={experiment.offload.name} with parallel.tensor, sequence or pipeline > 1: must be none, states "
            "that lie elsewhere are of data parallelism only"
        )
    if experiment.recompute not in RECOMPUTES:
        raise ValueError(
            f"recompute={experiment.recompute.value} with parallel.tensor, sequence or pipeline > 1 and engine=fsdp2: "
            f"use one of {[each.value for each in RECOMPUTES]}"
        )
    if experiment.comm.parameter_server:
        raise ValueError(
            f"comm={experiment.comm.name} with parallel.tensor, sequence or pipeline > 1: a parameter server holds "
            "the weights of a whole model; use ddp or a comm with zero_stage >= 1"
        )
