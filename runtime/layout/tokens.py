"""Where the tokens, sequences and features that a rank holds lie in the whole."""

import torch
from torch import Tensor

from ...policies.layout import ParallelLayout
from ...policies.layout.border import Axes, Border, num_parts, part_index
from ...policies.mesh import SEQUENCE, Mesh


def token_index(layout: ParallelLayout, mesh: Mesh, rank: int, num_tokens: int) -> Tensor:
    """[T] int64: positions of the rank's tokens of a sequence, apart from its tensor group's sharing out of them.

    Contiguous, or with zigzag piece r and piece 2 N - 1 - r of 2 N, for place r of N on the axis `sequence`.

    Args:
        num_tokens: Of the whole sequence.
    """
    parts = layout.sequence
    here = mesh.index(SEQUENCE, rank) if parts > 1 else 0
    if not layout.attention.zigzag or parts == 1:
        each = num_tokens // parts
        return torch.arange(here * each, (here + 1) * each)
    each = num_tokens // (2 * parts)
    pieces = (here, 2 * parts - 1 - here)
    return torch.cat([torch.arange(piece * each, (piece + 1) * each) for piece in pieces])


def border_index(
    layout: ParallelLayout, mesh: Mesh, rank: int, border: Border, *, batch: int, tokens: int, features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What lies at a border on a rank: its sequences of the micro-batch, positions of its tokens, its features."""
    return (
        _part(mesh, border.batch, rank, torch.arange(batch)),
        _part(mesh, border.tokens, rank, token_index(layout, mesh, rank, tokens)),
        _part(mesh, border.features, rank, torch.arange(features)),
    )


def _part(mesh: Mesh, axes: Axes, rank: int, whole: Tensor) -> Tensor:
    return whole.chunk(num_parts(mesh, axes))[part_index(mesh, axes, rank)]
