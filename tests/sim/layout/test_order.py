"""When stages send and wait: by hand, and what must hold for any pipeline."""

from collections import Counter

import pytest

from twinbed.conf.schema import Backend
from twinbed.sim.costs import Costs
from twinbed.sim.layout.order import Act, part_of, receives, sends, stage_actions
from twinbed.sim.simulate import simulate


def words(actions):
    return " ".join(f"{a.act.value} {a.of}" for a in actions)


def layout_of(make, spec_of, **keys):
    ranks = keys["pipeline"]
    return Costs(make(ranks, **keys), spec_of(layers=8), None).laid.model.layout


def test_one_forward_one_backward_of_two_stages(make, spec_of):
    """The last message of the warm-up goes with the receipt of the first gradient, and both are waited for."""
    first, last = stage_actions(layout_of(make, spec_of, pipeline=2, accumulation=3))
    assert words(first) == (
        "run F0.0 send F0.0 run F1.0 settle F0.0 "
        "send F1.0 receive B0.0 settle F1.0 run B0.0 run F2.0 "
        "send F2.0 receive B1.0 settle F2.0 run B1.0 receive B2.0 run B2.0"
    )
    assert words(last) == (
        "receive F0.0 run F0.0 run B0.0 send B0.0 receive F1.0 settle B0.0 run F1.0 "
        "run B1.0 send B1.0 receive F2.0 settle B1.0 run F2.0 run B2.0 send B2.0 settle B2.0"
    )


def test_gpipe_waits_for_its_messages_between_the_directions(make, spec_of):
    keys = {"pipeline": 2, "accumulation": 2, "pipeline_schedule": "gpipe"}
    first, last = stage_actions(layout_of(make, spec_of, **keys))
    assert words(first) == (
        "run F0.0 send F0.0 run F1.0 send F1.0 settle F0.0 settle F1.0 receive B0.0 run B0.0 receive B1.0 run B1.0"
    )
    assert words(last) == (
        "receive F0.0 run F0.0 receive F1.0 run F1.0 run B0.0 send B0.0 run B1.0 send B1.0 settle B0.0 settle B1.0"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize(("stages", "batches"), [(2, 2), (2, 6), (4, 4), (4, 8)])
def test_every_message_is_sent_received_and_settled_once(make, spec_of, schedule, stages, batches):
    keys = {"pipeline": stages, "accumulation": batches, "pipeline_schedule": schedule}
    keys |= {"virtual_stages": 2} if schedule == "interleaved" else {}
    layout = layout_of(make, spec_of, **keys)
    for stage, actions in enumerate(stage_actions(layout)):
        assert [a.of for a in actions if a.act is Act.run] == list(layout.passes(stage))
        counts = Counter((a.act, a.of) for a in actions)
        assert set(counts.values()) == {1}
        at = {(a.act, a.of): i for i, a in enumerate(actions)}
        for this in layout.passes(stage):
            assert ((Act.send, this) in at) == ((Act.settle, this) in at) == sends(layout, stage, this)
            assert ((Act.receive, this) in at) == receives(layout, stage, this)
            if sends(layout, stage, this):
                assert at[Act.run, this] < at[Act.send, this] < at[Act.settle, this]
            if receives(layout, stage, this):
                assert at.get((Act.post, this), -1) < at[Act.receive, this] < at[Act.run, this]


def test_interleaved_receipts_are_posted_where_the_message_was_made(make, spec_of):
    """Two stages of two chunks: stage 0 runs parts 0 and 2, and is ready for part 2's input before its turn."""
    keys = {"pipeline": 2, "accumulation": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}
    layout = layout_of(make, spec_of, **keys)
    first, last = stage_actions(layout)
    assert part_of(layout, 0, 1) == 2
    ahead = [a for a in first if not a.of.backward]
    # stage 1 has made part 1's output by then, round by round
    assert words(ahead[:5]) == "run F0.0 send F0.0 post F0.1 run F1.0 send F1.0"
    assert words([a for a in last if not a.of.backward][:3]) == "post F0.0 receive F0.0 run F0.0"
    assert {(a.act, a.of.chunk) for a in ahead if a.act is Act.post} == {(Act.post, 1)}


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(
    "order", [["pipeline", "tensor", "sequence", "data"], ["tensor", "pipeline", "sequence", "data"]]
)
@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "tensor": 4, "tensor_mode": "2d"},
        {"pipeline": 4, "accumulation": 8, "pipeline_schedule": "interleaved", "virtual_stages": 2},
        {"pipeline": 2, "sequence": 2, "sequence_mode": "ulysses"},
    ],
)
def test_stages_lie_in_any_order_and_send_the_same(make, spec_of, backend, order, keys):
    """Programs of stages that are not runs of ranks; totals do not depend on where they lie."""
    keys = {"accumulation": 4, "comm": "zero3", "micro": 4, "steps": 1, "cluster_backend": backend} | keys
    spec = spec_of(layers=8)
    moved, plain = (
        simulate(make(8, per_node=4, order=each, **keys), spec=spec, fold=False).result
        for each in (order, ["tensor", "sequence", "data", "pipeline"])
    )
    assert moved["status"] == "ok"
    for key in ("payload_bytes", "wire_bytes", "collectives"):
        assert moved["comm"][key] == plain["comm"][key]


@pytest.mark.parametrize("comm", ["ddp", "zero3"])
def test_a_tied_matrix_is_exchanged_by_the_ends_alone(make, spec_of, comm):
    """fp32, of a rank's own rows: 251 words over two replicas are 126 and 125, which FSDP2 does not pad here."""
    spec = spec_of(layers=4, vocab=251, tied_embeddings=True)
    record = simulate(make(8, pipeline=4, accumulation=4, comm=comm, steps=1), spec=spec, fold=False)
    rows = [r for r in record.ledger if r.layer == "root.embedding"]
    assert {(r.stream, r.phase, r.op, r.axis, r.group_size) for r in rows} == {
        ("reduce", "backward", "send", "pipeline", 4)
    }
    own = {0: 126, 1: 125, 6: 126, 7: 125} if comm == "zero3" else dict.fromkeys((0, 1, 6, 7), 251)
    assert {r.rank: r.payload_bytes for r in rows} == {rank: n * 64 * 4 for rank, n in own.items()}
    assert len(rows) == 4


def test_a_validation_goes_forward_through_all_stages(make, spec_of):
    experiment = make(4, pipeline=4, accumulation=4, steps=1)
    experiment.train.eval_every, experiment.train.eval_batches = 1, 3
    rows = [r for r in simulate(experiment, spec=spec_of(layers=4), fold=False).ledger if r.phase == "eval"]
    assert Counter((r.layer, r.op) for r in rows) == {
        ("stage.0", "send"): 3,
        ("stage.1", "send"): 3,
        ("stage.2", "send"): 3,
        ("", "all_reduce"): 4,
    }
