"""Layouts at an emulated rate, and with every collective blocking: what the runtime stretches is what the simulator
counts.
"""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_products_take_their_time_where_they_are_computed(launch: Launch) -> None:
    ranks = launch("ranks_pace", "counted,slept,blocked", 4, timeout_s=300.0)
    for rank, found in enumerate(ranks):
        for name, (stretched, simulated) in found["counted"].items():
            assert stretched == simulated > 0, f"{name}, rank {rank}"
        for name, (took_s, at_least_s) in found["slept"].items():
            assert took_s >= at_least_s, f"{name}, rank {rank}"

        beside, blocking = found["blocked"]["True"], found["blocked"]["False"]
        assert beside["rows"] == blocking["rows"] > 0
        # beside, a message is waited for behind the attention of a block; blocking, at once, one after the other
        assert beside["overlap"]
        assert not blocking["overlap"]

        # what DTensor communicates has a span for each row: 2 all-reduces a block forward, 2 backward
        planned = found["blocked"]["1d"]
        assert planned["rows"] == ["all_reduce"] * 8
        assert len(planned["spans"]) == 8
