"""Models laid out over ranks against one process: gradients, loss, what moves."""

import pytest
from tests.runtime.conftest import Launch

LIMITS = {"float32": 1e-5, "float64": 1e-12}


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "world"), [("four", 4), ("eight", 8)])
def test_loss_and_gradients_are_those_of_one_process(launch: Launch, case: str, world: int) -> None:
    for found in launch("ranks_layout", case, world, timeout_s=300.0):
        for name, errors in found.items():
            limit = LIMITS[name.split()[-1]]
            assert {key: error for key, error in errors.items() if not error <= limit} == {}, name
