"""On the shaped cluster the interfaces' own counters agree with the ledger within protocol overhead."""

from collections.abc import Callable
from typing import Any

import pytest

from twinbed.policies.mesh import Mesh


@pytest.mark.netns
@pytest.mark.distributed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("order", ["block", pytest.param("cyclic", marks=pytest.mark.long)])
def test_interfaces_count_what_the_ledger_says(order: str, run_cases: Callable[..., Any]) -> None:
    common = (
        f"cluster.rank_order={order}",
        "cluster.inter_node.bandwidth_Bps=62.5e6",
        "steps=3",
        "warmup_steps=0",
        "batch.sequence=32",
    )
    cases = {
        policy: (*common, f"comm={policy}")
        for policy in ("ddp", "ps", "zero3", "qwz", "hpz", "qgz", "zeropp")
    }
    for name, (composed, real) in run_cases(cases).items():
        if not real.result["interfaces"]:
            pytest.skip("links are not shaped here")
        mesh = Mesh.of(composed.experiment.cluster)
        for node, counted in enumerate(real.result["interfaces"]):
            said = sum(row.inter_node_bytes for row in real.ledger if mesh.node_of(row.rank) == node)
            ratio = counted["sent_bytes"] / said if said else None
            if ratio is None:  # the server's other node sends nothing but gradients
                continue
            assert 1.0 <= ratio <= 1.05, f"{name}, node {node}: counted {counted} against {said}"
        assert composed.experiment.comm.name == name
