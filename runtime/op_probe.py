"""Collectives as the interpreter runs them: how long each takes, small and large."""

from collections.abc import Callable, Mapping
from typing import Any

from .measured import OpRow
from .probe_timing import BATCHES, REPEATS, Work, agreed_mean, timed_between_work

SMALL_ELEMENTS = 256  # of one slice: nothing but fixed costs
LARGE_ELEMENTS = 200_000


class Timed:
    """Collectives that are measured turn by turn with others'."""

    def __init__(self, device: Any) -> None:
        self.calls: list[tuple[OpRow, Callable[[], None]]] = []
        self._batches: list[list[float]] = []
        self._work = Work(device)

    def add(self, row: OpRow, call: Callable[[], None]) -> None:
        """Of more than one rank. To be called on all ranks in one order."""
        if row.group_size > 1:
            self.calls.append((row, call))
            self._batches.append([])

    def begin(self) -> None:
        """Each once: the first opens connections."""
        for _, call in self.calls:
            call()

    def batch(self) -> None:
        for (row, call), batches in zip(self.calls, self._batches, strict=True):
            small = row.numel <= SMALL_ELEMENTS * max(1, row.group_size) * 8
            batches.append(timed_between_work(call, self._work, REPEATS if small else 2))

    def rows(self) -> list[OpRow]:
        flat = agreed_mean([seconds for batches in self._batches for seconds in batches])
        rows = []
        for i, (row, _) in enumerate(self.calls):
            mine = flat[i * BATCHES : (i + 1) * BATCHES]
            rows.append(OpRow(row.op, row.axis, row.group_size, row.message_bytes, row.numel, tuple(mine)))
        return rows


class OpProbe(Timed):
    """Each collective of a communication policy through the interpreter, as a run has it.

    Args:
        interpreter: Of all ranks, or of those that hold the same part of a model.
        names: What the axes of its mesh are called on the whole mesh.
        large: Elements of a rank's slice that are much.
    """

    def __init__(
        self,
        interpreter: Any,
        dtype: Any,
        device: Any,
        names: Mapping[str, str] | None = None,
        *,
        large: int = LARGE_ELEMENTS,
    ) -> None:
        super().__init__(device)
        import torch

        from ..policies.mesh import HPZ, LOCAL, NODE, WORLD
        from ..policies.plan import (
            AllGather,
            AllReduce,
            AllToAll,
            Broadcast,
            Plan,
            Reduce,
            ReduceScatter,
            ReduceTo,
            StoreCopy,
        )

        mesh = interpreter.mesh
        world = mesh.num_ranks
        called = names or {}

        def add(op: str, axis: str, message: int, numel: int, call: Callable[[], None]) -> None:
            self.add(OpRow(op, called.get(axis, axis), mesh.size(axis), message, numel, ()), call)

        class Held:
            def __init__(self, shard: torch.Tensor) -> None:
                self.shard = shard

            def load(self, axis: str) -> torch.Tensor:
                return self.shard

            def store(self, axis: str, shard: torch.Tensor) -> None:
                self.shard = shard

        from ..policies.plan import LoadCopy

        for n in (SMALL_ELEMENTS, large // world * 4):
            n -= n % (4 * world)
            full = torch.zeros(world * n, dtype=dtype, device=device)
            shard, out = full[:n].clone(), torch.empty_like(full)
            nbytes = n * dtype.itemsize
            held = Held(full[: world * n // mesh.size(HPZ)].clone())

            def gather(plan: Plan, shard: Any = shard, out: Any = out, n: int = n, held: Any = held) -> None:
                interpreter.gather(plan, unit="probe", shard=shard, out=out, segments=(n,), copies=held)

            def reduce(plan: Plan, full: Any = full, shard: Any = shard, n: int = n) -> None:
                interpreter.reduce(plan, unit="probe", slices=full, out=shard, segments=(n,), mean=True)

            def whole(plan: Plan, full: Any = full, n: int = n) -> None:
                interpreter.whole(plan, unit="probe", flat=full, segments=(world * n,), mean=True)

            all_gather = Plan((AllGather(axis=WORLD), StoreCopy(axis=HPZ)))
            local = Plan((LoadCopy(axis=HPZ), AllGather(axis=HPZ)))
            add("all_gather", WORLD, nbytes, world * n, lambda g=gather, p=all_gather: g(p))  # type: ignore[misc]
            if mesh.size(HPZ) < world:
                message = world * nbytes // mesh.size(HPZ)
                add("all_gather", HPZ, message, world * n, lambda g=gather, p=local: g(p))  # type: ignore[misc]
            ring = Plan((ReduceScatter(axis=WORLD),))
            add("reduce_scatter", WORLD, nbytes, world * n, lambda r=reduce, p=ring: r(p))  # type: ignore[misc]
            hop = Plan((AllToAll(axis=WORLD), Reduce()))
            add("all_to_all", WORLD, nbytes, world * n, lambda r=reduce, p=hop: r(p))  # type: ignore[misc]
            for axis in (LOCAL, NODE):
                size = mesh.size(axis)
                if size == world:
                    continue
                messages = [torch.zeros(n, dtype=dtype, device=device) for _ in range(size - 1)]
                received = [torch.empty_like(m) for m in messages]

                def exchange(axis: str = axis, m: Any = messages, r: Any = received) -> None:
                    with interpreter.ledger.span("probe", axis):
                        interpreter.collectives.all_to_all(interpreter.groups[axis], m, r)

                add("all_to_all", axis, nbytes, world * n, exchange)
            for op, step in (
                ("all_reduce", AllReduce(axis=WORLD)),
                ("reduce", ReduceTo(axis=WORLD)),
                ("broadcast", Broadcast(axis=WORLD)),
            ):
                plan = Plan((step,))
                add(op, WORLD, world * nbytes, world * n, lambda w=whole, p=plan: w(p))  # type: ignore[misc]
        self.begin()
