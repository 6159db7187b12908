"""The simulation of an experiment in which tensor groups are balanced: what ranks do depends on what they measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...analysis.record import Decision
from ...conf.model_spec import ModelSpec
from ...conf.schema import ClusterConf, ExperimentConf
from ...policies.balance import (
    BlockWork,
    ColumnsTimed,
    MovementTimed,
    ProductsTimed,
    balanced_work,
    build_balance,
)
from ...policies.comm import CommPolicy
from ...policies.layout import layout_of
from ...policies.mesh import PIPELINE, TENSOR
from ..classes import Fold
from ..conditions import Conditions
from ..costs import Costs
from ..engines import EngineModel, Setup
from ..executor import FailureError, Segment
from ..interpreter import Transfer
from ..layout.engine import LayoutEngine
from ..memory import MemoryPoint, memory_over_time, peak
from ..program import Program
from ..run import Run, Simulated
from .balancer import Balancer, MakePolicy
from .pretest import movements_timed, products_timed
from .rank_work import EVEN, RankWork


class BalancedRun(Run):
    """Every rank is simulated by itself, and every choice of guessed inputs has policies of its own. `segments` and
    `decided` are those of the first simulation.

    Args:
        make_policy: Makes the policy of a tensor group; None: the one that `experiment.balance` describes.
        decisions: As of `Balancer`.
    """

    apart = True

    def __init__(
        self,
        experiment: ExperimentConf,
        spec: ModelSpec,
        policy: CommPolicy | None,
        fold: bool | None,
        make_engine: Callable[[Setup], EngineModel],
        *,
        make_policy: MakePolicy | None = None,
        decisions: Sequence[Decision] | None = None,
    ) -> None:
        conf = experiment.balance
        work = balanced_work(experiment, spec, layout_of(experiment, spec))
        assert work is not None, "tensor ranks are balanced"
        self._work: BlockWork = work
        self._make_policy: MakePolicy = make_policy or (lambda work: build_balance(conf, work))
        self._given = decisions
        super().__init__(experiment, spec, policy, fold, make_engine)
        self.balance: dict[str, Any] = {}
        self._even_decided = self.decided
        self._simulated = False

    def simulate(self, cluster: ClusterConf) -> Simulated:
        costs = self._costs(cluster)
        segments: list[Segment] = []
        balancer = Balancer(
            self.experiment,
            self._work,
            self.mesh,
            segments,
            self._make_policy,
            free_bytes=self._free_bytes(cluster),
            decisions=self._given,
        )
        for number, even in enumerate(self.segments):
            programs = _Programs(self, balancer, number, validation=even.validation)
            segments.append(replace(even, programs=programs))
        conf = self.experiment.balance
        if conf.pretest:
            balancer.pretested(*self._pretest(costs))
        machine, executor = self._executor(costs, observer=balancer)
        try:
            simulated = Simulated(costs, machine, self.fold, executor.run(segments))
        except FailureError as err:
            simulated = Simulated(costs, machine, self.fold, executor.done(), str(err))
        if not self._simulated:
            self._simulated = True
            self.segments, self.balance = segments, balancer.plain()
            self.decided_apart = balancer.decided_apart()
            self.decided = [
                [*(balancer.decided(-1) if not number else ()), *even, *balancer.decided(number)]
                for number, even in enumerate(self._even_decided)
            ]
        return simulated

    def beside(self) -> dict[str, Any]:
        return {"balance": self.balance}

    def program(self, rank: int, number: int, balancer: Balancer, *, validation: bool) -> Program:
        """What a rank runs in a segment; in validation work is even."""
        assert isinstance(self.engine, LayoutEngine)
        return self.engine.write_for(
            rank,
            validation=validation,
            before=self.befores[number],
            work=EVEN if validation else balancer.work(rank, number),
            measuring=balancer.measuring(number),
        )

    def _pretest(
        self, costs: Costs
    ) -> tuple[tuple[MovementTimed | ColumnsTimed, ...], tuple[tuple[ProductsTimed, ...], ...]]:
        conf, work = self.experiment.balance, self._work

        def write(rank: int, of_rank: RankWork) -> Program:
            assert isinstance(self.engine, LayoutEngine)
            return self.engine.write_for(rank, validation=False, before=self.befores[0], work=of_rank)

        moved = (
            movements_timed(work, self.mesh, conf.way, lambda s: max(self._alone_ns(costs, s).values()))
            if conf.moves
            else ()
        )
        computed = (
            ()
            if work.by_columns
            else products_timed(work, self.mesh, conf, write, lambda s: self._alone_ns(costs, s))
        )
        return moved, computed

    def _alone_ns(self, costs: Costs, segment: Segment) -> dict[int, int]:
        """Each rank's end of a segment on an empty machine, on which nothing fails."""
        conditions = Conditions(replace(costs.cluster, failures=None), seed=self.experiment.seed)
        _, executor = self._executor(costs, conditions=conditions)
        return {rank: timings[0].end_ns for rank, timings in executor.run([segment]).items()}

    def _free_bytes(self, cluster: ClusterConf) -> dict[int, int]:
        """Of each rank, what its device has beyond the peak of its stage; stages between the ends hold no more than the
        first.
        """
        by_stage: dict[int, list[MemoryPoint]] = {}
        unit_bytes = list(self.engine.unit_bytes.values())
        for point in memory_over_time(self.experiment, self.spec, self.policy, unit_bytes):
            by_stage.setdefault(self.mesh.index(PIPELINE, point.rank), []).append(point)
        peaks = {stage: peak(points).total for stage, points in by_stage.items()}
        free = {}
        for rank in range(self.mesh.num_ranks):
            held = peaks.get(self.mesh.index(PIPELINE, rank), peaks[0])
            free[rank] = max(0, int(cluster.device_of(rank).memory_bytes) - held)
        return free

    def _fold(self) -> Fold:
        return Fold.apart(self.mesh)

    def _all_transfers(self) -> list[Transfer]:
        """With the messages that may come: from any rank of a tensor group to any other."""
        found = super()._all_transfers()
        if self.experiment.balance.moves:
            ranks = self._work.ranks
            found += [Transfer("send", TENSOR, ranks, 0, 0, peer=shift) for shift in range(1, ranks)]
        return found


class _Programs(Mapping[int, Program]):
    """Of one segment, each written when its rank comes to it."""

    def __init__(self, run: BalancedRun, balancer: Balancer, number: int, *, validation: bool) -> None:
        self._run, self._balancer = run, balancer
        self._number, self._validation = number, validation
        self._known: dict[int, Program] = {}

    def __getitem__(self, rank: int) -> Program:
        if rank not in self._known:
            if not 0 <= rank < len(self):
                raise KeyError(rank)
            self._known[rank] = self._run.program(
                rank, self._number, self._balancer, validation=self._validation
            )
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._run.mesh.num_ranks
