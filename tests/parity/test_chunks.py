"""Chunks of the two hops in a pipeline, and kernels that are not fused: the same sums, and the same ledger twice."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from twinbed.analysis.record import Record
from twinbed.conf.schema import CommConf, GradientPath
from twinbed.policies.comm import GradientsReady, build_comm
from twinbed.policies.mesh import Mesh

HOPS = ("reduce_local", "reduce_node")


@pytest.fixture(scope="module")
def rivals() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "rivals.py"
    spec = importlib.util.spec_from_file_location("benchmark_rivals_of_chunks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def reduced(
    rivals: ModuleType, mesh: Mesh, segments: Sequence[int], dtype: torch.dtype, keys: dict[str, Any]
) -> torch.Tensor:
    """[ranks, elements]: each rank's slice of the mean, by the runtime's own interpreter."""
    conf = CommConf(name="chunks", zero_quantized_gradients=True, **keys)
    policy, _ = build_comm(conf, num_ranks=mesh.num_ranks, ranks_per_node=mesh.ranks_per_node)
    plan = policy.decide(GradientsReady("unit", 0, 1))
    numel = sum(segments)
    generator = torch.Generator().manual_seed(numel)
    inputs = [
        (torch.randn(mesh.num_ranks, numel, generator=generator) ** 3).to(dtype)
        for _ in range(mesh.num_ranks)
    ]
    outputs = torch.empty(mesh.num_ranks, numel)

    def one(rank: int, interpreter: Any) -> None:
        interpreter.reduce(
            plan, unit="unit", slices=inputs[rank], out=outputs[rank], segments=tuple(segments), mean=True
        )

    rivals.on_all_ranks(mesh, one)
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segments", [(1,), (255, 257), (1000, 3, 0, 2049), (5000,), (7, 7, 7)])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gradient_bits": [8, 4]},
        {"gradient_bits": [6, 2]},
        {"gradient_block": 0},
        {"gradient_path": GradientPath.one_hop},
    ],
)
def test_chunks_change_no_bit(
    rivals: ModuleType, segments: tuple[int, ...], dtype: torch.dtype, keys: dict[str, Any]
) -> None:
    mesh = Mesh(8, 4)
    whole = reduced(rivals, mesh, segments, dtype, keys)
    for chunks in (2, 3, 4):
        assert torch.equal(reduced(rivals, mesh, segments, dtype, {**keys, "gradient_chunks": chunks}), whole)


@pytest.mark.parametrize("segments", [(1,), (255, 257), (1000, 3, 0, 2049)])
def test_sums_are_the_same_without_fused_kernels(rivals: ModuleType, segments: tuple[int, ...]) -> None:
    """Two ranks a node: each sum is of two terms, so no order of adding can show."""
    mesh = Mesh(4, 2)
    fused = reduced(rivals, mesh, segments, torch.bfloat16, {})
    for chunks in (1, 3):
        keys = {"fused_kernels": False, "gradient_chunks": chunks}
        assert torch.equal(reduced(rivals, mesh, segments, torch.bfloat16, keys), fused)


def cases(model: tuple[str, ...], nodes: int, per_node: int) -> dict[str, tuple[str, ...]]:
    few = (nodes, per_node) != (2, 2)  # what the shape of the cluster changes
    common = (
        *model,
        "model.layers=2",
        "data=synthetic",
        "cluster.shaped=false",
        f"cluster.nodes={nodes}",
        f"cluster.devices_per_node={per_node}",
        f"steps={1 if few else 2}",
        "warmup_steps=0",
        "comm=zeropp",
    )
    found = {
        f"chunks{chunks}-k{k}": (*common, f"comm.gradient_chunks={chunks}", f"batch.accumulation={k}")
        for chunks in ((1, 4) if few else (1, 2, 4))
        for k in (1, 2)
    }
    found["unfused"] = (*common, "comm.fused_kernels=false")
    found["unfused-chunks3"] = (*common, "comm.fused_kernels=false", "comm.gradient_chunks=3")
    found["one-hop"] = (*common, "comm.gradient_path=one_hop", "comm.gradient_chunks=3")
    found["whole-tensor"] = (*common, "comm.gradient_block=0", "comm.gradient_chunks=3")
    found["overlap"] = (*common, "comm.overlap=true", "comm.gradient_chunks=4")
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [(2, 1), *(pytest.param(*size, marks=pytest.mark.long) for size in ((2, 2), (2, 4)))],
)
def test_both_targets_carry_chunks_out_alike(
    nodes: int, per_node: int, odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    runs = run_cases(cases(odd_model, nodes, per_node))
    for composed, real in runs.values():
        same_ledger(composed, real)
    losses = {name: real.result["loss"] for name, (_, real) in runs.items()}
    for k in (1, 2):
        assert {
            str(losses[name]) for name in losses if name.startswith("chunks") and name.endswith(f"-k{k}")
        } == {str(losses[f"chunks1-k{k}"])}
    assert losses["unfused-chunks3"] == losses["unfused"]
    assert losses["overlap"] == losses["chunks1-k1"]
    volumes = {name: real.result["comm"] for name, (_, real) in runs.items()}
    for key in ("payload_bytes", "wire_bytes", "inter_node_bytes"):
        assert volumes["chunks4-k1"][key] == volumes["chunks1-k1"][key], key
    assert volumes["chunks4-k1"]["collectives"] > volumes["chunks1-k1"]["collectives"]


def beside_ns(record: Record) -> int:
    """How long, on rank 0, a chunk was between nodes while another was within its node; per unit and chunk pair."""
    hops = [[s for s in record.spans if s.rank == 0 and s.stream == stream] for stream in HOPS]
    return sum(
        max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a in hops[0] for b in hops[1]
    )


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_chunk_is_between_nodes_while_the_next_is_within(
    odd_model: Any, run_cases: Callable[..., Any], same_ledger: Callable[..., Any]
) -> None:
    common = (
        *odd_model,
        "model.hidden=96",
        "data=synthetic",
        "cluster.shaped=false",
        "steps=2",
        "comm=zeropp",
    )
    ((composed, real),) = run_cases({"four": (*common, "warmup_steps=0", "comm.gradient_chunks=4")}).values()
    sim = same_ledger(composed, real)
    for record in (sim, real):
        assert beside_ns(record) > 0
        for stream in HOPS:  # chunks of a stream end in their order
            ends = [s.end_ns for s in record.spans if s.rank == 0 and s.stream == stream]
            assert all(a <= b for a, b in pairwise(ends))
