"""Megatron's programs: one for each pipeline stage, which all ranks of the stage run.

A pass of one micro-batch is one item where nothing can come between its collectives (NCCL, equal ranks):
its length is worked out once (`timing`). On gloo, or with ranks of different speed, every step is an item.
Sends and receives are items of their own; without `parallel.pipeline_overlap` a stage exchanges with its
neighbours only between passes, and computes when the exchange is over (Megatron-LM until 2023).
"""

from collections.abc import Mapping
from dataclasses import replace

from ...conf.schema import Backend, ExperimentConf
from ...policies.comm import GradientsReady, Phase, Placement, WeightsNeeded
from ...policies.mesh import DATA, WORLD, Mesh
from ...policies.partition import shard_numel
from ...policies.plan import Plan
from ..engine import Decisions
from ..engines import Setup, State, Written
from ..interpreter import Goal, Interpreted, Transfer, interpret
from ..offload import Offload
from ..program import Program
from .ending import Reductions, StageEnding
from .model import LayoutModel
from .parts import FLOAT_BYTES
from .stage import StagePasses, unit_name

ZERO_STAGES = (0, 1)


class Megatron:
    """The engine model: `policies.layout` says what runs and what is sent, the communication policy how gradients
    are summed over the replicas.

    Raises:
        ValueError: If the layout does not fit, or the experiment asks for what Megatron does not do.
    """

    def __init__(self, setup: Setup) -> None:
        _check(setup.experiment, setup)
        self._experiment = setup.experiment
        self._decisions = Decisions(setup.policy)
        self._model = LayoutModel(setup.experiment, setup.spec, setup.costs.device, setup.costs.kernels)
        self.mesh = self._model.mesh
        self.offload: Offload | None = None
        self.unit_bytes: Mapping[str, int] = {
            unit_name(stage): self._model.num_parameters(stage) * setup.experiment.precision.element_bytes
            for stage in range(self.mesh.pipeline)
        }
        self._merged = setup.experiment.cluster.backend is Backend.nccl and _equal_ranks(setup.experiment)

    def write(self, *, validation: bool, before: State) -> Written:
        """One training step."""
        assert not validation, "train.eval_every is refused"
        self._decisions.log = []
        programs: dict[int, Program] = {}
        each, overlap = self.mesh.tensor * self.mesh.data, self._experiment.parallel.pipeline_overlap
        for stage in range(self.mesh.pipeline):
            passes = StagePasses(self._model, stage, merged=self._merged, overlap=overlap)
            waits = passes.write()
            ending = StageEnding(passes.writer, self._model, stage, self._experiment, waits)
            ending.write(self._reductions(stage))
            programs[stage * each] = passes.program
        return Written(programs, [*self._model.decided, *self._decisions.log], before)

    def _reductions(self, stage: int) -> Reductions:
        """What the communication policy does with a stage's gradients and weights over the replicas."""
        if self.mesh.data == 1:
            return Reductions(None, None)
        micro_batches = self._experiment.batch.accumulation
        ready = GradientsReady(unit_name(stage), micro_batches - 1, micro_batches)
        plan = self._decisions.decide(ready)
        if plan is None:
            raise ValueError(
                f"{self._decisions.policy.name!r} leaves the gradients of {unit_name(stage)} unreduced"
            )
        sharded = self._decisions.policy.placement is Placement.sharded
        gradients = self._over_replicas(plan, stage, Goal.reduce if sharded else Goal.whole, FLOAT_BYTES)
        if not sharded:
            return Reductions(gradients, None)
        needed = self._decisions.decide(WeightsNeeded(unit_name(stage), Phase.forward, False))
        if needed is None:
            return Reductions(gradients, None)
        element = self._experiment.precision.element_bytes
        return Reductions(gradients, self._over_replicas(needed, stage, Goal.gather, element))

    def _over_replicas(self, plan: Plan, stage: int, goal: Goal, element_bytes: int) -> Interpreted:
        """The policy's world is the data axis: one flat tensor a stage, in equal slices if it is sharded."""
        numel, replicas = self._model.num_parameters(stage), self.mesh.data
        slices = numel if goal is Goal.whole else shard_numel((numel,), replicas)
        made = interpret(
            plan, goal=goal, segments=(slices,), mesh=Mesh(replicas, 1), element_bytes=element_bytes
        )
        pieces = []
        for piece in made.pieces:
            if isinstance(piece.what, Transfer):
                if piece.what.axis != WORLD:
                    raise ValueError(
                        f"plan '{plan.describe()}': with engine=megatron a policy can name the axis {WORLD!r} "
                        f"only, which stands for the replicas, not {piece.what.axis!r}"
                    )
                piece = replace(piece, what=replace(piece.what, axis=DATA))
            pieces.append(piece)
        return replace(made, pieces=tuple(pieces))


def _equal_ranks(experiment: ExperimentConf) -> bool:
    """Whether all ranks of a tensor group come to its collectives together, over links that stay as they are."""
    cluster = experiment.cluster
    differ = any(part.intra_node or part.inter_node for part in cluster.parts)
    return not (cluster.slowdown or cluster.link_slowdown or differ)


def _check(experiment: ExperimentConf, setup: Setup) -> None:
    comm, train = experiment.comm, experiment.train
    if comm.parameter_server or comm.zero_stage not in ZERO_STAGES:
        raise ValueError(
            f"comm={comm.name} with engine=megatron: use comm=ddp or comm=zero1 (its distributed optimizer); "
            "a pipeline keeps its weights through a step"
        )
    if train.eval_every:
        raise ValueError(
            f"train.eval_every={train.eval_every} with engine=megatron: must be 0, only training steps are simulated"
        )
    if setup.policy.placement is Placement.server:
        raise ValueError(f"policy {setup.policy.name!r}: engine=megatron has no server")
