"""Why qgZ is as it is: the error of its rivals against the number of ranks, on the runtime's own interpreter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def rivals() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "rivals.py"
    spec = importlib.util.spec_from_file_location("benchmark_rivals", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_error_grows_with_the_ranks_only_where_each_hop_quantizes_again(rivals: ModuleType) -> None:
    errors = {
        name: [rivals.relative_error(world, dict(keys), seed=0) for world in (8, 32)]
        for name, keys in rivals.POLICIES.items()
    }
    assert errors["ring"][1] > 1.5 * errors["ring"][0]
    for name in ("qgZ (two hops)", "one hop"):
        assert errors[name][1] < errors[name][0], name  # noises of more ranks average out
    # one scale for a whole tensor is set by its largest values, and drowns the small ones
    assert errors["whole tensor"][1] > 2 * errors["qgZ (two hops)"][1]
    assert errors["ring"][1] > 4 * errors["qgZ (two hops)"][1]
