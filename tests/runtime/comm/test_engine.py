"""Engines on real processes: right gradients, weights that are never stale, errors that name what failed."""

import pytest


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_process(launch, world):
    """An all-reduce that forgot to divide gives 2 or 4 times the gradient: an error of 1 or 3."""
    for errors in launch("ranks_engine", "gradients", world):
        assert len(errors) == 7 * 2 + 7 + 3
        assert all(error <= 1e-5 for error in errors.values()), errors
