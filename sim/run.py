"""The simulation of one experiment's segments: which ranks are simulated for all, on which machine, for how long."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from ..conf.model_spec import ModelSpec
from ..conf.schema import Backend, ClusterConf, Engine, ExperimentConf, Precision, SlowdownBy
from ..policies.comm import CommPolicy, build_comm
from ..policies.layout import replicas_of
from .classes import Fold
from .collectives import PerStep
from .conditions import Conditions
from .constants import with_fixed_costs
from .costs import Costs
from .engines import EngineModel, Setup, State, Written
from .executor import Executor, FailureError, Observer, Segment, Timing
from .folded import Folded
from .interpreter import PASSES, Transfer
from .ledger import Ledger, rank_classes, transfers_of
from .levels import levels
from .machine import Machine
from .memory import MemoryPoint, memory_over_time
from .program import Program
from .topology import Topology

MAX_STEPWISE_RANKS = 64  # every message apart; above, collectives are single flows
MAX_LEDGER_ROWS = 10_000_000  # of a record, about 2 GB of memory
TIMELINE_STEPS = 3  # the timeline shows the first steps: two to warm up and one more


@dataclass(frozen=True, slots=True)
class Simulated:
    """All segments, or those before a failure, which `error` then describes."""

    costs: Costs
    machine: Machine
    fold: Fold
    timings: dict[int, list[Timing]]  # representative rank -> one for each segment
    error: str | None = None


class Run:
    """What is the same for every choice of guessed inputs: policy, programs, classes of ranks.

    Args:
        fold: Simulate ranks that behave alike once. None: on NCCL, and on gloo above 64 ranks. False: every rank,
            and up to 64 of them every message.
    """

    apart = False  # whether every rank does what it does by itself, even where collectives are single flows

    def __init__(
        self,
        experiment: ExperimentConf,
        spec: ModelSpec,
        policy: CommPolicy | None,
        fold: bool | None,
        make_engine: Callable[[Setup], EngineModel],
    ) -> None:
        cluster = experiment.cluster
        _check_slowdown(experiment)
        self.kinds: Sequence[int] = ()  # [ranks]: of equal ones ranks can be alike; (): all
        self.warnings: tuple[str, ...] = ()
        if policy is None:
            seen = replicas_of(experiment)
            policy, self.warnings = build_comm(
                experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node
            )
        self.policy = policy
        experiment = with_fixed_costs(experiment, spec, policy)
        self.experiment, self.spec = experiment, spec
        nccl = cluster.backend is Backend.nccl
        alike = fold if fold is not None else nccl or cluster.num_ranks > MAX_STEPWISE_RANKS
        self.folded = alike or cluster.num_ranks > MAX_STEPWISE_RANKS
        if nccl and experiment.comm.overlap:
            self.warnings += (
                "comm.overlap has no effect with cluster.backend=nccl, which overlaps by itself",
            )
        self.warnings += _precision_warnings(experiment)
        self.engine = make_engine(Setup(experiment, spec, policy, Costs(experiment, spec, policy)))
        self.mesh = self.engine.mesh
        self.ledger = Ledger(self.mesh)
        self.decided: list[list[tuple[str, str]]] = []  # for each segment
        self.befores: list[State] = []  # with what each segment begins
        self.segments = self._segments()
        self.codec_scale = self._codec_scale()
        self._each = list({id(s.programs): s.programs for s in self.segments}.values())
        self._transfers = self._all_transfers()
        self.conditions = Conditions(cluster, seed=experiment.seed)
        inside = {
            t.axis for ps in self._each for p in ps.values() for item in p.items for t, _, _ in item.inside
        }
        self.conditions.spread(self.mesh, sorted(inside))
        self.fold = self._fold() if alike else Fold.apart(self.mesh)

    def simulate(self, cluster: ClusterConf) -> Simulated:
        """All segments on `cluster`.

        Where all ranks end a segment together nothing is in flight between two segments and all streams are empty, so a
        segment takes the same time whenever it comes: each distinct one is simulated once and its timing shifted.
        """
        costs = self._costs(cluster)
        if not self.folded or len(self.fold) > 1 or self.conditions.varies:
            return self._whole(costs)
        known: dict[int, Timing] = {}
        timings: list[Timing] = []
        now = 0
        for segment in self.segments:
            timing = known.get(id(segment.programs))
            if timing is None:
                machine, executor = self._executor(costs)
                timing = known[id(segment.programs)] = executor.run([segment])[0][0]
            timings.append(timing.shifted(now) if len(timings) < TIMELINE_STEPS else timing.border(now))
            now += timing.end_ns
        return Simulated(costs, machine, self.fold, {0: timings})

    def iteration_s(self, simulated: Simulated) -> list[float]:
        """Time of each training step: from the last rank's end of what came before to its own last end."""
        times, before = [], 0
        whole = len(next(iter(simulated.timings.values())))
        for i, segment in enumerate(self.segments[:whole]):
            end = max(timings[i].end_ns for timings in simulated.timings.values())
            if not segment.validation:
                times.append((end - before) / 1e9)
            before = end
        return times

    def beside(self) -> dict[str, Any]:
        """What a record has besides, of the first simulation."""
        return {}

    def _whole(self, costs: Costs) -> Simulated:
        """All segments in one go."""
        machine, executor = self._executor(costs)
        try:
            timings = executor.run(self.segments)
        except FailureError as err:
            return Simulated(costs, machine, self.fold, executor.done(), str(err))
        return Simulated(costs, machine, self.fold, timings)

    def _executor(
        self, costs: Costs, *, observer: Observer | None = None, conditions: Conditions | None = None
    ) -> tuple[Machine, Executor]:
        conditions = conditions if conditions is not None else self.conditions
        total = self.mesh.num_ranks
        shares = {rank: n / total for rank, n in zip(self.fold.ranks, self.fold.counts, strict=True)}
        machine = Machine(
            simpy.Environment(),
            costs,
            Topology(costs.cluster),
            folded=self.folded,
            conditions=conditions,
            shares=shares,
            part_costs=self._part_costs(costs),
        )
        if not self.folded:
            per_step = PerStep(machine, self.mesh)
            return machine, Executor(machine, per_step, self.fold.ranks, observer=observer)
        collectives = Folded(machine, self.mesh, self.fold, self._transfers, conditions)
        counts = dict(zip(self.fold.ranks, self.fold.counts, strict=True))
        executor = Executor(
            machine, collectives, self.fold.ranks, classes=True, counts=counts, observer=observer
        )
        return machine, executor

    def _costs(self, cluster: ClusterConf) -> Costs:
        costs = Costs(replace(self.experiment, cluster=cluster), self.spec, self.policy)
        costs.codec_scale = self.codec_scale
        return costs

    def _part_costs(self, costs: Costs) -> Mapping[int, Costs]:
        """Of each part of a mixed cluster, by its first node."""
        cluster, first, found = costs.cluster, 0, {}
        for part in cluster.parts:
            found[first] = self._costs(replace(cluster, device=part.device))
            first += part.nodes
        return found

    def memory_points(self) -> list[tuple[str, float, list[MemoryPoint]]]:
        """(key of a device, its bytes, what a rank with it holds over a step), the fullest first: of the smallest."""
        key, smallest, _ = min(self.experiment.cluster.kinds, key=lambda kind: kind[1].memory_bytes)
        offload = self.engine.offload
        near = offload.near_bytes() if offload is not None else None
        unit_bytes = list(self.engine.unit_bytes.values())
        points = memory_over_time(self.experiment, self.spec, self.policy, unit_bytes, near)
        return [(key, smallest.memory_bytes, points)]

    def _codec_scale(self) -> float:
        """What brings the probed cost of all codec work of a step to the one that was measured in its place."""
        measured_ns = self.experiment.cluster.host.codec_step_ns
        if not measured_ns:
            return 1.0
        costs = Costs(self.experiment, self.spec, self.policy)
        works = [part.work for item in self.segments[0].program(0).items for part in item.parts]
        probed_ns = sum(costs.ns(w) for w in works if w.kind in ("encode", "decode") or w.key in PASSES)
        return measured_ns / probed_ns if probed_ns else 1.0

    def _fold(self) -> Fold:
        """Ranks with one program, one speed and equal partners are one class."""
        cluster = self.experiment.cluster
        colours = self.conditions.colours()
        ranks = np.arange(len(colours))
        for programs in self._each:
            own = np.searchsorted(np.array(list(programs)), ranks, side="right")
            colours = colours * (len(programs) + 1) + own
        if self.kinds:
            colours = colours * (max(self.kinds) + 1) + np.array(self.kinds)
        blocks = [level.block for level in levels(cluster)]  # a rail's ranks too: they share its link
        meetings = {(t.axis, abs(t.peer)): None for t in self._transfers}
        return Fold(self.mesh, colours, meetings, blocks)

    def _all_transfers(self) -> list[Transfer]:
        """One of each kind."""
        found: dict[tuple[str, str, int], Transfer] = {}
        for programs in self._each:
            for program in programs.values():
                for transfer in transfers_of(program):
                    found.setdefault((transfer.op, transfer.axis, transfer.peer), transfer)
        return list(found.values())

    def check_size(self, programs: Mapping[int, Program], steps: int) -> None:
        """Refuse a run whose record nobody could read, before it is made: each collective is a row."""
        segment = Segment(0, False, programs)
        most = max(self.ledger.num_rows(rank, program) for rank, program in programs.items())
        if most * steps * self.mesh.num_ranks <= MAX_LEDGER_ROWS:
            return  # whatever classes there are
        ranks: Iterable[int] = range(self.mesh.num_ranks)
        if self.folded and not self.apart:
            ranks = [each.rank for each in rank_classes(self.mesh, [programs])]
        rows = sum(self.ledger.num_rows(rank, segment.program(rank)) for rank in ranks)
        if rows * steps > MAX_LEDGER_ROWS:
            raise ValueError(
                f"steps={steps}: the ledger would have {rows * steps:,} rows, {rows:,} a step; simulated, it "
                f"must be at most {MAX_LEDGER_ROWS // rows:,}. A longer training takes no other time a step: "
                "train.tokens gives time_to_train_s"
            )

    def _segments(self) -> list[Segment]:
        """Programs are written once for each state of the weights that a segment can begin with."""
        known: dict[tuple[bool, State], Written] = {}
        segments = []
        state: State = ()
        every = self.experiment.train.eval_every
        for iteration in range(self.experiment.steps):
            validates = every > 0 and (iteration + 1) % every == 0
            for validation in (False, True) if validates else (False,):
                key = (validation, state)
                if key not in known:
                    known[key] = self.engine.write(validation=validation, before=state)
                    if not iteration:
                        self.check_size(known[key].programs, self.experiment.steps)
                written = known[key]
                self.befores.append(state)
                state = written.after
                segments.append(Segment(iteration, validation, written.programs))
                self.decided.append(written.decided)
        return segments


