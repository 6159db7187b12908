"""Ring reduce-scatter on sends and receives: g - 1 times one slice to the next rank (Patarasuk and Yuan,
2009).

Slice j starts at rank j + 1, gathers the slices of all on its way and ends at rank j. The partial sum is
sent, and so rounded, in the dtype of the input; with a codec it is quantized before each send and added in
fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import dequantize_reduce, dequantize_reduce_quantize, encode_segments
from ..policies.wire import encoded_bytes
from .groups import Group


@dataclass(frozen=True, slots=True)
class Codec:
    """A format of messages; `segments` as in `kernels.encode_segments`."""

    segments: tuple[int, ...]
    bits: int
    block: int

    @property
    def wire_bytes(self) -> int:
        return encoded_bytes(self.segments, self.bits, self.block)

    def times(self, slices: int) -> "Codec":
        """The format of so many slices, one after the other."""
        return self if slices == 1 else Codec(self.segments * slices, self.bits, self.block)

    @property
    def options(self) -> dict[str, Any]:
        """As keyword arguments of `kernels`."""
        return {"segments": self.segments, "bits": self.bits, "block": self.block}


def ring_reduce_scatter(group: Group, x_gn: Tensor, out_n: Tensor, codec: Codec | None) -> None:
    """Write this rank's slice of the sum.

    Args:
        group: g >= 2 ranks.
        x_gn: One slice for each rank of the group; left as it is.
        out_n: Of the same dtype; fp32 with a codec.
        codec: Quantize each message like this.
    """
    g, me = group.size, group.index
    following, previous = group.ranks[(me + 1) % g], group.ranks[(me - 1) % g]
    if codec is None:
        buffers = x_gn.new_empty(g - 1, x_gn.shape[1])
    else:
        buffers = torch.empty(g - 1, codec.wire_bytes, dtype=torch.uint8, device=x_gn.device)
    # One tag a hop, and all receives before the first send: no sender ever waits for a receiver to be ready.
    receives = [
        dist.irecv(buffer.view(torch.uint8), previous, group=group.handle, tag=hop)
        for hop, buffer in enumerate(buffers)
    ]
    sent: list[tuple[dist.Work | None, Tensor]] = []  # keeps what is being sent alive
    start = x_gn[(me - 1) % g]
    message = start if codec is None else encode_segments(start, **codec.options)
    for hop, receive in enumerate(receives):
        raw = message.view(torch.uint8)
        sent.append((dist.isend(raw, following, group=group.handle, tag=hop), raw))
        _wait(receive)
        arrived, own = buffers[hop], x_gn[(me - 2 - hop) % g]
        last = hop == g - 2
        if codec is None:
            message = torch.add(arrived, own, out=out_n if last else arrived)
        elif last:
            dequantize_reduce(arrived[None], own, **codec.options, out=out_n)
        else:
            message = dequantize_reduce_quantize(arrived[None], own, **codec.options)
    for work, _ in sent:
        _wait(work)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()
