"""Error of quantized gradient sums against the number of ranks: qgZ and the rivals that show why it is as it is.

Run: python benchmarks/rivals.py. Ranks are threads of this process (8 a node, up to 64), each running the runtime's
own interpreter on the very plans that a training would use; only the transport is replaced by hand-overs in memory.
"""

import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twinbed.conf.schema import CommConf, GradientPath
from twinbed.policies.comm import GradientsReady, build_comm
from twinbed.policies.mesh import HPZ, LOCAL, NODE, WORLD, Mesh
from twinbed.runtime.groups import Group
from twinbed.runtime.interpreter import Interpreter
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.ring import Codec

ELEMENTS = 64 * 256  # of one rank's slice
RANKS_PER_NODE = 8
WORLDS = (8, 16, 32, 64)
POLICIES = {
    "qgZ (two hops)": {},
    "one hop": {"gradient_path": GradientPath.one_hop},
    "ring": {"gradient_path": GradientPath.ring},
    "whole tensor": {"gradient_block": 0},
}


class InMemory:
    """Collectives between threads: what `runtime.collectives` promises, with a table in place of a network.

    All have ended when they return, those that were asked for `later` too.
    """

    def __init__(self, world: int) -> None:
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._table: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()

    def _wait(self, group: Group) -> None:
        with self._lock:
            barrier = self._barriers.setdefault(group.ranks, threading.Barrier(group.size))
        barrier.wait()

    def all_gather(self, group: Group, x: Tensor, out: Tensor, *, later: bool = False) -> None:
        me = group.ranks[group.index]
        self._table[me, me] = x.clone()  # `x` may be a part of `out`
        self._wait(group)
        out.view(group.size, -1).copy_(torch.stack([self._table[rank, rank] for rank in group.ranks]))
        self._wait(group)

    def all_to_all(
        self, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor], *, later: bool = False
    ) -> None:
        me = group.ranks[group.index]
        peers = [rank for rank in group.ranks if rank != me]
        for peer, message in zip(peers, sends, strict=True):
            self._table[me, peer] = message
        self._wait(group)
        for peer, buffer in zip(peers, receives, strict=True):
            buffer.copy_(self._table[peer, me])
        self._wait(group)

    def reduce_scatter(self, group: Group, x: Tensor, out: Tensor, codec: Codec | None) -> None:
        """The ring of `runtime.ring`, hop by hop."""
        from twinbed.kernels import dequantize_reduce, encode_segments

        g, me = group.size, group.index
        assert codec is not None
        current = encode_segments(x[(me - 1) % g], **codec.options)
        for hop in range(1, g):
            self._table[me, (me + 1) % g] = current
            self._wait(group)
            received = self._table[(me - 1) % g, me].clone()
            self._wait(group)
            total = dequantize_reduce(received[None], x[(me - 1 - hop) % g].float(), **codec.options)
            if hop + 1 < g:
                current = encode_segments(total, **codec.options)
        out.copy_(total)


class ThreadGroups:
    """`runtime.groups.Groups` without process groups."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank

    def __getitem__(self, axis: str) -> Group:
        ranks = self.mesh.group(axis, self.rank)
        assert axis in (WORLD, LOCAL, NODE, HPZ)
        return Group(axis, ranks, ranks.index(self.rank), None)


def relative_error(world: int, keys: dict[str, Any], *, seed: int) -> float:
    """Relative L2 error of the mean over all ranks' slices."""
    conf = CommConf(name="rival", zero_quantized_gradients=True, **keys)
    per_node = min(RANKS_PER_NODE, world // 2)
    policy, _ = build_comm(conf, num_ranks=world, ranks_per_node=per_node)
    plan = policy.decide(GradientsReady("unit", 0, 1))
    assert plan is not None
    mesh = Mesh(world, per_node)
    generator = torch.Generator().manual_seed(seed)
    # gradients: a common part and each rank's own noise, with magnitudes that differ along the tensor
    scale = torch.logspace(-3, 0, ELEMENTS).repeat(world, 1)
    common = torch.randn(world, ELEMENTS, generator=generator)
    inputs = [scale * (common + torch.randn(world, ELEMENTS, generator=generator)) for _ in range(world)]
    exact = torch.stack(inputs).mean(0)
    outputs = torch.empty(world, ELEMENTS)

    def one(rank: int, interpreter: Interpreter) -> None:
        interpreter.reduce(
            plan, unit="unit", slices=inputs[rank], out=outputs[rank], segments=(ELEMENTS,), mean=True
        )

    on_all_ranks(mesh, one)
    return float((outputs - exact).norm() / exact.norm())


def on_all_ranks(mesh: Mesh, call: Callable[[int, Interpreter], None]) -> None:
    """`call` with its rank and an interpreter, on a thread for each rank of the mesh."""
    collectives = InMemory(mesh.num_ranks)
    failed: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            interpreter = Interpreter(
                ThreadGroups(mesh, rank),  # type: ignore[arg-type]
                Ledger(rank=rank, mesh=mesh),
                collectives,  # type: ignore[arg-type]
            )
            call(rank, interpreter)
        except BaseException as err:
            failed.append(err)
            raise

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(mesh.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def main() -> None:
    print(f"{'relative L2 error, int4':>24}" + "".join(f"{world:>9} ranks" for world in WORLDS))
    for name, keys in POLICIES.items():
        errors = [
            statistics.mean(relative_error(world, dict(keys), seed=seed) for seed in range(3))
            for world in WORLDS
        ]
        print(f"{name:>24}" + "".join(f"{error:>15.4f}" for error in errors))


if __name__ == "__main__":
    main()
