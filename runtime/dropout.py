"""Dropout whose mask follows from where an activation lies in the whole training, and from nothing of its layout.

An activation is dropped if a hash of (seed, place in the model, step, number of its sequence within the step, position
of its token, feature) is below p 2^32. No generator is asked: a rank that holds a part of the sequences, tokens or
features drops what a single process would drop there, and a recomputation drops what the forward did.

The hash. `mix` is a bijection of 32 bits: a shift and a product, twice, and a shift (Wellons, "Prospecting for hash
functions", 2018: its lowbias32, in which a changed bit of the input changes each bit of the output with a chance of
1/2 within 0.09%). Seed, place and step are mixed one after another into a key, and from it by sequence and token two
numbers for each row of features: a, and an odd b. A feature's number is mix(a + b feature mod 2^32). torch has
no unsigned integers of 32 bits with shifts everywhere, so the numbers lie in int64, and no product overflows.

Shapes: B sequences, T tokens, D features.
"""

import zlib
from typing import Final

import torch
from torch import Tensor, nn

_MASK: Final = 0xFFFFFFFF
_HALF: Final = _MASK >> 1  # an odd multiplier has 31 bits: its product with a feature's number fits too
# lowbias32's multipliers. The second is 0x846ca68b - 2^32, the same modulo 2^32: its product with 32 bits fits an int64
_FIRST: Final = 0x7FEB352D
_SECOND: Final = 0x846CA68B - (1 << 32)
_SALTS: Final = (0x3C6EF372, 0x1B873593)  # keep a and b apart; any two numbers do


class DropoutClock:
    """Where a training is. Whoever trains sets it before each forward; all dropouts of a model look at one.

    A micro-batch comes in through the numbers of its sequences, so that a step has the same masks however it is cut
    into micro-batches.

    Attributes:
        seed: Any integer.
        step: The optimizer step, from 0.
        first_sequence: The number within the step, over all ranks and micro-batches, of the first sequence
            of the micro-batch that this model's replica computes.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = self.first_sequence = 0

    def at(self, *, step: int, first_sequence: int) -> None:
        self.step, self.first_sequence = step, first_sequence


class Dropout(nn.Module):
    """Zeroes activations with chance p and multiplies the others by 1 / (1 - p). In eval mode it does nothing.

    Args:
        p: In [0, 1).
        place: In the whole model, such as "block.3.attention"; each dropout of a model has one of its own.
        clock: Shared by the model.

    Attributes:
        batch_index: [B] int64, which of the replica's sequences are here; None: 0 to B - 1.
        token_index: [T] int64, the positions of the tokens that are here; None: 0 to T - 1.
        feature_index: [D] int64, the features that are here; None: 0 to D - 1.

    Raises:
        ValueError: p is not in [0, 1).
    """

    def __init__(self, p: float, *, place: str, clock: DropoutClock) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p={p!r}: must be in [0, 1)")
        self.p, self.place = p, place
        self._clock = clock
        self.batch_index: Tensor | None = None
        self.token_index: Tensor | None = None
        self.feature_index: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to the same. Backward keeps a mask of one byte an element."""
        if not self.training or self.p == 0:
            return x_BTD
        return x_BTD.masked_fill(self.dropped(x_BTD), 0.0) * (1 / (1 - self.p))

    def dropped(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D], True where x is zeroed now."""
        sequence_B, token_T, feature_D = (
            torch.arange(size, device=x_BTD.device) if index is None else index.to(x_BTD.device)
            for size, index in zip(
                x_BTD.shape, (self.batch_index, self.token_index, self.feature_index), strict=True
            )
        )
        clock = self._clock
        key = 0
        for number in (clock.seed, zlib.crc32(self.place.encode()), clock.step):
            key = _fold(key, number)
        row_BT = _mix((_mix((sequence_B + clock.first_sequence) ^ key)[:, None] + token_T) & _MASK)
        a_BT1, b_BT1 = (_mix(row_BT ^ salt)[..., None] for salt in _SALTS)
        number_BTD = _mix((a_BT1 + ((b_BT1 | 1) & _HALF) * feature_D) & _MASK)
        return number_BTD < round(self.p * (1 << 32))


def _mix(x: Tensor) -> Tensor:
    """Each of 32 bits to another of 32 bits."""
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
    return x ^ (x >> 16)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
    return x ^ (x >> 16)


def _fold(key: int, number: int) -> int:
    """The key with all bits of one more number in it."""
    rest, sign = abs(number), number < 0
    key = _mix_int((key + 0x9E3779B9 + sign) & _MASK)  # the golden ratio: 0 is no fixed point
    while True:
        key = _mix_int(key ^ (rest & _MASK))
        rest >>= 32
        if not rest:
            return key
