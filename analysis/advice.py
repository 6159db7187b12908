"""What to change where an experiment does not fit in memory. Imports no pandas: the console shows it too."""

from collections.abc import Mapping
from typing import Any

_WORTH_IT = 0.1  # of all that a rank holds: less than that would not help


def memory_advice(result: Mapping[str, Any]) -> list[str]:
    """Changes that would need less memory, the likeliest first. What is a small part of it is left alone.

    Empty unless the record's status is `oom`.
    """
    experiment = result.get("experiment") or {}
    if result.get("status") != "oom" or not experiment:
        return []
    if (result.get("far_memory_bytes") or {}) and "host memory" in str(result.get("error")):
        return _far(experiment)
    held = result.get("memory_bytes") or {}
    states = sum(held.get(key) or 0 for key in ("parameters", "gradients", "optimizer", "secondary_shard"))
    working, buffers = held.get("activations") or 0, held.get("buffers") or 0
    groups = [
        (working, _activations(experiment)),
        (states, _states(experiment, held)),
        (buffers, _gathered()),
    ]
    least = _WORTH_IT * (working + states + buffers)
    kept = sorted((group for group in groups if group[0] >= least), key=lambda group: -group[0])
    return [advice for _, group in kept for advice in group]


def advice_sentence(result: Mapping[str, Any]) -> str:
    """The advice as one sentence, or nothing."""
    found = memory_advice(result)
    return f"To need less: {', '.join(found)}." if found else ""


def _activations(experiment: Mapping[str, Any]) -> list[str]:
    batch = experiment.get("batch") or {}
    found = []
    if (batch.get("micro") or 1) > 1:
        found.append(f"a smaller batch.micro (now {batch['micro']}; batch.accumulation makes up for it)")
    if batch.get("sequence"):
        found.append(f"a smaller batch.sequence (now {batch['sequence']:,} tokens)")
    if experiment.get("recompute") not in (None, "full"):
        found.append(f"recompute=full (now {experiment['recompute']})")
    return found


def _gathered() -> list[str]:
    """Buffers hold whole units: no batch makes them smaller."""
    return ["a model of smaller layers (buffers hold whole ones)"]


def _far(experiment: Mapping[str, Any]) -> list[str]:
    """Of what a node keeps outside its devices."""
    offload = experiment.get("offload") or {}
    found = ["more nodes, each with a smaller share (cluster.nodes)"]
    if offload.get("name") == "cpu":
        found.append("states on disk (offload=disk)")
    for key in ("parameters", "optimizer"):
        if offload.get(key):
            found.append(f"a smaller share outside (offload.{key}, now {offload[key]:g})")
    return found


def _states(experiment: Mapping[str, Any], held: Mapping[str, Any]) -> list[str]:
    comm = experiment.get("comm") or {}
    found = []
    if not comm.get("policy") and (comm.get("zero_stage") or 0) < 3:
        found.append("a policy that shards weights, gradients and optimizer (comm=zero3)")
    if held.get("secondary_shard"):
        found.append("a policy without node copies (comm.zero_hpz_partition_size=1)")
    if comm.get("zero_stage") == 3 or comm.get("policy"):
        found.append("more ranks (cluster.nodes)")
    return found
