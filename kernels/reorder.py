"""The order of slices in a hierarchical all-to-all.

Rank p = node * ranks_per_node + local. In the first hop, inside a node, local rank j must get the slices of
all ranks with local index j, from every node, as one message: so slice p goes to place
(p mod ranks_per_node) * nodes + p div ranks_per_node (qgZ in ZeRO++, arXiv 2306.10209).
"""

from __future__ import annotations

import torch
from torch import Tensor


def slice_order(nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    """Rank whose slice stands at each place, [nodes * ranks_per_node]; 2 x 4: 0 4 1 5 2 6 3 7."""
    if nodes < 1 or ranks_per_node < 1:
        raise ValueError(f"nodes={nodes} and ranks_per_node={ranks_per_node} must be >= 1")
    return tuple(node * ranks_per_node + local for local in range(ranks_per_node) for node in range(nodes))


def reorder_slices(x: Tensor, *, nodes: int, ranks_per_node: int) -> Tensor:
    """A copy of `x` [ranks, ...] with its slices in that order.

    `encode_segments(x, order=slice_order(...))` quantizes in that order without this copy.
    """
    ranks = nodes * ranks_per_node
    if x.dim() == 0 or len(x) != ranks:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; {nodes} nodes of {ranks_per_node} take [{ranks}, ...]"
        )
    by_local = x.reshape(nodes, ranks_per_node, *x.shape[1:]).transpose(0, 1)
    return by_local.clone(memory_format=torch.contiguous_format).view(x.shape)
