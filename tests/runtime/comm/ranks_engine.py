"""Runs on each rank for test_engine.py."""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from twinbed.conf.schema import Precision
from twinbed.policies.comm import CommEvent, GradientsReady, Placement, WeightsNeeded
from twinbed.policies.mesh import WORLD
from twinbed.policies.plan import AllGather, AllToAll, Dequantize, LoadCopy, Plan, Quantize, Reduce, ReduceOp
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.wrap import CommEngine

from common import (
    Tiny,
    batch,
    engine_of,
    optimize,
    policy_of,
    reference_gradients,
    relative_error,
    sgd,
    train_step,
)
from ranks_run import launch_folder, run_cases

RANKS_PER_NODE = 2


def gradients() -> dict[str, float]:
    """The worst relative error of any parameter, over two steps, for each policy and setting."""
    world = dist.get_world_size()
    worst: dict[str, float] = {}
    settings = [
        (name, micro_batches, overlap)
        for name in ("ddp", "ps", "zero1", "zero2", "zero3", "hpz", "hpz_step")
        for micro_batches in (1, 3)
        for overlap in (False, True)
        if not (overlap and micro_batches > 1 and name not in ("ddp", "ps", "zero1"))
    ]
    for name, micro_batches, overlap in settings:
        policy = policy_of(name, world=world, ranks_per_node=RANKS_PER_NODE)
        engine, ledger = engine_of(
            policy, ranks_per_node=RANKS_PER_NODE, overlap=overlap, micro_batches=micro_batches
        )
        optimizer = sgd(engine)
        single = Tiny()
        stepper = torch.optim.SGD(single.parameters(), lr=0.1)
        errors = [0.0]
        for step in range(2):
            train_step(engine, ledger, step=step, micro_batches=micro_batches)
            want = reference_gradients(single, step=step, micro_batches=micro_batches, world=world)
            got = engine.full_gradients()
            owner = name != "ps" or dist.get_rank() == 0
            assert got.keys() == (want.keys() if owner else set())
            errors += [relative_error(got[key], want[key]) for key in got]
            for key, parameter in single.named_parameters():
                parameter.grad = want[key]
            stepper.step()
            single.zero_grad()
            optimize(engine, optimizer)
        worst[f"{name} x{micro_batches}{' overlap' if overlap else ''}"] = max(errors)
        engine.close()
    return worst


def ledgers() -> dict[str, list[tuple[Any, ...]]]:
    """One clipped iteration of one block: (stream, phase, layer, op, axis, group, payload, wire, inter)."""
    found = {}
    for name in ("zero3", "zeropp"):
        policy = policy_of(name, world=4, ranks_per_node=RANKS_PER_NODE)
        engine, ledger = engine_of(policy, ranks_per_node=RANKS_PER_NODE, model=Tiny(blocks=1))
        optimizer = sgd(engine)
        train_step(engine, ledger, step=0, micro_batches=1)
        norm = engine.clip_gradients(1e-3)
        assert norm is not None
        clipped = sum(float(g.square().sum()) for g in engine.full_gradients().values()) ** 0.5
        assert abs(clipped - 1e-3) < 1e-5
        optimize(engine, optimizer)
        found[name] = [
            (
                row.stream,
                row.phase,
                row.layer,
                row.op,
                row.axis,
                row.group_size,
                row.payload_bytes,
                row.wire_bytes,
                row.inter_node_bytes,
            )
            for row in ledger.rows
        ]
        found[f"{name} decisions"] = [(d.event, d.action) for d in ledger.decisions]
        engine.close()
    return found


def losses(precision: Precision) -> dict[str, list[str]]:
    """Losses of fifty steps as hex, for policies that must not change a bit."""
    found = {}
    for name, overlap in (
        ("zero3", False),
        ("zero3", True),
        ("hpz", False),
        ("hpz", True),
        ("hpz_step", False),
        ("zeropp", False),
        ("zeropp", True),
    ):
        policy = policy_of(name, world=4, ranks_per_node=RANKS_PER_NODE)
        engine, ledger = engine_of(
            policy, ranks_per_node=RANKS_PER_NODE, precision=precision, overlap=overlap
        )
        optimizer = sgd(engine)
        hexes = []
        for step in range(50):
            hexes.append(train_step(engine, ledger, step=step, micro_batches=1).hex())
            optimize(engine, optimizer)
        found[f"{name}{' overlap' if overlap else ''}"] = hexes
        engine.close()
    return found


