"""What a record's communication policy is called. Imports no pandas: the console shows it too."""

from collections.abc import Mapping
from typing import Any

_WORDS = {
    "ddp": "plain data parallelism",
    "ps": "a parameter server",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "qwz": "ZeRO-3 with quantized weights (qwZ)",
    "hpz": "ZeRO-3 with a copy of the weights in each node (hpZ)",
    "qgz": "ZeRO-3 with quantized gradients (qgZ)",
    "zeropp": "ZeRO++",
}
# (stage, parts) that a name promises
_PROMISED: dict[str, tuple[int, tuple[str, ...]]] = {
    "zero1": (1, ()),
    "zero2": (2, ()),
    "zero3": (3, ()),
    "qwz": (3, ("qwZ",)),
    "hpz": (3, ("hpZ",)),
    "qgz": (3, ("qgZ",)),
    "zeropp": (3, ("qwZ", "hpZ", "qgZ")),
}


def policy_name(result: Mapping[str, Any]) -> str:
    """`comm.name` of the experiment, or an empty string."""
    return str(_comm(result).get("name") or "")


def policy_label(result: Mapping[str, Any]) -> str:
    """The name, and what it does not tell: `deepspeed (ZeRO-3, qwZ, qgZ)`, `mine (comm.policy=mine.py:Mine)`."""
    comm, name = _comm(result), policy_name(result)
    if comm.get("policy"):
        return f"{name} (comm.policy={comm['policy']})"
    parts = _parts(comm)
    if parts is None or name in ("ddp", "ps") or _PROMISED.get(name) == parts:
        return name
    return f"{name} ({', '.join(_stage(parts))})"


def policy_words(result: Mapping[str, Any]) -> str:
    """As in `Training gpt_tiny with ...`; empty where the record names no policy."""
    comm, name = _comm(result), policy_name(result)
    if not name:
        return ""
    if comm.get("policy"):
        return f"the policy {name} (comm.policy={comm['policy']})"
    parts = _parts(comm)
    if name in _WORDS and (parts is None or name not in _PROMISED or _PROMISED[name] == parts):
        return f"{_WORDS[name]} (comm={name})"
    if parts is None:
        return f"the communication policy {name} (comm={name})"
    stage, *rest = _stage(parts)
    return f"{stage}{' plus ' if rest else ''}{', '.join(rest)} (comm={name})"


def _comm(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return (result.get("experiment") or {}).get("comm") or {}


def _parts(comm: Mapping[str, Any]) -> tuple[int, tuple[str, ...]] | None:
    """Stage and parts of ZeRO++ that the keys say; None where the record does not have them."""
    keys = ("zero_stage", "zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_gradients")
    if any(key not in comm for key in keys):
        return None
    stage, weights, copy, gradients = (comm[key] for key in keys)
    on = {"qwZ": weights, "hpZ": copy != 1, "qgZ": gradients}
    return int(stage), tuple(part for part, used in on.items() if used)


def _stage(parts: tuple[int, tuple[str, ...]]) -> list[str]:
    return [f"ZeRO-{parts[0]}" if parts[0] else "plain data parallelism", *parts[1]]
