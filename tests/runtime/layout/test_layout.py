"""Models laid out over ranks against one process: loss, gradients, and what moves against the papers' closed forms."""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]

LIMITS = {"float32": 1e-5, "float64": 1e-12}

# Of a block of a GPT, and of one product in a Llama: elements of its input, output and matrix
BSH = 4 * 16 * 64
X, Y, W = 4 * 16 * 256, 4 * 16 * 64, 256 * 64


def check_errors(found: dict[str, Any]) -> None:
    for name, errors in found["errors"].items():
        limit = LIMITS[name.split()[-1]]
        assert {key: error for key, error in errors.items() if not error <= limit} == {}, name


def check_right_answers(found: dict[str, Any]) -> None:
    for mode, (ranks, alone, error) in found["right"].items():
        assert (ranks, alone) == (1, 1), mode
        assert error <= LIMITS["float64"], mode


def mean_elements(ranks: list[dict[str, Any]], mode: str) -> float:
    return sum(found[mode][0] for found in ranks) / len(ranks)


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_one_and_two_dimensions(launch: Launch) -> None:
    ranks = launch("ranks_layout", "four", 4, timeout_s=300.0)
    for found in ranks:
        check_errors(found)
        check_right_answers(found)
    # Shoeybi et al. 2019, section 3: two all-reduces forward and two backward
    assert mean_elements(ranks, "1d") == 8 * 3 / 4 * BSH
    # Korthikanti et al. 2022: a reduce-scatter in forward, an all-gather in backward
    assert mean_elements(ranks, "1d sequence") == 2 * 3 / 4 * Y
    # Xu et al. 2021: each product is 2 q broadcasts, or q broadcasts and q reductions, of 1/q^2 of a factor
    assert mean_elements(ranks, "2d") == 3 * 1 / 4 * (X + W)


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_one_dimension_by_our_own_function_and_by_dtensor(launch: Launch) -> None:
    for found in launch("ranks_layout", "planned", 4, timeout_s=300.0):
        check_errors(found)
        for name, (library, ours) in found["rows"].items():
            assert library == ours, name
            assert len(ours) == 26 + 2 * ("vit" not in name), name  # vit: words are not cut


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_replicas_of_a_layout_under_communication_policies(launch: Launch) -> None:
    for found in launch("ranks_layout", "pairs", 4, timeout_s=300.0):
        check_errors(found)
        for name, axes in found["axes"].items():
            gathers = [] if "ddp" in name else [("gather", "replicas", 2)]
            assert axes == [*gathers, ("layer", "tensor", 2), ("reduce", "replicas", 2)], name


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_two_and_a_half_and_three_dimensions(launch: Launch) -> None:
    ranks = launch("ranks_layout", "eight", 8, timeout_s=300.0)
    for found in ranks:
        check_errors(found)
        check_right_answers(found)
    # Wang et al. 2021: each square has its share of the sequences; the matrix' gradients are summed over depth
    assert mean_elements(ranks, "2.5d") == 3 * 1 / 4 * (X / 2 + W) + 2 * 1 / 2 * W / 4
    # Bian et al. 2021: each of the three matrices is gathered or scattered once forward and once backward
    assert mean_elements(ranks, "3d") == 2 * 1 / 8 * (X + W + Y)


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_square_of_nine(launch: Launch) -> None:
    ranks = launch("ranks_layout", "nine", 9, timeout_s=300.0)
    for found in ranks:
        check_errors(found)
    assert mean_elements(ranks, "2d") == 3 * 2 / 9 * (3 * 16 * 144 + 144 * 72)
