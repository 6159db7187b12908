"""How many blocks each stage of a pipeline gets, by how long parts of the model take there; asked before the model is
built.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf, Recompute
from ...policies.balance import (
    BalanceAction,
    BalancePolicy,
    ShareBlocks,
    StagesMeasured,
)
from ...policies.balance.build import build_shares
from ...policies.layout import ParallelLayout
from ...policies.mesh import PIPELINE
from ..collectives import backend_of, build_collectives
from ..dispatch import activate
from ..feed import Feed
from ..groups import Groups
from ..layout.layout import lay_out
from ..layout.pace import Rate
from ..ledger import Ledger
from ..stack import Stack, build_model
from ..wrap import WIRE_DTYPE
from .build import build_rate
from .straggle import Straggler

_WARMUP, _REPEATS = 1, 3


@dataclass(frozen=True, slots=True)
class StageSplit:
    """What a policy was told of the stages, and what it answered.

    Attributes:
        experiment: With the numbers of blocks that the answer says.
    """

    experiment: ExperimentConf
    event: StagesMeasured
    answer: tuple[BalanceAction, ...] | None


def split_stages(
    experiment: ExperimentConf,
    spec: ModelSpec,
    layout: ParallelLayout | None,
    *,
    groups: Groups,
    device: torch.device,
    feed: Feed,
    straggler: Straggler | None,
    synchronize: Callable[[], None] | None,
) -> StageSplit | None:
    """With balance=layers, of stages whose numbers of blocks are not given; None: there are none. To be called on all
    ranks.

    Args:
        layout: Whatever its split.
        feed: Whose first micro-batch is measured.
        straggler: Makes this rank slow.
        synchronize: Waits for the device, where work runs asynchronously.

    Raises:
        ValueError: The policy answers what is no split.
    """
    if layout is None or experiment.balance.name != "layers" or experiment.parallel.stage_layers:
        return None
    policy = build_shares(experiment, spec)
    assert policy is not None
    if straggler is not None:
        straggler.measuring_begins()
    event = measure_stages(
        experiment,
        spec,
        layout,
        groups=groups,
        device=device,
        batch=feed.train(0, 0),
        rate=build_rate(
            experiment.cluster, straggler, device=device, measured=False, synchronize=synchronize
        ),
    )
    return with_split(experiment, policy, event)


def measure_stages(
    experiment: ExperimentConf,
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    groups: Groups,
    device: torch.device,
    batch: tuple[Tensor, Tensor],
    rate: Rate | None,
) -> StagesMeasured:
    """Time forward and backward of one block and of both ends of the model, on all ranks at once; each stage's slowest
    rank counts. All of it is set-up. To be called on all ranks.

    A tensor group's collectives within a block are part of its time, as of the block's in a step.

    Args:
        layout: Whatever its split.
        batch: Inputs and targets of one micro-batch.
        rate: As of `lay_out`.
    """
    ledger = Ledger(rank=groups.rank, mesh=groups.mesh)  # whose rows nobody reads
    activate(ledger)
    model = build_model(
        replace(spec, layers=1),
        seed=experiment.seed,
        recompute=experiment.recompute is Recompute.full,
        dropout=experiment.train.dropout,
    ).to(device)
    whole = replace(layout, stages=1, chunks=1, num_layers=1, stage_layers=())
    lay_out(
        model,
        whole,
        groups=groups,
        ledger=ledger,
        collectives=build_collectives(backend_of(device)),
        micro=experiment.batch.micro,
        sequence=experiment.batch.sequence or spec.sequence,
        rate=rate,
    )
    model.to(WIRE_DTYPE[experiment.precision])
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    dist.barrier()
    runs = [_time_parts(model, *batch, wait) for _ in range(_WARMUP + _REPEATS)][_WARMUP:]
    own = torch.tensor([round(median(part)) for part in zip(*runs, strict=True)], device=device)
    found = own.new_empty(groups.mesh.num_ranks * own.numel())
    dist.all_gather_single(found, own)
    stage_of = [groups.mesh.index(PIPELINE, rank) for rank in range(groups.mesh.num_ranks)]
    slowest = [[0, 0, 0] for _ in range(layout.stages)]
    for stage, times in zip(stage_of, found.view(-1, 3).tolist(), strict=True):
        slowest[stage] = [max(pair) for pair in zip(slowest[stage], times, strict=True)]
    return StagesMeasured(tuple(block for _, block, _ in slowest), (slowest[0][0], slowest[-1][2]))


def with_split(experiment: ExperimentConf, policy: BalancePolicy, event: StagesMeasured) -> StageSplit:
    """What the policy makes of it."""
    answer = policy.decide(event)
    for action in answer or ():
        if not isinstance(action, ShareBlocks):
            raise ValueError(f"balancing policy {policy.name!r} answers {action}: must be ShareBlocks")
        parallel = replace(experiment.parallel, stage_layers=list(action.counts))
        experiment = replace(experiment, parallel=parallel)
    return StageSplit(experiment, event, answer)


def _time_parts(
    model: Stack, inputs: Tensor, targets: Tensor, wait: Callable[[], None]
) -> tuple[int, int, int]:
    """Nanoseconds of what lies before the blocks, of a block and of what lies behind them, forward and backward."""
    times = [_now(wait)]
    embedded = model.before_blocks(inputs)
    times.append(_now(wait))
    into_block = embedded.detach().requires_grad_()
    passed = model.through_blocks(into_block)
    times.append(_now(wait))
    into_head = passed.detach().requires_grad_()
    loss = model.behind_blocks(into_head, targets)
    times.append(_now(wait))
    loss.backward()  # type: ignore[no-untyped-call]
    times.append(_now(wait))
    assert into_head.grad is not None
    passed.backward(into_head.grad)  # type: ignore[no-untyped-call]
    times.append(_now(wait))
    assert into_block.grad is not None
    embedded.backward(into_block.grad)  # type: ignore[no-untyped-call]
    times.append(_now(wait))
    model.zero_grad()
    laps = [end - start for start, end in itertools.pairwise(times)]
    return laps[0] + laps[5], laps[1] + laps[4], laps[2] + laps[3]


def _now(wait: Callable[[], None]) -> int:
    wait()
    return time.monotonic_ns()


def _nothing() -> None:
    """A CPU does what it is told at once."""
