"""One run in two lines, for the terminal. Imports no pandas: every run ends with it."""

from collections.abc import Mapping
from typing import Any

from .advice import advice_sentence
from .balancing import balance_sentences
from .naming import policy_label
from .record import Record
from .units import amount_text, number

_SIDES = {"sim": "simulated", "runtime": "measured"}


def summary(record: Record) -> str:
    """What a run gave: time of an iteration and rates; below it what was asked, memory and traffic.

    A simulated time is the mean of steps that all take as long unless something changes in between; a
    measured one is the mean too, because that is what predictions are compared with, and the median beside.
    """
    result = record.result
    who = f"{_SIDES.get(result['target'], result['target'])} {policy_label(result) or '?'}"
    if result["status"] == "failed" and result["iteration_s"]["mean"] is None:
        return f"{who}: failed: {result['error']}"
    if result["iteration_s"]["mean"] is None:
        parts = [f"{who}: {result['status']}, no iteration after the warm-up"]
    else:
        rates = [_time(result)]
        if result.get("tflops_per_gpu") is not None:
            speed = amount_text("flop/s", result["tflops_per_gpu"] * 1e12)
            rates.append(f"{speed} per {_device(result)}")
        if result.get("tokens_per_s") is not None:
            rates.append(f"{number(result['tokens_per_s'])} tokens/s")
        parts = [f"{who}: {', '.join(rates)}"]
    parts.append(f"  {'; '.join(_circumstances(result))}")
    parts += [f"  {sentence}" for sentence in balance_sentences(record)]
    if result["status"] != "ok":
        lead = "" if result["status"] == "oom" else f"{result['status']}: "  # that error says it itself
        parts.append(f"  {lead}{result['error']}")
    advice = advice_sentence(result)
    return "\n".join([*parts, f"  {advice}"] if advice else parts)


def _time(result: Mapping[str, Any]) -> str:
    stats = result["iteration_s"]
    text = f"{amount_text('s', stats['mean'])} an iteration"
    if result["target"] == "runtime":
        return f"{text} (mean of {stats['n']}; median {amount_text('s', stats['p50'])})"
    low, high = stats.get("low"), stats.get("high")
    if low is None or high is None or low == high:
        return text
    return f"{text} ({amount_text('s', low)} to {amount_text('s', high)} over the guessed inputs)"


def _circumstances(result: Mapping[str, Any]) -> list[str]:
    experiment = result.get("experiment") or {}
    found = []
    sequence, micro = ((experiment.get("batch") or {}).get(key) for key in ("sequence", "micro"))
    if sequence:
        found.append(f"{micro or 1} x {sequence:,} tokens a micro-batch")
    peak = (result.get("memory_bytes") or {}).get("peak")
    if peak:
        found.append(f"peak memory {amount_text('byte', peak)}{_of(result)}")
    found.append(
        f"{amount_text('byte', result['comm']['inter_node_bytes'])} sent between nodes per rank and iteration"
    )
    return found


def _device(result: Mapping[str, Any]) -> str:
    cluster = (result.get("experiment") or {}).get("cluster") or {}
    return "GPU" if cluster.get("backend") == "nccl" else "rank"


def _of(result: Mapping[str, Any]) -> str:
    cluster = (result.get("experiment") or {}).get("cluster") or {}
    if result["target"] == "runtime":
        return " of the process" if cluster.get("backend") == "gloo" else ""
    capacity = (cluster.get("device") or {}).get("memory_bytes")
    return f" of {amount_text('byte', capacity)}" if capacity else ""
