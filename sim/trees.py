"""NCCL's double binary tree: over the nodes of a group, with a chain of ranks within each node.

Source: NVIDIA/nccl, src/graph/trees.cc (ncclGetBtree, ncclGetDtree): a node that others hang on in one tree is a leaf
of the other, or close to it. NCCL spreads a node's traffic over two of its GPUs (the pattern "balanced tree"); here
the first tree leaves a node at its first rank of the group, the second at its last.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int64]


def tree_parents(group: Vector, node: Vector) -> Vector:
    """The rank above each, in both trees of its group; -1: none.

    Args:
        group: Which group each rank is in. [num_ranks]
        node: Which node it lies on. [num_ranks]

    Returns:
        [2, num_ranks], indices into the arguments.
    """
    num = len(group)
    order = np.lexsort((node, group))  # stable: the ranks of a node stay in their order
    starts_group = np.append(True, np.diff(group[order]) != 0)
    starts_node = starts_group | np.append(True, np.diff(node[order]) != 0)
    first: Vector = np.flatnonzero(starts_node)  # of each node of each group
    last = np.append(first[1:], num) - 1
    stretch = np.cumsum(starts_node) - 1
    group_first = stretch[starts_group]  # the first node of each group
    of_group = np.cumsum(starts_group[first]) - 1
    spans = np.diff(np.append(group_first, len(first)))[of_group]
    base = group_first[of_group]
    place = np.arange(len(first)) - base
    parents: Vector = np.full((2, num), -1, dtype=np.int64)
    for tree, (heads, step) in enumerate(((first, -1), (last, 1))):
        up = _double_tree(place, spans)[tree]
        above: Vector = np.arange(num) + step
        above[heads] = np.where(up < 0, -1, heads[np.where(up < 0, 0, base + up)])
        inner = above >= 0
        parents[tree, order[inner]] = order[above[inner]]
    return parents


def climb(parents: Vector, costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the way from each rank to the top of its tree costs, if each hop up costs `costs`. [num_ranks]"""
    at = parents
    total: NDArray[np.float64] = np.where(at < 0, 0.0, costs)
    while (at >= 0).any():  # each turn doubles the hops that a total holds
        above = np.where(at < 0, 0, at)
        total = total + np.where(at < 0, 0.0, total[above])
        at = np.where(at < 0, -1, at[above])
    return total


def _double_tree(place: Vector, num: Vector) -> tuple[Vector, Vector]:
    """Of the node at each place among `num`, the place above it in the first and in the second tree; -1: none."""
    odd = num % 2 == 1
    turned = np.where(odd, (place - 1) % num, num - 1 - place)  # by one place, or as in a mirror
    above = _tree(turned, num)
    second = np.where(odd, (above + 1) % num, num - 1 - above)
    return _tree(place, num), np.where(above < 0, -1, second)


def _tree(place: Vector, num: Vector) -> Vector:
    bit = place & -place
    up = (place ^ bit) | (bit << 1)
    up = np.where(up >= num, place ^ bit, up)
    return np.where(place == 0, -1, up)
