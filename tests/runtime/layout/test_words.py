"""The words of layers' plans on four ranks: values, rows and their order, groups."""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]


@pytest.mark.distributed
def test_words_rows_and_groups(launch: Launch) -> None:
    ranks = launch("ranks_words", "words", 4)
    for rank, found in enumerate(ranks):
        row, column = rank % 2, rank // 2
        *ledger, spans = found["rows"]
        # In the order of issue, though the second broadcast is waited for last
        assert ledger == [
            ("row", "here", "broadcast", "row", 2, 24, 24 if row == 0 else 0),
            ("row", "here", "broadcast", "row", 2, 24, 24 if row == 1 else 0),
            ("layer", "here", "reduce_tree", "column", 2, 24, 24 if column == 1 else 0),
            ("layer", "here", "all_reduce", "column", 2, 24, 24),
            ("library", "", "all_reduce", "column", 2, 12, 16),  # two chunks of ceil(3 / 2) elements
        ]
        assert spans == ("broadcast here", "reduce_tree here", "all_reduce here", "broadcast here")
        seen = found["replicas"]
        assert seen["ranks"] == {
            "world": (rank % 2, rank % 2 + 2),
            "local": (rank,),
            "node": (rank % 2, rank % 2 + 2),
        }
        assert (seen["index"], seen["world"], seen["plain"]) == (rank // 2, 2, "world")
        assert seen["mean"] == [rank % 2 + 1.0] * 6
        assert seen["rows"] == [
            ("reduce", "all_reduce", "replicas", 2, 24),
            ("library", "all_reduce", "tensor", 2, 0),
        ]
        pair, apart = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        ours = True  # the process group is the one that plans use
        assert found["meshes"] == {
            "plain": {"replicas": ((0, 1, 2, 3), ours, [0, 1, 2, 3])},
            "1d": {"replicas": (tuple(apart), ours, apart), "tensor": (tuple(pair), ours, apart)},
            "2d": {
                "replicas": ((rank,), False, [rank]),
                "column": (tuple(apart), ours, [rank]),
                "row": (tuple(pair), ours, [rank]),
            },
            "pipeline": {"pipeline": (tuple(apart), ours, pair), "replicas": (tuple(pair), ours, pair)},
        }
