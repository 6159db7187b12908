"""The fitted constants of cluster=dgx2_v100: on which rows, and that they are the best there."""

from dataclasses import replace

import pytest

from twinbed.conf.compose import Composed, compose
from twinbed.sim.deepspeed.fit import Constants, fitted_rows, printed


@pytest.fixture(scope="module")
def composed() -> list[tuple[Composed, float]]:
    return [
        (compose(["target=sim", "steps=1", "warmup_steps=0", *row.overrides]), row.value)
        for row in fitted_rows()
    ]


def _constants(found: list[tuple[Composed, float]]) -> Constants:
    cluster = found[0][0].experiment.cluster
    return Constants(
        cluster.device.matmul_efficiency, cluster.device.matmul_fixed_tokens, cluster.inter_node.efficiency
    )


def _errors(found: list[tuple[Composed, float]], constants: Constants) -> list[float]:
    return [printed(each, constants) / paper - 1 for each, paper in found]


def test_only_zero3_cells_are_fitted() -> None:
    rows = fitted_rows()
    assert len(rows) == 4
    assert all("comm=zero3" in row.overrides and row.verified for row in rows)


def test_the_configured_constants_are_the_best(composed: list[tuple[Composed, float]]) -> None:
    here = _constants(composed)
    errors = _errors(composed, here)
    assert max(map(abs, errors)) < 0.05
    least = sum(e * e for e in errors)
    for name, step in (("matmul_efficiency", 0.03), ("matmul_fixed_tokens", 0.15), ("link_efficiency", 0.03)):
        for factor in (1 - step, 1 + step):
            moved = replace(here, **{name: getattr(here, name) * factor})
            assert sum(e * e for e in _errors(composed, moved)) > least, (name, factor)
