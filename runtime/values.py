"""What a tensor is between two steps of a plan: plain, quantized, or a sum that nobody has needed yet.

Decoding and adding up wait until it is known what they are for, so that the kernels can do several steps in
one pass.

Shape letters: S slices, n elements of a slice (of the present chunk), P parts to be added up, w bytes of a
message.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import decode_segments, dequantize_reduce, dequantize_reduce_quantize, encode_segments
from ..policies.plan import Quantize
from .ring import Codec


@dataclass(frozen=True, slots=True)
class Plain:
    """Elements. `order`: the slices are to be read in this order (a permutation that was not carried out)."""

    x_PSn: Tensor
    order: tuple[int, ...] | None = None

    @property
    def slices(self) -> int:
        return self.x_PSn.shape[1]

    @property
    def parts(self) -> int:
        return self.x_PSn.shape[0]

    def pick(self, start: int, end: int) -> Tensor:
        """Slices [start, end) of the only part, in order."""
        if self.order is None:
            return self.x_PSn[0, start:end]
        return self.x_PSn[0, list(self.order[start:end])]

    def in_order(self) -> Tensor:
        """[S, n], contiguous, of the only part."""
        x_Sn = self.x_PSn[0] if self.order is None else self.pick(0, self.slices)
        return x_Sn.contiguous()


@dataclass(frozen=True, slots=True)
class Coded:
    """Messages of `slices` slices in `parts` parts; `own` [slices of one part, n] was left exact, and is not
    among them.

    Before an all-to-all the rows of `messages` are slices; after it there is one row for each part.
    """

    messages: Tensor  # uint8
    codec: Codec  # of one slice
    step: Quantize
    slices: int  # of one part
    parts: int = 1
    own: Tensor | None = None
    own_index: int = 0
    decoded: bool = False  # a Dequantize was asked for, and waits


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of all parts of a decoded `Coded`, which waits for what it is needed for."""

    terms: Coded

    @property
    def slices(self) -> int:
        return self.terms.slices


Value = Plain | Coded | Sum


def quantize(value: Plain | Sum, step: Quantize, codec: Codec, *, size: int, index: int) -> Coded:
    """All slices as messages, but for those that the rank at place `index` of `size` keeps exact."""
    slices = value.slices
    exact = step.exact_own is not None
    run = slices // size
    kept = range(index * run, (index + 1) * run) if exact else range(0)
    rows = [i for i in range(slices) if i not in kept]
    own: Tensor | None = None
    if isinstance(value, Plain):
        order = [value.order[i] for i in rows] if value.order is not None else rows
        x_Sn = value.x_PSn[0]
        messages = encode_segments(
            x_Sn, **codec.options, order=None if value.order is None and not exact else order
        )
        if exact:
            own = value.pick(kept.start, kept.stop)
    else:
        messages, own = _requantize(value.terms, codec, rows, kept)
    return Coded(messages, codec, step, slices, own=own, own_index=index if exact else 0)


def _requantize(terms: Coded, codec: Codec, rows: list[int], kept: range) -> tuple[Tensor, Tensor | None]:
    """Decode, add and encode in one pass for each run of slices, without the sum in memory."""
    source, width = terms.codec, terms.codec.wire_bytes
    device = terms.messages.device
    messages = torch.empty(len(rows), codec.wire_bytes, dtype=torch.uint8, device=device)

    def run(begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        own = None if terms.own is None else terms.own[begin:end].reshape(-1)
        return terms.messages[:, begin * width : end * width], own

    filled = 0
    for begin, end in ((0, kept.start), (kept.stop, terms.slices)) if kept else ((0, terms.slices),):
        if begin == end:
            continue
        out = messages[filled : filled + end - begin].view(-1)
        filled += end - begin
        several, results = source.times(end - begin), codec.times(end - begin)
        if codec.segments == source.segments:
            dequantize_reduce_quantize(
                *run(begin, end), **several.options, out_bits=codec.bits, out_block=codec.block, out=out
            )
        else:
            encode_segments(
                dequantize_reduce(*run(begin, end), **several.options), **results.options, out=out
            )
    if not kept:
        return messages, None
    own = torch.empty(len(kept), sum(source.segments), device=device)
    dequantize_reduce(*run(kept.start, kept.stop), **source.times(len(kept)).options, out=own.view(-1))
    return messages, own


def decode(coded: Coded, dtype: torch.dtype, out: Tensor | None) -> Plain:
    """Elements of messages that were not added up; `out` [S, n] where they are wanted."""
    if out is None:
        numel = sum(coded.codec.segments)
        out = torch.empty(coded.parts * coded.slices, numel, dtype=dtype, device=coded.messages.device)
    rows_per_part = coded.slices
    if coded.own is None:
        decode_segments(coded.messages.view(len(out), -1), **coded.codec.options, out=out)
    else:
        if coded.parts == 1:  # not exchanged yet: `own` are some of the slices
            rows_per_part = len(coded.own)
        first = coded.own_index * rows_per_part
        last = first + rows_per_part
        messages = coded.messages.reshape(len(out) - rows_per_part, -1)
        decode_segments(messages[:first], **coded.codec.options, out=out[:first])
        decode_segments(messages[first:], **coded.codec.options, out=out[last:])
        out[first:last].copy_(coded.own)
    return Plain(out.view(coded.parts, coded.slices, -1))


def add_up(total: Sum, out: Tensor | None) -> Plain:
    """The sum, in fp32 unless `out` [S, n] says otherwise."""
    terms = total.terms
    codec = terms.codec.times(terms.slices)
    own = None if terms.own is None else terms.own.reshape(-1)
    direct = out is not None and out.dtype == torch.float32 and out.is_contiguous()
    x = dequantize_reduce(
        terms.messages.view(-1, codec.wire_bytes),
        own,
        **codec.options,
        out=out.view(-1) if out is not None and direct else None,
    )
    x_Sn = x.view(terms.slices, -1)
    if out is not None and not direct:
        x_Sn = out.copy_(x_Sn)
    return Plain(x_Sn[None])
