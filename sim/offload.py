"""Carries the decisions of an offload policy out in a rank's program: copies, host steps, and what waits for them.

The order of events is both targets' (docs/architecture.md): a unit's parameters are needed where its gather is issued
and released when the gather has read them; in the step each chunk of states is stepped where it lies.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..conf.schema import ExperimentConf, OffloadKind
from ..policies.offload import (
    Chunk,
    ChunkNeeded,
    ChunkOutdated,
    ChunkReleased,
    ChunkStep,
    Evict,
    Fetch,
    IterationBegins,
    Kind,
    OffloadAction,
    OffloadEvent,
    OffloadPolicy,
    Place,
    Prefetch,
    build_offload,
    cut_chunks,
    describe_offload_actions,
    describe_offload_event,
)
from .costs import CLIP_PASS_BYTES
from .far import Move, Way
from .interpreter import FP32_BYTES, Work
from .memory import optimizer_bytes
from .optimizer import moment_bytes, pass_bytes

if TYPE_CHECKING:
    from .rules import Blocking

_STATE = "offload#"  # begins the part of an engine's state that is ours
Items = tuple[int, ...]


def make_offload(experiment: ExperimentConf, numels: Mapping[str, int], *, clip: bool) -> "Offload | None":
    """Of `experiment.offload`; None with offload=none.

    Args:
        numels: Elements of each unit's shard on one rank, in the model's order.
        clip: Whether the norm of all gradients is taken before the step.

    Raises:
        ValueError: If chunks do not fit in `offload.memory_bytes`.
    """
    conf = experiment.offload
    if not conf.active:
        return None
    own = experiment.precision.element_bytes
    crossing = FP32_BYTES if conf.fp32 or conf.name == "disk" else own
    states = moment_bytes(experiment.optimizer) if crossing == FP32_BYTES else optimizer_bytes(experiment)
    chunks = [
        *cut_chunks(
            {unit: n * crossing for unit, n in numels.items()}, Kind.parameters, chunk_bytes=conf.chunk_bytes
        ),
        *cut_chunks(
            {unit: n * states for unit, n in numels.items()}, Kind.optimizer, chunk_bytes=conf.chunk_bytes
        ),
    ]
    near_bytes = experiment.cluster.device.memory_bytes if conf.policy is OffloadKind.auto else None
    policy = build_offload(conf, chunks, memory_bytes=near_bytes)
    assert policy is not None
    # scaling reads and writes the gradient; the norm has read it before
    step_bytes = pass_bytes(experiment.optimizer) + (CLIP_PASS_BYTES - FP32_BYTES if clip else 0)
    return Offload(
        policy,
        numels,
        in_host=conf.name == "cpu",
        gradient_bytes=crossing,
        step_bytes=step_bytes,
        commit_every=conf.commit_every if conf.name == "disk" else 0,
    )


class Offload:
    """One rank's.

    Args:
        numels: Elements of each unit's shard.
        in_host: Far memory has cores: states that lie there are stepped there, and gradients go to them.
        gradient_bytes: Of an element on its way to far memory.
        step_bytes: Read plus written in host memory for each element stepped there.
        commit_every: Steps between generations on disk; 0: none.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        numels: Mapping[str, int],
        *,
        in_host: bool,
        gradient_bytes: int,
        step_bytes: int,
        commit_every: int = 0,
    ) -> None:
        self.policy = policy
        self.log: list[tuple[str, str]] = []  # the engine's, put here for each program
        self._numels = numels
        self._in_host = in_host
        self._gradient_bytes = gradient_bytes
        self._step_bytes = step_bytes
        self._parameters = _by_unit(policy, Kind.parameters)
        self._optimizer = _by_unit(policy, Kind.optimizer)
        self._elements = {
            chunk.name: n
            for unit, chunks in self._optimizer.items()
            for chunk, n in zip(chunks, _elements(chunks, numels[unit]), strict=True)
        }
        self._commit_every = commit_every
        self._steps = 0  # since the last commit; all of them: it is due
        self._dirty: frozenset[str] = frozenset()  # near, and not on disk as they are
        # As these were in each state that a segment has begun with
        self._begun = [(copy.deepcopy(policy), self._steps, self._dirty)]
        self._numbers = {self._state(): 0}
        self._near = dict.fromkeys(Kind, 0)
        self._peak = dict(self._near)
        self._ready: dict[str, Items] = {}
        self._used: dict[str, Items] = {}
        self._written: dict[str, Items] = {}  # after these the far copy is good
        self._freed: Items = ()  # what the next fetch waits for, so that there is room
        self._forget()

    def restore(self, before: Sequence[str]) -> None:
        """Begin a segment with the state that `key` gave."""
        numbers = [int(part.removeprefix(_STATE)) for part in before if part.startswith(_STATE)]
        policy, self._steps, self._dirty = self._begun[numbers[0] if numbers else 0]
        self.policy = copy.deepcopy(policy)
        self._forget()

    def key(self) -> tuple[str, ...]:
        """What the programs to come depend on."""
        number = self._numbers.setdefault(self._state(), len(self._begun))
        if number == len(self._begun):
            self._begun.append((copy.deepcopy(self.policy), self._steps, self._dirty))
        return (f"{_STATE}{number}",)

    def _state(self) -> tuple[object, ...]:
        return (self.policy.state(), self._steps, self._dirty)

    def begin(self, kind: str) -> None:
        """An iteration of this kind begins."""
        self._ask(IterationBegins(kind))

    def settle(self, rules: "Blocking") -> None:
        """Between the last forward of a step and its backward: commit, if it is due since the step before."""
        if not self._commit_every or self._steps < self._commit_every:
            return
        for name in sorted(self._dirty):
            chunk = self.policy.chunks[name]
            move = Move(Way.commit, chunk.nbytes)
            rules.wait((rules.writer.move("forward", chunk.unit, f"commit {name}", move, rules.reached()),))
        self._steps, self._dirty = 0, frozenset()

    def gather(self, rules: "Blocking", phase: str, unit: str) -> Items:
        """The unit's gather is issued next. Returns what it waits for."""
        ready: Items = ()
        for chunk in self._parameters[unit]:
            ready += self._need(rules, phase, ChunkNeeded(chunk.name), rules.issued())
        return ready

    def gathered(self, rules: "Blocking", phase: str, unit: str, ends: Items) -> None:
        """The gather has been issued; `ends`: when the shard has been read."""
        for chunk in self._parameters[unit]:
            self._release(rules, phase, chunk, ends, changed=False)

    def reduced(self, rules: "Blocking", phase: str, unit: str, ends: Items, *, again: bool) -> None:
        """The unit's gradients are reduced. `again`: they are added to those of an earlier micro-batch."""
        for chunk in self._far_states(unit):
            nbytes = self._elements[chunk.name] * self._gradient_bytes
            item = rules.writer.move(phase, unit, "gradients", Move(Way.evict, nbytes), ends)
            if again:
                rules.writer.move(phase, unit, "add gradients", Move(Way.host, 3 * nbytes), (item,))

    def norm(self, rules: "Blocking") -> None:
        """The host reads the gradients that lie there; everything waits for it."""
        elements = sum(self._elements[c.name] for unit in self._optimizer for c in self._far_states(unit))
        if elements:
            move = Move(Way.host, elements * self._gradient_bytes)
            rules.writer.move("step", "", "norm", move, rules.reached())
            rules.drain()

    def step(self, rules: "Blocking") -> None:
        """All units, each where its states lie."""
        self._steps += bool(self._commit_every)
        for unit in self._optimizer:
            far = self._far_states(unit)
            if far:
                self._step_far(rules, unit, far)
            near = [chunk for chunk in self._optimizer[unit] if chunk not in far]
            if near:
                self._step_near(rules, unit, near)

    def near_bytes(self) -> dict[str, int]:
        """Classes of states when most of them are near, and gradients with those on their way out."""
        far = {unit: sum(self._elements[c.name] for c in self._far_states(unit)) for unit in self._optimizer}
        stay = sum(self._numels[unit] - far[unit] for unit in far)
        leaving = max(far.values(), default=0)
        return {
            "parameters": self._peak[Kind.parameters],
            "optimizer": self._peak[Kind.optimizer],
            "gradients": (stay + leaving) * self._gradient_bytes,
        }

    def far_bytes(self) -> dict[str, int]:
        """What one rank keeps in far memory, by class, with the master copy of what is stepped there."""
        far = dict.fromkeys(Kind, 0)
        for unit, chunks in self._optimizer.items():
            states = self._far_states(unit)
            far[Kind.optimizer] += sum(c.nbytes for c in chunks if not self.policy.stays(c.name))
            far[Kind.gradients] += sum(self._elements[c.name] for c in states) * self._gradient_bytes
            for chunk in self._parameters[unit]:
                if states or not self.policy.stays(chunk.name):
                    far[Kind.parameters] += chunk.nbytes
        found = {kind.value: nbytes for kind, nbytes in far.items()}
        return found | {"total": sum(found.values())}

    def _far_states(self, unit: str) -> list[Chunk]:
        """Chunks of the unit's states that the host steps."""
        if not self._in_host:
            return []
        return [c for c in self._optimizer[unit] if self.policy.place(c.name) is Place.far]

    def _step_far(self, rules: "Blocking", unit: str, far: Sequence[Chunk]) -> None:
        items: Items = ()
        for chunk in far:
            self._ask(ChunkStep(chunk.name))
            move = Move(Way.host, self._elements[chunk.name] * self._step_bytes)
            items += (rules.writer.move("step", unit, f"step {chunk.name}", move, rules.reached()),)
        for chunk in self._parameters[unit]:
            self._written[chunk.name] = items
            for action in self._ask(ChunkOutdated(chunk.name)):
                self._carry_out(rules, "step", action, ())

    def _step_near(self, rules: "Blocking", unit: str, near: Sequence[Chunk]) -> None:
        ends: Items = ()
        for chunk in self._parameters[unit]:
            rules.wait(self._need(rules, "step", ChunkNeeded(chunk.name), rules.reached()))
        for chunk in near:
            rules.wait(self._need(rules, "step", ChunkStep(chunk.name), rules.reached()))
            work = Work("step", "part", 0, self._elements[chunk.name])
            ends = (rules.local("step", unit, f"step {chunk.name}", work),)
            self._release(rules, "step", chunk, ends, changed=True)
        for chunk in self._parameters[unit]:
            self._release(rules, "step", chunk, ends, changed=True)

    def _need(self, rules: "Blocking", phase: str, event: ChunkNeeded | ChunkStep, issued: Items) -> Items:
        """Bring a chunk near. Returns what its use waits for."""
        for action in self._ask(event):
            self._carry_out(rules, phase, action, issued)
        return self._ready.get(event.chunk, ())

    def _release(self, rules: "Blocking", phase: str, chunk: Chunk, ends: Items, *, changed: bool) -> None:
        self._used[chunk.name] = ends
        if changed and self._commit_every and chunk.nbytes:
            self._dirty |= {chunk.name}
        for action in self._ask(ChunkReleased(chunk.name, changed)):
            self._carry_out(rules, phase, action, ())

    def _carry_out(self, rules: "Blocking", phase: str, action: OffloadAction, issued: Items) -> None:
        """Write the copy that an action asks for. A step is written by who asked for it."""
        chunk = self.policy.chunks[action.chunk]
        name = chunk.name
        match action:
            case Evict():
                self._near[chunk.kind] -= chunk.nbytes
                ready = self._ready.pop(name, ())
                waits = self._used.pop(name, ready)
                if action.write_back:
                    self._dirty -= {name}
                    move = Move(Way.evict, chunk.nbytes)
                    waits = (rules.writer.move(phase, chunk.unit, f"write {name}", move, waits),)
                    self._written[name] = waits
                self._freed += waits
            case Fetch() | Prefetch():
                if not self.policy.stays(name):
                    self._near[chunk.kind] += chunk.nbytes
                    self._note_peak()
                after = (*issued, *self._freed, *self._written.pop(name, ()))
                self._freed = ()
                move = Move(Way.fetch, chunk.nbytes)
                self._ready[name] = (rules.writer.move(phase, chunk.unit, f"fetch {name}", move, after),)

    def _ask(self, event: OffloadEvent) -> tuple[OffloadAction, ...]:
        actions = self.policy.decide(event)
        self.log.append((describe_offload_event(event), describe_offload_actions(actions)))
        return actions

    def _forget(self) -> None:
        """A segment begins: all items of the one before have ended."""
        self._ready, self._used, self._written, self._freed = {}, {}, {}, ()
        for kind in Kind:
            self._near[kind] = sum(
                c.nbytes
                for c in self.policy.chunks.values()
                if c.kind is kind and self.policy.place(c.name) is Place.near
            )
        self._note_peak()

    def _note_peak(self) -> None:
        if sum(self._near.values()) > sum(self._peak.values()):
            self._peak = dict(self._near)


def _by_unit(policy: OffloadPolicy, kind: Kind) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {}
    for chunk in policy.chunks.values():
        if chunk.kind is kind:
            found.setdefault(chunk.unit, []).append(chunk)
    return found


def _elements(chunks: Sequence[Chunk], numel: int) -> list[int]:
    """A unit's elements, shared out over chunks by their bytes."""
    total = sum(chunk.nbytes for chunk in chunks)
    ends, at = [0], 0
    for chunk in chunks:
        at += chunk.nbytes
        ends.append(numel * at // total if total else numel)
    return [end - begin for begin, end in pairwise(ends)]
