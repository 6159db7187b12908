"""Runs on each rank for test_words.py: four ranks in a square of `row` and `column`, and in two replicas of two."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.schema import Backend
from twinbed.policies.layout.modes.summa import COLUMN, ROW
from twinbed.policies.mesh import DATA, LOCAL, NODE, PIPELINE, SEQUENCE, TENSOR, WORLD, Dims, Mesh
from twinbed.policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Multiply,
    Plan,
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    SendRecv,
    Slice,
    Step,
)
from twinbed.runtime.collectives import build_collectives
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.interpreter import Interpreter
from twinbed.runtime.layout import Context, LayerInterpreter
from twinbed.runtime.ledger import Ledger

from ranks_run import run_cases

COLLECTIVES = build_collectives(Backend.gloo)


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers, which every sum here has exactly, in bf16 too."""
    random = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=random).to(dtype)


def square() -> tuple[Mesh, LayerInterpreter, Ledger]:
    mesh = Mesh(4, 2, dims=(("row", 2), ("column", 2), (DATA, 1)))
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    return mesh, LayerInterpreter(Groups(mesh), ledger, COLLECTIVES), ledger


def run(
    interpreter: LayerInterpreter, steps: Sequence[Step], keep: Sequence[str], **operands: Tensor
) -> dict[str, Tensor]:
    before = {name: x.clone() for name, x in operands.items()}
    mesh = interpreter.groups.mesh
    context = Context(mesh=mesh, rank=interpreter.groups.rank)
    plan = Plan.of_operands(steps, "layer")
    made = interpreter.run(plan, operands, label="here", context=context, keep=keep)
    for name, x in operands.items():
        assert torch.equal(x, before[name]), f"{name} was given, and is written over"
    return made


def words() -> dict[str, Any]:
    """Every word, in three dtypes, on parts that are not contiguous, against what all ranks' operands say."""
    mesh, interpreter, _ = square()
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for dim in (0, 1, -1):
            group = mesh.group("row", rank)
            me, there = (
                mesh.index("row", rank),
                [of_rank(r, 6, 4, 2, dtype=dtype).transpose(0, 1) for r in group],
            )
            x = there[me]
            total = there[0] + there[1]
            axis: dict[str, Any] = {"axis": "row", "reads": ("x",), "writes": ("y",)}
            sums: dict[str, Any] = axis | {"op": ReduceOp.sum}
            checks: list[tuple[Step, Tensor | None]] = [
                (AllGather(dim=dim, **axis), torch.cat(there, dim)),
                (AllGather(dim=dim, stream="beside", **axis), torch.cat(there, dim)),
                (ReduceScatter(dim=dim, **sums), total.chunk(2, dim)[me]),
                (AllReduce(**sums), total),
                (AllReduce(stream="beside", **sums), total),
                (AllReduce(**(axis | {"op": ReduceOp.max})), torch.maximum(*there)),
                (Slice(dim=dim, **axis), x.chunk(2, dim)[me]),
                (Broadcast(root=1, **axis), there[1]),
                (Broadcast(root=0, stream="beside", **axis), there[0]),
                (ReduceTo(root=1, tree=True, **sums), total if me == 1 else None),
                (ReduceTo(root=0, stream="beside", **sums), total if me == 0 else None),
                (AllToAll(dim=dim, into_dim=1, **axis), torch.cat([t.chunk(2, dim)[me] for t in there], 1)),
                (SendRecv(shift=1, **axis), there[1 - me]),
                (SendRecv(shift=-1, stream="beside", **axis), there[1 - me]),
                (SendRecv(shift=2, **axis), x),
            ]
            for step, expected in checks:
                made = run(interpreter, [step], ["y"], x=x)
                assert made.keys() == (set() if expected is None else {"y"}), step
                assert expected is None or torch.equal(made["y"], expected), (step, made["y"], expected)
    return {}


