"""The shards of FSDP2's units in regions, brought in around each gather.

A unit's shard is read when the unit is gathered and at no other time, so it may be away in between. FSDP2 has no
hook before that read (its all-gather hooks come after it), so the two methods of a unit's parameter group in which
it reads are wrapped, on that object alone.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .header import Layout, lay_out
from .region import Region

# A `with` block in which the named unit's shard is near
Near = Callable[[str], AbstractContextManager[object]]


def shard_layout(module: FSDPModule) -> Layout:
    """This rank's shards of one unit, each flat and padded as FSDP2 sends it, by the parameter's name."""
    return lay_out(
        {
            name: (p._sharded_param_data.dtype, (p._sharded_param_data.numel(),))
            for name, p in _named(module).items()
        }
    )


def unit_parameters(module: FSDPModule) -> dict[str, nn.Parameter]:
    """What the optimizer steps of one unit, by name, in FSDP2's order."""
    return {name: p.sharded_param for name, p in _named(module).items()}


@torch.no_grad()
def move_in(module: FSDPModule, region: Region, *, copy: bool) -> None:
    """Let a unit's shards be the region's tensors, and free what they were.

    Args:
        module: Before its first forward.
        region: Of `shard_layout`.
        copy: Fill the region with the shards as they are.
    """
    for name, p in _named(module).items():
        flat = region.tensors[name]
        if copy:
            flat.copy_(p._sharded_param_data)
        local = p.sharded_param._local_tensor
        dim, length = p.fsdp_placement.dim, local.size(p.fsdp_placement.dim) if local.numel() else 0
        p._sharded_param_data = flat
        # What FSDP2's own reset_sharded_param does after a load that assigns
        p.sharded_param._local_tensor = flat.view(p.padded_sharded_param_size).narrow(dim, 0, length)


def watch_gathers(units: Mapping[str, FSDPModule], near: Near, *, reads_shard: Callable[[str], bool]) -> None:
    """Have `near` around the time in which each unit's shard is read by a gather.

    Args:
        near: A `with` block in which the named unit's shard is near.
        reads_shard: Asked once before each gather over several ranks: whether it reads the shard at all.
    """
    for name, module in units.items():
        for group in module._get_fsdp_state()._fsdp_param_groups:
            _wrap(group, name, near, reads_shard)


def _wrap(group: Any, name: str, near: Near, reads_shard: Callable[[str], bool]) -> None:
    unshard, wait = group.unshard, group.wait_for_unshard

    def unshard_near(async_op: bool = False) -> None:
        idle = group._all_gather_result is not None or group.is_unsharded  # FSDP2 will not gather
        if _alone(group) or idle or not reads_shard(name):
            unshard(async_op)
            return
        with near(name):
            unshard(async_op)

    def wait_near() -> None:
        if not _alone(group) or group._all_gather_result is None:
            wait()
            return
        with near(name):  # a rank alone copies its shard here
            wait()

    group.unshard, group.wait_for_unshard = unshard_near, wait_near


def _alone(group: Any) -> bool:
    return bool(group._all_gather_process_group.size() == 1)


def _named(module: FSDPModule) -> dict[str, Any]:
    """FSDP2's parameters of one unit, not of those within it, by qualified name."""
    assert isinstance(module, nn.Module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(p.sharded_param)]: p
        for group in module._get_fsdp_state()._fsdp_param_groups
        for p in group.fsdp_params
    }
