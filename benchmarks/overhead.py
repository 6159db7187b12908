"""What the policy path costs: comm=zero3 against plain `fully_shard` with the very same collectives, in pairs.

Run: python benchmarks/overhead.py. Both train one model on the same ranks, one step each in turn; the plain side
calls the all-gather and the ring reduce-scatter from its hooks directly: no policy, plan, ledger or laps.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from twinbed.conf.compose import compose, load_experiment
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

PAIRS, WARMUP = 100, 3
CLUSTERS = {
    "unshaped": ("cluster.shaped=false",),
    "500 Mbit/s": ("cluster.inter_node.bandwidth_Bps=62.5e6",),
}


def run_pairs(case: Case, context: Any) -> None:
    """On each rank: alternate steps; rank 0 writes the times."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import get_total_norm

    from twinbed.policies.mesh import Mesh
    from twinbed.runtime.dispatch import activate
    from twinbed.runtime.model import GPT
    from twinbed.runtime.ring import ring_reduce_scatter
    from twinbed.runtime.trainer import Trainer

    experiment = load_experiment(case.experiment)
    trainer = Trainer(experiment, context)
    world = context.groups(Mesh(context.num_ranks, context.ranks_per_node, 1))["world"]

    class Allocating:
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return torch.empty(*size, dtype=dtype, device=device)

    class PlainGather(Allocating, AllGather):  # type: ignore[misc]
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            dist.all_gather_single(output_tensor, input_tensor, group=group)

    class PlainReduce(Allocating, ReduceScatter):  # type: ignore[misc]
        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> None:
            ring_reduce_scatter(world, input_tensor.view(world.size, -1), output_tensor, None)
            output_tensor.div_(world.size)

    plain = GPT(trainer.spec, seed=experiment.seed)
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    modules = [*plain.blocks, plain]
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        module.set_custom_all_gather(PlainGather())
        module.set_custom_reduce_scatter(PlainReduce())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True, weight_decay=0.0)

    def plain_step(step: int) -> None:
        tokens, targets = trainer.feed.train(step, 0)
        plain(tokens, targets).backward()
        gradients = [p.grad.to_local() for p in plain.parameters() if isinstance(p.grad, DTensor)]
        square = get_total_norm(gradients).float().square()
        dist.all_reduce(square)
        factor = min(1.0, 1.0 / (float(square.sqrt()) + 1e-6))
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
        optimizer.step()
        optimizer.zero_grad()

    times: dict[str, list[float]] = {"twinbed": [], "plain": []}
    for step in range(WARMUP + PAIRS):
        context.beat(step)
        order = [("twinbed", trainer.step), ("plain", plain_step)]
        for name, call in order if step % 2 else reversed(order):
            dist.barrier()
            started = time.perf_counter()
            activate(trainer.ledger if name == "twinbed" else None)
            call(step)
            dist.barrier()
            if step >= WARMUP:
                times[name].append(time.perf_counter() - started)
    trainer.close()
    if context.rank == 0:
        context.case_folder(case).joinpath("pairs.json").write_text(json.dumps(times))


def measure(cluster: tuple[str, ...]) -> dict[str, list[float]]:
    composed = compose(["target=runtime", "comm=zero3", "steps=2", *cluster])
    with tempfile.TemporaryDirectory() as folder:
        case = Case(name="pairs", folder="pairs", experiment=composed.resolved, kind=f"{__file__}:run_pairs")
        outcome = launch_local(Path(folder), cluster=composed.experiment.cluster, cases=[case])
        if outcome.status != "ok":
            sys.exit(outcome.error)
        found: dict[str, list[float]] = json.loads((Path(folder) / "pairs" / "pairs.json").read_text())
    return found


def main() -> None:
    print(f"{'links':>12} {'plain':>10} {'zero3':>10} {'median of paired ratios':>24}   ({PAIRS} pairs)")
    for name, keys in CLUSTERS.items():
        times = measure(keys)
        ratios = [a / b for a, b in zip(times["twinbed"], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        plain, ours = (statistics.median(times[side]) * 1e3 for side in ("plain", "twinbed"))
        print(f"{name:>12} {plain:8.1f}ms {ours:8.1f}ms {middle:14.3f} (quartiles {low:.3f}, {high:.3f})")


if __name__ == "__main__":
    main()
