"""A policy that exists only in this file runs on both targets, with equal ledgers and no engine touched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from twinbed.policies.comm import CommEvent, GradientsReady, Placement, WeightsNeeded
from twinbed.policies.plan import AllGather, AllToAll, Dequantize, Plan, Quantize, Reduce, ReduceOp


@dataclass(frozen=True)
class OneHop8:
    """Gradients in 8 bits by one all-to-all over the world, in two chunks."""

    num_ranks: int
    ranks_per_node: int
    name: str = "one_hop8"
    placement: Placement = Placement.sharded
    reshard_after_forward: bool = True
    hpz_size: int = 1
    copy_outlives_micro_batch: bool = False

    def decide(self, event: CommEvent) -> Plan | None:
        if isinstance(event, WeightsNeeded):
            return Plan((AllGather(axis="world"),), "gather")
        if isinstance(event, GradientsReady):
            return Plan(
                (
                    Quantize(bits=8, block=256, exact_own="world", chunks=2),
                    AllToAll(axis="world", chunks=2),
                    Dequantize(chunks=2),
                    Reduce(op=ReduceOp.mean, chunks=2),
                ),
                "reduce",
            )
        return None


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_policy_of_a_test_runs_on_both_targets(
    odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    overrides = (
        *odd_model,
        "data=synthetic",
        "cluster.shaped=false",
        "comm=zero3",
        "comm.name=one_hop8",
        f"comm.policy={__file__}:OneHop8",
        "steps=2",
        "warmup_steps=0",
    )
    ((composed, real),) = run_cases({"mine": overrides}).values()
    sim = same_ledger(composed, real)
    chunks = [row for row in sim.ledger if row.op == "all_to_all" and row.layer == "block.0"]
    assert len(chunks) == 2 * 2 * 4  # chunks, steps, ranks
    assert len(real.result["loss"]) == 2
