"""What the simulator asks of an engine: the programs of a step, and what holds after it. And FSDP2's answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..conf.model_spec import ModelSpec, parameters
from ..conf.schema import Backend, ExperimentConf, Precision
from ..policies.comm import CommPolicy, Placement
from ..policies.mesh import Mesh
from ..policies.partition import shard_segments
from .costs import Costs
from .engine import Decisions, Engine, Weights
from .offload import Offload, make_offload
from .optimizer import num_norms
from .program import Program, Writer
from .rules import Blocking, CommThread, Streams

State = tuple[str, ...]  # what a program depends on when it begins, such as the units with a good copy


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is made from."""

    experiment: ExperimentConf
    spec: ModelSpec
    policy: CommPolicy
    costs: Costs


class Written(NamedTuple):
    """The programs of one segment (`executor.Segment`), the decisions behind them, and the state after it."""

    programs: Mapping[int, Program]
    decided: list[tuple[str, str]]  # (event, action) as the record shows them
    after: State


class EngineModel(Protocol):
    """Whose order of collectives and computation is followed. Segments begin with the state `()`."""

    mesh: Mesh
    unit_bytes: Mapping[str, int]  # of each unit when it is gathered whole
    offload: Offload | None  # where something lies outside near memory

    def write(self, *, validation: bool, before: State) -> Written:
        """One training step, or one validation: asked once for each state that it can begin with."""
        ...


class Fsdp2:
    """All ranks run one program: `engine` writes it, `rules` say what overlaps on this backend."""

    def __init__(self, setup: Setup) -> None:
        experiment, policy = setup.experiment, setup.policy
        cluster = experiment.cluster
        self.mesh = Mesh.of(cluster, policy.hpz_size)
        self._experiment = experiment
        self._sharded = policy.placement is Placement.sharded
        self._decisions = Decisions(policy)
        train, units = experiment.train, parameters(setup.spec)
        clip = self._sharded and (train.gradient_clipping > 0 or experiment.precision is Precision.fp16)
        if experiment.offload.active and not self._sharded:
            raise ValueError(
                f"offload={experiment.offload.name} needs sharded weights, and comm={policy.name} replicates them: use "
                "a comm with zero_stage >= 1"
            )
        numels = {u.name: sum(shard_segments([t.shape for t in u.tensors], cluster.num_ranks)) for u in units}
        self.offload: Offload | None = make_offload(experiment, numels, clip=clip)
        self._engine = Engine(
            decisions=self._decisions,
            mesh=self.mesh,
            units=units,
            precision=experiment.precision,
            num_micro_batches=experiment.batch.accumulation,
            eval_batches=train.eval_batches,
            clip=clip,
            num_norms=num_norms(experiment.optimizer, units) if self._sharded else 0,
            num_figures=2 if setup.spec.classifies else 1,
            gradient_bytes=Precision.fp32.element_bytes if experiment.kernels.reduce_fp32 else None,
            offload=self.offload,
        )
        parts = cluster.num_ranks if self._sharded else 1
        element = experiment.precision.element_bytes
        self.unit_bytes: Mapping[str, int] = {
            unit.name: parts * sum(self._engine.segments(unit)) * element for unit in units
        }
        self._copies = self.unit_bytes if self._sharded and setup.costs.engine_copies else {}

    def write(self, *, validation: bool, before: State) -> Written:
        self._decisions.log = []
        weights = Weights(part for part in before if "/" in part)
        if self.offload is not None:
            self.offload.restore(before)
            self.offload.log = self._decisions.log
        write = self._engine.validation if validation else self._engine.training_step
        program = write(self._rules(), weights)
        own = self.offload.key() if self.offload is not None else ()
        return Written({0: program}, self._decisions.log, weights.key() + own)

    def _rules(self) -> Blocking:
        experiment = self._experiment
        writer = Writer(merge=not experiment.cluster.host.cores)
        if experiment.cluster.backend is Backend.nccl:
            return Streams(writer, self._copies, sharded=self._sharded)
        return (CommThread if experiment.comm.overlap else Blocking)(writer, self._copies)
