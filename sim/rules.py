"""What may run beside what: one set of rules for each way in which a backend overlaps.

All methods write items; the handle of a gather is the items with which it ends, None if nothing was gathered.
"""

from collections.abc import Collection, Hashable, Mapping
from typing import Protocol

from .interpreter import Interpreted, Transfer, Work
from .program import COMPUTE, LIBRARY, MAIN, Writer

Handle = tuple[int, ...] | None

COMM_THREAD = "comm"


class Layers(Protocol):
    """Computation of units that a layout shares out: several steps with collectives between, and beside."""

    def write(
        self, writer: Writer, phase: str, unit: str, key: str, waits: tuple[int, ...]
    ) -> tuple[int, ...]:
        """All steps of one computation, of which the first waits for `waits`; the items with which it ends."""
        ...


class Blocking:
    """FSDP2 on gloo: everything is done by the one thread of a rank, in the order of issue. Only a plan's collectives
    on other streams than its own run beside it, until the plan has ended.

    Args:
        copies: Bytes of a unit's gathered tensor that FSDP copies out after a gather, and in before a
        reduction;
            empty where its copies are part of the computation's own time, or nothing is sharded.
        layers: Writes the computation of a unit; None: it is one piece of local work.
    """

    prefetches_forward = False  # the next unit's gather is issued before this unit computes

    def __init__(self, writer: Writer, copies: Mapping[str, int], layers: Layers | None = None) -> None:
        self.writer = writer
        self._copies = copies
        self._layers = layers
        self._waits: tuple[int, ...] = ()  # of the next item on the main worker

    def gather(
        self,
        plan: Interpreted,
        phase: str,
        unit: str,
        after: tuple[int, ...] = (),
        *,
        tag: Hashable = None,
    ) -> Handle:
        """Issue a gather, or the publication of a unit.

        Args:
            after: What brings the own shard near.
            tag: Where ranks of a group run programs of different length.
        """
        return self.writer.plan(plan, phase, unit, worker=MAIN, after=after, tag=tag) or after

    def issued(self) -> tuple[int, ...]:
        """What a copy waits for that is issued now with the unit's gather."""
        return self.reached()

    def reached(self) -> tuple[int, ...]:
        """All that the main worker has been given, and will wait for next."""
        return self.writer.last(MAIN) + self._waits

    def wait(self, items: tuple[int, ...]) -> None:
        """The main worker goes on when `items` have ended."""
        self._waits += items

    def use(self, handle: Handle, phase: str, unit: str) -> None:
        """The main worker goes on when the unit's weights are there."""
        if handle is not None:
            self._waits += handle
            self._copy("copy_out", phase, unit)

    def compute(self, phase: str, unit: str, key: str) -> None:
        if self._layers is not None:
            self._waits = self._layers.write(self.writer, phase, unit, key, self._waits)
            return
        self.local(phase, unit, f"{phase}/{unit}", Work("compute", key), product=True)

    def free(self, unit: str) -> None:
        """The unit's gathered weights are dropped once the computation so far is done."""

    def reduce(self, plan: Interpreted, phase: str, unit: str) -> tuple[int, ...]:
        """The unit's gradients are complete. Returns the items with which they are reduced."""
        self._copy("copy_in", phase, unit)
        return self.writer.plan(plan, phase, unit, worker=MAIN) or self.reached()

    def backward_done(self, besides: Collection[str] = ()) -> None:
        """The end of a micro-batch. `besides`: workers that go on."""

    def drain(self, besides: Collection[str] = ()) -> None:
        """What follows waits for everything."""
        self._waits = self.writer.everything(besides)

    def local(
        self,
        phase: str,
        unit: str,
        name: str,
        work: Work,
        *,
        only_root: bool = False,
        product: bool = False,
    ) -> int:
        """Work on the main worker."""
        index = self.writer.local(
            MAIN,
            COMPUTE,
            phase,
            unit,
            name,
            work,
            self._waits,
            only_root=only_root,
            product=product,
        )
        self._waits = ()
        return index

    def library(self, phase: str, transfer: Transfer, *, tag: Hashable = None) -> None:
        """A collective on the main worker that no plan asked for. `tag`: where ranks run other programs too."""
        self.writer.transfer(MAIN, LIBRARY, phase, "", transfer, self._waits, tag=tag)
        self._waits = ()

    def message(
        self,
        phase: str,
        layer: str,
        transfer: Transfer,
        *,
        tag: Hashable,
        worker: str = MAIN,
        stream: str = LIBRARY,
    ) -> int:
        """One end of a message. On the main worker it blocks; elsewhere it begins when that one has come here."""
        index = self.writer.transfer(worker, stream, phase, layer, transfer, self.reached(), tag=tag)
        if worker == MAIN:
            self._waits = ()
        return index

    def _copy(self, name: str, phase: str, unit: str) -> None:
        moved = 2 * self._copies.get(unit, 0)
        if moved:
            self.local(phase, unit, f"{name} {unit}", Work("traffic", "fsdp_copy", 0, moved))


