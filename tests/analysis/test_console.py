"""What a run says at its end, and what it is called."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from twinbed.analysis.advice import memory_advice
from twinbed.analysis.console import summary
from twinbed.analysis.naming import policy_label, policy_words
from twinbed.analysis.record import Decision, Record

Make = Callable[..., Record]

FULL = {
    "zero_stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 1,
    "zero_quantized_gradients": True,
    "policy": None,
}


def named(**comm: Any) -> dict[str, Any]:
    return {"experiment": {"comm": FULL | comm}}


def test_a_prediction_says_rates_memory_and_range(make_record: Make) -> None:
    record = make_record(step_s=2.0)
    record.result["iteration_s"] |= {"low": 1.5, "high": 2.5}
    record.result["tflops_per_gpu"] = 45.67
    experiment = record.result["experiment"]
    experiment["batch"] = {"micro": 2, "sequence": 1024}
    experiment["cluster"] |= {"backend": "nccl", "device": {"memory_bytes": 80e9}}
    text = summary(record)
    assert text.startswith(
        "simulated zero3: 2 s an iteration (1.5 s to 2.5 s over the guessed inputs), 45.67 TFLOP/s per GPU"
    )
    assert "256 tokens/s" in text
    assert "2 x 1,024 tokens a micro-batch; peak memory 17 MB of 80 GB" in text
    assert "9 kB sent between nodes per rank and iteration" in text
    assert "median" not in text


def test_a_measured_time_is_a_mean_and_says_so(make_record: Make) -> None:
    record = make_record("runtime")
    record.result["iteration_s"] |= {"mean": 0.5, "p50": 0.4}
    record.result["experiment"]["cluster"]["backend"] = "gloo"
    assert "measured zero3: 500 ms an iteration (mean of 3; median 400 ms), 25 GFLOP/s per rank" in summary(
        record
    )
    assert "peak memory 17 MB of the process" in summary(record)


def test_what_does_not_fit_says_what_to_change(make_record: Make) -> None:
    record = make_record(status="oom")
    record.result["experiment"] |= {"batch": {"micro": 4, "sequence": 2048}, "recompute": "none"}
    record.result["memory_bytes"] |= {"activations": 80_000_000_000, "secondary_shard": 1}
    advice = memory_advice(record.result)
    assert advice[0].startswith("a smaller batch.micro (now 4")
    assert advice[1] == "a smaller batch.sequence (now 2,048 tokens)"
    assert advice[2] == "recompute=full (now none)"
    text = summary(record)
    assert "out of memory: a rank needs 90 GB" in text
    assert "To need less: a smaller batch.micro" in text
    assert not any("node copies" in change for change in advice)  # 80 GB of 80.01 are activations
    record.result["memory_bytes"]["activations"] = 0  # then the states are the largest
    assert memory_advice(record.result)[0] == "a policy without node copies (comm.zero_hpz_partition_size=1)"
    record.result["experiment"]["comm"]["zero_stage"] = 1
    assert memory_advice(record.result)[0].endswith("(comm=zero3)")


def test_what_does_not_fit_outside_says_what_to_change_there(make_record: Make) -> None:
    record = make_record(status="oom")
    record.result |= {"error": "out of host memory: ...", "far_memory_bytes": {"total": 1}}
    record.result["experiment"] |= {"batch": {"micro": 4, "sequence": 2048}}
    record.result["experiment"]["offload"] = {"name": "cpu", "parameters": 1.0, "optimizer": 0.0}
    assert memory_advice(record.result) == [
        "more nodes, each with a smaller share (cluster.nodes)",
        "states on disk (offload=disk)",
        "a smaller share outside (offload.parameters, now 1)",
    ]


def test_a_failed_run_says_why(make_unfinished: Callable[[str, str, str], Record]) -> None:
    assert (
        summary(make_unfinished("runtime", "failed", "rank 1 died")) == "measured zero3: failed: rank 1 died"
    )


@pytest.mark.parametrize(
    ("comm", "label", "words"),
    [
        (
            {"name": "zero3", "zero_quantized_weights": False, "zero_quantized_gradients": False},
            "zero3",
            "ZeRO-3 (comm=zero3)",
        ),
        ({"name": "deepspeed"}, "deepspeed (ZeRO-3, qwZ, qgZ)", "ZeRO-3 plus qwZ, qgZ (comm=deepspeed)"),
        (
            {"name": "deepspeed", "zero_hpz_partition_size": None},
            "deepspeed (ZeRO-3, qwZ, hpZ, qgZ)",
            "ZeRO-3 plus qwZ, hpZ, qgZ (comm=deepspeed)",
        ),
        ({"name": "zero3"}, "zero3 (ZeRO-3, qwZ, qgZ)", "ZeRO-3 plus qwZ, qgZ (comm=zero3)"),
        (
            {"name": "mine", "policy": "a.py:Mine"},
            "mine (comm.policy=a.py:Mine)",
            "the policy mine (comm.policy=a.py:Mine)",
        ),
    ],
)
def test_a_policy_is_called_what_it_is(comm: dict[str, Any], label: str, words: str) -> None:
    assert policy_label(named(**comm)) == label
    assert policy_words(named(**comm)) == words


def test_the_console_needs_neither_pandas_nor_matplotlib() -> None:
    code = (
        "import sys, twinbed.analysis.console; "
        "assert not {'pandas', 'matplotlib', 'torch', 'numpy'} & {*sys.modules}, 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def balanced(make_record: Make, name: str, answers: list[tuple[str, str]], **conf: str | float) -> str:
    record = make_record()
    record.result["experiment"]["balance"] = {"name": name, "way": "paired", **conf}
    record.result["balance"] = {"groups": [{"periods": [{"predicted_speedup": 2.5}]}]}
    other = Decision(4, 1, "GroupMeasured(step=2)", "nothing")
    record.decisions[:] = [
        *(Decision(0, i, event, action) for i, (event, action) in enumerate(answers)),
        other,
    ]
    return summary(record).splitlines()[2]


def test_a_balanced_run_says_what_ranks_do_at_its_end(make_record: Make) -> None:
    actions = "prune rank 1 by 0.25, prune rank 1 by 0.5 in block.0.fc1, migrate 1 attention from 3 to 0, "
    actions += "migrate 40 ffn from 3 to 0, migrate 2 ffn from 3 to 1"
    events = ("MovementTimed(half=ffn)", *(f"GroupMeasured(step={step})" for step in (2, 4, 6)))
    told = balanced(make_record, "semi", list(zip(events, ("keep", "nothing", actions, "keep"), strict=True)))
    assert told == (
        "  balance=semi: 2 changes; at the end rank 1 leaves 0.25 to 0.5 of its columns out; rank 3 lends 1 key head "
        "and 42 hidden features; its products are predicted 2.50 times as fast as an even split's"
    )
    told = balanced(make_record, "resize", [("GroupMeasured(step=2)", "keep")])
    assert told == "  balance=resize: nothing was changed"
    told = balanced(make_record, "layers", [("StagesMeasured(block_ns=1/2)", "share blocks 3/1")])
    assert "at the end stages hold 3/1 blocks" in told
    told = balanced(
        make_record, "migrate", [("GroupMeasured(step=2)", "migrate 3 ffn from 0 to 1")], way="scatter"
    )
    assert "rank 0 lends 3 ffn units (columns of every matrix)" in told


@pytest.mark.parametrize(
    ("took", "room", "says"),
    [("40/10/10", "3/0/0", True), ("40/10/10", "0/1/0", False), ("11/10/10", "0/0/0", False)],
)
def test_a_run_says_that_there_was_no_memory_for_more_sequences(
    make_record: Make, took: str, room: str, says: bool
) -> None:
    event = f"ReplicasMeasured(step=5, compute_ns={took}, room={room})"
    told = balanced(make_record, "batch", [(event, "keep")], slack=0.15)
    why = ": replica 0 is slow, but the faster ones have no memory for more sequences"
    assert told == "  balance=batch: nothing was changed" + why * says
