"""Memory that is left for larger micro-batches."""

from ..held import HeldMemory
from .measured import available_bytes


class Room:
    """Of one rank, whose first step was watched, with an even split.

    Args:
        micro: Sequences of a micro-batch in an even split.
        device_bytes: Of the rank's device.
        ranks_here: That share this machine's memory; None: the rank computes with a memory of its own.
    """

    def __init__(self, held: HeldMemory, *, micro: int, device_bytes: int, ranks_here: int | None) -> None:
        self._held, self._micro = held, micro
        self._device_bytes, self._ranks_here = device_bytes, ranks_here

    def beside(self, sequences: int) -> int:
        """By how many sequences a micro-batch of so many could grow: each keeps as much as one of the first step did,
        while the device's memory, and this machine's, have so much left.
        """
        saved = self._held.saved
        assert saved is not None, "the first step was measured"
        each_bytes = max(1, -(-saved.peak_bytes // self._micro))
        free = self._device_bytes - sum(self._held.num_bytes.values()) - sequences * each_bytes
        if self._ranks_here is not None:
            free = min(free, available_bytes() // self._ranks_here)
        return free // each_bytes
