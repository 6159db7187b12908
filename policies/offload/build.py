"""From a config to a policy object."""

from collections.abc import Sequence
from math import inf

from ...conf.schema.offload import OffloadConf, OffloadKind
from .pager import AutoOffload, StaticOffload
from .policy import Chunk, OffloadPolicy


def build_offload(
    conf: OffloadConf, chunks: Sequence[Chunk], *, memory_bytes: float | None = None
) -> OffloadPolicy | None:
    """The policy that `conf` describes; None with offload=none.

    Args:
        chunks: All of one rank, in the order of the model.
        memory_bytes: Near memory of one rank where `offload.memory_bytes` does not say; None: without limit.

    Raises:
        ValueError: If what always lies near, and the largest other chunk, do not fit.
    """
    if not conf.active:
        return None
    memory = conf.memory_bytes if conf.memory_bytes is not None else memory_bytes
    if conf.policy is OffloadKind.auto:
        return AutoOffload(conf, chunks, memory_bytes=inf if memory is None else memory)
    return StaticOffload(conf, chunks, memory_bytes=inf if memory is None else memory)
