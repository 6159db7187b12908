"""The ledger is taken where torch.distributed dispatches."""

import subprocess
import sys

import pytest


@pytest.mark.distributed
def test_every_way_to_communicate_is_seen(launch):
    """24-byte tensors on 2 x 2 ranks. gloo's reduce-scatter moves what an all-reduce would."""
    for rank, rows in enumerate(launch("ranks_beneath", "operators", 4)):
        after, before = rank % 2, 1 - rank % 2  # 1: that neighbour in the ring is on the other node
        ring = 2 * 3 * 2 * 4  # chunks of two elements
        tree = {0: 0, 1: 2, 2: 1, 3: 0}[
            rank
        ]  # sends of a broadcast from rank 1: to 2 and 3, then from 2 to 0
        tree_out = {0: 0, 1: 2, 2: 1, 3: 0}[rank]
        to_root = 0 if rank == 2 else 2 * 4
        reduce_out = 3 * 8 * before + (to_root if rank < 2 else 0)
        assert rows == [
            ("all_reduce", "world", 24, ring, ring * before),
            ("all_reduce", "world", 24, ring, ring * before),
            ("all_reduce", "world", 24, ring, ring * before),
            ("all_gather", "world", 96, 72, 72 * after),
            ("all_gather", "world", 96, 72, 72 * after),
            ("reduce_scatter", "world", 96, 2 * 3 * 24, 2 * 3 * 24 * before),
            ("all_to_all", "world", 96, 72, 48),
            ("broadcast", "world", 24, 24 * tree, 24 * tree_out),
            ("reduce", "world", 24, 3 * 8 + to_root, reduce_out),
            ("all_reduce", "local", 24, 2 * 3 * 4, 0),
            ("all_to_all", "local", 99, 24 + 24, 0),
        ]


@pytest.mark.distributed
def test_watching_does_not_hang(launch):
    assert launch("ranks_beneath", "many", 2) == [9000, 9000]


def test_import_is_cheap():
    """The package is looked at by tools that never train."""
    code = "import sys, twinbed.runtime; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
