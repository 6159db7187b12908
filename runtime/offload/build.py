"""From a config to the training whose states lie on disk."""

from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf, OffloadKind
from ..ledger import Ledger
from ..sharded_engine import ShardedEngine
from ..wrap import CommEngine
from .disk import DiskOffload

FOLDER: Final = "offload"  # in the run's own folder, where offload.path does not say


def build_disk_offload(
    experiment: ExperimentConf,
    spec: ModelSpec,
    *,
    engine: CommEngine,
    optimizer: torch.optim.Optimizer | None,
    ledger: Ledger,
    folder: Path | None,
    rank: int,
) -> DiskOffload | None:
    """Of this rank, over an engine that has sharded weights; None: nothing lies on disk.

    Args:
        folder: Of the run; None: it has none.
        rank: Whose files it has.

    Raises:
        ValueError: The run has no folder, and offload.path is not given.
    """
    conf = experiment.offload
    if conf.name != "disk":
        return None
    assert isinstance(engine, ShardedEngine), "conf.offload_check lets sharded weights through only"
    assert optimizer is not None
    if conf.path is not None:
        where = Path(conf.path)
    elif folder is not None:
        where = folder / FOLDER
    else:
        raise ValueError("offload.path must be given: this training has no folder of its own")
    offload = DiskOffload(
        conf,
        units=engine.units,
        optimizer=optimizer,
        ledger=ledger,
        folder=where / f"rank_{rank}",
        identity={
            "model": asdict(spec),
            "optimizer": experiment.optimizer.name,
            **{key: getattr(experiment.batch, key) for key in ("micro", "accumulation", "sequence")},
            "data": experiment.data.name,
            "precision": experiment.precision.value,
            "seed": experiment.seed,
            "num_ranks": experiment.cluster.num_ranks,
            "rank": rank,
        },
        reads_shard=engine.reads_shard,
        memory_bytes=experiment.cluster.device.memory_bytes if conf.policy is OffloadKind.auto else None,
    )
    engine.look_with(offload.unit_near)
    return offload
