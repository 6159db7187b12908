"""Weights, gradients and optimizer states in the host's memory, by FSDP2's own offload."""

from torch.distributed.fsdp import CPUOffloadPolicy

from ...conf.schema import OffloadConf


def host_memory(conf: OffloadConf) -> CPUOffloadPolicy | None:
    """What `fully_shard` is given with offload=cpu; None else.

    The optimizer is given the shards that lie there, so its states do too, and the host's cores step them.
    """
    return CPUOffloadPolicy(pin_memory=conf.pinned) if conf.name == "cpu" else None