def _check_slowdown(experiment: ExperimentConf) -> None:
    """Refuse a slowdown of what an engine's programs do not tell apart.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    cluster, engine = experiment.cluster, experiment.engine
    by, key = cluster.slowdown_by, f"cluster.slowdown_by={cluster.slowdown_by.value}"
    if not cluster.slowdown or by in (SlowdownBy.device, SlowdownBy.quota):
        return
    if engine is not Engine.fsdp2:
        raise ValueError(
            f"{key} with engine={engine.value}: its products are not told apart; use device or quota"
        )
    if by is SlowdownBy.repeat and experiment.parallel.tensor == 1:
        raise ValueError(
            f"{key} with parallel.tensor=1: repeats products of tensor-parallel layers; use device, sleep or quota"
        )


def _precision_warnings(experiment: ExperimentConf) -> tuple[str, ...]:
    """A GPU's peak in fp32 is a tenth of that in 16 bits: without it a prediction is far too fast."""
    cluster = experiment.cluster
    if experiment.precision is not Precision.fp32 or cluster.backend is not Backend.nccl:
        return ()
    return tuple(
        f"precision=fp32: cluster.{key}.flop_per_s_fp32 is null, so cluster.{key}.flop_per_s={device.flop_per_s:g} "
        "is taken, which is a guess"
        for key, device, _ in cluster.kinds
        if device.flop_per_s_fp32 is None
    )
