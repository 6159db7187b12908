"""FSDP2 over the replicas of a layout: its order of gathers and reductions, with each unit's computation shared out."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...conf.schema import Backend, ExperimentConf, Precision, Recompute
from ...policies.balance import MEASURE_STREAM
from ...policies.comm import Placement
from ...policies.layout import Kind
from ...policies.mesh import PIPELINE, REPLICAS, SEQUENCE, STAGE, Mesh
from ..balance.lending import Lending
from ..balance.rank_work import EVEN, RankWork
from ..engine import Decisions, Weights
from ..engines import Setup, State, Written
from ..interpreter import Transfer
from ..offload import Offload
from ..optimizer import num_norms
from ..program import Program, Writer
from ..rules import Blocking, CommThread, Streams
from .computation import LayersOf
from .order import Action, forward_actions, stage_actions
from .shapes import BEHIND
from .stage import CopiesInFlight, StageEngine, StepWork

GLOO_THREADS = 2  # of each process group (torch's ProcessGroupGloo::Options)
RECOMPUTES = (Recompute.none, Recompute.full)


class _Kind(NamedTuple):
    """Ranks that run one program."""

    stage: int
    tied_rows: int
    place: int  # on the sequence axis
    work: RankWork = EVEN
    measuring: tuple[tuple[str, Transfer], ...] = ()  # (layer, collective) behind the step


class LayoutEngine:
    """All ranks of a stage run one program: what differs by their place in a group is which part of a tensor they hold.

    Raises:
        ValueError: If the layout does not fit, or the experiment asks for what it does not do.
    """

    def __init__(self, setup: Setup) -> None:
        experiment, policy = setup.experiment, setup.policy
        check_layout(experiment)
        laid = setup.costs.laid
        assert laid is not None, "a layout"
        self._experiment = experiment
        self._costs = setup.costs
        self._model = model = laid.model
        self._layout = model.layout
        self.mesh = Mesh.of(experiment.cluster, policy.hpz_size, model.layout.dims)
        self._replicas = self.mesh.of_replicas()
        self._sharded = policy.placement is Placement.sharded and self._replicas.num_ranks > 1
        self._server = policy.placement is Placement.server  # of each replica's parameters, replica 0
        self._decisions = Decisions(policy)
        self.offload: Offload | None = None
        units, train = model.units(), experiment.train
        # whether a rank lacks some of the gradients
        self._shared = self._sharded or self._layout.tensor * self._layout.stages > 1
        if self._num_norms(0) and self._layout.stages > 1 and self.mesh.size(STAGE) == 1:
            raise ValueError(
                f"optimizer={experiment.optimizer.name} with parallel.pipeline={self._layout.stages} and "
                f"parallel.order={list(experiment.parallel.order)}: pipeline must be the first or the last, for the "
                "ranks of a stage sum norms"
            )
        self._engine = StageEngine(
            model,
            decisions=self._decisions,
            mesh=self._replicas,
            units=units,
            precision=experiment.precision,
            num_micro_batches=experiment.batch.accumulation,
            eval_batches=train.eval_batches,
            clip=self._shared and (train.gradient_clipping > 0 or experiment.precision is Precision.fp16),
            num_norms=self._num_norms(0),
            num_figures=2 if setup.spec.classifies else 1,
            gradient_bytes=Precision.fp32.element_bytes if experiment.kernels.reduce_fp32 else None,
            world=self.mesh,
        )
        self.unit_bytes: Mapping[str, int] = self._bytes_of(0)
        self._apart: dict[tuple[_Kind, bool, State], Program] = {}

    def write(self, *, validation: bool, before: State) -> Written:
        """A program for each stage, for ranks that hold more rows of a tied matrix than others, and for those whose
        tokens see more than others'.
        """
        self._decisions.log = []
        layout, train = self._layout, self._experiment.train
        actions = forward_actions(layout, train.eval_batches) if validation else stage_actions(layout)
        known: dict[_Kind, Program] = {}
        programs: dict[int, Program] = {}
        after: set[str] = set()
        log = self._decisions.log
        last: Program | None = None
        for rank in range(self.mesh.num_ranks):
            kind = self._kind(rank, validation=validation)
            if kind not in known:
                known[kind], held = self._program(kind, actions[kind.stage], validation, before)
                after.update(held)
                self._decisions.log = []  # a record has those of the first rank
            if known[kind] is not last:
                last = programs[rank] = known[kind]
            if rank == 0 and layout.stages * self._model.num_places == 1:
                break
        return Written(programs, [*self._model.decided, *log], tuple(sorted(after)))

    def write_for(
        self,
        rank: int,
        *,
        validation: bool,
        before: State,
        work: RankWork = EVEN,
        measuring: tuple[tuple[str, Transfer], ...] = (),
    ) -> Program:
        """The program of one rank that may compute another share than others: equal ones are one.

        Args:
            work: What it computes, and what moves.
            measuring: (layer, collective) behind the step, in order.
        """
        kind = self._kind(rank, validation=validation)._replace(work=work, measuring=measuring)
        key = (kind, validation, before)
        if key not in self._apart:
            layout = self._layout
            actions = (
                forward_actions(layout, self._experiment.train.eval_batches)
                if validation
                else stage_actions(layout)
            )
            self._decisions.log = []
            program, _ = self._program(kind, actions[kind.stage], validation, before)
            program.tag_by_axis()
            self._apart[key] = program
        return self._apart[key]

    def _kind(self, rank: int, *, validation: bool) -> "_Kind":
        stage = self.mesh.index(PIPELINE, rank)
        rows = 0 if validation else self._tied_rows(stage, rank)
        return _Kind(stage, rows, self.mesh.index(SEQUENCE, rank) if self._model.num_places > 1 else 0)

    def _program(
        self, kind: "_Kind", actions: Sequence[Action], validation: bool, before: State
    ) -> tuple[Program, State]:
        stage, rows = kind.stage, kind.tied_rows
        rules = self._rules(kind)
        if self._layout.stages == 1:
            weights = Weights(before)
            write = self._engine.validation if validation else self._engine.training_step
            return self._measured(write(rules, weights), rules, kind), weights.key()
        weights = Weights(())
        weights.copies = CopiesInFlight()
        names = {unit.name for unit in self._model.units(stage)}
        for unit, axis in Weights(before).copies.items():
            if unit in names:
                weights.copies[unit] = axis
        if validation:
            program = self._engine.stage_validation(rules, weights, stage, actions)
        else:
            share = self._model.num_parameters(stage) / self._model.num_parameters(0)
            step = StepWork(self._num_norms(stage), round(self._costs.stepped_elements * share))
            program = self._engine.stage_step(rules, weights, stage, actions, step, tied_rows=rows)
        return self._measured(program, rules, kind), weights.key()

    def _measured(self, program: Program, rules: Blocking, kind: "_Kind") -> Program:
        """With what ranks tell each other behind their step."""
        for layer, transfer in kind.measuring:
            rules.message("step", layer, transfer, tag=None, stream=MEASURE_STREAM)
        return program

    def _tied_rows(self, stage: int, rank: int) -> int:
        """Rows of a matrix that two stages hold of which this rank has the gradient: FSDP2 cuts without padding."""
        if not self._layout.tied or stage not in (0, self._layout.stages - 1):
            return 0
        head = next(layer for layer in self._model.shapes.parts[BEHIND] if layer.kind is Kind.tied)
        rows = self._model.shapes.operands_of_parameters(head)["weight"].shape[0]
        replica = self.mesh.index(REPLICAS, rank)
        if not self._sharded:
            return 0 if self._server and replica else rows
        each = -(-rows // self._replicas.num_ranks)
        return min(each, max(0, rows - each * replica))

    def _num_norms(self, stage: int) -> int:
        """Numbers that a trust ratio's norms take; 0: each rank has its parameters whole."""
        if not self._sharded and self._layout.tensor == 1:
            return 0
        return num_norms(self._experiment.optimizer, self._model.units(stage))

    def _bytes_of(self, stage: int) -> dict[str, int]:
        """Of each unit of a stage when it is gathered whole."""
        parts = self._replicas.num_ranks if self._sharded else 1
        element = self._experiment.precision.element_bytes
        return {
            unit.name: parts * sum(self._engine.segments(unit)) * element for unit in self._model.units(stage)
        }

    def _rules(self, kind: "_Kind") -> Blocking:
        experiment = self._experiment
        nccl = experiment.cluster.backend is Backend.nccl
        stage, layout = kind.stage, self._layout
        chunks = [[f"block.{i}" for i in layout.layers(stage, chunk)] for chunk in range(layout.chunks)]
        lending = Lending(kind.work, chunks, ahead=not self._sharded)
        at_a_time = 1 if nccl else GLOO_THREADS
        layers = LayersOf(self._model, kind.place, at_a_time=at_a_time, lending=lending)
        writer = Writer(merge=not experiment.cluster.host.cores)
        copies = self._bytes_of(stage) if self._sharded and self._costs.engine_copies else {}
        if nccl:
            return Streams(writer, copies, layers, sharded=self._sharded)
        return (CommThread if experiment.comm.overlap else Blocking)(writer, copies, layers)


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
