"""Four ranks whose products are slept out, and a straggler among them that appears, moves and leaves."""

import json
from pathlib import Path

import pytest

from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

CHI = 4
# (first step, last one + 1, the slow rank); a period has 5 steps, the usual number
PHASES = ((0, 5, None), (5, 20, 1), (20, 35, 2), (35, 45, None))
OVERHEAD = 0.01  # measuring and deciding, of all steps
KEYS = (
    "target=runtime",
    "cluster.nodes=1",
    "cluster.devices_per_node=4",
    "cluster.shaped=false",
    "cluster.slowdown_by=sleep",
    "cluster.emulated_flops_per_s=2e8",  # 0.3 s of products in a step
    "parallel.tensor=4",
    "comm=ddp",
    "balance=semi",
    "precision=fp32",
    "warmup_steps=0",
    "model=gpt",
    "model.layers=2",
    "model.hidden=224",
    "model.heads=28",
    "model.vocab=64",
    "model.sequence=16",
    "data=synthetic",
    "batch.micro=2",
    "train.timeout_s=60",
)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(180)
def test_a_straggler_appears_moves_and_leaves(tmp_path: Path) -> None:
    slow = ",".join(
        f"{{rank:{rank},factor:{CHI},from_step:{first},until_step:{end}}}"
        for first, end, rank in PHASES
        if rank is not None
    )
    composed = compose([*KEYS, f"cluster.slowdown=[{slow}]", f"steps={PHASES[-1][1]}"])
    assert composed.experiment.balance.period == 5
    outcome = launch_local(
        tmp_path,
        cluster=composed.experiment.cluster,
        cases=[Case(name="adapts", folder="adapts", experiment=composed.resolved)],
        timeout_s=150,
        show_progress=False,
    )
    assert outcome.status == "ok", outcome.error
    result = json.loads((tmp_path / "adapts" / "result.json").read_text())
    (group,) = result["balance"]["groups"]
    in_force = {period["step"]: period["actions"] for period in group["periods"]}
    steps_s = result["iterations_s"]
    for first, end, rank in PHASES[1:]:
        for step in range(first + 10, end + 1, 5):
            actions = in_force[step].split(", ")
            if rank is None:
                assert actions == ["nothing"], in_force
            else:
                about = (f"from {rank} ", f"rank {rank} ")
                assert all(any(each in action for each in about) for action in actions), in_force
                # four times as long with nothing done
                assert max(steps_s[first : first + 5]) > 1.5 * min(steps_s[first + 10 : end]), steps_s
    overhead = group["overhead_s"] / sum(steps_s)
    assert overhead < OVERHEAD, [period["overhead_s"] for period in group["periods"]]
