"""From a config to what balances a rank."""

import os
from collections.abc import Callable

import torch

from ...conf.schema import ClusterConf, ExperimentConf
from ...policies.balance import BalancePolicy, BlockWork
from ..collectives import backend_of, build_collectives
from ..groups import Groups
from ..layout.pace import Rate
from ..ledger import Ledger
from ..wrap import WIRE_DTYPE
from .balanced import Balanced
from .balancer import Balancer
from .free_memory import free_bytes
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
    policy: BalancePolicy,
    *,
    groups: Groups,
    ledger: Ledger,
    rate: Rate,
    device: torch.device,
) -> Balancer:
    """Of this rank, before its model is laid out; `Balancer.balanced` is to be told of the model's blocks.

    Args:
        rate: With a stopwatch.

    Raises:
        ValueError: If units are to move in a way that is not carried out.
    """
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
        policy,
        stopwatch=rate.stopwatch,
        groups=groups,
        ledger=ledger,
        collectives=collectives,
        free_bytes=lambda: free_bytes(
            device, device_bytes=cluster.device.memory_bytes, ranks_here=ranks_here
        ),
        device=device,
    )
