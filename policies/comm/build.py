"""From a config to a policy object, with what depends on the cluster resolved and odd choices said."""

from typing import cast

from ...conf.schema import CommConf, GradientPath, HpzLifetime
from ..loading import load_named
from ..mesh import Mesh
from .policy import CommPolicy
from .zero import ZeroComm

# What engines ask of a policy (`policy.CommPolicy`)
_POLICY = ("name", "placement", "reshard_after_forward", "hpz_size", "copy_outlives_micro_batch", "decide")


def build_comm(conf: CommConf, *, num_ranks: int, ranks_per_node: int) -> tuple[CommPolicy, tuple[str, ...]]:
    """The policy that `conf` describes on this cluster, and warnings about keys without effect.

    Raises:
        ValueError: If sizes do not fit the world, naming both; or if `comm.policy` cannot be loaded.
    """
    if conf.policy:
        return _load_policy(conf.policy, num_ranks=num_ranks, ranks_per_node=ranks_per_node), ()
    warnings: list[str] = []
    hpz_size = conf.zero_hpz_partition_size
    if hpz_size is None:
        hpz_size = ranks_per_node
    Mesh(num_ranks, ranks_per_node, hpz_size)  # refuses sizes that do not divide
    if hpz_size > 1:
        if hpz_size == num_ranks:
            warnings.append(
                f"comm.zero_hpz_partition_size={hpz_size} has no effect: the group is the whole world of "
                f"{num_ranks} ranks, so the copy is cut as the weights are"
            )
            hpz_size = 1
        elif hpz_size > ranks_per_node:
            warnings.append(
                f"comm.zero_hpz_partition_size={hpz_size} spans nodes of {ranks_per_node} ranks: backward "
                f"gathers leave the node; use {ranks_per_node}"
            )
    path = conf.gradient_path if conf.zero_quantized_gradients else None
    if num_ranks == 1:
        path, hpz_size = None, 1
        warnings = []
    if path is not None and num_ranks == ranks_per_node:
        warnings.append(
            "comm.zero_quantized_gradients has no effect on one node: gradients are reduce-scattered "
            "unquantized, as DeepSpeed does"
        )
        path = None
    if num_ranks > 1 and (path is None or path is GradientPath.ring):
        why = "gradients are not quantized" if path is None else "a ring is not cut, and fuses at each hop"
        changed = {"gradient_chunks": conf.gradient_chunks != 1, "fused_kernels": not conf.fused_kernels}
        warnings += [
            f"comm.{key}={getattr(conf, key)} has no effect: {why}"
            for key, is_changed in changed.items()
            if is_changed
        ]
    return ZeroComm(
        name=conf.name,
        zero_stage=conf.zero_stage,
        parameter_server=conf.parameter_server,
        weight_bits=conf.weight_bits if conf.zero_quantized_weights else 0,
        weight_block=conf.weight_block,
        hpz_size=hpz_size,
        quantize_node_copy=bool(conf.quantize_node_copy),
        copy_outlives_micro_batch=conf.hpz_lifetime is HpzLifetime.step,
        gradient_path=path,
        gradient_bits=tuple(conf.gradient_bits),
        gradient_block=conf.gradient_block,
        gradient_chunks=conf.gradient_chunks,
        fused_kernels=conf.fused_kernels,
        ranks_per_node=ranks_per_node,
    ), tuple(warnings)


def _load_policy(name: str, *, num_ranks: int, ranks_per_node: int) -> CommPolicy:
    """`package.module:Class` or `path/to/file.py:Class`, called with num_ranks and ranks_per_node."""
    policy = load_named("comm.policy", name, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    lacking = [key for key in _POLICY if not hasattr(policy, key)]
    if lacking:
        raise ValueError(
            f"comm.policy={name!r} makes a {type(policy).__name__}, which is no policy: it lacks {lacking}"
        )
    return cast(CommPolicy, policy)
