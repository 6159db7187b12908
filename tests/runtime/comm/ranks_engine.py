"""Runs on each rank for test_engine.py."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # scripts of this folder share common.py
from common import (
    Tiny,
    engine_of,
    main,
    optimize,
    policy_of,
    reference_gradients,
    relative_error,
    sgd,
    train_step,
)

RANKS_PER_NODE = 2


def gradients() -> dict[str, float]:
    """The worst relative error of any parameter, over two steps, for each policy and setting."""
    world = dist.get_world_size()
    worst: dict[str, float] = {}
    settings = [
        (name, micro_batches, overlap)
        for name in ("ddp", "ps", "zero1", "zero2", "zero3", "hpz", "hpz_step")
        for micro_batches in (1, 3)
        for overlap in (False, True)
        if not (overlap and micro_batches > 1 and name not in ("ddp", "ps", "zero1"))
    ]
    for name, micro_batches, overlap in settings:
        policy = policy_of(name, world=world, ranks_per_node=RANKS_PER_NODE)
        engine, ledger = engine_of(
            policy, ranks_per_node=RANKS_PER_NODE, overlap=overlap, micro_batches=micro_batches
        )
        optimizer = sgd(engine)
        single = Tiny()
        stepper = torch.optim.SGD(single.parameters(), lr=0.1)
        errors = [0.0]
        for step in range(2):
            train_step(engine, ledger, step=step, micro_batches=micro_batches)
            want = reference_gradients(single, step=step, micro_batches=micro_batches, world=world)
            got = engine.full_gradients()
            owner = name != "ps" or dist.get_rank() == 0
            assert got.keys() == (want.keys() if owner else set())
            errors += [relative_error(got[key], want[key]) for key in got]
            for key, parameter in single.named_parameters():
                parameter.grad = want[key]
            stepper.step()
            single.zero_grad()
            optimize(engine, optimizer)
        worst[f"{name} x{micro_batches}{' overlap' if overlap else ''}"] = max(errors)
        engine.close()
    return worst


CASES: dict[str, Any] = {"gradients": gradients}

if __name__ == "__main__":
    main(CASES)
