"""Runs on each rank for test_pace.py."""

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from twinbed.conf.compose import compose
from twinbed.conf.schema import Backend
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import Direction, layout_of
from twinbed.policies.mesh import SEQUENCE, Mesh
from twinbed.runtime.collectives import build_collectives
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.layout.layout import lay_out
from twinbed.runtime.layout.pace import Rate
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.stack import Stack, build_model
from twinbed.sim.costs import Costs
from twinbed.sim.interpreter import Transfer
from twinbed.sim.layout.model import LaidModel
from twinbed.sim.layout.shapes import BEFORE, BEHIND, BLOCK

from ranks_run import run_cases

COLLECTIVES = build_collectives(Backend.gloo)
MICRO, TOKENS = 4, 16
SMALL = (
    "cluster=local_2x2",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "precision=fp32",
    f"model.sequence={TOKENS}",
    f"batch.micro={MICRO}",
)
GPT = ("model=gpt", "model.vocab=64")
LLAMA = ("model=llama_tiny", "model.kv_heads=4", "model.ffn=64", "model.vocab=64")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "1d": ("parallel.tensor=4",),
    "1d, sequence": ("parallel.tensor=4", "parallel.sequence=4"),
    "2d": ("parallel.tensor=4", "parallel.tensor_mode=2d"),
    "ring": ("parallel.sequence=4", "parallel.sequence_mode=ring"),
    "zigzag": ("parallel.sequence=4", "parallel.sequence_mode=ring", "parallel.zigzag=true"),
    "ulysses": ("parallel.sequence=4", "parallel.sequence_mode=ulysses"),
}


class Counting(Rate):
    """Adds up what work is stretched by, and lets no time pass."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.flop = 0.0

    def end(self, began_ns: int, flop: float) -> None:
        self.flop += flop


class Laid:
    """A model under one layout on this rank."""

    def __init__(
        self, keys: tuple[str, ...], rate: Rate, *, library: bool = True, beside: bool = True
    ) -> None:
        composed = compose(["target=sim", *SMALL, *keys])
        self.experiment, self.spec = composed.experiment, composed.spec
        layout = layout_of(self.experiment, self.spec)
        assert layout is not None
        mesh = Mesh.of(self.experiment.cluster, 1, layout.dims)
        self.ledger = Ledger(rank=dist.get_rank(), mesh=mesh)
        activate(self.ledger)
        self.model: Stack = build_model(self.spec, seed=0)
        lay_out(
            self.model,
            layout,
            groups=Groups(mesh),
            ledger=self.ledger,
            collectives=COLLECTIVES,
            micro=MICRO,
            sequence=TOKENS,
            library=library,
            rate=rate,
            beside=beside,
        )
        self.tokens = TOKENS // layout.sequence
        self.mesh = mesh

    def step(self) -> float:
        """Seconds of a forward and a backward."""
        ids = torch.zeros(MICRO, self.tokens, dtype=torch.int64)
        self.ledger.at(iteration=0, phase="forward")
        dist.barrier()
        began = time.perf_counter()
        self.model(ids, ids).backward()
        return time.perf_counter() - began

    def simulated_flop(self) -> float:
        """What the simulator counts for the same on this rank."""
        policy, _ = build_comm(self.experiment.comm, num_ranks=1, ranks_per_node=1)
        laid = Costs(self.experiment, self.spec, policy).laid
        assert laid is not None
        model: LaidModel = laid.model
        place, total = self.mesh.index(SEQUENCE, dist.get_rank()) if model.layout.sequence > 1 else 0, 0
        for part, times in ((BEFORE, 1), (BLOCK, self.spec.layers), (BEHIND, 1)):
            for direction in (Direction.forward, Direction.backward):
                for step in model.steps(part, direction):
                    if not isinstance(step.what, Transfer):
                        total += times * (step.by_place[place] if step.by_place else step.what).flop
        return float(total)


def counted() -> dict[str, tuple[float, float]]:
    """(operations that the runtime stretches, operations that the simulator counts) of each layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        for model in (GPT, LLAMA) if name in ("1d", "ring") else (GPT,):
            for library in (True, False) if name == "1d" else (True,):
                rate = Counting()
                laid = Laid((*model, *layout), rate, library=library)
                laid.step()
                found[f"{name} {model[0]} {library}"] = (rate.flop, laid.simulated_flop())
    return found


def slept() -> dict[str, tuple[float, float]]:
    """(seconds of a step, seconds that its products take at the rate)."""
    found = {}
    for name in ("1d", "2d", "ring"):
        flop = Laid((*GPT, *LAYOUTS[name]), Counting()).simulated_flop()
        laid = Laid((*GPT, *LAYOUTS[name]), Rate(flop / 0.5))
        found[name] = (laid.step(), 0.5)
    return found


def blocked() -> dict[str, Any]:
    """Of a ring, with and without what runs beside: whether spans overlap in time, and the rows."""
    found = {}
    for beside in (True, False):
        laid = Laid((*GPT, *LAYOUTS["ring"]), Rate(1e7), beside=beside)
        laid.step()
        sends = sorted((s.start_ns, s.end_ns) for s in laid.ledger.spans if s.name.startswith("send"))
        waits = [end - start for start, end in sends]
        found[str(beside)] = {
            "rows": len(laid.ledger.rows),
            "longest_ms": max(waits) / 1e6,
            "overlap": any(second[0] < first[1] for first, second in pairwise(sends)),
        }
    laid = Laid((*GPT, *LAYOUTS["1d"]), Counting())
    laid.step()
    found["1d"] = {
        "rows": [row.op for row in laid.ledger.rows if row.stream == "layer" and "block" in row.layer],
        "spans": [s.name for s in laid.ledger.spans if s.stream == "layer" and "block" in s.name],
    }
    return found


if __name__ == "__main__":
    run_cases({"counted": counted, "slept": slept, "blocked": blocked})