def freshness() -> dict[str, float]:
    """How far losses are from one process's, where weights change while units are gathered or copied."""
    world = dist.get_world_size()
    worst = {}
    for name in ("ddp", "ps", "zero1", "zero2", "zero3", "hpz", "hpz_step"):
        policy = policy_of(name, world=world, ranks_per_node=RANKS_PER_NODE)
        engine, ledger = engine_of(policy, ranks_per_node=RANKS_PER_NODE, micro_batches=2)
        optimizer = sgd(engine, lr=1.0)  # large, so that old weights show
        single = Tiny()
        stepper = torch.optim.SGD(single.parameters(), lr=1.0)
        errors = []

        def evaluate(
            engine: CommEngine = engine,
            ledger: Ledger = ledger,
            single: Tiny = single,
            errors: list[float] = errors,
        ) -> None:
            tokens = batch(step=99, micro_batch=0, rank=0)
            ledger.at(phase="eval")
            with torch.no_grad():
                errors.append(abs(float(engine.model(tokens)) - float(single(tokens))))

        for step in range(3):
            got = train_step(engine, ledger, step=step, micro_batches=2)
            with torch.no_grad():
                mine = [
                    float(single(batch(step=step, micro_batch=j, rank=dist.get_rank()))) for j in range(2)
                ]
            errors.append(abs(got - sum(mine) / 2))
            want = reference_gradients(single, step=step, micro_batches=2, world=world)
            for key, parameter in single.named_parameters():
                parameter.grad = want[key]
            stepper.step()
            single.zero_grad()
            optimize(engine, optimizer)
            if step != 1:
                evaluate()
                evaluate()
            if step == 0:  # between two evaluations, with units gathered and copies kept
                state = engine.state_dict()
                with torch.no_grad():
                    for tensor in state.values():
                        tensor.mul_(0.5)
                    for parameter in single.parameters():
                        parameter.mul_(0.5)
                engine.load_state_dict(state)
                evaluate()
        worst[name] = max(errors)
        engine.close()
    return worst


def quantized() -> dict[str, tuple[float, float]]:
    """(share of the true mean in the gradient, largest error over its bound) of quantized reductions."""
    world = dist.get_world_size()
    found = {}
    for name in ("qgz", "one_hop", "ring", "zeropp", "chunked"):
        for same_data in (True, False):
            policy = (
                Chunked()
                if name == "chunked"
                else policy_of(name, world=world, ranks_per_node=RANKS_PER_NODE)
            )
            engine, ledger = engine_of(policy, ranks_per_node=RANKS_PER_NODE)
            train_step(engine, ledger, step=0, micro_batches=1, same_data=same_data)
            got = engine.full_gradients()
            single = Tiny()
            want = reference_gradients(single, step=0, micro_batches=1, world=world, same_data=same_data)
            largest = dict.fromkeys(want, 0.0)  # of one rank's gradient, in each parameter
            for rank in range(world):
                single.zero_grad()
                single(batch(step=0, micro_batch=0, rank=0 if same_data else rank)).backward()
                for key, parameter in single.named_parameters():
                    assert parameter.grad is not None
                    largest[key] = max(largest[key], float(parameter.grad.abs().max()))
            flat_got = torch.cat([got[key].flatten() for key in want])
            flat_want = torch.cat([want[key].flatten() for key in want])
            share = float(flat_got @ flat_want / flat_want.square().sum())
            worst = max(
                float((got[key] - want[key]).abs().max())
                / (error_bound(name, largest[key], world=world) + 1e-6)
                for key in want
            )
            found[f"{name}{' same data' if same_data else ''}"] = (share, worst)
            engine.close()
    return found


def error_bound(name: str, largest: float, *, world: int) -> float:
    """Half a step for each value quantized on its way, over the world size; a step is largest / 7."""
    half = 1 / 14 if name != "chunked" else 1 / 254
    if name in ("one_hop", "chunked"):
        return (world - 1) * largest * half / world
    error = 0.0
    if name == "ring":
        for hop in range(1, world):
            error += (hop * largest + error) * half
        return error / world
    local, nodes = RANKS_PER_NODE, world // RANKS_PER_NODE
    error = (local - 1) * largest * half  # of one node's sum
    again = (local * largest + error) * half
    return (nodes * error + (nodes - 1) * again) / world


class Chunked:
    """A policy that no engine has heard of: everything in two chunks, gradients in one hop of 8 bits."""

    name = "chunked"
    placement = Placement.sharded
    reshard_after_forward = True
    hpz_size = 1
    copy_outlives_micro_batch = False

    def decide(self, event: CommEvent) -> Plan | None:
        if isinstance(event, WeightsNeeded):
            return Plan((AllGather(axis=WORLD, chunks=2),))
        if isinstance(event, GradientsReady):
            steps = (
                Quantize(bits=8, block=16, exact_own=WORLD, chunks=2),
                AllToAll(axis=WORLD, chunks=2),
                Dequantize(chunks=2),
                Reduce(op=ReduceOp.mean, chunks=2),
            )
            return Plan(steps, "reduce")
        return None


