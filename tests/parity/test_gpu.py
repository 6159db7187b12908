"""What needs GPUs: run where there are two or more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.timeout(300)
def test_ledgers_are_equal_on_nccl(
    odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    common = (
        *odd_model,
        "data=synthetic",
        "cluster=dgx_a100",
        "cluster.nodes=1",
        "cluster.devices_per_node=2",
    )
    cases = {
        comm: (*common, f"comm={comm}", "steps=2", "warmup_steps=0")
        for comm in ("ddp", "zero1", "zero3", "qwz")
    }
    for composed, real in run_cases(cases).values():
        same_ledger(composed, real)
