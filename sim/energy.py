"""Energy of an iteration: devices by what they do, links by what they carry."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..conf.schema import DeviceConf

# Within a node: NVLink-C2C takes 1.3 pJ a bit, a fifth of PCIe 5 (NVIDIA Grace white paper); NVLink between boards
# lies between them. A guess of 5 pJ a bit.
INTRA_NODE_J_PER_BYTE = 5e-12 * 8

# Between nodes, a guess (30 to 53 W for 200 Gbit/s): an adapter some 20 W, its share of a 40-port switch 10 W, two
# transceivers 4.5 W each (an active cable takes up to 6 W a port, NVIDIA's SuperPOD cabling guide)
INTER_NODE_J_PER_BYTE = 39.0 / 25e9


def energy_j(
    devices: Sequence[DeviceConf],
    *,
    seconds: float,
    ranks: Sequence[Mapping[str, Any]],
    intra_node_bytes: float,
    inter_node_bytes: float,
) -> float | None:
    """One iteration of all ranks; None where the `power_w` of a device is not known.

    A device draws `power_w` while it computes or quantizes and `idle_w` the rest of the time; what its memory
    takes is in there.

    Args:
        devices: Of each class of `ranks`.
        ranks: Of the record: seconds of `compute` and `quantize` of each class, and its `count`.
        intra_node_bytes: Sent by all ranks together, within nodes.
        inter_node_bytes: Between nodes.
    """
    joule = intra_node_bytes * INTRA_NODE_J_PER_BYTE + inter_node_bytes * INTER_NODE_J_PER_BYTE
    for device, rank in zip(devices, ranks, strict=True):
        if device.power_w is None:
            return None
        busy_s = min(seconds, rank["compute"] + rank["quantize"])
        joule += rank.get("count", 1) * (device.power_w * busy_s + device.idle_w * (seconds - busy_s))
    return joule
