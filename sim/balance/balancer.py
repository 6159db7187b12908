"""The balancing policies of one simulated run: what they are told, what they answer, and what then holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...analysis.record import Decision
from ...conf.schema import ExperimentConf, Selection
from ...policies.balance import (
    MEASURE_STREAM,
    Assignment,
    BalanceAction,
    BalanceEvent,
    BalancePolicy,
    BlockWork,
    ChangesMeasured,
    ColumnsTimed,
    GroupMeasured,
    Half,
    Migrate,
    MovementTimed,
    ProductsTimed,
    describe_balance_actions,
    describe_balance_event,
    least_room_bytes,
)
from ...policies.mesh import TENSOR, Mesh
from ..executor import Segment, Timing
from ..interpreter import FP32_BYTES, Transfer
from ..program import Program
from .rank_work import RankWork, rank_work
from .recorded import Recorded, recorded_by_group
from .share import PRODUCTS
from .stretches import Stretches, stretches

TIME_BYTES = (
    48  # of one rank: two times and its free memory, and three times beside products; 64-bit integers
)
CHANGES = "changes"  # the layer of the row that tells how much weights have changed

MakePolicy = Callable[[BlockWork], BalancePolicy]
Took = tuple[int, ...]  # nanoseconds of a rank: products, by half; between them, by half; around them


@dataclass(slots=True)
class _Group:
    """The ranks of one tensor group.

    `assignments`: by the segment from which on each holds, ascending. `took`: by segment and place.
    """

    ranks: tuple[int, ...]
    policy: BalancePolicy
    assignments: list[tuple[int, Assignment]]
    recorded: Recorded | None
    took: dict[int, dict[int, Took]] = field(default_factory=dict)
    period: list[int] = field(default_factory=list)  # training segments since the last measurement
    decided: dict[int, list[tuple[str, str]]] = field(
        default_factory=dict
    )  # by segment; -1: before the first
    periods: list[dict[str, Any]] = field(default_factory=list)

    @property
    def now(self) -> Assignment:
        return self.assignments[-1][1]


class Balancer:
    """Of all tensor groups of one simulation.

    A rank's products are timed as the executor runs them. What all ranks of a group tell each other behind the last
    step of a period has come to an end before any of them begins the next segment, so that its programs can be written
    when they are first asked for.

    Args:
        segments: All of the run.
        program: What a rank runs in a segment.
        free_bytes: Of a rank's memory, with even work.
        decisions: Of a record whose events the policies are told; groups that it has none of are told what is measured
            here.
    """

    stream = MEASURE_STREAM

    def __init__(
        self,
        experiment: ExperimentConf,
        work: BlockWork,
        mesh: Mesh,
        segments: Sequence[Segment],
        make_policy: MakePolicy,
        *,
        free_bytes: Mapping[int, int],
        decisions: Sequence[Decision] | None = None,
    ) -> None:
        self._conf, self._work, self._mesh = experiment.balance, work, mesh
        self._segments = segments
        self._free_bytes = free_bytes
        self._in_flight = experiment.batch.accumulation if experiment.parallel.pipeline > 1 else 1
        groups = mesh.groups(TENSOR)
        recorded = recorded_by_group(decisions or (), groups)
        self._groups = [
            _Group(ranks, make_policy(work), [(0, Assignment(work))], recorded.get(number))
            for number, ranks in enumerate(groups)
        ]
        self._of = {rank: (group, place) for group in self._groups for place, rank in enumerate(group.ranks)}
        self._works: dict[tuple[tuple[BalanceAction, ...], int], RankWork] = {}
        self._stretches: dict[int, tuple[Program, Stretches]] = {}

    # ---- what ranks do

    def work(self, rank: int, number: int) -> RankWork:
        """Of a rank in segment `number`."""
        group, place = self._of[rank]
        assignment = next(a for first, a in reversed(group.assignments) if first <= number)
        key = (assignment.actions, place)
        if key not in self._works:
            self._works[key] = rank_work(assignment, place, self._conf.way)
        return self._works[key]

    def measuring(self, number: int) -> tuple[tuple[str, Transfer], ...]:
        """(layer, collective) behind the step of a segment, in order."""
        segment = self._segments[number]
        if segment.validation:
            return ()
        found = []
        for due, layer, each in (
            (self._refreshes(segment), CHANGES, FP32_BYTES * len(PRODUCTS) * self._work.blocks),
            (self._ends_period(segment), "", TIME_BYTES),
        ):
            if due:
                ranks = self._work.ranks
                found.append((layer, Transfer("all_gather", TENSOR, ranks, ranks * each, each)))
        return tuple(found)

    def _ends_period(self, segment: Segment) -> bool:
        return (segment.iteration + 1) % self._conf.period == 0

    def _refreshes(self, segment: Segment) -> bool:
        conf = self._conf
        wanted = conf.prunes and conf.selection is Selection.differentiated
        return wanted and (segment.iteration + 1) % conf.refresh == 0

    # ---- what ranks have measured

    def pretested(
        self,
        moved: Sequence[MovementTimed | ColumnsTimed],
        computed: Sequence[Sequence[ProductsTimed]] = (),
    ) -> None:
        """Before the first step.

        Args:
            moved: Of all groups at once.
            computed: [groups]; (): no products were timed.
        """
        for number, group in enumerate(self._groups):
            for event in (*moved, *(computed[number] if computed else ())):
                self._decide(group, -1, event)

    def computed(self, rank: int, number: int, timing: Timing) -> None:
        """Of a rank whose local work in a segment is done (`executor.Observer`)."""
        segment = self._segments[number]
        group, place = self._of[rank]
        took = group.took.setdefault(number, {})
        if segment.validation or place in took:
            return
        took[place] = self._took(segment.program(rank), timing)
        if len(took) == len(group.ranks):
            group.period.append(number)
            self._all_computed(group, number)

    def _took(self, program: Program, timing: Timing) -> Took:
        known = self._stretches.get(id(program))
        if known is None:
            known = self._stretches[id(program)] = (program, stretches(program))
        starts, ends = timing.starts_ns, timing.ends_ns
        return tuple(sum(ends[i] - starts[i] for i in own) for own in known[1])

    def _all_computed(self, group: _Group, number: int) -> None:
        segment = self._segments[number]
        done = segment.iteration + 1
        if self._refreshes(segment):
            # there are no weights here: all change alike
            alike = (1.0,) * (len(PRODUCTS) * self._work.blocks)
            self._decide(group, number, ChangesMeasured(done, (alike,) * len(group.ranks)))
        if not self._ends_period(segment):
            return
        steps, group.period = group.period, []
        by_place = [[group.took[step][place] for step in steps] for place in range(len(group.ranks))]
        attention_ns, ffn_ns, *beside_ns = (
            tuple(sum(took[which] for took in own) // len(steps) for own in by_place)
            for which in range(len(by_place[0][0]))
        )
        if self._work.by_columns:  # what is between products has movement in it
            beside_ns = []
        free = tuple(self._free(group, place) for place in range(len(group.ranks)))
        event = self._decide(group, number, GroupMeasured(done, attention_ns, ffn_ns, free, *beside_ns))
        assert isinstance(event, GroupMeasured)
        speedup = getattr(group.policy, "predicted_speedup", None)
        group.periods.append(
            {
                "step": event.step,
                "attention_ns": list(event.attention_ns),
                "ffn_ns": list(event.ffn_ns),
                "attention_between_ns": list(event.attention_between_ns),
                "ffn_between_ns": list(event.ffn_between_ns),
                "around_ns": list(event.around_ns),
                "free_bytes": list(event.free_bytes),
                "actions": describe_balance_actions(group.now.actions),
                "predicted_speedup": speedup,
            }
        )

    def _free(self, group: _Group, place: int) -> int:
        """What is left of a rank's memory: what it was lent stays from a block's forward to its backward."""
        work, assignment = self._work, group.now
        lent = sum(
            assignment.received(half, place) * (work.unit_bytes(half) + work.lent_input_bytes(half))
            for half in Half
        )
        return max(0, self._free_bytes[group.ranks[place]] - lent * work.blocks * self._in_flight)

    def _decide(self, group: _Group, number: int, measured: BalanceEvent) -> BalanceEvent:
        """The event that was put to the policy."""
        event = group.recorded.next(measured) if group.recorded is not None else measured
        actions = group.policy.decide(event)
        group.decided.setdefault(number, []).append(
            (describe_balance_event(event), describe_balance_actions(actions))
        )
        if actions is not None:
            group.assignments.append((number + 1, self._checked(group, actions)))
        return event

    def _checked(self, group: _Group, actions: tuple[BalanceAction, ...]) -> Assignment:
        try:
            assignment = Assignment(self._work, actions)
        except ValueError as err:
            raise ValueError(f"balance policy {group.policy.name!r}: {err}") from err
        if not self._conf.moves and any(isinstance(action, Migrate) for action in actions):
            raise ValueError(
                f"balance policy {group.policy.name!r} migrates with balance={self._conf.name}: use balance=migrate "
                "or semi"
            )
        return assignment

    # ---- for the record

    def decided(self, number: int) -> list[tuple[str, str]]:
        """(event, action) of the first group behind a segment; -1: before the first."""
        return self._groups[0].decided.get(number, [])

    def decided_apart(self) -> list[Decision]:
        """Of all other groups, each by its first rank."""
        return [
            Decision(group.ranks[0], self._segments[max(0, number)].iteration, *decided)
            for group in self._groups[1:]
            for number in sorted(group.decided)
            for decided in group.decided[number]
        ]

    def plain(self) -> dict[str, Any]:
        """As `result["balance"]` has it."""
        return {
            "policy": self._groups[0].policy.name,
            "groups": [
                {
                    "ranks": list(group.ranks),
                    "periods": group.periods,
                    "least_room_bytes": least_room_bytes(self._work),
                }
                for group in self._groups
            ],
        }
