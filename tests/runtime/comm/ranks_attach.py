"""Runs on each rank for test_attach.py: loops that know nothing of the package but `attach`."""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import twinbed.runtime
from twinbed.conf.schema import CommConf

from common import VOCAB, Tiny, batch
from ranks_run import run_cases


def own_loop() -> dict[str, Any]:
    """Losses of a loop with evaluations and weights loaded midway, plain and attached."""
    found: dict[str, Any] = {}
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    comms: dict[str, Any] = {
        "plain": None,
        "zero3": "zero3",
        "hpz": CommConf(name="hpz", zero_hpz_partition_size=2),
        "zeropp": "zeropp",
    }
    for name, comm in comms.items():
        model = Tiny()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        attached = None if comm is None else twinbed.runtime.attach(model, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for step in range(4):
            loss = model(batch(step=step, micro_batch=0, rank=dist.get_rank()))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                losses.append(float(model(batch(step=step, micro_batch=9, rank=0))))
            if step == 1:
                state = {key: value * 0.5 for key, value in model.state_dict().items()}
                model.load_state_dict(state)
        found[name] = losses
        if attached is not None:
            rows = attached.ledger.rows
            found[f"{name} rows"] = [
                (row.iteration, row.phase, row.layer, row.op, row.axis) for row in rows if row.iteration < 2
            ]
            found[f"{name} copy"] = attached.secondary_bytes
    return found


def two_models() -> dict[str, Any]:
    """Rows of two models that are trained in turns, and of the same ones each alone."""
    found: dict[str, Any] = {}
    for which in ("both", "a", "b"):
        loops = {}
        for name, comm in (("a", "zero3"), ("b", "zeropp")):
            if which not in ("both", name):
                continue
            model = Tiny(blocks=2 if name == "a" else 3)
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            attached = twinbed.runtime.attach(model, comm, ranks_per_node=1)
            loops[name] = (model, attached, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            for model, _, optimizer in loops.values():
                model(batch(step=step, micro_batch=0, rank=dist.get_rank())).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        for name, (_, attached, _) in loops.items():
            found[f"{name} in {which}"] = attached.ledger.rows
    return found


def hugging_face() -> dict[str, Any]:
    """First and last loss of a GPT-2 made from a config, and the units that were found."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    model.config.use_cache = False
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        attached = twinbed.runtime.attach(model, "zeropp", ranks_per_node=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens: Tensor = batch(step=0, micro_batch=0, rank=0)[None]
    losses = []
    for _ in range(12):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "units": sorted({row.layer for row in attached.ledger.rows}),
        "iterations": attached.ledger.rows[-1].iteration,
        "warnings": attached.warnings,
        "warned": [str(warning.message) for warning in warned],
    }


def refusals() -> list[str]:
    """What attach says to what it cannot serve."""
    said = []
    sharded = Tiny()
    fully_shard(sharded)
    tries: list[tuple[nn.Module, Any]] = [
        (Tiny(), "zero3"),
        (sharded, "zero4"),
        (sharded, "ddp"),
        (sharded, CommConf(name="zero3", overlap=True)),
        (sharded, None),
    ]
    for model, comm in tries:
        try:
            twinbed.runtime.attach(model, comm, ranks_per_node=1)
        except ValueError as err:
            said.append(str(err))
    try:
        twinbed.runtime.attach(sharded, "zero3")
    except ValueError as err:
        said.append(str(err))
    return said


if __name__ == "__main__":
    run_cases(
        {"own_loop": own_loop, "two_models": two_models, "hugging_face": hugging_face, "refusals": refusals}
    )
