"""For the same experiment the ledgers of simulator and runtime are equal, entry by entry, no tolerance."""

from collections.abc import Callable
from typing import Any

import pytest

from twinbed.policies.comm import build_comm, describe_action, parse_event

POLICIES = ("ddp", "ps", "zero1", "zero2", "zero3", "qwz", "hpz", "qgz", "zeropp")
ON_EIGHT = ("ddp", "ps", "zero3", "qgz", "zeropp")  # what eight ranks send in another way than four
RIVALS = {
    "one_hop": ("comm=zeropp", "comm.gradient_path=one_hop"),
    "ring": ("comm=zeropp", "comm.gradient_path=ring"),
    "whole_tensor": ("comm=zeropp", "comm.gradient_block=0"),
    "copy_until_step": ("comm=zeropp", "comm.hpz_lifetime=step"),
    "mixed_bits": ("comm=zeropp", "comm.gradient_bits=[8,4]", "comm.weight_bits=4"),
}


def cases_on(model: tuple[str, ...], nodes: int, per_node: int) -> dict[str, tuple[str, ...]]:
    common = (
        *model,
        "data=synthetic",
        "cluster.shaped=false",
        f"cluster.nodes={nodes}",
        f"cluster.devices_per_node={per_node}",
        "warmup_steps=0",
        "train.gradient_clipping=1.0",
    )
    cases = {}
    everything = (nodes, per_node) == (2, 2)  # elsewhere what the shape of the cluster changes
    common = (*common, f"steps={2 if everything else 1}")
    for k in (1, 3) if everything else (1,):
        for policy in POLICIES if nodes * per_node <= 4 else ON_EIGHT:
            cases[f"{policy}-k{k}"] = (*common, f"comm={policy}", f"batch.accumulation={k}")
        for rival, keys in RIVALS.items():
            cases[f"{rival}-k{k}"] = (*common, *keys, f"batch.accumulation={k}")
    cases["zeropp-k3"] = (*common, "comm=zeropp", "batch.accumulation=3")
    if not everything:
        return cases
    cases["fp32"] = (*common, "comm=zeropp", "precision=fp32")
    cases["fp16"] = (*common, "comm=zero3", "precision=fp16", "train.gradient_clipping=0")
    cases["unclipped"] = (*common, "comm=zero3", "train.gradient_clipping=0")
    cases["recompute"] = (*common, "comm=zeropp", "recompute=full")
    cases["validation"] = (*common, "comm=zeropp", "train.eval_every=1", "train.eval_batches=2")
    cases["validation-ddp"] = (*common, "comm=ddp", "train.eval_every=2", "train.eval_batches=1")
    cases["overlap"] = (*common, "comm=zeropp", "comm.overlap=true")
    cases["overlap-zero3"] = (*common, "comm=zero3", "comm.overlap=true")
    return cases


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [(2, 2), *(pytest.param(*size, marks=pytest.mark.long) for size in ((2, 1), (1, 2), (2, 4)))],
)
def test_ledgers_are_equal(
    nodes: int, per_node: int, odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    differences = []
    for name, (composed, real) in run_cases(cases_on(odd_model, nodes, per_node)).items():
        try:
            same_ledger(composed, real)
        except AssertionError as err:
            differences.append(f"{name}: {err}")
        policy, _ = build_comm(composed.experiment.comm, num_ranks=nodes * per_node, ranks_per_node=per_node)
        for decision in real.decisions:
            assert describe_action(policy.decide(parse_event(decision.event))) == decision.action
    assert not differences, "\n".join(differences)
