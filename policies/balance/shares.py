"""Uneven shares of work that does not move between ranks of a tensor group: sequences of micro-batches over replicas of
the model, blocks over the stages of a pipeline. What their policies are told, what they answer, and the best split.
"""

import heapq
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


def taken_for_equal(speeds_ns: Sequence[float], slack: float) -> list[float]:
    """Times of one unit of work, of which those that differ by at most `slack` are replaced by their mean: groups begin
    with the fastest that is left.
    """
    order = sorted(range(len(speeds_ns)), key=lambda i: (speeds_ns[i], i))
    found = list(speeds_ns)
    while order:
        first = speeds_ns[order[0]]
        group = [i for i in order if speeds_ns[i] <= (1 + slack) * first]
        mean = sum(speeds_ns[i] for i in group) / len(group)
        for i in group:
            found[i] = mean
        order = order[len(group) :]
    return found


def best_split(
    total: int, each_ns: Sequence[float], *, most: Sequence[int] | None = None, ends_ns: Sequence[float] = ()
) -> tuple[int, ...]:
    """Whole shares of `total`, at least one each, whose slowest ends first.

    Units are given out one by one, each to whom it lets end first (ties: the lowest number). That is the optimum: the
    ends of all units that a taker could get are in ascending order, and the split takes the smallest of all.

    Args:
        each_ns: [takers], of one unit.
        most: [takers], that each can take; None: all.
        ends_ns: [takers], that each needs beside; (): none does.

    Raises:
        ValueError: If they cannot take so many, or there are fewer units than takers.
    """
    takers = len(each_ns)
    limits = [total] * takers if most is None else list(most)
    if total < takers or sum(limits) < total or min(limits) < 1:
        raise ValueError(f"{total} units over {takers} that can take {limits}, at least one each")
    beside = list(ends_ns) or [0.0] * takers
    counts = [1] * takers
    waiting = [(2 * each_ns[i] + beside[i], i) for i in range(takers) if limits[i] > 1]
    heapq.heapify(waiting)
    for _ in range(total - takers):
        _, i = heapq.heappop(waiting)
        counts[i] += 1
        if counts[i] < limits[i]:
            heapq.heappush(waiting, ((counts[i] + 1) * each_ns[i] + beside[i], i))
    return tuple(counts)
