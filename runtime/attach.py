"""A policy for a model that is already under `fully_shard`, in the user's own loop."""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..conf.schema import CommConf
from ..policies.comm import CommPolicy, Placement, build_comm
from ..policies.mesh import Mesh
from .ledger import Ledger
from .named_comm import local_world_size, named_comm
from .sharded import ROOT, ShardedHooks
from .wrap import build_interpreter


@dataclass(frozen=True, slots=True)
class Attached:
    """A policy at work in a model."""

    policy: CommPolicy
    mesh: Mesh
    ledger: Ledger
    warnings: tuple[str, ...]  # keys of `comm` that have no effect on this cluster
    _hooks: ShardedHooks

    def weights_changed(self) -> None:
        """Say that weights were changed by hand (an average, a manual copy).

        Optimizer steps and load_state_dict are noticed without it.
        """
        self._hooks.weights_changed()

    def begin_micro_batch(self, index: int, count: int) -> None:
        """Before the forward of micro-batch `index` of `count`, where a step has several.

        Needed only for a policy that does not reduce each of them (zero1), and for the log of decisions.
        """
        self._hooks.begin_micro_batch(index, count)

    @property
    def secondary_bytes(self) -> int:
        """What this rank holds of hpZ's copies."""
        return self._hooks.secondary_bytes


def attach(
    model: nn.Module,
    comm: CommConf | CommPolicy | str,
    *,
    mesh: Mesh | None = None,
    ranks_per_node: int | None = None,
) -> Attached:
    """Let `comm` decide how the weights and gradients of `model` move.

    Call it after `fully_shard`, on all ranks, before the first forward; then train as before. Every FSDP
    module becomes a unit; all are resharded after forward as the policy says, the root too. Optimizer steps
    and load_state_dict are noticed; anything else that changes weights must be followed by `weights_changed`.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        attached = twinbed.runtime.attach(model, "zeropp")

    Args:
        model: Sharded over the whole world, with the outermost `fully_shard` on itself.
        comm: A name (`zero3`, `qwz`, `hpz`, `qgz`, `zeropp`, ...), a CommConf, or a policy object of your own.
        mesh: How ranks lie on nodes; it must agree with the policy's hpZ size.
        ranks_per_node: In place of `mesh`; by default LOCAL_WORLD_SIZE, as torchrun sets it.

    Keys of `comm` that have no effect on this cluster are warned of, and kept in `Attached.warnings`.

    Raises:
        ValueError: If `model` is not under `fully_shard`, `comm` does not shard, or sizes do not fit.
    """
    units = fsdp_units(model)
    if mesh is not None:
        ranks_per_node = mesh.ranks_per_node
    elif ranks_per_node is None:
        ranks_per_node = _ranks_per_node()
    policy, told = _policy(comm, ranks_per_node)
    for message in told:
        warnings.warn(message, stacklevel=2)
    if policy.placement is not Placement.sharded:
        raise ValueError(
            f"comm={policy.name!r} keeps whole weights on every rank, but the model is sharded; use zero1, "
            "zero2, zero3 or a policy of ZeRO++"
        )
    if mesh is None:
        mesh = Mesh(dist.get_world_size(), ranks_per_node, policy.hpz_size)
    elif policy.hpz_size > 1 and mesh.hpz_size != policy.hpz_size:
        raise ValueError(
            f"mesh.hpz_size={mesh.hpz_size}, but {policy.name!r} keeps copies over {policy.hpz_size} "
            "ranks; make them equal"
        )
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    device = next(model.parameters()).device
    interpreter = build_interpreter(mesh, ledger, device=torch.device(device.type))
    units[ROOT].set_reshard_after_forward(policy.reshard_after_forward)
    hooks = ShardedHooks(units, policy=policy, interpreter=interpreter, counts_steps=True)
    ledger.at(iteration=0, phase="forward")
    return Attached(policy, mesh, ledger, told, hooks)


def fsdp_units(model: nn.Module) -> dict[str, FSDPModule]:
    """All FSDP modules by their names in `model`, which is "root".

    Raises:
        ValueError: If `model` itself is none.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"{type(model).__name__} is not under fully_shard; call fully_shard on its blocks, then on itself"
        )
    return {name or ROOT: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def _policy(comm: CommConf | CommPolicy | str, ranks_per_node: int) -> tuple[CommPolicy, tuple[str, ...]]:
    if isinstance(comm, str):
        comm = named_comm(comm)
    if not isinstance(comm, CommConf):
        lacking = [key for key in ("name", "placement", "hpz_size", "decide") if not hasattr(comm, key)]
        if lacking:
            raise ValueError(
                f"comm={comm!r} is no policy; give the name of one, such as 'zeropp' or 'zero3', a CommConf, or an "
                f"object with {lacking} (policies.comm.CommPolicy)"
            )
        return comm, ()
    if comm.overlap:
        raise ValueError(
            "comm.overlap=true: a loop of your own reads gradients before a queued reduction has ended; "
            "leave it false (NCCL overlaps by itself)"
        )
    return build_comm(comm, num_ranks=dist.get_world_size(), ranks_per_node=ranks_per_node)


def _ranks_per_node() -> int:
    value = local_world_size()
    if value is None:
        raise ValueError(
            "ranks_per_node is not given, and LOCAL_WORLD_SIZE is not set (torchrun sets it): say how many "
            "ranks share a node"
        )
    return value
