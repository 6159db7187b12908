"""Uneven micro-batches in simulated time: what a step is made of depends on what replicas measured before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import overload

from ...analysis.record import Decision
from ...conf.model_spec import ModelSpec
from ...conf.schema import ClusterConf, ExperimentConf
from ...policies.balance import (
    MEASURE_STREAM,
    BalancePolicy,
    ReplicasMeasured,
    ShareSequences,
    describe_balance_actions,
    describe_balance_event,
    is_balance_event,
    parse_balance_event,
    replica_ns,
)
from ...policies.balance.build import build_shares
from ...policies.comm import CommPolicy
from ...policies.mesh import DATA, PIPELINE
from ..classes import Fold
from ..engines import EngineModel, Setup, State, Written
from ..executor import FailureError, Segment, Timing
from ..memory import MemoryPoint, memory_over_time, peak
from ..program import Program
from ..run import Run, Simulated
from .batch_engine import UnevenBatches


class BatchRun(Run):
    """One whose replicas share the sequences of each micro-batch out anew after each period.

    Args:
        decisions: Of a record whose events the policy is told, in place of what is measured here.
    """

    def __init__(
        self,
        experiment: ExperimentConf,
        spec: ModelSpec,
        policy: CommPolicy | None,
        fold: bool | None,
        make_engine: Callable[[Setup], EngineModel],
        decisions: Sequence[Decision] = (),
    ) -> None:
        self._recorded: dict[int, ReplicasMeasured] = {}
        for decision in decisions:
            if is_balance_event(decision.event):
                event = parse_balance_event(decision.event)
                assert isinstance(event, ReplicasMeasured)
                self._recorded[event.step] = event
        super().__init__(experiment, spec, policy, fold, make_engine)
        assert isinstance(self.engine, UnevenBatches)
        self._uneven = self.engine
        self._most: dict[float, int] = {}
        self._settled = False

    def simulate(self, cluster: ClusterConf) -> Simulated:
        """As `Run.simulate`. The segments of the first simulation are the run's."""
        costs, policy = self._costs(cluster), build_shares(self.experiment, self.spec)
        assert policy is not None
        shared = SharedSegments(self, self._uneven, policy, self._room, self._recorded)
        machine, executor = self._executor(costs, observer=shared)
        error = None
        try:
            timings = executor.run(shared)
        except FailureError as err:
            timings, error = executor.done(), str(err)
        if not self._settled:
            self._settled = True
            self.segments, self.decided = list(shared), shared.decided
            self._counts = shared.counts
        return Simulated(costs, machine, self.fold, timings, error)

    def memory_points(self) -> list[tuple[str, float, list[MemoryPoint]]]:
        """Of each kind of device the replica with the most sequences."""
        cluster, found = self.experiment.cluster, []
        kinds = {id(device): (key, device) for key, device, _ in cluster.kinds}
        for key, device in kinds.values():
            replicas = {
                self.mesh.index(DATA, rank)
                for rank in range(self.mesh.num_ranks)
                if cluster.device_of(rank) is device
            }
            most = max(counts[replica] for counts in self._counts for replica in replicas)
            found.append((key, device.memory_bytes, self._points(most)))
        return sorted(found, key=lambda kind: peak(kind[2]).total, reverse=True)

    def _fold(self) -> Fold:
        """Each replica may take another number of sequences."""
        ranks = range(self.mesh.num_ranks)
        self.kinds = [self.mesh.index(DATA, rank) for rank in ranks]
        return super()._fold()

    def _room(self, counts: Sequence[int]) -> tuple[int, ...]:
        """[replicas], by how many sequences each could take more."""
        room = [max(0, self._uneven.even[0] * len(counts))] * len(counts)
        for rank in range(self.mesh.num_ranks):
            replica = self.mesh.index(DATA, rank)
            most = self._fits(self.experiment.cluster.device_of(rank).memory_bytes)
            room[replica] = min(room[replica], max(0, most - counts[replica]))
        return tuple(room)

    def _fits(self, memory_bytes: float) -> int:
        """Sequences of a micro-batch: what one more takes is the same for all."""
        if memory_bytes not in self._most:
            micro = self.experiment.batch.micro
            held, more = (peak(self._points(n)).total for n in (micro, micro + 1))
            self._most[memory_bytes] = micro + int((memory_bytes - held) // max(1, more - held))
        return self._most[memory_bytes]

    def _points(self, count: int) -> list[MemoryPoint]:
        experiment = replace(self.experiment, batch=replace(self.experiment.batch, micro=count))
        return memory_over_time(experiment, self.spec, self.policy, list(self.engine.unit_bytes.values()))


class SharedSegments(Sequence[Segment]):
    """Segments that are written when the first rank begins them: what all ranks tell each other at the end of a period
    has come to an end then. It is the executor's observer, too.

    Attributes:
        decided: Of each segment that was written.
        counts: All shares that were in force.
    """

    stream = MEASURE_STREAM

    def __init__(
        self,
        run: BatchRun,
        engine: UnevenBatches,
        policy: BalancePolicy,
        room: Callable[[Sequence[int]], tuple[int, ...]],
        recorded: Mapping[int, ReplicasMeasured],
    ) -> None:
        self._engine, self._policy, self._room, self._recorded = engine, policy, room, recorded
        self._planned = [(segment.iteration, segment.validation) for segment in run.segments]
        self._period = run.experiment.balance.period
        fold, mesh = run.fold, run.mesh
        self._simulated = fold.ranks
        # [replicas][stages], those that stand for their ranks
        self._members: list[list[set[int]]] = [
            [set() for _ in range(mesh.pipeline)] for _ in range(mesh.data)
        ]
        for rank in range(mesh.num_ranks):
            own = self._members[mesh.index(DATA, rank)][mesh.index(PIPELINE, rank)]
            own.add(fold.representative(rank))
        self._micro_batches = run.experiment.batch.accumulation
        self._written: list[Segment] = []
        self._known: dict[tuple[tuple[int, ...], bool, State, bool], Written] = {}
        self._state: State = ()
        self._took: dict[int, dict[int, int]] = {}  # of each training segment, by rank
        self._steps: list[int] = []  # training segments since the last decision
        self._computing: dict[int, tuple[Program, tuple[int, ...]]] = {}
        self.decided: list[list[tuple[str, str]]] = []
        self.counts = [engine.even]

    def __len__(self) -> int:
        return len(self._planned)

    @overload
    def __getitem__(self, at: int) -> Segment: ...
    @overload
    def __getitem__(self, at: slice) -> list[Segment]: ...
    def __getitem__(self, at: int | slice) -> Segment | list[Segment]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            raise IndexError(at)
        while len(self._written) <= number:
            self._write(*self._planned[len(self._written)])
        return self._written[number]

    def _write(self, iteration: int, validation: bool) -> None:
        measures = not validation and (iteration + 1) % self._period == 0
        key = (self.counts[-1], validation, self._state, measures)
        if key not in self._known:
            self._known[key] = self._engine.write_shares(
                self.counts[-1], validation=validation, before=self._state, measures=measures
            )
        written = self._known[key]
        self._state = written.after
        self._written.append(Segment(iteration, validation, written.programs))
        self.decided.append(list(written.decided))

    # ---- what the executor tells

    def computed(self, rank: int, number: int, timing: Timing) -> None:
        """Of a rank whose local work in a segment is done."""
        iteration, validation = self._planned[number]
        took = self._took.setdefault(number, {})
        if validation or rank in took:
            return
        indices = self._indices(self._written[number].program(rank))
        took[rank] = sum(timing.ends_ns[i] - timing.starts_ns[i] for i in indices)
        if len(took) < len(self._simulated):
            return
        self._steps.append(number)
        if (iteration + 1) % self._period == 0:
            self._decide(iteration, number)

    def _decide(self, iteration: int, number: int) -> None:
        steps, self._steps = self._steps, []
        means = {rank: sum(self._took[n][rank] for n in steps) // len(steps) for rank in self._simulated}
        now = self.counts[-1]
        compute_ns = [
            replica_ns([max(means[rank] for rank in ranks) for ranks in stages], self._micro_batches)
            for stages in self._members
        ]
        event = ReplicasMeasured(iteration + 1, tuple(compute_ns), self._room(now))
        event = self._recorded.get(iteration + 1, event)
        answer = self._policy.decide(event)
        self.decided[number].append((describe_balance_event(event), describe_balance_actions(answer)))
        for action in answer or ():
            assert isinstance(action, ShareSequences), f"{self._policy.name!r} answers {action}"
            self.counts.append(action.counts)

    def _indices(self, program: Program) -> tuple[int, ...]:
        """Items that compute a pass."""
        if id(program) not in self._computing:
            found = tuple(
                item.index
                for item in program.items
                if any(part.work.kind == "compute" for part in item.parts)
            )
            self._computing[id(program)] = (program, found)
        return self._computing[id(program)][1]