def shifts_and_trees() -> None:
    """Over all four ranks."""
    mesh = Mesh(4, 2, dims=((TENSOR, 4), (DATA, 1)))
    interpreter = LayerInterpreter(Groups(mesh), Ledger(rank=dist.get_rank(), mesh=mesh), COLLECTIVES)
    rank = dist.get_rank()
    for shift in (1, 3, -1, 2):
        step = SendRecv(axis=TENSOR, shift=shift, reads=("k", "v"), writes=("k2", "v2"))
        made = run(interpreter, [step], ["k2", "v2"], k=of_rank(rank, 3), v=of_rank(rank, 2, 2))
        assert torch.equal(made["k2"], of_rank((rank - shift) % 4, 3))
        assert torch.equal(made["v2"], of_rank((rank - shift) % 4, 2, 2))
    total = sum(of_rank(r, 5, 3) for r in range(4))
    assert isinstance(total, Tensor)
    for root in range(4):
        step = ReduceTo(axis=TENSOR, root=root, op=ReduceOp.sum, tree=True, reads=("x",), writes=("y",))
        made = run(interpreter, [step], ["y"], x=of_rank(rank, 5, 3))
        assert ("y" in made) == (rank == root)
        assert rank != root or torch.equal(made["y"], total)


def rows() -> list[tuple[Any, ...]]:
    """Of a plan whose second broadcast is waited for after a reduction that was issued behind it."""
    _, interpreter, ledger = square()
    ledger.at(phase="forward")
    steps: list[Step] = [
        Broadcast(axis="row", root=0, stream="row", reads=("x",), writes=("x0",)),
        Broadcast(axis="row", root=1, stream="row", reads=("x",), writes=("x1",)),
        Multiply(reads=("x0", "w"), writes=("y0",)),
        ReduceTo(axis="column", root=0, op=ReduceOp.sum, tree=True, reads=("y0",), writes=("z",)),
        AllReduce(axis="column", op=ReduceOp.sum, reads=("x0",), writes=("s",)),
        Multiply(reads=("x1", "w"), writes=("y1",)),
    ]
    run(interpreter, steps, ["y1"], x=of_rank(dist.get_rank(), 3, 2), w=of_rank(9, 2, 2))
    dist.all_reduce(torch.ones(3), group=interpreter.groups["column"].handle)
    names = [span.name for span in ledger.spans]
    found = [
        (row.stream, row.layer, row.op, row.axis, row.group_size, row.payload_bytes, row.wire_bytes)
        for row in ledger.rows
    ]
    return [*found, tuple(names)]


def replicas() -> dict[str, Any]:
    """What a communication policy sees of two replicas of two ranks each."""
    mesh = Mesh(4, 2, dims=((TENSOR, 2), (DATA, 2)))
    groups = Groups(mesh)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    ledger.at(phase="backward")
    view = groups.of_replicas()
    flat = torch.full((6,), float(dist.get_rank()))
    plan = Plan((AllReduce(axis=WORLD, op=ReduceOp.mean),), "reduce")
    Interpreter(view, ledger, COLLECTIVES).whole(plan, unit="root", flat=flat, segments=(6,), mean=True)
    dist.all_reduce(torch.ones(3), group=groups[TENSOR].handle)
    return {
        "ranks": {axis: view[axis].ranks for axis in (WORLD, LOCAL, NODE)},
        "index": view.rank,
        "world": view.mesh.num_ranks,
        "mean": flat.tolist(),
        "rows": [(row.stream, row.op, row.axis, row.group_size, row.inter_node_bytes) for row in ledger.rows],
        "plain": Groups(Mesh(4, 2)).of_replicas()[WORLD].axis,
    }


def meshes_of_torch() -> dict[str, Any]:
    """The one mesh of torch's for a product, by the sizes of its axes."""
    products: dict[str, Dims] = {
        "plain": ((DATA, 4),),
        "1d": ((TENSOR, 2), (SEQUENCE, 1), (DATA, 2)),
        "2d": ((ROW, 2), (COLUMN, 2)),
        "pipeline": ((SEQUENCE, 2), (DATA, 1), (PIPELINE, 2)),
    }
    found = {}
    for name, dims in products.items():
        groups = Groups(Mesh(4, 2, dims=dims))
        mesh = groups.device_mesh(torch.device("cpu"))
        assert mesh.mesh_dim_names is not None
        found[name] = {
            each: (
                tuple(mesh[each].mesh.tolist()),
                mesh.get_group(each) is groups[each].handle,
                groups.of_replicas().device_mesh(torch.device("cpu")).mesh.tolist(),
            )
            for each in mesh.mesh_dim_names
        }
    return found


def all_words() -> dict[str, Any]:
    words()
    shifts_and_trees()
    return {"rows": rows(), "replicas": replicas(), "meshes": meshes_of_torch()}


if __name__ == "__main__":
    run_cases({"words": all_words})