class CommThread(Blocking):
    """FSDP2 on gloo with `comm.overlap`: one thread a rank runs gathers and reductions, first in first out.

    The main thread waits for a gather where FSDP does, and for the rest before the optimizer step. Forward
    prefetch is explicit: a unit's gather is queued when the unit before it begins to compute.
    """

    prefetches_forward = True

    def gather(
        self,
        plan: Interpreted,
        phase: str,
        unit: str,
        after: tuple[int, ...] = (),
        *,
        tag: Hashable = None,
    ) -> Handle:
        begin = self.reached() + after
        return self.writer.plan(plan, phase, unit, worker=COMM_THREAD, after=begin, tag=tag) or after

    def reduce(self, plan: Interpreted, phase: str, unit: str) -> tuple[int, ...]:
        self._copy("copy_in", phase, unit)
        begin = self.reached()
        return self.writer.plan(plan, phase, unit, worker=COMM_THREAD, after=begin) or begin


class Streams(Blocking):
    """FSDP2 on NCCL: each stream runs by itself, and the CPU is far ahead of all.

    What holds a gather back are the waits that FSDP2 puts on its streams (torch 2.13, `_fsdp_param_group.py`
    and `_fsdp_state.py`): in forward for the copy-out of the unit before the last used, so that two gathered
    outputs live at a time; in backward for the copy-out of the unit just used; after a forward for the end of
    the unit's own computation; and at a forward's begin for all before it. The compute stream waits for the
    reduction before the last. Replicated placements know no such wait: their reductions only follow each
    other.

    Args:
        sharded: Whether FSDP2's waits hold.
    """

    def __init__(
        self, writer: Writer, copies: Mapping[str, int], layers: Layers | None = None, *, sharded: bool
    ) -> None:
        super().__init__(writer, copies, layers)
        self._sharded = sharded
        self._gate: tuple[int, ...] = ()
        self._copied_out: tuple[int, ...] = ()
        self._freed: dict[str, tuple[int, ...]] = {}
        self._reduced: tuple[int, ...] = ()

    def gather(
        self,
        plan: Interpreted,
        phase: str,
        unit: str,
        after: tuple[int, ...] = (),
        *,
        tag: Hashable = None,
    ) -> Handle:
        begin = self._gate + self._freed.pop(unit, ()) + after
        return self.writer.plan(plan, phase, unit, worker=None, after=begin, tag=tag) or after

    def issued(self) -> tuple[int, ...]:
        return self._gate

    def use(self, handle: Handle, phase: str, unit: str) -> None:
        if handle is None:
            return
        self._waits += handle
        index = self.local(phase, unit, f"copy_out {unit}", self._copy_work(unit))
        if phase == "backward":
            self._gate = (index,)
        else:
            self._gate, self._copied_out = self._copied_out or self._gate, (index,)

    def free(self, unit: str) -> None:
        self._freed[unit] = self.writer.last(MAIN)
        if unit == "root":
            self._gate, self._copied_out = self._copied_out or self._gate, ()

    def reduce(self, plan: Interpreted, phase: str, unit: str) -> tuple[int, ...]:
        if self._sharded:
            self._waits += self._reduced
            self.local(phase, unit, f"copy_in {unit}", self._copy_work(unit))
        self._reduced = self.writer.plan(plan, phase, unit, worker=None, after=self.writer.last(MAIN))
        return self._reduced or self.writer.last(MAIN)

    def backward_done(self, besides: Collection[str] = ()) -> None:
        self.drain(besides)

    def drain(self, besides: Collection[str] = ()) -> None:
        super().drain(besides)
        self._gate = self._waits
        self._copied_out = self._reduced = ()
        self._freed.clear()

    def _copy_work(self, unit: str) -> Work:
        return Work("traffic", "fsdp_copy", 0, 2 * self._copies.get(unit, 0))
