"""In which order a pipeline stage runs forward and backward passes of its micro-batches.

A stage that holds several parts of the model has `chunks` > 1 (virtual stages): chunk c of stage s is part
c * stages + s of all.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, order=True)
class Pass:
    """One micro-batch through one chunk of a stage, forward or backward."""

    micro_batch: int
    chunk: int
    backward: bool

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro_batch}.{self.chunk}"


def stage_passes(
    schedule: str, *, stage: int, stages: int, chunks: int, micro_batches: int, megatron: bool = True
) -> tuple[Pass, ...]:
    """All passes of one stage in one step, in their order.

    gpipe: all forwards, then all backwards (Huang et al. 2019). 1f1b: after `num_warm_up` forwards one
    forward and one backward in turn (PipeDream-Flush; Narayanan et al. 2021, section 2.2.1). interleaved:
    the same over all chunks, in groups of as many micro-batches as there are stages (section 2.2.2).

    Args:
        megatron: As Megatron-LM does it; else as torch.distributed.pipelining.

    Raises:
        ValueError: If the schedule cannot take these sizes, naming the keys.
    """
    check_schedule(schedule, stages=stages, chunks=chunks, micro_batches=micro_batches)
    total = micro_batches * chunks
    forwards, backwards = _in_order(False, stages, chunks, total), _in_order(True, stages, chunks, total)
    ahead = num_warm_up(
        schedule, stage=stage, stages=stages, chunks=chunks, micro_batches=micro_batches, megatron=megatron
    )
    order = list(forwards[:ahead])
    for i in range(total - ahead):
        order += (forwards[ahead + i], backwards[i])
    return (*order, *backwards[total - ahead :])


def num_warm_up(
    schedule: str, *, stage: int, stages: int, chunks: int, micro_batches: int, megatron: bool = True
) -> int:
    """Forward passes of a stage before its first pair of one forward and one backward.

    As Megatron counts them: the last of 4 stages has none ([3, 2, 1, 0]), with two chunks each [10, 8, 6, 4].
    torch.distributed.pipelining counts 1f1b's first pair in: [4, 3, 2, 1]; the order of passes is the same.
    """
    total = micro_batches * chunks
    if schedule == "gpipe":
        return total
    if schedule == "interleaved" and chunks > 1:
        if micro_batches == stages and megatron:
            return total  # Megatron-LM ran all forwards first then; its newest schedule has no such case
        return min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
    return min(total, stages - stage - 1)


def check_schedule(schedule: str, *, stages: int, chunks: int, micro_batches: int) -> None:
    """Raises ValueError if the sizes do not go together."""
    if schedule not in ("1f1b", "interleaved", "gpipe"):
        raise ValueError(
            f"parallel.pipeline_schedule={schedule!r}: must be one of ['1f1b', 'interleaved', 'gpipe']"
        )
    if schedule != "interleaved" and chunks > 1:
        raise ValueError(
            f"parallel.virtual_stages={chunks} needs parallel.pipeline_schedule=interleaved, got {schedule}"
        )
    if schedule == "interleaved" and stages > 1 and micro_batches % stages:
        fewer = micro_batches // stages * stages
        legal = [count for count in (fewer, fewer + stages) if count]
        rounds = max(1, micro_batches // stages)
        torch_does = "refuses them too"
        if micro_batches % rounds == 0:
            each = micro_batches // rounds
            torch_does = (
                f"would go through them in {rounds} round{'s' * (rounds > 1)} of {each}, another order"
            )
        raise ValueError(
            f"batch.accumulation={micro_batches} micro-batches must be a multiple of parallel.pipeline={stages} "
            f"with parallel.pipeline_schedule=interleaved, {' or '.join(map(str, legal))}: chunks take turns in groups "
            f"of as many as there are stages (torch.distributed.pipelining {torch_does})"
        )
    if chunks > 1 and stages == 1:
        raise ValueError(
            f"parallel.virtual_stages={chunks} needs parallel.pipeline > 1: one stage holds all layers anyway"
        )


@lru_cache(maxsize=64)
def _in_order(backward: bool, stages: int, chunks: int, total: int) -> tuple[Pass, ...]:
    """The passes of one direction: groups of `stages` micro-batches go through one chunk after the other."""
    order = []
    for k in range(total):
        chunk = k % (stages * chunks) // stages
        micro_batch = k // (stages * chunks) * stages + k % stages
        order.append(Pass(micro_batch, chunks - 1 - chunk if backward else chunk, backward))
    return tuple(order)
