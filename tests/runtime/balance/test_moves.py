from collections.abc import Callable
from typing import Any
import pytest

Launch = Callable[..., list[Any]]


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_x(launch: Launch) -> None:
    ranks = launch("ranks_balance", "moved,even", 4, timeout_s=300.0)
    for rank, found in enumerate(ranks):
        for name, case in found["moved"].items():
            print(
                rank,
                name,
                {k: v for k, v in case.items() if k not in ("rows", "decisions", "told")},
                len(case["rows"]),
            )
        print(found["even"])
    assert 0
