"""The norms that LAMB and LARS add up over the ranks are in both ledgers, and nowhere else."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from twinbed.conf.model_spec import parameters

KEYS: dict[str, Sequence[str]] = {
    "lamb": ("optimizer=lamb",),
    "lars": ("optimizer=lars",),
    "all": ("optimizer=lamb", "optimizer.exclude_1d=false"),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_norms_are_one_row_a_step_in_both_ledgers(
    odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    common = (*odd_model, "data=synthetic", "cluster.shaped=false", "steps=2", "warmup_steps=0")
    cases = {}
    for optimizer, keys in KEYS.items():
        for comm in ("ddp", "ps", "zero1", "zero2", "zero3", "zeropp"):
            cases[f"{optimizer}-{comm}"] = (*common, *keys, f"comm={comm}")
    lamb = (*common, *KEYS["lamb"], "comm=zero3")
    cases["unclipped"] = (*lamb, "train.gradient_clipping=0")
    cases["accumulated"] = (*lamb, "batch.accumulation=3", "train.eval_every=1")
    cases["overlap"] = (*lamb, "comm.overlap=true")
    cases["overflow"] = (*lamb, "precision=fp16", "train.loss_scale=16777216")
    for name, (composed, real) in run_cases(cases).items():
        sim = same_ledger(composed, real)
        norms = [row for row in sim.ledger if row.phase == "step" and row.payload_bytes > 4]
        if name.endswith(("-ddp", "-ps")):
            assert not [row for row in norms if row.op == "all_reduce"], name
            continue
        assert len(norms) == 2 * 4, name  # steps, ranks
        assert {(row.stream, row.op, row.axis, row.layer) for row in norms} == {
            ("library", "all_reduce", "world", "")
        }
        tensors = [tensor for unit in parameters(composed.spec) for tensor in unit.tensors]
        adapted = [tensor for tensor in tensors if len(tensor.shape) > 1 or name.startswith("all")]
        assert len(adapted) > 12
        assert {row.payload_bytes for row in norms} == {2 * 4 * len(adapted)}, name
