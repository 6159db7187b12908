"""The order in which FSDP2 asks for weights and hands over gradients.

`Engine` holds the order, which both targets share (docs/architecture.md); `rules` says what each backend
overlaps. Neither asks which policy it runs: they follow its plans.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..conf.model_spec import Unit
from ..conf.schema import Precision
from ..policies.comm import (
    CommEvent,
    CommPolicy,
    GradientsReady,
    Phase,
    Placement,
    WeightsChanged,
    WeightsNeeded,
    check_copy,
    check_reduced,
    describe_action,
    describe_event,
)
from ..policies.mesh import HPZ, LOCAL, NODE, OF_REPLICAS, STAGE, WORLD, Mesh
from ..policies.partition import fsdp2_order, shard_segments
from ..policies.plan import Plan
from .costs import EMBED, HEAD
from .interpreter import Goal, Interpreted, Transfer, Work, axis_size, interpret
from .offload import Offload
from .program import Program
from .rules import Blocking, Handle

ROOT = "root"
_AXES = (WORLD, LOCAL, NODE, HPZ)


@dataclass(slots=True)
class Decisions:
    """Asks a policy, once for each distinct event (it is a pure function of them), and keeps the log."""

    policy: CommPolicy
    _known: dict[CommEvent, tuple[Plan | None, str, str]] = field(default_factory=dict)
    _plans: dict[Plan | None, tuple[Plan | None, str]] = field(default_factory=dict)  # equal plans are one
    _same: dict[int, tuple[Plan | None, str]] = field(
        default_factory=dict
    )  # by identity: quicker than a plan's hash
    _kept: list[Plan | None] = field(default_factory=list)  # so that no identity comes twice
    log: list[tuple[str, str]] = field(default_factory=list)

    def decide(self, event: CommEvent) -> Plan | None:
        known = self._known.get(event)
        if known is None:
            plan = self.policy.decide(event)
            if isinstance(event, WeightsNeeded) and plan is not None:
                check_copy(self.policy, event, plan)
            answer = self._same.get(id(plan))
            if answer is None:
                answer = self._plans.setdefault(plan, (plan, describe_action(plan)))
                self._same[id(plan)] = answer
                self._kept.append(plan)
            plan, action = answer
            known = self._known[event] = (plan, describe_event(event), action)
        self.log.append(known[1:])
        return known[0]


class Weights:
    """Which units are gathered, and which have a secondary copy that is good, cut over which axis."""

    def __init__(self, copies: Iterable[str] = ()) -> None:
        """`copies`: as `key` gives them."""
        self.gathered: dict[str, None] = {}
        parts = (copy.rpartition("/") for copy in copies)
        self.copies: dict[str, str] = {unit: axis for unit, _, axis in parts}

    def key(self) -> tuple[str, ...]:
        return tuple(sorted(f"{unit}/{axis}" for unit, axis in self.copies.items()))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive parts of a model. `root`: its units outside the blocks; None: there is nothing of it here."""

    root: Unit | None
    blocks: tuple[Unit, ...]
    first: bool = True  # what lies before the blocks is here
    last: bool = True

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.blocks if self.root is None else (self.root, *self.blocks)


