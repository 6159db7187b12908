"""When a stage of torch.distributed.pipelining computes, starts messages and waits for them (torch 2.13, schedules.py).

The passes are the layout's; this is what lies between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...policies.layout import ParallelLayout, Pass


class Act(Enum):
    run = "run"
    send = "send"  # start the message that a pass has made; the rank goes on
    post = "post"  # be ready for the message that a pass reads; the rank goes on
    receive = "receive"  # wait for it
    settle = "settle"  # wait until the message that a pass has made has been sent


@dataclass(frozen=True, slots=True)
class Action:
    act: Act
    of: Pass


def stage_actions(layout: ParallelLayout) -> tuple[tuple[Action, ...], ...]:
    """Of each stage, in order, for one training step. With one stage, passes alone."""
    passes = [layout.passes(stage) for stage in range(layout.stages)]
    if layout.schedule == "interleaved" and layout.chunks > 1:
        return _interleaved(layout, passes)
    made = []
    for stage, own in enumerate(passes):
        order = _gpipe(own) if layout.schedule == "gpipe" else _one_forward_one_backward(own)
        made.append(tuple(a for a in order if _is_there(layout, stage, a)))
    return tuple(made)


def forward_actions(layout: ParallelLayout, batches: int) -> tuple[tuple[Action, ...], ...]:
    """Of a validation: each batch through all parts, forward only."""
    made = []
    for stage in range(layout.stages):
        order = []
        for batch in range(batches):
            for chunk in range(layout.chunks):
                this = Pass(batch, chunk, False)
                order += [Action(Act.receive, this), Action(Act.run, this), Action(Act.send, this)]
            order += [Action(Act.settle, Pass(batch, chunk, False)) for chunk in range(layout.chunks)]
        made.append(tuple(a for a in order if _is_there(layout, stage, a)))
    return tuple(made)


def part_of(layout: ParallelLayout, stage: int, chunk: int) -> int:
    """Position of a chunk in the model, torch's stage index."""
    return chunk * layout.stages + stage


def sends(layout: ParallelLayout, stage: int, this: Pass) -> bool:
    """Whether another part reads what a pass makes."""
    last = 0 if this.backward else layout.stages * layout.chunks - 1
    return layout.stages > 1 and part_of(layout, stage, this.chunk) != last


def receives(layout: ParallelLayout, stage: int, this: Pass) -> bool:
    """Whether a pass reads what another part makes."""
    first = layout.stages * layout.chunks - 1 if this.backward else 0
    return layout.stages > 1 and part_of(layout, stage, this.chunk) != first


def _is_there(layout: ParallelLayout, stage: int, action: Action) -> bool:
    match action.act:
        case Act.run:
            return True
        case Act.send | Act.settle:
            return sends(layout, stage, action.of)
        case _:
            return receives(layout, stage, action.of)


def _gpipe(passes: Sequence[Pass]) -> list[Action]:
    """Each direction's messages must all have gone before the next begins."""
    order: list[Action] = []
    for backward in (False, True):
        own = [this for this in passes if this.backward is backward]
        for this in own:
            order += [Action(Act.receive, this), Action(Act.run, this), Action(Act.send, this)]
        order += [Action(Act.settle, this) for this in own]
    return order


def _one_forward_one_backward(passes: Sequence[Pass]) -> list[Action]:
    """A message starts together with the receipt of the next pass, and the rank waits for both.

    The last forward before the first backward counts to the steady state: torch's warm-up has one pass more than
    Megatron's.
    """
    forwards = [this for this in passes if not this.backward]
    backwards = [this for this in passes if this.backward]
    ahead = passes.index(backwards[0])
    order: list[Action] = []
    for i in range(ahead):
        this = forwards[i]
        order += [Action(Act.receive, this), Action(Act.run, this)]
        order += [Action(Act.settle, forwards[i - 1])] if i else []
        order += [Action(Act.send, this)] if i + 1 < ahead else []
    at, j = ahead, 0
    while True:
        order += _together(forwards[at - 1], backwards[j])
        order.append(Action(Act.run, backwards[j]))
        j += 1
        if at == len(forwards):
            break
        order += _together(backwards[j - 1], forwards[at])
        order.append(Action(Act.run, forwards[at]))
        at += 1
    order.append(Action(Act.send, backwards[j - 1]))
    for this in backwards[j:]:
        before = backwards[j - 1]
        order += [Action(Act.receive, this), Action(Act.run, this), Action(Act.settle, before)]
        order.append(Action(Act.send, this))
        j += 1
    return [*order, Action(Act.settle, backwards[-1])]


def _together(sent: Pass, read: Pass) -> list[Action]:
    return [Action(Act.send, sent), Action(Act.receive, read), Action(Act.settle, sent)]


def _interleaved(layout: ParallelLayout, passes: Sequence[Sequence[Pass]]) -> tuple[tuple[Action, ...], ...]:
    """Stage by stage, round after round, each puts its next pass if its receipt has been put, then its message, and the
    receipt into the reader's order at that place (`_add_send_recv`). Messages are waited for at the end of the step.
    """
    parts = layout.stages * layout.chunks
    order: list[list[Action]] = [[] for _ in passes]
    put: list[set[Pass]] = [set() for _ in passes]  # receipts
    at = [0] * len(passes)
    while any(at[stage] < len(own) for stage, own in enumerate(passes)):
        before = list(at)
        for stage, own in enumerate(passes):
            if at[stage] == len(own):
                continue
            this = own[at[stage]]
            if receives(layout, stage, this):
                if this not in put[stage]:
                    continue
                order[stage].append(Action(Act.receive, this))
            order[stage].append(Action(Act.run, this))
            at[stage] += 1
            if sends(layout, stage, this):
                order[stage].append(Action(Act.send, this))
                reader = part_of(layout, stage, this.chunk) + (-1 if this.backward else 1)
                assert 0 <= reader < parts
                there, chunk = reader % layout.stages, reader // layout.stages
                read = Pass(this.micro_batch, chunk, this.backward)
                order[there].append(Action(Act.post, read))
                put[there].add(read)
        assert before != at, "passes wait for each other"
    for stage, own in enumerate(passes):
        order[stage] += [Action(Act.settle, this) for this in own if sends(layout, stage, this)]
    return tuple(tuple(each) for each in order)
