"""A training whose parameters and optimizer states lie on disk: what the trainer talks to."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.fsdp import FSDPModule

from ...conf.schema import OffloadConf
from ...policies.offload import Chunk, Kind, Place, build_offload, cut_chunks
from ..checkpoint import prepare_optimizer_state
from ..ledger import OFFLOAD_STREAM, Ledger
from .header import Layout
from .manifest import StoreError, committed_generations
from .parameters import move_in, shard_layout, unit_parameters, watch_gathers
from .planners import PagedLoadPlanner, PagedSavePlanner
from .region import Region
from .residency import Residency
from .states import counters, make_states, move_states_in, only
from .store import Store


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit's tensors."""

    module: FSDPModule
    parameters: dict[str, nn.Parameter]
    shards: Region
    states: Region | None  # None: the optimizer has none
    shard_chunk: str
    state_chunk: str  # of no bytes, and with no file, where there are no states


class DiskOffload:
    """Of one rank. Gathers bring the weights in by themselves; the rest is said by the trainer.

    Args:
        conf: Of name "disk".
        units: Every FSDP module by its name, "root" first.
        optimizer: Over the units' parameters; its states are made here.
        ledger: Told of decisions and waits.
        folder: For this rank's files.
        identity: What the files belong to.
        reads_shard: Asked once before each gather of a unit: whether it reads the shard.
        memory_bytes: Where offload.memory_bytes does not say; None: no limit.

    Attributes:
        resumed: What the commit says that the training goes on from; None: it begins.

    Raises:
        StoreError: The folder holds a store and offload.resume is false, or the other way round; or the disk is too
            small, naming what is needed and what is free.
        DamagedError: Naming all files that are damaged, and what of them.
        ValueError: offload.memory_bytes is too small.
    """

    def __init__(
        self,
        conf: OffloadConf,
        *,
        units: Mapping[str, FSDPModule],
        optimizer: torch.optim.Optimizer,
        ledger: Ledger,
        folder: Path,
        identity: Mapping[str, Any],
        reads_shard: Callable[[str], bool],
        memory_bytes: float | None = None,
    ) -> None:
        self._conf = conf
        self._optimizer = optimizer
        self._ledger = ledger
        self._due: tuple[int, Mapping[str, Any]] | None = None
        self._units = {unit: _make_unit(unit, module, optimizer) for unit, module in units.items()}
        policy = build_offload(conf, self._chunks(), memory_bytes=memory_bytes)
        assert policy is not None
        regions = self._regions()
        store = self._open(folder, {chunk: region.layout for chunk, region in regions.items()}, identity)
        self.resumed: dict[str, Any] | None = dict(store.committed.notes) if store.committed else None
        self.residency = Residency(
            policy,
            store,
            regions,
            log=ledger.decided_offload,
            wait=lambda what, nbytes: ledger.span(OFFLOAD_STREAM, f"wait {what}", nbytes),
            moved=ledger.moved,
        )
        for unit in self._units.values():
            move_in(unit.module, unit.shards, copy=self.resumed is None)
            for chunk in (unit.shard_chunk, unit.state_chunk):
                if chunk in regions and self.resumed is None:
                    self.residency.adopt(chunk)
                elif chunk in regions and policy.place(chunk) is Place.near:
                    store.read(chunk, regions[chunk]).result()
        if self.resumed is not None:
            for counter in counters(optimizer):
                counter.fill_(self.resumed["counter"])
        watch_gathers(units, self._gathering, reads_shard=reads_shard)

    def first_step(self, otherwise: int, notes: Mapping[str, Any], *, steps: int) -> int:
        """Which step comes first, to be asked before it: the one behind the commit that the training goes on from; or
        `otherwise`, and what it begins with is committed.

        Args:
            notes: Of the trainer, for `resumed`.
            steps: Of the whole training.

        Raises:
            ValueError: All steps are done.
        """
        if self.resumed is None:
            self.commit(otherwise, notes)
            return otherwise
        done: int = self.resumed["step"]
        if done >= steps:
            raise ValueError(f"offload.resume=true: {done} steps are done; steps={steps} must be more")
        return done

    def begins(self, kind: str) -> None:
        """An iteration of a kind ("train", "eval") begins."""
        self.residency.begins(kind)

    def step(self) -> None:
        """The optimizer's step, unit by unit; a unit's gradients are dropped as soon as they are used."""
        residency = self.residency
        for unit in self._units.values():
            residency.needed(unit.shard_chunk)
            residency.step(unit.state_chunk)
            with only(self._optimizer, unit.parameters.values()):
                self._optimizer.step()
            for parameter in unit.parameters.values():
                parameter.grad = None
            residency.released(unit.state_chunk, changed=True)
            residency.released(unit.shard_chunk, changed=True)

    def stepped(self, steps_done: int, notes: Mapping[str, Any]) -> None:
        """After a step: what has changed is to be committed, if it is time.

        Args:
            notes: As of `first_step`.
        """
        every = self._conf.commit_every
        if every and steps_done % every == 0:
            self._due = (steps_done, notes)

    def settle(self) -> None:
        """Commit what is due. To be called between the last forward of a step and its backward.

        So the writes of a step have the next forward to hide behind. The reductions of the backward that follows end
        only when every rank has committed: no rank writes over the generation that another may need.
        """
        if self._due is not None:
            self.commit(*self._due)

    def commit(self, steps_done: int, notes: Mapping[str, Any]) -> None:
        """Make all tensors, as they are, what a crash leaves."""
        self._due = None
        counter = next((float(value) for value in counters(self._optimizer)), 0.0)
        self.residency.commit({"step": steps_done, "counter": counter, **notes})

    @contextmanager
    def saving(self) -> Iterator[SavePlanner]:
        """A `with` block in which a checkpoint is written, by the planner that it gives."""
        planner = PagedSavePlanner(self.residency)
        yield planner
        planner.close()

    @contextmanager
    def loading(self) -> Iterator[LoadPlanner]:
        """A `with` block in which a checkpoint is read, by the planner that it gives."""
        planner = PagedLoadPlanner(self.residency)
        yield planner
        planner.close()

    @contextmanager
    def unit_near(self, unit: str) -> Iterator[None]:
        """A `with` block to look at a unit's shards in."""
        with self.residency.visit(self._units[unit].shard_chunk):
            yield

    def near_bytes(self, kind: Kind) -> int:
        """What this rank's chunks of a kind take of memory now."""
        policy = self.residency.policy
        return sum(
            chunk.nbytes
            for chunk in policy.chunks.values()
            if chunk.kind is kind and policy.place(chunk.name) is Place.near
        )

    def far_bytes(self) -> dict[str, int]:
        """What this rank has on disk, by kind; one generation of it."""
        found = {kind.value: 0 for kind in Kind}
        policy = self.residency.policy
        for chunk in policy.chunks.values():
            if not policy.stays(chunk.name):
                found[chunk.kind.value] += chunk.nbytes
        return found | {"total": sum(found.values())}

    def finish(self) -> None:
        """The training has ended well: nobody will go on from the files."""
        self.residency.store.remove()

    def close(self) -> None:
        """Let go of threads; the files stay."""
        self.residency.store.close()

    # ---- parts of the beginning

    def _chunks(self) -> tuple[Chunk, ...]:
        shards = {name: unit.shards.layout.nbytes for name, unit in self._units.items()}
        states = {
            name: unit.states.layout.nbytes if unit.states is not None else 0
            for name, unit in self._units.items()
        }
        return (*cut_chunks(shards, Kind.parameters), *cut_chunks(states, Kind.optimizer))

    def _regions(self) -> dict[str, Region]:
        regions: dict[str, Region] = {}
        for unit in self._units.values():
            regions[unit.shard_chunk] = unit.shards
            if unit.states is not None:
                regions[unit.state_chunk] = unit.states
        return regions

    def _open(self, folder: Path, layouts: Mapping[str, Layout], identity: Mapping[str, Any]) -> Store:
        num_threads, direct = self._conf.io_threads, self._conf.direct
        found = committed_generations(folder)
        if not self._conf.resume:
            if found:
                raise StoreError(
                    f"{folder} holds generation {found[0]} of a training that did not end: offload.resume=true goes on "
                    "from it; else remove the folder"
                )
            return Store.create(folder, layouts, identity, num_threads=num_threads, direct=direct)
        generation = self._newest_of_all(found, folder)
        return Store.open(
            folder, layouts, identity, generation=generation, num_threads=num_threads, direct=direct
        )

    def _newest_of_all(self, found: list[int], folder: Path) -> int:
        """Ranks commit one after the other, so a crash may leave the last one behind by one generation."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        with self._ledger.set_up():
            dist.all_gather_object(everywhere, found)
        common = set(found).intersection(*everywhere)
        if not common:
            raise StoreError(
                f"offload.resume=true, but ranks hold no generation in common: {everywhere} (by rank; this one's in "
                f"{folder})"
            )
        return max(common)

    @contextmanager
    def _gathering(self, name: str) -> Iterator[None]:
        chunk = self._units[name].shard_chunk
        self.residency.needed(chunk)
        yield
        self.residency.released(chunk, changed=False)


def _make_unit(name: str, module: FSDPModule, optimizer: torch.optim.Optimizer) -> _Unit:
    parameters = unit_parameters(module)
    shards = Region(shard_layout(module))
    layout = make_states(optimizer, parameters, shards.layout, prepare_optimizer_state)
    states: Region | None = None
    if layout.tensors:
        states = Region(layout)
        move_states_in(optimizer, parameters, states)
    return _Unit(
        module,
        parameters,
        shards,
        states,
        f"{Kind.parameters.value}/{name}",
        f"{Kind.optimizer.value}/{name}",
    )
