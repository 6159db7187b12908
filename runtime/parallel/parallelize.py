"""From a model of one process and a few keys to a parallel one."""

import atexit
import copy
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...conf.schema import CommConf
from ...policies.comm import CommPolicy, build_comm
from ...policies.layout import ParallelLayout, build_parallel
from ...policies.mesh import PIPELINE, Dims, Mesh
from ..collectives import backend_of, build_collectives
from ..dispatch import activate
from ..groups import Groups
from ..interpreter import Interpreter
from ..layout import lay_out
from ..layout.stages import keep_part
from ..ledger import Ledger
from ..named_comm import local_world_size
from ..stack import Stack
from .callers import Caller, OwnCaller, SizedInside
from .config import ScriptConf, read_config
from .model import ParallelModel, Part
from .replicas import join_replicas

_FAREWELL_S = 2.0


def parallelize(module: nn.Module, config: Mapping[str, Any] | str | Path) -> ParallelModel:
    """Share a model out over the ranks that torchrun started.

    The script goes on as if it were one process: it gives the whole batch to every rank, and gets the loss of the whole
    batch; gradients are those of that loss, and an optimizer over `model.parameters()`, made afterwards, steps each
    rank's part.

        model = twinbed.runtime.parallelize(model, "tensor=4 tensor_mode=2d")

    With parallel.pipeline > 1 `loss = model.forward_backward(...)` stands for the lines of forward and backward.

    Where labels of -100 lie unequally over replicas, the loss is still the mean over all labels of the batch, and not a
    mean of means (`batch.share_of`).

    Args:
        module: Of twinbed's own (`runtime.stack.build_model`), or transformers' GPT2LMHeadModel, LlamaForCausalLM or
            Qwen2ForCausalLM. It is changed, and must not be used any more. Rank 0's weights count.
        config: See `config.read_config`: "parallel.tensor=4 comm=zero3", a mapping, or a YAML file's path.

    Started by torchrun, the process group is initialised, unless it is already: gloo for a model on CPUs, NCCL for
    one on a GPU. LOCAL_WORLD_SIZE says how many ranks a node has. Without torchrun there is one rank.

    Raises:
        ValueError: If a key, the layout, or something in the module is not legal or not built, by name; before any
            communication.
    """
    conf = read_config(config)
    copies = [copy.deepcopy(module) for _ in range(conf.parallel.virtual_stages - 1)]
    stack, caller = _understood(module, conf)
    num_ranks, ranks_per_node = _world()
    layout = _layout(conf, stack, num_ranks)
    mesh, policy, told = _policy(conf, num_ranks, ranks_per_node, layout.dims)
    for message in told:
        warnings.warn(message, stacklevel=2)
    first = next(stack.parameters())
    device, dtype = first.device, first.dtype
    _join(device)
    groups = Groups(mesh)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    collectives = build_collectives(backend_of(device))
    interpreter = Interpreter(groups.of_replicas(), ledger, collectives)
    micro, sequence = _fitting(conf)
    stage = mesh.index(PIPELINE, groups.rank)
    parts = []
    for chunk, whole in enumerate([stack, *(_understood(each, conf)[0] for each in copies)]):
        with ledger.set_up():
            _same_weights(whole)
        if layout.stages > 1:
            keep_part(whole, layout, stage=stage, chunk=chunk)
        laid = lay_out(
            whole,
            layout,
            groups=groups,
            ledger=ledger,
            collectives=collectives,
            micro=micro,
            sequence=sequence,
            stage=stage,
            chunk=chunk,
        )
        if isinstance(whole, SizedInside):
            whole.laid_out(layout, mesh)
        replicas = join_replicas(
            whole,
            whole.units(),
            mesh=mesh,
            groups=groups,
            policy=policy,
            interpreter=interpreter,
            device=device,
        )
        parts.append(Part(chunk, whole, laid, replicas))
    ledger.at(iteration=0, phase="forward")
    given: dict[str, Any] = {
        "caller": caller,
        "conf": conf.parallel,
        "layout": layout,
        "groups": groups,
        "ledger": ledger,
        "warnings": told,
    }
    if layout.stages == 1:
        return ParallelModel(parts, **given)
    from .pipelined import PipelinedModel  # torch.distributed.pipelining

    return PipelinedModel(parts, **given, placement=policy.placement, device=device, dtype=dtype)


def _understood(module: nn.Module, conf: ScriptConf) -> tuple[Stack, Caller]:
    if isinstance(module, Stack):
        return module, OwnCaller(module)
    from ..foreign import adapt

    adapted = adapt(module, seed=conf.seed)
    return adapted, adapted


def _world() -> tuple[int, int]:
    """(ranks, ranks of a node)."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    here = local_world_size()
    if here is None and world > 1:
        raise ValueError(
            f"{world} ranks, and LOCAL_WORLD_SIZE is not set (torchrun sets it): it says how many share a node"
        )
    return world, here or 1


def _fitting(conf: ScriptConf) -> tuple[int, int]:
    """Sequences of a replica, and tokens, that any layout divides: those of batches come with the batches."""
    parallel = conf.parallel
    return parallel.tensor, 2 * parallel.sequence * parallel.tensor


def _layout(conf: ScriptConf, stack: Stack, num_ranks: int) -> ParallelLayout:
    micro, sequence = _fitting(conf)
    return build_parallel(
        conf.parallel,
        stack.spec,
        num_ranks=num_ranks,
        micro=micro,
        micro_batches=conf.accumulation,
        sequence=sequence,
    )


def _policy(
    conf: ScriptConf, num_ranks: int, ranks_per_node: int, dims: Dims
) -> tuple[Mesh, CommPolicy, tuple[str, ...]]:
    """The policy among the ranks that hold the same part of the model, and the mesh with its groups."""
    comm: CommConf = conf.comm
    if comm.overlap:
        raise ValueError(
            "comm.overlap=true: a loop of your own reads gradients before a queued reduction has ended; leave it "
            "false (NCCL overlaps by itself)"
        )
    among = Mesh(num_ranks, ranks_per_node, dims=dims).of_replicas()
    policy, told = build_comm(comm, num_ranks=among.num_ranks, ranks_per_node=among.ranks_per_node)
    if among.num_ranks == 1 and conf.comm_given:
        told = (f"comm={comm.name} has no effect: no two ranks hold the same part of the model",)
    return Mesh(num_ranks, ranks_per_node, policy.hpz_size, dims), policy, told


def _join(device: torch.device) -> None:
    """The default process group, if there is none; it ends with the script."""
    if dist.is_initialized():
        return
    atexit.register(_leave)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _leave() -> None:
    """Before the interpreter ends: a thread of gloo that lets go of its last tensor later aborts the process."""
    failed = hasattr(sys, "last_value")  # what is under way with a rank that is gone would be waited for
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
        _wait_for_threads()


def _wait_for_threads() -> None:
    """Until none of them runs; a model that the script still has keeps them from being joined."""
    idle = 0
    until = time.monotonic() + _FAREWELL_S
    while idle < 2 and time.monotonic() < until:
        time.sleep(0.005)  # without the interpreter's lock, which they may be waiting for
        idle = 0 if any(_runs(task) for task in Path("/proc/self/task").glob("*")) else idle + 1


def _runs(task: Path) -> bool:
    if int(task.name) == threading.get_native_id():
        return False
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False


@torch.no_grad()
def _same_weights(stack: nn.Module) -> None:
    """Rank 0's, so that a script needs no seed."""
    if dist.get_world_size() == 1:
        return
    for tensor in (*stack.parameters(), *stack.buffers()):
        dist.broadcast(tensor.detach(), 0)
