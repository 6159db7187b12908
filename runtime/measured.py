"""What a probe measured, and the cluster's config that it makes. Imports no torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..conf.schema import Backend


@dataclass(frozen=True, slots=True)
class OpRow:
    """One collective, all ranks at once.

    `message_bytes` as the simulator's `Transfer` has it: all_gather: one rank's part; reduce_scatter and
    all_to_all: the part for one peer; else the whole tensor. `batch_s`: seconds of one call, mean of a batch.
    """

    op: str
    axis: str
    group_size: int
    message_bytes: int
    numel: int
    batch_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.batch_s)


@dataclass(frozen=True, slots=True)
class _Ops:
    """The smallest and the largest measured collective of each kind."""

    small: dict[tuple[str, str], OpRow]
    large: dict[tuple[str, str], OpRow]

    def bytes_per_s(self, op: str, axis: str, *, loads: int) -> float | None:
        """Of a link that carries `loads` messages of the collective, from what long ones take more than short ones."""
        key = (op, axis)
        if key not in self.large:
            return None
        seconds = self.large[key].seconds - self.small[key].seconds
        nbytes = self.large[key].message_bytes - self.small[key].message_bytes
        return loads * nbytes / seconds if seconds > 0 else None


def links(measured: Mapping[str, Any]) -> dict[str, float | None]:
    """Payload bytes a second, one direction: between two ranks of a node, and of a node's way to the others."""
    ops = _ops(measured)
    ranks, per_node = measured["num_ranks"], measured["ranks_per_node"]
    nodes = ranks // per_node
    inside = "world" if nodes == 1 else "local"
    outside = "world" if per_node == 1 else "node"
    return {
        "intra_node_Bps": ops.bytes_per_s("all_to_all", inside, loads=1) if per_node > 1 else None,
        "inter_node_Bps": ops.bytes_per_s("all_to_all", outside, loads=per_node * (nodes - 1))
        if nodes > 1
        else None,
    }


def cluster_with(
    cluster: Mapping[str, Any],
    measured: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
    *,
    one_machine: bool,
    links_known: bool,
) -> dict[str, Any]:
    """A cluster's config with what a probe measured.

    Args:
        cluster: Plain values of a `ClusterConf`.
        measured: What `probe.measure` returned.
        calibration: Plain values of a `calibrate.Calibration` of the experiment, if there was one.
        one_machine: All nodes share this machine's cores.
        links_known: Links between nodes are shaped, so their rate is what the config says; else it is measured.
    """
    ops = _ops(measured)
    codec = measured["codec"]
    on_gpus = cluster["backend"] == Backend.nccl.value
    host = dict(cluster["host"]) | {
        "cores": 0 if on_gpus else measured["cores"],
        "all_nodes": one_machine,
        "op_ns": {},
        "op_measured_ns": {
            f"{op}/{axis}/{row.message_bytes}": round(row.seconds * 1e9)
            for sizes in (ops.small, ops.large)
            for (op, axis), row in sizes.items()
        },
        "codec_ns": {kind: round(found["fixed_ns"]) for kind, found in codec.items()},
        "codec_ns_per_element": {kind: found["ns_per_element"] for kind, found in codec.items()},
        "codec_step_ns": calibration["quantize_ns"] if calibration else 0,
        "compute_ns": dict(calibration["compute_ns"]) if calibration else {},
    }
    found = links(measured)
    intra, inter = dict(cluster["intra_node"]), dict(cluster["inter_node"])
    if found["intra_node_Bps"] is not None:
        intra |= {"bandwidth_Bps": found["intra_node_Bps"], "latency_ns": 0}  # latency: in op_measured_ns
    if found["inter_node_Bps"] is not None and not links_known:
        inter |= {"links": 1, "bandwidth_Bps": found["inter_node_Bps"], "latency_ns": 0, "efficiency": 1.0}
    device = dict(cluster["device"])
    if calibration is None:  # else computation is known by itself, and the peak stays the experiment's
        device |= {"flop_per_s": measured["matmul"]["flop_per_s"], "matmul_efficiency": 1.0}
    matmul = measured["matmul"]
    if on_gpus:  # on CPUs the simulated cores are shared out anyway
        device["busy_slowdown"] = max(1.0, matmul["flop_per_s"] / matmul["flop_per_s_beside_collective"])
    copy = codec["copy"]["ns_per_element"]
    if copy > 0:
        device["memory_Bps"] = 8 / copy * 1e9  # a copy reads and writes 4 bytes an element
    disk = measured.get("disk")
    guesses = {} if disk else {k: v for k, v in cluster["guesses"].items() if k.startswith("disk.")}
    return dict(cluster) | {
        "host": host,
        "disk": dict(cluster["disk"]) | dict(disk or {}),
        "intra_node": intra,
        "inter_node": inter,
        "device": device,
        "guesses": guesses,  # all else that was guessed is measured now
    }


def _ops(measured: Mapping[str, Any]) -> _Ops:
    ops = _Ops({}, {})
    for plain in measured["ops"]:
        row = OpRow(**{**plain, "batch_s": tuple(plain["batch_s"])})
        key = (row.op, row.axis)
        (ops.large if key in ops.small else ops.small)[key] = row
    return ops


def merged(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several probes of one launch as one: constants wander, so medians are over batches spread over the launch."""
    first = dict(probes[0])
    first["ops"] = [
        {**row, "batch_s": [seconds for probe in probes for seconds in probe["ops"][i]["batch_s"]]}
        for i, row in enumerate(first["ops"])
    ]
    first["codec"] = {
        kind: {key: statistics.mean(probe["codec"][kind][key] for probe in probes) for key in found}
        for kind, found in first["codec"].items()
    }
    if first.get("disk"):
        first["disk"] = {
            key: type(value)(statistics.mean(probe["disk"][key] for probe in probes))
            for key, value in first["disk"].items()
        }
    return first
