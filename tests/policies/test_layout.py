"""Layouts: schedules against hand counts and a tiny event loop, plans of a block, what is refused."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.conf.schema import ParallelConf
from twinbed.policies.layout import (
    Direction,
    MegatronLayout,
    Part,
    PartRuns,
    Pass,
    PassEnded,
    StepGradientsReady,
    build_layout,
    describe_layout_event,
    num_warm_up,
    parse_layout_event,
)
from twinbed.policies.mesh import Mesh
from twinbed.policies.plan import Collective, Matmul, Plan


def make_layout(
    *, stages: int = 1, chunks: int = 1, micro_batches: int = 8, layers: int = 24, **keys: Any
) -> MegatronLayout:
    fields: dict[str, Any] = {
        "name": "test",
        "num_layers": layers,
        "micro_batches": micro_batches,
        "stages": stages,
        "chunks": chunks,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "tensor": 1,
        "sequence": False,
        "overlap": True,
        "recompute": "none",
        "tied": False,
    }
    return MegatronLayout(**(fields | keys))


def build(conf: ParallelConf, **changes: Any) -> MegatronLayout:
    sizes: dict[str, Any] = {
        "num_ranks": 64,
        "micro_batches": 16,
        "layers": 24,
        "heads": 16,
        "kv_heads": 16,
        "ffn": 4096,
        "vocab": 51200,
        "sequence": 2048,
        "tied": True,
    }
    return build_layout(conf, **(sizes | changes))


def run_pipeline(layout: MegatronLayout, *, forward: int, backward: int) -> list[tuple[int, int]]:
    """(end, busy) of each stage: a pass begins when the one before it and what it needs have ended.

    Raises:
        AssertionError: If no stage can go on.
    """
    stages, chunks = layout.stages, layout.chunks
    ended: dict[tuple[int, Pass], int] = {}
    queues = [list(layout.passes(stage)) for stage in range(stages)]
    at, now, busy = [0] * stages, [0] * stages, [0] * stages
    while any(at[s] < len(queues[s]) for s in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(queues[stage]):
                this = queues[stage][at[stage]]
                part = this.chunk * stages + stage
                before = part + 1 if this.backward else part - 1
                ready = 0
                if this.backward and part == stages * chunks - 1:
                    ready = ended.get((stage, Pass(this.micro_batch, this.chunk, False)), -1)
                elif 0 <= before < stages * chunks:
                    there = Pass(this.micro_batch, before // stages, this.backward)
                    ready = ended.get((before % stages, there), -1)
                if ready < 0:
                    break
                length = backward if this.backward else forward
                now[stage] = max(now[stage], ready) + length
                busy[stage] += length
                ended[stage, this] = now[stage]
                at[stage] += 1
                moved = True
        assert moved, "the stages wait for each other"
    return list(zip(now, busy, strict=True))


@pytest.mark.parametrize(
    ("schedule", "chunks", "of_total", "of_ideal"),
    [("1f1b", 1, 3 / 11, 3 / 8), ("gpipe", 1, 3 / 11, 3 / 8), ("interleaved", 2, 0.1579, 0.1875)],
)
def test_bubble_of_four_stages_and_eight_micro_batches(
    schedule: str, chunks: int, of_total: float, of_ideal: float
) -> None:
    layout = make_layout(stages=4, chunks=chunks, schedule=schedule)
    ends = run_pipeline(layout, forward=10, backward=20)
    total, busy = max(end for end, _ in ends), ends[0][1]
    assert all(b == busy for _, b in ends)
    assert (total - busy) / total == pytest.approx(of_total, abs=5e-5)
    assert (total - busy) / busy == pytest.approx(of_ideal, abs=5e-5)


def test_warm_up_as_megatron_counts_it() -> None:
    def all_stages(schedule: str, chunks: int, micro_batches: int) -> list[int]:
        return [
            num_warm_up(schedule, stage=s, stages=4, chunks=chunks, micro_batches=micro_batches)
            for s in range(4)
        ]

    assert all_stages("1f1b", 1, 8) == [3, 2, 1, 0]
    assert all_stages("interleaved", 2, 8) == [10, 8, 6, 4]
    assert all_stages("interleaved", 2, 4) == [8, 8, 8, 8]  # as many micro-batches as stages: all of them
    assert all_stages("gpipe", 1, 8) == [8, 8, 8, 8]
    assert all_stages("1f1b", 1, 2) == [2, 2, 1, 0]


def test_torch_counts_the_first_pair_of_1f1b_in() -> None:
    firsts = []
    for stage in range(4):
        order = make_layout(stages=4).passes(stage)
        firsts.append(next(i for i, p in enumerate(order) if p.backward))
    assert firsts == [4, 3, 2, 1]


def test_the_order_of_two_stages_with_two_chunks() -> None:
    order = make_layout(stages=2, chunks=2, micro_batches=4).passes(1)
    shown = " ".join(map(str, order))
    assert shown == ("F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0")


@given(
    stages=st.integers(1, 6),
    chunks=st.integers(1, 4),
    groups=st.integers(1, 4),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved"]),
)
def test_every_pass_runs_once_and_no_stage_waits_for_ever(
    stages: int, chunks: int, groups: int, schedule: str
) -> None:
    if schedule != "interleaved" or stages == 1:
        chunks = 1
    micro_batches = stages * groups
    layout = make_layout(
        stages=stages, chunks=chunks, micro_batches=micro_batches, layers=stages * chunks, schedule=schedule
    )
    for stage in range(stages):
        counts = Counter(layout.passes(stage))
        assert len(counts) == 2 * chunks * micro_batches
        assert set(counts.values()) == {1}
    ends = run_pipeline(layout, forward=1, backward=2)
    bubble = max(end for end, _ in ends) - ends[0][1]
    assert bubble >= 3 * (stages - 1) / chunks - 1e-9  # the closed form is the least there can be


def test_chunks_hold_layers_round_robin() -> None:
    layout = make_layout(stages=2, chunks=3, micro_batches=4, layers=12)
    assert [list(layout.layers(1, c)) for c in range(3)] == [[2, 3], [6, 7], [10, 11]]
    held = [layer for s in range(2) for c in range(3) for layer in layout.layers(s, c)]
    assert sorted(held) == list(range(12))


def sends(layout: MegatronLayout, *, backward: bool) -> dict[tuple[int, int], str]:
    found = {}
    for stage in range(layout.stages):
        for chunk in range(layout.chunks):
            plan = layout.decide(PassEnded(stage, chunk, backward))
            if plan is not None:
                found[stage, chunk] = plan.describe()
    return found


def test_what_is_sent_after_a_pass() -> None:
    layout = make_layout(stages=2, chunks=2, micro_batches=4, layers=4)
    one = "pipeline: SendRecv(axis=pipeline, shift=1)"
    assert sends(layout, backward=False) == {(0, 0): one, (1, 0): one, (0, 1): one}
    back = "pipeline: SendRecv(axis=pipeline, shift=-1)"
    assert sends(layout, backward=True) == {(1, 1): back, (0, 1): back, (1, 0): back}
    split = make_layout(stages=2, tensor=4)
    assert sends(split, backward=False) == {
        (0, 0): "pipeline: Slice(axis=tensor), SendRecv(axis=pipeline, shift=1), AllGather(axis=tensor)"
    }
    assert sends(make_layout(stages=2, tensor=4, sequence=True), backward=False) == {(0, 0): one}
    assert sends(make_layout(), backward=False) == {}


def collectives(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [type(step).__name__ for step in plan.steps if isinstance(step, Collective)]


def test_collectives_of_a_block() -> None:
    """Two sums in forward and two in backward (Shoeybi et al.), or twice a gather and a scatter each."""
    plain = make_layout(tensor=4, recompute="full")
    for direction in Direction:
        assert collectives(plain.decide(PartRuns(Part.block, direction))) == ["AllReduce", "AllReduce"]
    shared = make_layout(tensor=4, sequence=True, recompute="selective")
    forward = shared.decide(PartRuns(Part.block, Direction.forward))
    assert collectives(forward) == ["AllGather", "ReduceScatter"] * 2
    assert collectives(shared.decide(PartRuns(Part.block, Direction.recompute))) == []
    backward = shared.decide(PartRuns(Part.block, Direction.backward))
    assert collectives(backward) == ["AllGather", "AllGather", "ReduceScatter"] * 2  # one repeats the input
    alone = make_layout()
    assert collectives(alone.decide(PartRuns(Part.block, Direction.backward))) == []
    assert alone.decide(PartRuns(Part.block, Direction.recompute)) is None


def test_a_sum_runs_beside_the_weights_product() -> None:
    plan = make_layout(tensor=4).decide(PartRuns(Part.block, Direction.backward))
    assert plan is not None
    at = next(i for i, step in enumerate(plan.steps) if isinstance(step, Collective))
    product = plan.steps[at + 1]
    assert isinstance(product, Matmul)
    assert product.product == "mlp_in"
    assert plan.dependencies(at + 1) == plan.dependencies(at) == (at - 1,)
    assert plan.stream_of(at) != plan.stream_of(at + 1)
    assert plan.dependencies(at + 2) == (at, at + 1)
    serial = make_layout(tensor=4, overlap=False).decide(PartRuns(Part.block, Direction.backward))
    assert serial is not None
    assert all(serial.dependencies(i) in ((), (i - 1,)) for i in range(len(serial.steps)))


def test_collectives_of_embedding_head_and_loss() -> None:
    layout = make_layout(tensor=2)
    assert collectives(layout.decide(PartRuns(Part.embedding, Direction.forward))) == ["AllReduce"]
    assert collectives(layout.decide(PartRuns(Part.embedding, Direction.backward))) == []
    assert collectives(layout.decide(PartRuns(Part.head, Direction.forward))) == []
    assert collectives(layout.decide(PartRuns(Part.head, Direction.backward))) == ["AllReduce"]
    assert collectives(layout.decide(PartRuns(Part.loss, Direction.forward))) == ["AllReduce"] * 3
    shared = make_layout(tensor=2, sequence=True)
    assert collectives(shared.decide(PartRuns(Part.head, Direction.forward))) == ["AllGather"]
    assert collectives(shared.decide(PartRuns(Part.head, Direction.backward))) == [
        "AllGather",
        "ReduceScatter",
    ]


def test_a_tied_matrix_is_added_up_between_the_ends() -> None:
    layout = make_layout(stages=4, tied=True)
    plans = [layout.decide(StepGradientsReady(stage, "embedding")) for stage in range(4)]
    assert plans[1] is plans[2] is None
    assert plans[0] is not None
    assert plans[0].describe() == "pipeline: SendRecv(axis=pipeline, shift=3), Reduce()"
    assert plans[3] is not None
    assert make_layout(stages=4).decide(StepGradientsReady(0, "embedding")) is None
    shared = make_layout(tensor=2, sequence=True).decide(StepGradientsReady(0, "replicated"))
    assert collectives(shared) == ["AllReduce"]
    assert make_layout(tensor=2).decide(StepGradientsReady(0, "replicated")) is None


@pytest.mark.parametrize(
    "event",
    [
        PartRuns(Part.block, Direction.recompute),
        PassEnded(3, 1, True),
        StepGradientsReady(0, "embedding"),
    ],
)
def test_events_survive_the_log(event: Any) -> None:
    assert parse_layout_event(describe_layout_event(event)) == event


def test_axes_as_megatron_orders_ranks() -> None:
    mesh = Mesh(16, 8, dims=(("tensor", 2), ("data", 2), ("pipeline", 4)))
    assert mesh.data == 2
    assert mesh.group("tensor", 5) == (4, 5)
    assert mesh.group("data", 5) == (5, 7)
    assert mesh.group("pipeline", 5) == (1, 5, 9, 13)
    assert [mesh.index("pipeline", rank) for rank in (0, 5, 15)] == [0, 1, 3]
    for axis in ("tensor", "data", "pipeline"):
        assert sorted(r for group in mesh.groups(axis) for r in group) == list(range(16))
    assert Mesh(8, 4).group("data", 3) == tuple(range(8))  # no layout: all are replicas


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor": 3}, r"parallel\.tensor=3 times parallel\.pipeline=1 must divide the 64 ranks"),
        ({"tensor": 8, "data": 4}, r"parallel\.data=4 must be -1 or 8"),
        ({"tensor_mode": "2d"}, r"tensor_mode=2d with engine=megatron.*use parallel\.tensor_mode=1d"),
        ({"sequence_mode": "ring"}, r"sequence_mode=ring with engine=megatron"),
        ({"tensor": 4, "sequence": 2}, r"parallel\.sequence=2 must be 1 or parallel\.tensor=4"),
        ({"tensor": 32}, r"parallel\.tensor=32 must divide model\.heads=16"),
        ({"pipeline": 16}, r"parallel\.pipeline=16 times .*virtual_stages=1 must divide model\.layers=24"),
        ({"pipeline": 4, "virtual_stages": 2}, r"needs parallel\.pipeline_schedule=interleaved, got 1f1b"),
        (
            {"virtual_stages": 2, "pipeline_schedule": "interleaved"},
            r"virtual_stages=2 needs parallel\.pipeline > 1",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(ParallelConf(**keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 2}, r"parallel\.tensor=4 must divide model\.kv_heads=2"),
        ({"ffn": 4098}, r"must divide model\.ffn=4098"),
        ({"vocab": 50257}, r"must divide model\.vocab=50257; Megatron pads .* 128 \* 4: model\.vocab=50688"),
        ({"sequence": 510}, r"must divide batch\.sequence=510"),
        ({"recompute": "selective_op"}, r"recompute=selective_op"),
    ],
)
def test_models_that_do_not_divide_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(ParallelConf(tensor=4, sequence=4), **changes)


def test_interleaving_takes_whole_groups_of_micro_batches() -> None:
    conf = ParallelConf(pipeline=4, virtual_stages=2, pipeline_schedule="interleaved")
    with pytest.raises(ValueError, match=r"batch\.accumulation=6 micro-batches must be a multiple of"):
        build(conf, micro_batches=6)


def test_keys_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.pipeline=0: must be >= 1"):
        ParallelConf(pipeline=0)
    with pytest.raises(ValueError, match=r"parallel\.tensor_mode='4d': must be one of"):
        ParallelConf(tensor_mode="4d")


def test_tensor_groups_do_not_lie_askew_on_nodes() -> None:
    with pytest.raises(ValueError, match=r"parallel\.tensor=6 must divide the 4 ranks of a node"):
        Mesh(24, 4, dims=(("tensor", 6), ("data", 4)))
