"""The passes of one pipeline stage as items of a program, and the exchanges between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...policies.layout import Pass
from ...policies.mesh import PIPELINE
from ..interpreter import LocalWork, Transfer, Work
from ..program import COMPUTE, MAIN, Item, Program, Writer
from .model import LayoutModel
from .timing import PassKind

TENSOR_STREAM = "tensor"

Inside = tuple[tuple[Transfer, str, int], ...]


@dataclass(frozen=True, slots=True)
class _Routine:
    """What all passes of one chunk and direction have in common.

    `part` and `next_part`: positions in the model of this pass and of the one that it sends to, which with the
    micro-batch name a message on both ends.
    """

    kind: PassKind
    phase: str
    work: Work
    inside: Inside
    send: Transfer | None
    receipt: Transfer | None
    part: int
    next_part: int


class StagePasses:
    """Writes all passes of a step of one stage.

    Args:
        merged: One item a pass; else one for each step of its plans.
        overlap: A pass waits for its own input alone, and sends run beside computation. Else a stage exchanges with
            its neighbours between passes: it sends what it has made and receives what it needs next, and goes on
            when both are over.
    """

    def __init__(self, model: LayoutModel, stage: int, *, merged: bool, overlap: bool) -> None:
        self._model = model
        self._stage = stage
        self._unit = unit_name(stage)
        self._merged = merged
        self._overlap = overlap
        self.writer = Writer(merge=False)
        self._items = self.writer.program.items
        self.writer.program.compact = merged
        chunks = range(model.layout.chunks)
        self._routines = {
            (chunk, way): self._routine(chunk, way) for chunk in chunks for way in (False, True)
        }

    @property
    def program(self) -> Program:
        return self.writer.program

    def write(self) -> tuple[int, ...]:
        """All passes; the items that what follows must wait for.

        Receipts are items of the main worker, and so is a turn's last send, which it waits for anyhow: on NCCL a
        message leaves when its sender has it, whoever waits. On gloo both ends must have come, so that all sends
        have workers of their own.
        """
        sent: tuple[int, ...] = ()
        for turn in self._turns():
            for this in turn:
                self._receive(this)
            end = -1
            for this in turn:
                end = self._run(this, sent)
                sent = ()
            beside = turn[:-1] if self._merged and not self._overlap else turn
            made = [self._send(this, (end,), beside=True) for this in beside]
            for this in turn[len(beside) :]:
                self._send(this, (), beside=False)
            if not self._overlap:
                sent = tuple(index for index in made if index >= 0)
        self.writer.catch_up()
        return self.writer.everything()

    def _turns(self) -> Sequence[Sequence[Pass]]:
        """Passes between two exchanges. Interleaved, Megatron exchanges after a forward and a backward together."""
        order = self._model.layout.passes(self._stage)
        if self._overlap or self._model.layout.chunks == 1:
            return [(this,) for this in order]
        turns: list[Sequence[Pass]] = []
        at = 0
        while at < len(order):
            pairs = at + 1 < len(order) and not order[at].backward and order[at + 1].backward
            size = 2 if pairs else 1
            turns.append(order[at : at + size])
            at += size
        return turns

    def _routine(self, chunk: int, backward: bool) -> _Routine:
        model, stage = self._model, self._stage
        kind = model.kind(stage, chunk, backward)
        sent, received = model.sent(stage, chunk, backward), model.received(stage, chunk, backward)
        part = model.part(stage, chunk)
        return _Routine(
            kind,
            "backward" if backward else "forward",
            Work("layout", f"pass/{kind.key}"),
            model.steps.transfers(kind) if self._merged else (),
            sent.send if sent is not None else None,
            received.receipt if received is not None else None,
            part,
            part + (-1 if backward else 1),
        )

    # Items are made in place: a long pipeline has hundreds of thousands

    def _run(self, this: Pass, waits: tuple[int, ...]) -> int:
        """The pass's own work; the index of its last item."""
        routine = self._routines[this.chunk, this.backward]
        if not self._merged:
            return self._run_steps(this, routine, waits)
        items = self._items
        index = len(items)
        parts = (self._model.local_work(this.micro_batch, this.chunk, routine.phase, routine.work),)
        items.append(
            Item(
                index,
                MAIN,
                COMPUTE,
                routine.phase,
                self._unit,
                waits,
                parts,
                None,
                False,
                None,
                routine.inside,
            )
        )
        return index

    def _send(self, this: Pass, after: tuple[int, ...], *, beside: bool) -> int:
        """The item, -1 if nothing is sent. `beside`: the main worker goes on."""
        routine = self._routines[this.chunk, this.backward]
        if routine.send is None:
            return -1
        worker = f"send_{routine.phase}" if beside else MAIN
        return self._message(worker, routine, routine.send, this.micro_batch, routine.next_part, after)

    def _receive(self, this: Pass) -> None:
        """Wait for what a pass needs of another stage."""
        routine = self._routines[this.chunk, this.backward]
        if routine.receipt is not None:
            self._message(MAIN, routine, routine.receipt, this.micro_batch, routine.part, ())

    def _message(
        self,
        worker: str,
        routine: _Routine,
        transfer: Transfer,
        micro_batch: int,
        part: int,
        after: tuple[int, ...],
    ) -> int:
        items = self._items
        index = len(items)
        tag = (routine.kind.backward, micro_batch, part)
        items.append(
            Item(index, worker, PIPELINE, routine.phase, self._unit, after, (), transfer, False, tag)
        )
        return index

    def _run_steps(self, this: Pass, routine: _Routine, waits: tuple[int, ...]) -> int:
        """Every step of every part as an item; streams beside the main one are workers of their own."""
        items, kind, phase, unit = self._items, routine.kind, routine.phase, self._unit
        tag = (self._stage, this.micro_batch, this.chunk, this.backward)

        def add(
            worker: str,
            after: Iterable[int],
            work: LocalWork | None,
            transfer: Transfer | None,
            place: object,
        ) -> int:
            own = tuple(at for at in after if items[at].worker != worker)
            parts, stream = ((work,), COMPUTE) if work is not None else ((), TENSOR_STREAM)
            items.append(
                Item(len(items), worker, stream, phase, unit, own, parts, transfer, False, (*tag, place))
            )
            return len(items) - 1

        for position, transfer in enumerate(kind.behind):
            waits = (add(MAIN, waits, None, transfer, position),)
        ended = waits  # what the next part waits for
        for part, direction, times in kind.parts():
            steps = self._model.steps.of(part, direction)
            for repeat in range(times if steps else 0):
                made: list[int] = []
                for i, step in enumerate(steps):
                    after = [made[at] for at in step.after] or ended
                    if isinstance(step.what, Transfer):
                        worker = TENSOR_STREAM if step.stream == TENSOR_STREAM else MAIN
                        place = (part.value, direction.value, repeat, i)
                        made.append(add(worker, after, None, step.what, place))
                    else:
                        key = f"local/{part.value}/{direction.value}/{i}"
                        work = LocalWork(step.name, Work("layout", key))
                        made.append(add(MAIN, after, work, None, None))
                # streams end at different steps: what follows waits for the last of each
                ended = tuple({items[index].worker: index for index in made}.values())
        return next(index for index in reversed(range(len(items))) if items[index].worker == MAIN)


def unit_name(stage: int) -> str:
    """As ledger and decisions name all that a stage holds."""
    return f"stage.{stage}"
