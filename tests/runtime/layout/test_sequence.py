"""Models whose sequences lie over ranks, against one process: the mean is over all labelled tokens, and gradients are
those of it, once averaged over the ranks; what attention sends, against the closed forms.
"""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]

LIMITS = {"float32": 1e-5, "float64": 1e-12}
HEADS, KEY_HEADS = 8, 4  # of the Llama; others have as many key heads as heads
HEAD_SEQUENCE = 4 * 16 * 8  # elements of one head of all tokens


def check(ranks: list[dict[str, Any]], name: str, size: int) -> None:
    """Args:
    size: Ranks of the sequence.
    """
    limit = LIMITS[name.split()[-1]]
    for found in ranks:
        assert {key: error for key, error in found[name]["errors"].items() if not error <= limit} == {}, name
    labels = [found[name]["labels"] for found in ranks]
    assert len(set(labels)) > 1, "a mean of means would be no other"
    rows = [found[name]["sent"] for found in ranks]
    assert all(row == rows[0] for row in rows)
    heads = HEADS // 2 if "1d" in name else HEADS
    keys = KEY_HEADS if "grouped" in name else heads
    share = HEAD_SEQUENCE // size
    hops = size - 1
    if "ulysses" in name:
        away = [share * width * hops / size for width in (heads, keys, keys, heads)]
        forward = [("forward", "layer", "all_to_all", elements) for elements in away]
        backward = [("backward", "layer", "all_to_all", elements) for elements in (away[3], *away[:3])]
        assert rows[0] == forward + backward
        return
    unit = share * keys  # B Z (L / N) A, a message is two
    if "rsa" in name:  # Li et al. 2021: 2 (N - 1) forward, 6 (N - 1) backward
        gathers, sums = (
            [("layer", "all_gather", hops * unit)] * 2,
            [("layer", "all_reduce", 2 * hops * unit)] * 2,
        )
        assert rows[0] == [("forward", *row) for row in gathers] + [
            ("backward", *row) for row in gathers + sums
        ]
        return
    forward = [row for row in rows[0] if row[0] == "forward"]
    backward = [row for row in rows[0] if row[0] == "backward"]
    assert forward == [("forward", "ring", "send", 2 * unit)] * hops
    assert backward == [("backward", "ring", "send", 2 * unit)] * (2 * hops)
    assert sum(row[3] for row in forward) == 2 * hops * unit
    assert sum(row[3] for row in backward) == 4 * hops * unit


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_ranks(launch: Launch) -> None:
    ranks = launch("ranks_sequence", "two", 2, timeout_s=240.0)
    for name in ranks[0]:
        check(ranks, name, 2)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_four_ranks(launch: Launch) -> None:
    ranks = launch("ranks_sequence", "four", 4, timeout_s=240.0)
    for name in ranks[0]:
        check(ranks, name, 2 if "1d" in name else 4)
