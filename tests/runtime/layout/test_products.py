"""Products of dimensions against one process: gradients, losses and the norm of one step of four micro-batches."""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]

LIMIT = 1e-5  # relative L2 of each parameter's gradient, fp32
# ZeRO++ with weights and gradients of 8 bits in blocks of 64, of all gradients together: 0.1 of the ViT, whose pictures
# are noise, and less of the others. The same product under zero3 holds LIMIT
QUANTIZED = 0.15


def check(ranks: list[dict[str, Any]]) -> None:
    wrong = {}
    for case in ranks[0]:
        names: set[str] = set()
        for rank, all_found in enumerate(ranks):
            found = all_found[case]
            names |= set(found["errors"])
            quantized = "zeropp" in case
            off = {name: error for name, error in found["errors"].items() if not error <= LIMIT}
            if quantized:
                off = {} if found["together"] <= QUANTIZED else {"all": found["together"]}
                assert not found["errors"] or found["together"] > 1e-4, f"{case}: nothing is quantized"
            for what in ("losses", "norm"):
                if not found[what] <= (QUANTIZED if quantized else LIMIT):
                    off[what] = found[what]
            if "ring, pipeline" in case:  # nothing is gathered over the ring, nor between stages
                over = {(axis, op) for _, _, op, axis, _ in found["rows"] if axis in ("sequence", "pipeline")}
                assert over <= {("sequence", "send"), ("sequence", "all_reduce"), ("pipeline", "send")}, case
                assert ("sequence", "send") in over, case
            if off:
                wrong[f"{case}, rank {rank}"] = off
        assert names == ranks[0][case]["names"], case
    assert not wrong


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_products_of_four(launch: Launch) -> None:
    check(launch("ranks_products", "four", 4, timeout_s=300.0))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_products_of_eight(launch: Launch) -> None:
    check(launch("ranks_products", "eight", 8, timeout_s=300.0))
