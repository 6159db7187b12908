"""Runs on each rank for test_pipeline.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import CommConf, ParallelConf, Precision
from twinbed.policies.comm import CommPolicy, build_comm
from twinbed.policies.layout.parallel import ParallelLayout, build_parallel
from twinbed.policies.mesh import Mesh
from twinbed.runtime.dispatch import activate
from twinbed.runtime.groups import Groups
from twinbed.runtime.laps import Laps
from twinbed.runtime.layout.build import build_layout_engine
from twinbed.runtime.layout.engine import LayoutEngine
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.micro_batches import MicroBatches
from twinbed.runtime.optim.lamb import Lamb
from twinbed.runtime.optim.norms import Holders
from twinbed.runtime.stack import Stack, build_model

from ranks_run import run_cases

CPU = torch.device("cpu")
MICRO, TOKENS, STEPS, RATE = 2, 6, 5, 0.5
SPEC = ModelSpec(
    name="small",
    family="gpt",
    layers=4,
    hidden=12,
    heads=2,
    kv_heads=2,
    ffn=20,
    vocab=19,
    sequence=8,
    tied_embeddings=False,
    head="lm",
)
COMM: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "ps": {"zero_stage": 0, "parameter_server": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {},
    "hpz": {"zero_hpz_partition_size": None},
    "zeropp": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": None,
        "zero_quantized_gradients": True,
        # Finer than the defaults, which would fill up parameters as small as these to blocks many times their size
        "weight_block": 64,
        "gradient_block": 64,
        "gradient_bits": [8, 8],
    },
}
Case = tuple[str, dict[str, Any], str, int, bool]  # name, parallel, comm, micro-batches, tied


def cases(world: int) -> list[Case]:
    found: list[Case] = []
    for stages in (2, 4) if world == 4 else (2,):
        schedules: list[tuple[str, dict[str, Any]]] = [
            ("gpipe", {"pipeline_schedule": "gpipe"}),
            ("1f1b", {"pipeline_schedule": "1f1b"}),
        ]
        if stages == 2:
            schedules.append(("interleaved", {"pipeline_schedule": "interleaved", "virtual_stages": 2}))
        for schedule, keys in schedules:
            policies = (
                ("ddp", "zero1", "zero3") if schedule != "1f1b" else tuple(c for c in COMM if c != "zeropp")
            )
            for comm in policies:
                name = f"p{stages} {schedule} {comm}"
                found.append((name, {"pipeline": stages, **keys}, comm, 4, False))
    found.append(("p2 1f1b zero3 tied", {"pipeline": 2}, "zero3", 3, True))
    found.append(
        (
            "p2 interleaved ddp tied",
            {"pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2},
            "ddp",
            2,
            True,
        )
    )
    return found


def tokens(step: int, micro_batch: int, replica: int) -> tuple[Tensor, Tensor]:
    """The same wherever they are asked for."""
    random = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + replica)
    drawn = torch.randint(0, SPEC.vocab, (MICRO, TOKENS + 1), generator=random)
    return drawn[:, :-1], drawn[:, 1:]


class Rank:
    """An engine on this rank, and what a step needs."""

    def __init__(
        self,
        parallel: Mapping[str, Any],
        comm: str,
        *,
        micro_batches: int,
        tied: bool,
        ranks_per_node: int = 2,
        precision: Precision = Precision.fp32,
        recompute: bool = False,
    ) -> None:
        spec = replace(SPEC, tied_embeddings=tied)
        self.layout: ParallelLayout = build_parallel(
            ParallelConf(**parallel),
            spec,
            num_ranks=dist.get_world_size(),
            micro=MICRO,
            micro_batches=micro_batches,
            sequence=TOKENS,
        )
        world = dist.get_world_size()
        plain = Mesh(world, ranks_per_node, 1, self.layout.dims).of_replicas()
        self.policy: CommPolicy = build_comm(
            CommConf(name=comm, **COMM[comm]), num_ranks=plain.num_ranks, ranks_per_node=plain.ranks_per_node
        )[0]
        self.mesh = Mesh(world, ranks_per_node, self.policy.hpz_size, self.layout.dims)
        self.ledger = Ledger(rank=dist.get_rank(), mesh=self.mesh)
        activate(self.ledger)
        self.groups = Groups(self.mesh)
        self.laps = Laps()

        def new_model() -> Stack:
            model = build_model(spec, seed=3, recompute=recompute)
            model.clock = self.laps  # as the trainer: borders of units are tensors of their own
            return model

        self.engine: LayoutEngine = build_layout_engine(
            new_model,
            layout=self.layout,
            policy=self.policy,
            groups=self.groups,
            ledger=self.ledger,
            precision=precision,
            device=CPU,
            micro=MICRO,
            tokens=TOKENS,
        )
        self.micro_batches = micro_batches
        self.replica = self.mesh.index("data", dist.get_rank())
        parameters = self.engine.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=RATE) if parameters else None

    def backward(self, step: int) -> Tensor:
        self.ledger.at(iteration=step)
        read = lambda index: tokens(step, index, self.replica)  # noqa: E731
        losses = self.engine.run_step(
            MicroBatches(count=self.micro_batches, read=read, factor=1 / self.micro_batches)
        )
        self.ledger.at(phase="step", layer="")
        return losses

    def finish(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        self.engine.after_optimizer_step()
        self.engine.zero_grad()


class Single:
    """The same training in one process."""

    def __init__(self, *, micro_batches: int, replicas: int, tied: bool) -> None:
        self.model = build_model(replace(SPEC, tied_embeddings=tied), seed=3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.micro_batches, self.replicas = micro_batches, replicas

    def backward(self, step: int) -> Tensor:
        """Losses, [replicas, micro_batches]."""
        losses = []
        for replica in range(self.replicas):
            for index in range(self.micro_batches):
                loss = self.model(*tokens(step, index, replica))
                (loss / (self.replicas * self.micro_batches)).backward()
                losses.append(loss.detach())
        return torch.stack(losses).view(self.replicas, -1)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def gradients() -> dict[str, Any]:
    """For each case: the worst errors of gradients and losses over some steps, names of all parameters, norms."""
    found: dict[str, Any] = {}
    for name, parallel, comm, micro_batches, tied in cases(dist.get_world_size()):
        rank = Rank(parallel, comm, micro_batches=micro_batches, tied=tied)
        single = Single(micro_batches=micro_batches, replicas=rank.mesh.data, tied=tied)
        worst, off = 0.0, 0.0
        names: set[str] = set()
        for step in range(STEPS):
            losses, wanted = rank.backward(step), single.backward(step)[rank.replica]
            off = max(off, error(losses, wanted))
            want = single.gradients()
            got = rank.engine.full_gradients()
            names |= got.keys()
            worst = max([worst, *(error(got[key], want[key]) for key in got)])
            norm = rank.engine.clip_gradients(float("inf"))
            assert norm is not None
            whole = torch.stack([g.norm() for g in want.values()]).norm()
            off = max(off, abs(norm / float(whole) - 1))
            rank.finish()
            single.finish()
        found[name] = (worst, off, sorted(names), sorted(want), comm == "ps" and rank.replica > 0)
        rank.engine.close()
    return found


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    f"{name} {comm}": (keys, comm)
    for name, keys in (
        ("2 gpipe", {"pipeline": 2, "pipeline_schedule": "gpipe"}),
        ("2 1f1b", {"pipeline": 2}),
        ("2 interleaved", {"pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}),
        ("4 1f1b", {"pipeline": 4}),
    )
    for comm in ("ddp", "zero1", "zero3")
}
TIED = {"2 1f1b zero3"}


def rows() -> dict[str, Any]:
    """Of each case the rows of one clipped step after a first one, and what a validation sends."""
    found: dict[str, Any] = {}
    for name, (keys, comm) in ROWS.items():
        rank = Rank(keys, comm, micro_batches=4, tied=name in TIED)
        for step in range(2):
            rank.backward(step)
            rank.engine.clip_gradients(1.0)
            rank.finish()
        rank.ledger.at(iteration=2, phase="eval", layer="")
        total = rank.engine.evaluate(MicroBatches(count=3, read=lambda index: tokens(9, index, 0)))
        dist.all_reduce(total)
        single = Single(micro_batches=4, replicas=rank.mesh.data, tied=name in TIED)
        for step in range(2):
            single.backward(step)
            torch.nn.utils.clip_grad_norm_(single.model.parameters(), 1.0)
            single.finish()
        with torch.no_grad():
            wanted = sum(float(single.model(*tokens(9, index, 0))) for index in range(3))
        found[name] = (
            keys,
            comm,
            name in TIED,
            [
                (r.stream, r.phase, r.layer, r.op, r.axis, r.group_size, r.payload_bytes)
                for r in rank.ledger.rows
                if r.iteration >= 1
            ],
            float(total[0]) / rank.mesh.data / wanted - 1,
        )
        rank.engine.close()
    return found


def quantized() -> dict[str, Any]:
    """ZeRO++ over replicas on two nodes: how far gradients are off, losses and what they should be, quantized rows."""
    keys = {"pipeline": 2, "order": ["pipeline", "tensor", "sequence", "data"]}
    found = {}
    per_node = dist.get_world_size() // 2
    for name, more in (
        ("1f1b", {}),
        ("interleaved", {"pipeline_schedule": "interleaved", "virtual_stages": 2}),
    ):
        rank = Rank(keys | more, "zeropp", micro_batches=4, tied=False, ranks_per_node=per_node)
        single = Single(micro_batches=4, replicas=rank.mesh.data, tied=False)
        losses, wanted, off = [], [], 0.0
        for step in range(3):
            losses.append(float(rank.backward(step).mean()))
            wanted.append(float(single.backward(step)[rank.replica].mean()))
            if step == 0:
                want, got = single.gradients(), rank.engine.full_gradients()
                together = [torch.cat([x[key].flatten() for key in got]) for x in (got, want)]
                off = error(*together)  # a bias's own gradient can be smaller than what it is summed up from
            rank.finish()
            single.finish()
        small = {
            (r.stream, r.axis, r.op)
            for r in rank.ledger.rows
            if r.op == "all_to_all" or (r.op == "all_gather" and r.wire_bytes < r.payload_bytes // 2)
        }
        found[name] = (off, losses, wanted, sorted(small), rank.engine.secondary_bytes())
        rank.engine.close()
    return found


def holders() -> tuple[float, float]:
    """LAMB on a matrix cut over the two ranks and a bias that both have: how far from one process with all of it."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    whole = [torch.linspace(-1, 2, 24).view(6, 4), torch.linspace(1, 3, 8).view(2, 4)]
    slopes = [torch.linspace(3, -2, 24).view(6, 4), torch.linspace(0.5, 2, 8).view(2, 4)]
    cut = [torch.nn.Parameter(whole[0].chunk(2)[rank].clone()), torch.nn.Parameter(whole[1].clone())]
    cut[0].grad, cut[1].grad = slopes[0].chunk(2)[rank].clone(), slopes[1].clone()
    shares = {id(cut[0]): 1.0, id(cut[1]): 0.5}
    Lamb(cut, lr=0.1, weight_decay=0.1, holders=Holders(group, shares)).step()
    alone = [torch.nn.Parameter(x.clone()) for x in whole]
    for parameter, slope in zip(alone, slopes, strict=True):
        parameter.grad = slope
    Lamb(alone, lr=0.1, weight_decay=0.1).step()
    return error(cut[0].data, alone[0].data.chunk(2)[rank]), error(cut[1].data, alone[1].data)


if __name__ == "__main__":
    run_cases({"gradients": gradients, "rows": rows, "quantized": quantized, "holders": holders})
