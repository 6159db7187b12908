"""Why qgZ is as it is: the error of its rivals against the number of ranks, on the runtime's own interpreter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from twinbed.policies.comm import Phase, WeightsNeeded, ZeroComm
from twinbed.policies.mesh import Mesh
from twinbed.policies.partition import real_elements


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


class _Held:
    """One rank's secondary shard."""

    shard = torch.empty(0)

    def load(self, axis: str) -> torch.Tensor:
        return self.shard

    def store(self, axis: str, shard: torch.Tensor) -> None:
        self.shard = shard.clone()


@pytest.mark.parametrize("numel", [0, 1, 32, 127, 129, 2047])
def test_a_padded_parameter_comes_back_from_the_secondary_shards(numel: int, rivals: ModuleType) -> None:
    """Padded to 2048, two nodes of 16 ranks, hpZ 16: shards of 128; of 32 elements the first rank holds all."""
    mesh = Mesh(32, 16, 16)
    policy = ZeroComm(name="hpz", hpz_size=16, ranks_per_node=16)
    original = torch.zeros(2048)
    original[:numel] = torch.arange(1.0, numel + 1)
    shards = original.view(32, -1).clone()
    held = [_Held() for _ in range(32)]
    back = torch.empty(32, 2048)

    def gather(rank: int, interpreter: Any) -> None:
        for phase, valid in ((Phase.forward, False), (Phase.backward, True)):
            plan = policy.decide(WeightsNeeded("unit", phase, copy_valid=valid))
            out = torch.empty(2048)
            interpreter.gather(
                plan, unit="unit", shard=shards[rank], out=out, segments=(64,), copies=held[rank]
            )
            assert torch.equal(out, original)
        back[rank] = out

    rivals.on_all_ranks(mesh, gather)
    assert torch.equal(back, original.expand(32, -1))
    real = [int((held[rank].shard != 0).sum()) for rank in range(16)]
    assert real == real_elements(numel, 2048, 16)
    assert all(h.shard.numel() == 128 for h in held)
    if numel == 32:
        assert real == [32] + [0] * 15
