"""Uneven shares of work that does not move between ranks of a tensor group: sequences of micro-batches over replicas of
the model, blocks over the stages of a pipeline. What their policies are told, and what they answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicasMeasured:
    """A period has ended.

    Args:
        step: Optimizer steps that are done.
        compute_ns: [replicas], computation of one step, mean over the period, waiting left out: `replica_ns`.
        room: [replicas], by how many sequences each could take more of every micro-batch: of its ranks' free memory.
    """

    step: int
    compute_ns: tuple[int, ...]
    room: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagesMeasured:
    """Before the model is built each rank has timed parts of it: forward and backward of one micro-batch.

    Args:
        block_ns: [stages], of one block, of each stage's slowest rank.
        ends_ns: What the first stage computes before the blocks, and the last behind them.
    """

    block_ns: tuple[int, ...]
    ends_ns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ShareSequences:
    """From the next step on the i-th replica takes `counts[i]` sequences of each micro-batch."""

    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShareBlocks:
    """The i-th stage holds `counts[i]` blocks, from the first step to the last."""

    counts: tuple[int, ...]


def replica_ns(stages_ns: Sequence[int], micro_batches: int) -> int:
    """How long a replica computes a step: all micro-batches in its slowest stage, and one in all the others, where a
    pipeline fills and drains.

    Args:
        stages_ns: What the slowest rank of each stage computed of the step.
    """
    slowest = max(stages_ns)
    return slowest + (sum(stages_ns) - slowest) // micro_batches