class Engine:
    """Writes the program of one training step, or of one validation.

    Args:
        units: Of the model, root first.
        clip: Whether the norm of all gradients is reduced before the step.
        num_norms: Numbers that the optimizer sums over the ranks, fp32; 0: none.
        num_figures: That a validation sums over the ranks, fp32: the loss, and how often a classifier is right.
        gradient_bytes: Of an element on the wire when sharded gradients are summed; None: as the weights.
        offload: Carries out what an offload policy decides; None: all states stay near.
        world: Where the ranks of `mesh` are the replicas of a layout, all ranks.
    """

    def __init__(
        self,
        *,
        decisions: Decisions,
        mesh: Mesh,
        units: tuple[Unit, ...],
        precision: Precision,
        num_micro_batches: int,
        eval_batches: int,
        clip: bool,
        num_norms: int = 0,
        num_figures: int = 1,
        gradient_bytes: int | None = None,
        offload: Offload | None = None,
        world: Mesh | None = None,
    ) -> None:
        self._decisions = decisions
        self._policy = decisions.policy
        self._mesh = mesh
        self._world = world
        root, *blocks = units
        self._whole = Stretch(root, tuple(blocks))
        self._precision = precision
        self._num_micro_batches = num_micro_batches
        self._eval_batches = eval_batches
        self._clip = clip
        self._num_norms = num_norms
        self._num_figures = num_figures
        self._offload = offload
        self._gradient_bytes = gradient_bytes or precision.element_bytes
        self._sharded = self._policy.placement is Placement.sharded
        # a layout's one replica has no other parts of its weights to get, and FSDP2 asks for none
        self._alone = self._sharded and world is not None and mesh.num_ranks == 1
        self._interpreted: dict[tuple[int, Goal, int], Interpreted] = {}
        self._segments: dict[int, tuple[int, ...]] = {}
        self._reduced: dict[str, None] = {}  # units of which a plan has reduced gradients in this step

    def training_step(self, rules: Blocking, weights: Weights) -> Program:
        """One optimizer step. `weights` is changed to what holds after it."""
        last = self._num_micro_batches - 1
        self._reduced.clear()
        if self._offload is not None:
            self._offload.begin("train")
        for micro_batch in range(self._num_micro_batches):
            self._forward(rules, weights, Phase.forward.value, self._whole)
            if self._offload is not None and micro_batch == last:
                self._offload.settle(rules)
            self._backward(rules, weights, micro_batch, self._whole)
            rules.backward_done()
            if micro_batch == last:
                weights.gathered.clear()
        self._check_reduced(self._whole.units)
        rules.drain()
        if self._clip:
            if self._offload is not None:
                self._offload.norm(rules)
            self._all_reduce(rules, "step", 1)
        if self._num_norms:
            self._all_reduce(rules, "step", self._num_norms, axis=WORLD if self._world is None else STAGE)
        if self._offload is not None:
            self._offload.step(rules)
        else:
            self._step(rules, Work("step"))
        rules.drain()
        weights.copies.clear()
        self._publish(rules, self._whole.units)
        return rules.writer.program

    def _check_reduced(self, units: Sequence[Unit]) -> None:
        if not self._alone:
            check_reduced(self._policy, [unit.name for unit in units], self._reduced)

    def _step(self, rules: Blocking, work: Work) -> None:
        # in a layout each group of replicas has a server, whose others wait for it
        root_only = self._policy.placement is Placement.server and self._world is None
        rules.local("step", "", "step", work, only_root=root_only)

    def validation(self, rules: Blocking, weights: Weights) -> Program:
        """Forward passes without gradients, and the mean of their figures."""
        if self._offload is not None:
            self._offload.begin("eval")
        for _ in range(self._eval_batches):
            self._forward(rules, weights, "eval", self._whole)
        weights.gathered.clear()  # resharded, or the next step would compute with stale weights
        rules.drain()
        self._all_reduce(rules, "eval", self._num_figures)
        return rules.writer.program

    def _forward(self, rules: Blocking, weights: Weights, phase: str, of: Stretch) -> None:
        blocks, handles = of.blocks, {}
        if of.root is not None:
            rules.use(self._gather(rules, weights, of.root, Phase.forward, phase), phase, ROOT)
        if rules.prefetches_forward and blocks:
            handles[blocks[0].name] = self._gather(rules, weights, blocks[0], Phase.forward, phase)
        if of.first:
            rules.compute(phase, ROOT, f"forward/{EMBED}")
        for i, block in enumerate(blocks):
            if not rules.prefetches_forward:
                handles[block.name] = self._gather(rules, weights, block, Phase.forward, phase)
            rules.use(handles[block.name], phase, block.name)
            if rules.prefetches_forward and i + 1 < len(blocks):
                handles[blocks[i + 1].name] = self._gather(
                    rules, weights, blocks[i + 1], Phase.forward, phase
                )
            rules.compute(phase, block.name, f"forward/{block.name}")
            self._reshard(rules, weights, block.name)
        if of.last:
            rules.compute(phase, ROOT, f"forward/{HEAD}")
        if of.root is not None:
            self._reshard(rules, weights, ROOT)

    def _backward(self, rules: Blocking, weights: Weights, micro_batch: int, of: Stretch) -> None:
        phase, blocks, handles = Phase.backward.value, of.blocks, {}
        if of.root is not None:
            rules.use(self._gather(rules, weights, of.root, Phase.backward, phase), phase, ROOT)
        if blocks:  # the root's own hook prefetches the last block, before the head's backward
            handles[blocks[-1].name] = self._gather(rules, weights, blocks[-1], Phase.backward, phase)
        if of.last:
            rules.compute(phase, ROOT, f"backward/{HEAD}")
        # sharded units are reduced after all their module's backward, replicated ones when their gradients are there
        early = of.root is not None and not of.first and not self._sharded
        if early and of.root is not None:
            self._reduce(rules, of.root, micro_batch)
        for i in reversed(range(len(blocks))):
            name = blocks[i].name
            rules.use(handles[name], phase, name)
            if i:
                before = blocks[i - 1]
                handles[before.name] = self._gather(rules, weights, before, Phase.backward, phase)
            rules.compute(phase, name, f"backward/{name}")
            self._reshard(rules, weights, name)
            self._reduce(rules, blocks[i], micro_batch)
        if of.first:
            rules.compute(phase, ROOT, f"backward/{EMBED}")
        if of.root is not None:
            self._reshard(rules, weights, ROOT)
            if not early:
                self._reduce(rules, of.root, micro_batch)

    def _gather(self, rules: Blocking, weights: Weights, unit: Unit, asked: Phase, phase: str) -> Handle:
        if not self._sharded or self._alone or unit.name in weights.gathered:
            return None
        plan = self._decisions.decide(WeightsNeeded(unit.name, asked, unit.name in weights.copies))
        if plan is None:
            raise ValueError(
                f"policy {self._policy.name!r} gathers nothing for {unit.name} in {phase}: a sharded unit "
                "cannot do without"
            )
        weights.gathered[unit.name] = None
        interpreted = self._interpret(plan, Goal.gather, unit)
        if interpreted.loads_copy and interpreted.loads_copy != weights.copies[unit.name]:
            raise ValueError(
                f"policy {self._policy.name!r}: {unit.name}: no secondary shard over {interpreted.loads_copy!r} has "
                f"been stored, but one over {weights.copies[unit.name]!r}"
            )
        if interpreted.loads_copy and asked is Phase.backward and not self._policy.copy_outlives_micro_batch:
            weights.copies.pop(unit.name, None)
        if interpreted.stores_copy:
            weights.copies[unit.name] = interpreted.stores_copy
        if self._offload is None or interpreted.loads_copy:  # a copy lies near
            return rules.gather(interpreted, phase, unit.name)
        handle = rules.gather(interpreted, phase, unit.name, self._offload.gather(rules, phase, unit.name))
        self._offload.gathered(rules, phase, unit.name, handle or ())
        return handle

    def _reshard(self, rules: Blocking, weights: Weights, unit: str) -> None:
        if self._sharded and self._policy.reshard_after_forward and not self._alone:
            weights.gathered.pop(unit, None)
            rules.free(unit)

    def _reduce(self, rules: Blocking, unit: Unit, micro_batch: int) -> None:
        if self._alone:
            return
        plan = self._decisions.decide(GradientsReady(unit.name, micro_batch, self._num_micro_batches))
        if plan is not None:
            again = unit.name in self._reduced
            self._reduced[unit.name] = None
            goal, phase = Goal.reduce if self._sharded else Goal.whole, Phase.backward.value
            ends = rules.reduce(self._interpret(plan, goal, unit), phase, unit.name)
            if self._offload is not None:
                self._offload.reduced(rules, phase, unit.name, ends, again=again)

    def _publish(self, rules: Blocking, units: Sequence[Unit]) -> None:
        for unit in units:
            plan = self._decisions.decide(WeightsChanged(unit.name))
            if plan is not None:
                if self._sharded:
                    raise ValueError(
                        f"policy {self._policy.name!r} publishes {unit.name} by '{plan.describe()}': only a "
                        "replicated or server placement can, a sharded one gathers what it needs"
                    )
                # of the ranks that hold a tied matrix' gradient, a server alone has had an exchange before this
                tag = None if self._world is None else ("published", unit.name)
                handle = rules.gather(self._interpret(plan, Goal.whole, unit), "step", unit.name, tag=tag)
                rules.use(handle, "step", unit.name)
        rules.drain()

    def _all_reduce(
        self, rules: Blocking, phase: str, numel: int, *, axis: str = WORLD, tag: Hashable = None
    ) -> None:
        """Of fp32 numbers, as a library or the trainer issues it."""
        ranks = axis_size(self._world or self._mesh, axis)
        if ranks > 1 and numel:
            element = Precision.fp32.element_bytes
            nbytes = numel * element
            rules.library(phase, Transfer("all_reduce", axis, ranks, nbytes, nbytes, numel, element), tag=tag)

    def _interpret(self, plan: Plan, goal: Goal, unit: Unit) -> Interpreted:
        self._check_axes(plan)
        key = (id(plan), goal, id(unit.tensors))  # equal plans are one object, and blocks share their tensors
        known = self._interpreted.get(key)
        if known is None:
            known = interpret(
                plan,
                goal=goal,
                segments=self.segments(unit),
                mesh=self._mesh,
                element_bytes=self._gradient_bytes if goal is Goal.reduce else self._precision.element_bytes,
            )
            if self._world is not None:
                known = over_replicas(known)
            self._interpreted[key] = known
        return known

    def _check_axes(self, plan: Plan) -> None:
        """The axes of a layout are not there: FSDP2 knows data parallelism only."""
        for step in plan.steps:
            axis = getattr(step, "axis", WORLD)
            if axis not in _AXES:
                raise ValueError(f"axis={axis!r} is not on the mesh; use one of {list(_AXES)}")

    def segments(self, unit: Unit) -> tuple[int, ...]:
        """Elements of each tensor in one slice of the unit."""
        known = self._segments.get(id(unit.tensors))
        if known is None:
            tensors, parts = unit.tensors, 1
            if self._sharded:
                parts = self._mesh.num_ranks
                tensors = tuple(tensors[at] for at in fsdp2_order([tensor.name for tensor in tensors]))
            shapes = [tensor.shape for tensor in tensors]
            known = self._segments[id(unit.tensors)] = shard_segments(shapes, parts)
        return known


def over_replicas(made: Interpreted) -> Interpreted:
    """The same collectives over the ranks of a layout that hold the same part of the model."""
    pieces = []
    for piece in made.pieces:
        if isinstance(piece.what, Transfer):
            piece = replace(piece, what=replace(piece.what, axis=OF_REPLICAS[piece.what.axis]))
        pieces.append(piece)
    return replace(made, pieces=tuple(pieces))
