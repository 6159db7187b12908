"""NCCL's double binary tree against the drawings in its source (src/graph/trees.cc)."""

import numpy as np
import pytest

from twinbed.sim.trees import climb, tree_parents

# rank -> the one above it
FIRST_OF_14 = {8: 0, 4: 8, 12: 8, 2: 4, 6: 4, 10: 12, 1: 2, 3: 2, 5: 6, 7: 6, 9: 10, 11: 10, 13: 12}
SECOND_OF_12 = {3: 11, 7: 3, 1: 3, 5: 7, 9: 7, 0: 1, 2: 1, 4: 5, 6: 5, 8: 9, 10: 9}  # the first in a mirror
SECOND_OF_13 = {
    9: 1,
    5: 9,
    0: 9,
    3: 5,
    7: 5,
    11: 0,
    2: 3,
    4: 3,
    6: 7,
    8: 7,
    10: 11,
    12: 11,
}  # moved on by one


def above(parents):
    return {rank: int(at) for rank, at in enumerate(parents) if at >= 0}


@pytest.mark.parametrize(
    ("num", "tree", "drawn"), [(14, 0, FIRST_OF_14), (12, 1, SECOND_OF_12), (13, 1, SECOND_OF_13)]
)
def test_trees_over_nodes_of_one_rank(num, tree, drawn):
    parents = tree_parents(np.zeros(num, dtype=np.int64), np.arange(num))
    assert above(parents[tree]) == drawn


def test_a_chain_within_each_node_and_two_groups_apart():
    """Two groups of two nodes with two ranks: one tree leaves a node at its first rank, the other at its last."""
    group, node = np.repeat([0, 1], 4), np.tile([0, 0, 1, 1], 2)
    first, second = tree_parents(group, node)
    assert above(first) == {1: 0, 2: 0, 3: 2, 5: 4, 6: 4, 7: 6}
    assert above(second) == {0: 1, 2: 3, 1: 3, 4: 5, 6: 7, 5: 7}


def test_the_way_up_adds_every_hop():
    parents = tree_parents(np.zeros(14, dtype=np.int64), np.arange(14))[0]
    total = climb(parents, np.arange(14, dtype=float))
    assert total[13] == 13 + 12 + 8
    assert total[0] == 0
