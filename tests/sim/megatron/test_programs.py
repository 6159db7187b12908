"""Programs of pipeline stages, run by a tiny event loop of our own: who waits for whom, and what is sent."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from twinbed.conf.model_spec import ModelSpec, num_parameters, spec_from_keys
from twinbed.conf.schema import (
    Backend,
    BatchConf,
    ClusterConf,
    CommConf,
    DataConf,
    DeviceConf,
    Engine,
    ExperimentConf,
    ModelConf,
    OptimizerConf,
    ParallelConf,
    Precision,
    Recompute,
    TrainConf,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import Direction, Part
from twinbed.policies.plan import Cut, Matmul, Plan
from twinbed.sim.costs import Costs
from twinbed.sim.engines import Setup
from twinbed.sim.interpreter import Transfer, Work
from twinbed.sim.megatron.engine import Megatron
from twinbed.sim.program import Program

SPEC = spec_from_keys(
    {
        "family": "gpt",
        "layers": 8,
        "hidden": 64,
        "heads": 4,
        "vocab": 256,
        "sequence": 32,
        "tied_embeddings": True,
    }
)


def make(
    *, ranks: int = 4, per_node: int = 4, micro_batches: int = 8, comm: str = "ddp", **changes: Any
) -> ExperimentConf:
    parallel = ParallelConf(**changes.pop("parallel", {}))
    fields: dict[str, Any] = {
        "cluster": ClusterConf(
            name="test",
            nodes=ranks // per_node,
            devices_per_node=per_node,
            backend=changes.pop("backend", Backend.nccl),
            device=DeviceConf(),
        ),
        "model": ModelConf(name="test"),
        "comm": CommConf(name=comm, zero_stage={"ddp": 0, "zero1": 1, "zero3": 3}[comm]),
        "batch": BatchConf(accumulation=micro_batches),
        "data": DataConf(name="synthetic"),
        "optimizer": OptimizerConf(name="adamw"),
        "train": TrainConf(gradient_clipping=0.0),
        "engine": Engine.megatron,
        "parallel": parallel,
        "steps": 2,
        "warmup_steps": 0,
    }
    return ExperimentConf(**(fields | changes))


def engine(experiment: ExperimentConf, spec: ModelSpec = SPEC) -> Megatron:
    cluster = experiment.cluster
    policy, _ = build_comm(
        experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
    )
    return Megatron(Setup(experiment, spec, policy, Costs(experiment, spec, policy)))


def programs(experiment: ExperimentConf, spec: ModelSpec = SPEC) -> dict[int, Program]:
    return dict(engine(experiment, spec).write(validation=False, before=()).programs)


def run(
    programs: dict[int, Program], work_ns: Callable[[Work], int], transfer_ns: Callable[[Transfer], int]
) -> dict[int, list[tuple[int, int]]]:
    """(start, end) of every item. A receipt ends when what it is for has been sent and is there.

    Raises:
        AssertionError: If programs wait for each other for ever.
    """
    at = {rank: dict.fromkeys(program.workers(), 0) for rank, program in programs.items()}
    queues = {rank: program.workers() for rank, program in programs.items()}
    times: dict[int, list[tuple[int, int]]] = {
        rank: [(-1, -1)] * len(program.items) for rank, program in programs.items()
    }
    arrived: dict[Any, int] = {}
    meeting: dict[Any, dict[int, int]] = {}
    moved = True
    while moved:
        moved = False
        for rank in programs:
            for worker, items in queues[rank].items():
                while at[rank][worker] < len(items):
                    item = items[at[rank][worker]]
                    before = items[at[rank][worker] - 1].index if at[rank][worker] else None
                    ends = [times[rank][index][1] for index in item.after]
                    ends += [times[rank][before][1]] if before is not None else [0]
                    if -1 in ends:
                        break
                    start = max(ends)
                    if item.transfer is None:
                        end = start + sum(work_ns(part.work) for part in item.parts)
                    elif item.transfer.op == "recv":
                        if item.tag not in arrived:
                            break
                        end = max(start, arrived[item.tag])
                    elif item.transfer.op == "send":
                        end = arrived[item.tag] = start + transfer_ns(item.transfer)
                    elif item.transfer.axis == "pipeline":
                        meeting.setdefault(item.tag, {})[rank] = start
                        if len(meeting[item.tag]) < len(programs):
                            break
                        end = max(meeting[item.tag].values())
                    else:
                        end = start + transfer_ns(item.transfer)
                    times[rank][item.index] = (start, end)
                    at[rank][worker] += 1
                    moved = True
    assert all(end >= 0 for spans in times.values() for _, end in spans), "stages wait for each other"
    return times


def pass_ns(work: Work) -> int:
    """10 forward and 20 backward a stage; a chunk has its share. Nothing else takes time."""
    if work.kind != "layout" or not work.key.startswith("pass/"):
        return 0
    _, way, rest = work.key.split("/")
    blocks = int("".join(c for c in rest if c.isdigit()))
    return (10 if way == "forward" else 20) * blocks


def last_end(times: dict[int, list[tuple[int, int]]]) -> int:
    return max(end for spans in times.values() for _, end in spans)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("schedule", "chunks", "share"), [("1f1b", 1, 3 / 11), ("gpipe", 1, 3 / 11), ("interleaved", 2, 3 / 19)]
)
def test_bubble_with_free_communication(overlap: bool, schedule: str, chunks: int, share: float) -> None:
    """8 layers on 4 stages, 8 micro-batches: 480 of work a stage, and the bubble of the closed form."""
    keys = {
        "pipeline": 4,
        "virtual_stages": chunks,
        "pipeline_schedule": schedule,
        "pipeline_overlap": overlap,
    }
    times = run(programs(make(parallel=keys)), pass_ns, lambda _: 0)
    total = last_end(times)
    assert (total - 480) / total == pytest.approx(share)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_sends_beside_computation_cost_less(stages: int, chunks: int) -> None:
    ends = {}
    for overlap in (False, True):
        keys = {"pipeline": stages, "virtual_stages": chunks, "pipeline_overlap": overlap}
        keys["pipeline_schedule"] = "interleaved" if chunks > 1 else "1f1b"
        made = programs(make(ranks=stages, per_node=stages, parallel=keys))
        ends[overlap] = last_end(run(made, pass_ns, lambda t: 3 if t.op == "send" else 0))
    free = 480 * 4 // stages + 60 * 4 // stages * (stages - 1) // chunks
    assert free < ends[True] < ends[False]


def test_every_send_has_its_receipt() -> None:
    keys = {"pipeline": 4, "virtual_stages": 2, "pipeline_schedule": "interleaved"}
    made = programs(make(parallel=keys))
    ends: dict[str, Counter[Any]] = {"send": Counter(), "recv": Counter()}
    for rank, program in made.items():
        for item in program.items:
            t = item.transfer
            if t is None or t.op not in ends:
                continue
            other = (rank + t.peer) % 4
            route = (rank, other) if t.op == "send" else (other, rank)
            ends[t.op][(item.tag, route, t.message_bytes)] += 1
    assert ends["send"] == ends["recv"]
    assert set(ends["send"].values()) == {1}
    # 7 borders between 8 parts, 8 micro-batches, both ways; and the two copies of the embedding
    assert sum(ends["send"].values()) == 7 * 8 * 2 + 2


def bytes_sent(program: Program) -> Counter[str]:
    found: Counter[str] = Counter()
    for item in program.items:
        for t, _, times in item.inside:
            found[t.op] += times * t.payload_bytes
        if item.transfer is not None:
            found[item.transfer.op] += item.transfer.payload_bytes
    return found


def test_volume_of_tensor_parallelism() -> None:
    """One stage, 8 blocks, one micro-batch of 32 tokens and hidden 64 in 16 bits: 4096 bytes a border.

    Forward and backward each sum twice a block, and a full recomputation twice more; the embedding once, the
    head's gradient once, the loss three numbers of 4 bytes a token.
    """
    border, blocks, loss = 4096, 8, 3 * 32 * 4
    plain = make(ranks=2, per_node=2, micro_batches=1, parallel={"tensor": 2})
    assert bytes_sent(programs(plain)[0])["all_reduce"] == border * (4 * blocks + 2) + loss
    full = replace(plain, recompute=Recompute.full)
    assert bytes_sent(programs(full)[0])["all_reduce"] == border * (6 * blocks + 2) + loss
    shared = make(ranks=2, per_node=2, micro_batches=1, parallel={"tensor": 2, "sequence": 2})
    sent = bytes_sent(programs(shared)[0])
    # a block: gathers 2 forward and 4 backward, scatters 2 and 2; the embedding's gradient, the head's twice
    assert sent["all_gather"] == border * (6 * blocks + 3)
    assert sent["reduce_scatter"] == border * (4 * blocks + 1)
    replicated = engine(shared)._model.num_replicated(0)
    assert sent["all_reduce"] == border + loss + 4 * replicated


def test_tensor_ranks_share_what_they_send() -> None:
    """Each sends its part and the receivers gather; with sequence parallelism a part is all there is."""
    for keys, gathered in (({"tensor": 2}, 1), ({"tensor": 2, "sequence": 2}, 0)):
        made = programs(make(micro_batches=1, parallel={"pipeline": 2, **keys}))
        (sent,) = {
            i.transfer
            for i in made[0].items
            if i.transfer and i.transfer.op == "send" and i.unit == "stage.0"
        }
        assert sent is not None
        assert sent.message_bytes == 2048
        first = next(i for i in made[2].items if i.phase == "forward" and i.inside)
        behind = [times for t, _, times in first.inside if t.op == "all_gather"]
        assert sum(behind) == gathered + (4 * 2 + 1 if "sequence" in keys else 0)


def test_stages_hold_all_parameters_once() -> None:
    untied = spec_from_keys(
        {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "sequence": 32}
    )
    for spec in (SPEC, untied):
        model = engine(make(parallel={"pipeline": 4}), spec)._model
        held = sum(model.num_parameters(stage) for stage in range(4))
        twice = spec.vocab * spec.hidden if spec.tied_embeddings else 0
        assert held == num_parameters(spec) + twice
    half = engine(make(parallel={"tensor": 2, "pipeline": 2}))._model
    assert (
        sum(half.num_parameters(s) - half.num_replicated(s) for s in range(2)) * 2
        + sum(half.num_replicated(s) for s in range(2))
        == num_parameters(SPEC) + SPEC.vocab * SPEC.hidden
    )


def test_replicas_sum_their_gradients() -> None:
    made = engine(make(parallel={"tensor": 2}))
    numel = made._model.num_parameters(0)
    (program,) = made.write(validation=False, before=()).programs.values()
    (summed,) = [i.transfer for i in program.items if i.transfer and i.transfer.axis == "data"]
    assert summed is not None
    assert (summed.op, summed.group_size, summed.payload_bytes) == ("all_reduce", 2, 4 * numel)
    (program,) = programs(make(comm="zero1", parallel={"tensor": 2})).values()
    ops = [
        (i.transfer.op, i.phase, i.transfer.payload_bytes)
        for i in program.items
        if i.transfer and i.transfer.axis == "data"
    ]
    padded = numel + numel % 2
    assert ops == [("reduce_scatter", "backward", 4 * padded), ("all_gather", "step", 2 * padded)]


def test_steps_of_a_pass_add_up_to_its_item() -> None:
    """On gloo each step is an item; what it moves is what the one item of a pass holds."""
    keys = {"tensor": 2, "pipeline": 2, "sequence": 2}
    merged = programs(make(parallel=keys, recompute=Recompute.selective))
    apart = programs(make(parallel=keys, recompute=Recompute.selective, backend=Backend.gloo))
    for rank in merged:
        assert bytes_sent(merged[rank]) == bytes_sent(apart[rank])
        assert not any(item.inside for item in apart[rank].items)
    run(apart, lambda _: 1, lambda _: 1)


def test_clipping_joins_all_stages() -> None:
    made = programs(make(parallel={"pipeline": 2, "tensor": 2}, train=TrainConf(), precision=Precision.fp16))
    for program in made.values():
        norms = [i for i in program.items if i.stream == "library"]
        assert [i.transfer.axis for i in norms if i.transfer] == ["tensor", "pipeline"]
    run(made, pass_ns, lambda _: 0)


def test_a_cut_that_is_not_known_is_refused() -> None:
    parts = engine(make())._model.parts
    plan = Plan((Matmul(product="mlp_in", cut=Cut.rows),))
    with pytest.raises(ValueError, match=r"mlp_in cut by rows: the simulator knows it cut by columns only"):
        parts.steps(plan, Part.block, Direction.forward)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comm": "zero3"}, r"comm=zero3 with engine=megatron: use comm=ddp or comm=zero1"),
        ({"train": TrainConf(eval_every=1)}, r"train\.eval_every=1 with engine=megatron: must be 0"),
        (
            {"parallel": {"tensor": 8}},
            r"parallel\.tensor=8 times parallel\.pipeline=1 must divide the 4 ranks",
        ),
        ({"recompute": Recompute.selective_op}, r"recompute=selective_op"),
    ],
)
def test_what_megatron_does_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(make(**changes))
