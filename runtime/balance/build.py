"""From a config to what balances a rank: its tensor group, or its replica's share of sequences."""

import os
from collections.abc import Callable

import torch

from ...conf.model_spec import ModelSpec
from ...conf.schema import ClusterConf, ExperimentConf, Launch
from ...policies.balance import BalancePolicy, BlockWork
from ...policies.balance.build import build_balance, build_shares
from ..collectives import backend_of, build_collectives
from ..groups import Groups
from ..held import HeldMemory
from ..laps import Laps
from ..layout.pace import Rate
from ..ledger import Ledger
from ..wrap import WIRE_DTYPE
from .balanced import Balanced
from .balancer import Balancer
from .batch import SequenceShares
from .free_memory import free_bytes
from .room import Room
from .stopwatch import Stopwatch
from .straggle import Straggler


def build_rate(
    cluster: ClusterConf,
    straggler: Straggler | None,
    *,
    device: torch.device,
    measured: bool,
    synchronize: Callable[[], None] | None,
) -> Rate | None:
    """How long the products of a layout take on this rank; None: as long as they take, and nobody asks.

    Args:
        measured: Products are timed.
    """
    if cluster.emulated_flops_per_s is None and straggler is None and not measured:
        return None
    return Rate(
        cluster.emulated_flops_per_s,
        straggler=straggler,
        stopwatch=Stopwatch(device) if measured else None,
        synchronize=synchronize,
    )


def build_balancer(
    experiment: ExperimentConf,
    work: BlockWork,
    *,
    policy: BalancePolicy | None,
    groups: Groups,
    ledger: Ledger,
    rate: Rate | None,
    device: torch.device,
) -> Balancer:
    """Of this rank, before its model is laid out; `Balancer.balanced` is to be told of the model's blocks.

    Args:
        policy: None: the one that the experiment describes.
        rate: With a stopwatch.
    """
    assert rate is not None, "products that are balanced are timed"
    assert rate.stopwatch is not None, "products are timed where they are balanced"
    cluster = experiment.cluster
    collectives = build_collectives(backend_of(device))
    balanced = Balanced(
        experiment.balance,
        work,
        groups=groups,
        ledger=ledger,
        collectives=collectives,
        dtype=WIRE_DTYPE[experiment.precision],
        seed=experiment.seed,
        rate=rate,
    )
    ranks_here = cluster.num_ranks if "TWINBED_LAUNCHER_PID" in os.environ else cluster.devices_per_node
    return Balancer(
        balanced,
        policy or build_balance(experiment.balance, work),
        stopwatch=rate.stopwatch,
        groups=groups,
        ledger=ledger,
        collectives=collectives,
        free_bytes=lambda: free_bytes(
            device, device_bytes=cluster.device.memory_bytes, ranks_here=ranks_here
        ),
        device=device,
    )


def build_sequence_shares(
    experiment: ExperimentConf,
    spec: ModelSpec,
    *,
    groups: Groups,
    ledger: Ledger,
    laps: Laps,
    held: HeldMemory,
    ranks_per_node: int,
    device: torch.device,
) -> SequenceShares | None:
    """Of this rank's replica with balance=batch; None: all replicas have as many.

    Args:
        laps: Of whole steps.
    """
    if experiment.balance.name != "batch":
        return None
    policy = build_shares(experiment, spec)
    assert policy is not None
    ranks_here: int | None = None
    if device.type == "cpu":
        ranks_here = groups.mesh.num_ranks if experiment.launch is Launch.local else ranks_per_node
    batch = experiment.batch
    room = Room(
        held,
        micro=batch.micro,
        device_bytes=int(experiment.cluster.device_of(groups.world_rank).memory_bytes),
        ranks_here=ranks_here,
    )
    return SequenceShares(
        policy,
        groups=groups,
        ledger=ledger,
        laps=laps,
        device=device,
        period=experiment.balance.period,
        micro=batch.micro,
        micro_batches=batch.accumulation,
        room=room,
    )
