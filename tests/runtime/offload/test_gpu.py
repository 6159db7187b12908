"""What needs a GPU: states in the host's memory."""

import json
from pathlib import Path

import pytest

from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
COMMON = [
    "target=runtime",
    "cluster=dgx_a100",
    "cluster.nodes=1",
    "cluster.devices_per_node=1",
    "model=gpt",
    "model.layers=8",
    "model.hidden=512",
    "model.heads=8",
    "model.vocab=256",
    "model.sequence=128",
    "comm=zero3",
    "precision=fp32",
    "data=synthetic",
    "steps=5",
]


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.timeout(300)
def test_states_in_host_memory_train_alike_and_leave_the_gpu(tmp_path: Path) -> None:
    cases = {"none": [], "pinned": ["offload=cpu"], "pageable": ["offload=cpu", "offload.pinned=false"]}
    composed = {name: compose([*COMMON, *overrides]) for name, overrides in cases.items()}
    outcome = launch_local(
        tmp_path,
        cluster=composed["none"].experiment.cluster,
        cases=[Case(name=name, folder=name, experiment=c.resolved) for name, c in composed.items()],
        timeout_s=240,
        show_progress=False,
    )
    assert outcome.exit_code == 0, outcome.error
    results = {name: json.loads((tmp_path / name / "result.json").read_text()) for name in cases}
    plain = results.pop("none")
    states = sum(plain["memory_bytes"][key] for key in ("parameters", "optimizer"))
    for found in results.values():
        # the same sums on other hardware: AdamW's step and the norm are the host's
        assert found["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert plain["memory_bytes"]["peak"] - found["memory_bytes"]["peak"] > 0.8 * states
