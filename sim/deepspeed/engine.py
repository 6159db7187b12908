"""One training step of DeepSpeed's ZeRO-3, from the coordinator's replay and a policy's plans.

engine=deepspeed_2023 follows the release of June 2023, with which the ZeRO++ paper's tables were made;
engine=deepspeed that of today. They differ in two named options (`conf.schema.DeepSpeedConf`): which gathers may
read the node copy, and whether gathers run beside computation; and today's host waits for node copies. Nothing
in DeepSpeed's source keeps gathers from it; that the paper's did not run so is what its tables say (every other
rule misses them by ten percent and more).

Rules of the streams: one host thread runs the hooks, far ahead of the device but for its limits; computation,
gathers and reductions have a stream each; NCCL runs the collectives of one group of ranks in the order of issue.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...conf.model_spec import parameters
from ...conf.schema import Backend, Engine, NodeCopyRule, Precision
from ...policies.comm import CommEvent, GradientsReady, Phase, Placement, WeightsNeeded, describe_event
from ...policies.mesh import WORLD, Mesh
from ...policies.plan import GATHER_STREAM, REDUCE_STREAM, AllGather, AllToAll, Plan, ReduceScatter
from ..engine import Decisions
from ..engines import Setup, State, Written
from ..interpreter import Goal, LocalWork, Transfer, Work, interpret
from ..offload import Offload
from ..program import COMPUTE
from .coordinator import Coordinator, Stop
from .modules import Parameter, Pass, network
from .script import GATHER, REDUCE, Rows, Script, rows_of

COPIES: State = ("copies",)  # a segment begins with node copies that are good

# Which gathers read the node copy; whether gathers run beside computation; whether the host waits until a node
# copy is cut (PR #5216, March 2024)
_RELEASES = {
    Engine.deepspeed_2023: (NodeCopyRule.backward_hook, False, False),
    Engine.deepspeed: (NodeCopyRule.exists, True, True),
}


class DeepSpeed:
    """All ranks run one program.

    Raises:
        ValueError: If the policy is not ZeRO stage 3, `recompute` is neither none nor full, or the cluster's backend is
            not NCCL.
    """

    def __init__(self, setup: Setup) -> None:
        experiment, policy = setup.experiment, setup.policy
        which = experiment.engine.value
        if policy.placement is not Placement.sharded or not policy.reshard_after_forward:
            raise ValueError(
                f"engine={which} simulates ZeRO stage 3, and comm={policy.name} is none: use a comm with "
                "zero_stage=3 (zero3, qwz, hpz, qgz, zeropp)"
            )
        cluster, conf = experiment.cluster, experiment.deepspeed
        if cluster.backend is not Backend.nccl or cluster.host.compute_ns:
            raise ValueError(
                f"engine={which} needs cluster.backend=nccl and no probed cluster.host.compute_ns: cluster="
                f"{cluster.name} has backend={cluster.backend.value}"
            )
        node_copy, overlaps, self.waits_for_copies = _RELEASES[experiment.engine]
        self.node_copy = conf.node_copy if conf.node_copy is not None else node_copy
        self.overlaps = conf.overlap_gathers if conf.overlap_gathers is not None else overlaps
        self.conf = conf
        self.network = network(setup.spec, experiment.recompute)
        self.mesh = Mesh.of(cluster, policy.hpz_size)
        self.experiment, self.spec, self.policy = experiment, setup.spec, policy
        self.decisions = Decisions(policy)
        element, ranks = experiment.precision.element_bytes, self.mesh.num_ranks
        self.offload: Offload | None = None
        self.unit_bytes: Mapping[str, int] = {
            unit.name: element * ranks * sum(-(-tensor.numel // ranks) for tensor in unit.tensors)
            for unit in parameters(setup.spec)
        }
        self.numel = [parameter.numel for parameter in self.network.parameters]
        # DeepSpeed quantizes no vector, and nothing that the ranks cannot halve: those it reduce-scatters
        self.exchangeable = [
            len(parameter.shape) > 1 and parameter.numel % (2 * ranks) == 0
            for parameter in self.network.parameters
        ]
        self._asked: dict[tuple[object, ...], tuple[Plan, tuple[str, str]]] = {}
        self._rows: dict[tuple[int, Goal, tuple[int, ...]], Rows] = {}
        self._exchanges: dict[int, bool] = {}

    def write(self, *, validation: bool, before: State) -> Written:
        self.decisions.log = []
        step = _Segment(self, with_copies=before == COPIES)
        if validation:
            step.validation()
        else:
            step.training()
        after = COPIES if validation and self.policy.copy_outlives_micro_batch and step.copies else ()
        return Written({0: step.script.program}, self.decisions.log, after)

    def weights(self, unit: str, wanted: Phase, good: bool) -> Plan:
        """The policy's plan for weights of `unit`; `good`: they have a node copy."""
        return self._ask((unit, wanted, good), lambda: WeightsNeeded(unit, wanted, good))

    def gradients(self, unit: str, micro_batch: int) -> Plan:
        """The policy's plan for gradients of `unit`."""
        total = self.experiment.batch.accumulation
        return self._ask((unit, micro_batch), lambda: GradientsReady(unit, micro_batch, total))

    def _ask(self, key: tuple[object, ...], event: Callable[[], CommEvent]) -> Plan:
        """A policy is a pure function of the event, so each is asked once, and logged as often as it occurs."""
        known = self._asked.get(key)
        if known is not None:
            self.decisions.log.append(known[1])
            return known[0]
        asked = event()
        plan = self.decisions.decide(asked)
        if plan is None:
            raise ValueError(
                f"policy {self.policy.name!r} does nothing on {describe_event(asked)}: ZeRO stage 3 gathers "
                "weights wherever they are needed, and reduces gradients in each micro-batch"
            )
        self._asked[key] = (plan, self.decisions.log[-1])
        return plan

    def exchanges(self, plan: Plan) -> bool:
        """Whether all-to-alls reduce the gradients, which DeepSpeed does one tensor at a time."""
        known = self._exchanges.get(id(plan))
        if known is None:
            known = self._exchanges[id(plan)] = any(isinstance(step, AllToAll) for step in plan.steps)
        return known

    def rows(self, plan: Plan, goal: Goal, places: Sequence[int]) -> Rows:
        """`plan` for these parameters in one call: their weights gathered, or their gradients reduced."""
        numels = tuple([self.numel[at] for at in places])
        key = (id(plan), goal, numels)
        known = self._rows.get(key)
        if known is None:
            known = self._rows[key] = self._make_rows(plan, goal, numels)
        return known

    def _make_rows(self, plan: Plan, goal: Goal, numels: Sequence[int]) -> Rows:
        element = self.experiment.precision.element_bytes
        interpreted = interpret(
            plan,
            goal=goal,
            segments=tuple(-(-numel // self.mesh.num_ranks) for numel in numels),
            mesh=self.mesh,
            element_bytes=element,
        )
        # several tensors of one call are laid side by side before a reduction, and parted after a plain gather
        moved = Work("traffic", "flatten", 0, 2 * element * sum(numels) if len(numels) > 1 else 0)
        if goal is Goal.reduce:
            return rows_of(
                interpreted, before=(LocalWork("flatten", moved),) * (len(numels) > 1), stream=REDUCE
            )
        rows = rows_of(interpreted, before=(), stream=GATHER)
        if len(numels) > 1 and not rows.late:
            rows = replace(rows, late=(LocalWork("part", moved),))
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A gather on its way. `late`: what is to be done where it is waited for."""

    phase: str
    unit: str
    ends: tuple[int, ...]
    late: tuple[LocalWork, ...]


class _Segment:
    """Writes one segment. `copies`: parameters with a node copy that is good."""

    def __init__(self, engine: DeepSpeed, *, with_copies: bool) -> None:
        self.engine = engine
        self.script = Script()
        self.conf = engine.conf
        self.held: tuple[Parameter, ...] = engine.network.parameters
        self.coordinator = Coordinator(engine.network, engine.conf)
        self.copies: set[int] = set()
        if with_copies:
            self.copies = set(range(len(self.held))) - set(self.coordinator.persistent)
        self.cuts: dict[int, LocalWork] = {}  # what is to be cut when a parameter is released
        self.open: list[int] = []  # ends of collectives of gathers that no computation has waited for yet
        self.flying: dict[int, _Flight] = {}  # parameter -> its gather, until it is waited for
        self.fetches: deque[tuple[int, ...]] = deque()  # ends of the gathers that the host has waited for
        self.reductions: deque[tuple[int, ...]] = deque()
        self.bucket: list[int] = []
        self.bucket_numel = 0
        self.produced: tuple[int, ...] = ()  # the computation that gave the bucket's last gradient
        self.micro_batch = 0

    def training(self) -> None:
        """Micro-batches, reductions among them, and the optimizer step."""
        for micro_batch in range(self.engine.experiment.batch.accumulation):
            self.micro_batch = micro_batch
            if micro_batch and not self.engine.policy.copy_outlives_micro_batch:
                self.copies.clear()
            for stop in self.coordinator.micro_batch():
                self._stop(stop, "forward" if stop.visit.asked is Pass.forward else "backward")
            self._reduce()
        self._step()

    def validation(self) -> None:
        """Forward passes, each with the beginning of the trace."""
        forward = [visit.asked is Pass.forward for visit in self.engine.network.visits].index(False)
        for _ in range(self.engine.experiment.train.eval_batches):
            for stop in self.coordinator.micro_batch(forward):
                self._stop(stop, "eval")
        self._all_reduce("eval", self.script.everything())

    def _stop(self, stop: Stop, phase: str) -> None:
        script, visit = self.script, stop.visit
        module = visit.module
        script.host(visit.hooked * self.conf.hook_ns)
        if stop.fetched:
            self._gather(stop.fetched, visit.asked, phase)
        waits = self._await(stop.awaited) if stop.awaited else []
        if self.engine.overlaps:  # for what its stream has been given so far
            waits, self.open = [*waits, *self.open], []
        if stop.prefetched:
            self._gather(stop.prefetched, visit.asked, phase)
        if not self.engine.overlaps:
            waits, self.open = [*waits, *self.open], []
        script.compute_waits(waits)
        if module.computes:
            key = f"{'backward' if visit.asked is Pass.backward else 'forward'}/{module.computes}"
            script.compute(phase, module.unit, f"{visit.asked.value} {module.name}", Work("compute", key))
        if visit.asked is Pass.backward:
            self._gradients(module.holds)
        for at in stop.released:
            cut = self.cuts.pop(at, None)
            if cut is not None:
                item = script.main(COMPUTE, phase, module.unit, cut, ())
                if self.engine.waits_for_copies:
                    script.host_waits((item,))
                self.copies.add(at)

    def _gather(self, places: Sequence[int], asked: Pass, phase: str) -> None:
        """One call for those with a good node copy, and one for those without."""
        engine, script, copies = self.engine, self.script, self.copies
        script.flush()
        by_hook = engine.node_copy is NodeCopyRule.backward_hook
        forward = asked.forward_hook if by_hook else asked is Pass.forward
        wanted = Phase.forward if forward else Phase.backward
        begin = () if engine.overlaps else script.computed
        for good in (True, False):
            group = tuple([at for at in places if (at in copies) is good])
            if not group:
                continue
            unit = self.held[group[0]].unit
            rows = engine.rows(engine.weights(unit, wanted, good), Goal.gather, group)
            ends = script.plan(rows, phase, unit, begin)
            self.open += ends
            flight = _Flight(phase, unit, ends, rows.late)
            for at in group:
                self.flying[at] = flight
            if rows.cut is not None:
                self.cuts[max(group, key=engine.numel.__getitem__)] = rows.cut

    def _await(self, places: Sequence[int]) -> list[int]:
        """What is left of these gathers is issued; returns all that the next computation waits for.

        The host leaves `max_fetch_events` waits unfinished and waits for the one before them.
        """
        waits: list[int] = []
        for flight in dict.fromkeys([self.flying.pop(at) for at in places]):
            ends = flight.ends
            if len(self.fetches) > self.conf.max_fetch_events:
                self.script.host_waits(self.fetches.popleft())
            if flight.late:
                ends = self.script.late(flight.late, flight.phase, flight.unit, ends)
            self.fetches.append(ends)
            waits += ends
        return waits

    def _gradients(self, holds: Sequence[int]) -> None:
        """Each gradient joins the bucket; one that does not fit into it sends it off first.

        autograd hands over a linear's bias before its weight.
        """
        self.script.flush()
        for at in reversed(holds):
            numel = self.engine.numel[at]
            if self.bucket and self.bucket_numel + numel > self.conf.reduce_bucket_size:
                self._reduce()
            self.bucket.append(at)
            self.bucket_numel += numel
            self.produced = self.script.computed

    def _reduce(self) -> None:
        """Reduce what is in the bucket: in one call, or one for each tensor where all-to-alls reduce it.

        The host leaves `max_reduce_events` buckets unfinished and waits for the one before them.
        """
        if not self.bucket:
            return
        engine, script = self.engine, self.script
        places, self.bucket, self.bucket_numel = tuple(self.bucket), [], 0
        if len(self.reductions) > self.conf.max_reduce_events:
            script.host_waits(self.reductions.popleft())
        unit = self.held[places[0]].unit
        plan = engine.gradients(unit, self.micro_batch)
        ends: tuple[int, ...] = ()
        if not engine.exchanges(plan):
            ends = script.plan(engine.rows(plan, Goal.reduce, places), "backward", unit, self.produced)
        else:
            for at in places:
                rows = engine.rows(plan if engine.exchangeable[at] else _SCATTER, Goal.reduce, (at,))
                ends = script.plan(rows, "backward", self.held[at].unit, self.produced)
        self.reductions.append(ends)

    def _step(self) -> None:
        """Overflow check and norm, the optimizer, and the gather of what stays gathered."""
        script, experiment = self.script, self.engine.experiment
        everything = script.everything()
        if experiment.precision is Precision.fp16:
            everything = self._all_reduce("step", everything)
        if experiment.train.gradient_clipping > 0:
            everything = self._all_reduce("step", everything)
        script.main(COMPUTE, "step", "", LocalWork("step", Work("step")), everything)
        if self.coordinator.persistent and self.engine.mesh.num_ranks > 1:
            for at in self.coordinator.persistent:
                rows = self.engine.rows(_GATHER, Goal.gather, (at,))
                script.plan(rows, "step", self.held[at].unit, script.computed)
        self.coordinator.weights_stepped()
        self.copies.clear()

    def _all_reduce(self, phase: str, after: Iterable[int]) -> tuple[int, ...]:
        """Of one fp32 number."""
        ranks, element = self.engine.mesh.num_ranks, Precision.fp32.element_bytes
        if ranks == 1:
            return tuple(after)
        transfer = Transfer("all_reduce", WORLD, ranks, element, element, 1, element)
        return (self.script.library(phase, transfer, after),)


# DeepSpeed's own, whatever the policy says: gradients that qgZ does not take, and persistent parameters
_SCATTER = Plan((ReduceScatter(axis=WORLD),), REDUCE_STREAM)
_GATHER = Plan((AllGather(axis=WORLD),), GATHER_STREAM)