def precisions() -> dict[str, float]:
    """Relative error of all gradients in 16 bits."""
    world = dist.get_world_size()
    found = {}
    for name in ("ddp", "zero2", "zero3"):
        for precision in (Precision.bf16, Precision.fp16):
            policy = policy_of(name, world=world, ranks_per_node=RANKS_PER_NODE)
            engine, ledger = engine_of(policy, ranks_per_node=RANKS_PER_NODE, precision=precision)
            train_step(engine, ledger, step=0, micro_batches=2)
            got = engine.full_gradients()
            want = reference_gradients(Tiny(), step=0, micro_batches=2, world=world)
            assert all(parameter.dtype == torch.float32 for parameter in engine.parameters())
            assert all(gradient.dtype == torch.float32 for gradient in got.values())
            found[f"{name} {precision.value}"] = relative_error(
                torch.cat([got[key].flatten() for key in want]),
                torch.cat([want[key].flatten() for key in want]),
            )
            engine.close()
    return found


def failures() -> dict[str, str]:
    """What is said when gradients are not finite, or a plan cannot be carried out."""
    said = {}
    for name in ("ddp", "zero3", "qgz"):
        policy = policy_of(name, world=4, ranks_per_node=RANKS_PER_NODE)
        model = Tiny()
        model.blocks[1].poisoned = dist.get_rank() == 1
        engine, ledger = engine_of(policy, ranks_per_node=RANKS_PER_NODE, model=model)
        train_step(engine, ledger, step=0, micro_batches=1)
        norm = engine.clip_gradients(1.0)
        assert norm is not None
        assert math.isnan(norm)
        try:
            engine.check_finite()
        except RuntimeError as err:
            said[name] = str(err)
        engine.close()
    for overlap in (False, True):
        engine, ledger = engine_of(Broken(), ranks_per_node=RANKS_PER_NODE, overlap=overlap)
        try:
            train_step(engine, ledger, step=0, micro_batches=1)
        except ValueError as err:
            said[f"broken{' overlap' if overlap else ''}"] = str(err)
        engine.close()
    whole = Unreduced()
    whole.placement = Placement.replicated
    for name, policy in (("unreduced", Unreduced()), ("unreduced whole", whole), ("stale", Stale())):
        engine, ledger = engine_of(policy, ranks_per_node=RANKS_PER_NODE)
        try:
            train_step(engine, ledger, step=0, micro_batches=2)
        except ValueError as err:
            said[name] = str(err)
        engine.close()
    return said


class Unreduced(Chunked):
    """Leaves all gradients where they are."""

    name = "unreduced"

    def decide(self, event: CommEvent) -> Plan | None:
        return None if isinstance(event, GradientsReady) else super().decide(event)


class Stale(Chunked):
    """Starts from a copy that nobody has stored."""

    name = "stale"

    def decide(self, event: CommEvent) -> Plan | None:
        if isinstance(event, WeightsNeeded):
            return Plan((LoadCopy(axis=WORLD), AllGather(axis=WORLD)))
        return super().decide(event)


class Broken(Chunked):
    name = "broken"

    def decide(self, event: CommEvent) -> Plan | None:
        return Plan((AllGather(axis=WORLD), Dequantize()))


def checkpoints() -> dict[str, float]:
    """Weights saved under one placement and loaded under another: the largest difference."""
    folder = launch_folder()
    saver, ledger = engine_of(policy_of("zero3", world=2, ranks_per_node=2), ranks_per_node=2)
    optimizer = sgd(saver)
    train_step(saver, ledger, step=0, micro_batches=1)
    optimize(saver, optimizer)
    want = saver.full_parameters()
    dcp.save({"model": saver.state_dict()}, checkpoint_id=folder / "saved")
    found = {}
    for name in ("ddp", "ps", "hpz", "zero1"):
        policy = policy_of(name, world=2, ranks_per_node=2)
        engine, ledger = engine_of(policy, ranks_per_node=2, model=Tiny(seed=1))
        state = {"model": engine.state_dict()}
        dcp.load(state, checkpoint_id=folder / "saved")
        engine.load_state_dict(state["model"])
        got = engine.full_parameters() if name != "ps" else dict(engine.model.named_parameters())
        found[name] = max(float((got[key] - want[key]).abs().max()) for key in want)
        engine.close()
    return found


CASES: dict[str, Any] = {
    "gradients": gradients,
    "ledgers": ledgers,
    **{
        f"losses {precision.value}": partial(losses, precision)
        for precision in (Precision.fp32, Precision.bf16)
    },
    "freshness": freshness,
    "quantized": quantized,
    "precisions": precisions,
    "failures": failures,
    "checkpoints": checkpoints,
}

if __name__ == "__main__":
    run_cases(CASES)
