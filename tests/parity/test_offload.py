"""With states on disk, ledgers and decisions of both targets are equal, and as many bytes move."""

from collections.abc import Callable
from typing import Any

import pytest

POLICIES = ("zero1", "zero2", "zero3", "hpz", "zeropp")
AUTO = ("offload.policy=auto", "offload.memory_bytes=250000")


def cases(model: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    common = (
        *model,
        "data=synthetic",
        "cluster.shaped=false",
        "cluster.nodes=1",
        "cluster.devices_per_node=2",
        "steps=4",
        "warmup_steps=0",
        "precision=fp32",
        "offload=disk",
    )
    found = {
        f"{policy}-k{k}": (*common, f"comm={policy}", f"batch.accumulation={k}")
        for k in (1, 3)
        for policy in POLICIES
    }
    found["momentum"] = (*common, "comm=zero3", "optimizer=sgd", "optimizer.momentum=0.9")
    found["sgd"] = (*common, "comm=zero3", "optimizer=sgd")
    found["half"] = (*common, "comm=zeropp", "offload.parameters=0.5", "offload.optimizer=0.5")
    found["no_prefetch"] = (*common, "comm=zero3", "offload.prefetch=0")
    found["far_ahead"] = (*common, "comm=zero3", "offload.prefetch=3")
    found["auto"] = (*common, "comm=zero3", *AUTO)
    found["auto-committed-now-and-then"] = (*found["auto"], "offload.commit_every=3", "steps=5")
    found["auto-zeropp-k3"] = (*common, "comm=zeropp", "batch.accumulation=3", *AUTO)
    found["bf16"] = (*common, "comm=zero3", "precision=bf16", "train.gradient_clipping=0")
    found["recompute"] = (*common, "comm=zeropp", "recompute=full")
    found["validation"] = (*common, "comm=zero3", "train.eval_every=1", "train.eval_batches=2")
    found["overlap"] = (*common, "comm=zero3", "comm.overlap=true")
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_targets_decide_and_send_alike(
    odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    differences = []
    for name, (composed, real) in run_cases(cases(odd_model)).items():
        try:
            sim = same_ledger(composed, real)
            assert sim.result["moved_bytes"] == real.result["moved_bytes"]
            assert real.result["far_memory_bytes"] == sim.result["far_memory_bytes"]
        except AssertionError as err:
            differences.append(f"{name}: {err}")
    assert not differences, "\n".join(differences)
