"""Runs on each rank for test_beneath.py: what the ledger sees of torch.distributed."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from twinbed.policies.mesh import Mesh
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.ledger import Ledger

from ranks_run import run_cases


def operators() -> list[tuple[Any, ...]]:
    """(op, axis, payload, wire, inter-node) of each, in the order of the calls; a 2 x 2 cluster."""
    mesh = Mesh(4, 2)
    rank = dist.get_rank()
    ledger = Ledger(rank=rank, mesh=mesh)
    groups = Groups(mesh)
    activate(ledger)
    x, four = torch.ones(6), torch.ones(24)
    dist.all_reduce(x)  # set-up: not seen
    ledger.at(iteration=3, phase="step")
    dist.all_reduce(x)
    with torch.inference_mode():
        dist.all_reduce(torch.ones(6))
    functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    dist.all_gather_single(four, x)
    dist.all_gather([torch.empty(6) for _ in range(4)], x)
    dist.reduce_scatter_tensor(x, four)
    dist.all_to_all_single(torch.empty(24), four)
    dist.broadcast(x, 1)
    dist.reduce(x, 2)
    local = groups["local"]
    dist.all_reduce(x, group=local.handle)
    peer = local.ranks[1 - local.index]
    with ledger.collective(
        op="all_to_all", axis="local", group=local.ranks, payload_bytes=99, stream="reduce", layer="root"
    ):
        work = dist.irecv(torch.empty(6), peer, group=local.handle)
        dist.send(x, peer, group=local.handle)
        work.wait()
        dist.all_gather_single(torch.empty(12), x, group=local.handle)
    assert all(row.iteration == 3 and row.phase == "step" for row in ledger.rows)
    assert [span.name for span in ledger.spans] == ["all_to_all root"]
    return [
        (row.op, row.axis, row.payload_bytes, row.wire_bytes, row.inter_node_bytes) for row in ledger.rows
    ]


def many() -> int:
    """Many small collectives: a watcher that kept the interpreter lock would hang in a few thousand."""
    mesh = Mesh(2, 2)
    ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
    activate(ledger)
    ledger.at(phase="step")
    x, both = torch.ones(157), torch.empty(314)
    for _ in range(3000):
        dist.broadcast(x, 0)
        dist.all_gather_single(both, x)
        dist.reduce(x, 0)
    return len(ledger.rows)


if __name__ == "__main__":
    run_cases({"operators": operators, "many": many})
