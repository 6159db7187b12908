"""What a rank's share of a block comes to: products, what lies between, pruned columns, and items that move units."""

from collections import Counter
from dataclasses import replace

import pytest

from twinbed.conf.schema import Backend, DeviceConf, Precision
from twinbed.policies.balance import (
    Assignment,
    Half,
    Migrate,
    Product,
    Prune,
    balanced_work,
)
from twinbed.policies.layout import Direction, layout_of
from twinbed.sim.balance.rank_work import EVEN, rank_work
from twinbed.sim.balance.share import Share, shares_of
from twinbed.sim.device import Device
from twinbed.sim.layers import kernels_of
from twinbed.sim.layout.model import LaidModel
from twinbed.sim.layout.shapes import BLOCK

WAYS = (Direction.forward, Direction.backward)
FAMILIES = (
    {"family": "gpt", "kv_heads": 4},
    {"family": "llama", "kv_heads": 4, "ffn": 96},
    {
        "family": "vit",
        "vocab": None,
        "sequence": None,
        "extra": {"image": 16, "patch": 4, "channels": 3, "classes": 10},
    },
    {"family": "bert", "extra": {"head": "masked_lm"}},
)


def model_of(experiment, spec):
    device = Device(experiment.cluster.device, element_bytes=4)
    return LaidModel(experiment, spec, device, kernels_of(experiment))


def work_of(experiment, spec):
    work = balanced_work(experiment, spec, layout_of(experiment, spec))
    assert work is not None
    return work


def product_flop(model, half, share=None):
    steps = [step for way in WAYS for step in model.steps(BLOCK, way, share)]
    return sum(step.what.flop for step in steps if step.half is half)


@pytest.mark.parametrize("keys", FAMILIES, ids=lambda keys: keys["family"])
def test_products_follow_units_in_both_halves_and_the_rest_of_the_group_takes_up_the_slack(
    make, spec_of, keys
):
    experiment, spec = make(2), spec_of(**keys)
    model, work = model_of(experiment, spec), work_of(experiment, spec)
    moves = (Migrate(0, 1, Half.attention, 1), Migrate(0, 1, Half.ffn, 7))
    shares = [shares_of(Assignment(work, moves), place)[0] for place in (0, 1)]
    for half in Half:
        even = product_flop(model, half)
        # 3 products of each matrix: forward, and the gradients of input and weight
        assert even == 3 * work.unit_flop[half] * work.units[half]
        units = [share.units(half) for share in shares]
        assert [product_flop(model, half, share) for share in shares] == [
            3 * work.unit_flop[half] * each for each in units
        ]
        assert sum(units) == 2 * work.units[half]
    for way in WAYS:  # the group's work is the same altogether, attention and activation too
        even_bytes = sum(s.what.nbytes for s in model.steps(BLOCK, way) if hasattr(s.what, "flop"))
        even_flop = model.flop(BLOCK, way)
        flop = [
            sum(s.what.flop for s in model.steps(BLOCK, way, x) if hasattr(s.what, "flop")) for x in shares
        ]
        moved = [
            sum(s.what.nbytes for s in model.steps(BLOCK, way, x) if hasattr(s.what, "flop")) for x in shares
        ]
        assert sum(flop) == 2 * even_flop
        assert sum(moved) == pytest.approx(2 * even_bytes)
        assert moved[0] < even_bytes < moved[1]


def test_no_collectives_shape_changes(make, spec_of):
    experiment, spec = make(4), spec_of()
    model, work = model_of(experiment, spec), work_of(experiment, spec)
    actions = (Migrate(0, 1, Half.attention, 2), Migrate(0, 2, Half.ffn, 33), Prune(3, 0.5))
    for place in range(4):
        (share, *_) = shares_of(Assignment(work, actions), place)
        assert share is not None
        for way in WAYS:
            transfers = [
                [s.what for s in model.steps(BLOCK, way, x) if s.half is None and hasattr(s.what, "op")]
                for x in (None, share)
            ]
            assert transfers[0] == transfers[1] != []


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_pruning_shrinks_all_three_products_of_each_matrix(make, spec_of, ratio):
    experiment, spec = make(2), spec_of()
    model, work = model_of(experiment, spec), work_of(experiment, spec)
    share = shares_of(Assignment(work, (Prune(0, ratio),)), 0)[0]
    for half in Half:
        assert product_flop(model, half, share) == round((1 - ratio) * product_flop(model, half))
    for way in WAYS:  # nothing else changes, but what copies columns
        whole, less = model.steps(BLOCK, way), model.steps(BLOCK, way, share)
        assert [s.what for s in whole if s.half is None] == [s.what for s in less if s.half is None]
        for before, after in zip(whole, less, strict=True):
            if before.half is not None:
                assert after.what.kernels == before.what.kernels + (2 if way is Direction.forward else 1)


def test_the_copies_of_a_pruned_product_are_counted(make, spec_of):
    experiment, spec = make(2, precision=Precision.fp32), spec_of()
    model, work = model_of(experiment, spec), work_of(experiment, spec)
    share = shares_of(Assignment(work, (Prune(0, 0.5, "block.1.fc1"),)), 0)
    assert share[0] is None
    assert share[1] is not None
    rows, hidden, wide, kept = 4 * 16, 64, 4 * 64 // 2, 32
    forward, dx, dw = (
        next(s.what.nbytes for s in steps)
        for steps in (
            [s for s in model.steps(BLOCK, Direction.forward, share[1]) if s.path == "fc1" and s.half],
            [s for s in model.steps(BLOCK, Direction.backward, share[1]) if s.path == "fc1" and s.half],
            [s for s in model.steps(BLOCK, Direction.backward, share[1]) if s.path == "fc1" and s.half][1:],
        )
    )
    product = rows * kept + kept * wide + rows * wide
    assert forward == 4 * (product + 2 * (rows * kept + kept * wide))
    assert dx == 4 * (product + rows * kept + rows * hidden)
    assert dw == 4 * (product + wide * kept + wide * hidden)


def test_with_both_the_columns_of_what_is_then_computed_are_pruned(make, spec_of):
    experiment, spec = make(2), spec_of()
    work = work_of(experiment, spec)
    actions = (Migrate(0, 1, Half.ffn, 28), Prune(0, 0.5, "block.0.fc2"))
    assignment = Assignment(work, actions)
    share = shares_of(assignment, 0)[0]
    columns = work.units[Half.ffn] - 28
    assert assignment.kept_columns(0, Product.fc2, "block.0.fc2") == (columns // 2, columns)
    model = model_of(experiment, spec)
    fc2 = next(s.what for s in model.steps(BLOCK, Direction.forward, share) if s.path == "fc2" and s.half)
    assert fc2.flop == 2 * 4 * 16 * 64 * (columns // 2)


def test_a_share_is_kept_in_the_key_of_its_work():
    share = Share(3, 511, (0.0, 1 / 3, 0.1, 0.875))
    assert Share.parse(str(share)) == share


def test_even_ranks_have_no_share(make, spec_of):
    work = work_of(make(4), spec_of())
    assert rank_work(Assignment(work), 0) is EVEN
    moved = Assignment(work, (Migrate(0, 1, Half.ffn, 1), Prune(2, 0.0)))
    assert rank_work(moved, 2) == rank_work(moved, 3) == EVEN
    assert rank_work(moved, 1) != EVEN


def items_of(make, spec_of, experiment, rank, actions, *, layers=3, validation=False):
    from twinbed.sim.run import Run
    from twinbed.sim.simulate import make_engine

    spec = spec_of(layers=layers)
    engine = Run(experiment, spec, None, None, make_engine).engine
    work = rank_work(Assignment(work_of(experiment, spec), actions), rank)
    return engine.write_for(rank, validation=validation, before=(), work=work).items


ACTIONS = (Migrate(0, 2, Half.attention, 1), Migrate(0, 2, Half.ffn, 5), Migrate(0, 3, Half.ffn, 4))


@pytest.mark.parametrize("backend", list(Backend))
def test_units_are_lent_one_block_ahead_where_weights_lie_whole(make, spec_of, backend):
    """Each item waits for the start of the block before its own, and the first two for the first's."""
    items = items_of(make, spec_of, make(4, cluster_backend=backend), 2, ACTIONS)
    order = [i.unit for i in items if i.stream == "lend"]
    assert order == [f"block.{b}.{half}" for b in range(3) for half in ("attention", "ffn")]
    starts = {}
    for item in items:
        if item.phase == "forward" and item.stream == "compute" and item.unit.startswith("block"):
            starts.setdefault(item.unit, item.index)
    for item in (i for i in items if i.stream == "lend"):
        block = int(item.unit.split(".")[1])
        begun = starts[f"block.{max(0, block - 1)}"]
        assert max(item.after, default=-1) < begun < starts.get(f"block.{block}", begun + 1) + 1
        assert item.index < starts[f"block.{max(0, block - 1)}"]


def test_sharded_weights_are_lent_when_they_are_there(make, spec_of):
    experiment = make(8, per_node=4, tensor=4, comm="zero3")
    items = items_of(make, spec_of, experiment, 2, ACTIONS)
    for item in (i for i in items if i.stream == "lend"):
        unit = item.unit.rpartition(".")[0]
        gathered = max(
            i.index for i in items if i.unit == unit and i.stream == "gather" and i.phase == "forward"
        )
        assert gathered < item.index


def test_a_product_waits_for_what_is_lent_and_a_block_for_what_comes_back(make, spec_of):
    items = items_of(make, spec_of, make(4), 2, ACTIONS)
    lent = {i.unit: i.index for i in items if i.stream == "lend"}
    for block in range(3):
        for half in Half:
            first = next(
                i for i in items if i.half is half and i.unit == f"block.{block}" and i.phase == "forward"
            )
            joins = items[first.index - 1]
            assert joins.parts[0].name.endswith("join")
            assert lent[f"block.{block}.{half.value}"] in joins.after
    returned = [i for i in items if i.stream == "return"]
    assert [i.unit for i in returned] == [
        f"block.{b}.{half}" for b in (2, 1, 0) for half in ("ffn", "attention")
    ]
    for item in returned:
        unit, _, half = item.unit.rpartition(".")
        own = [i.index for i in items if i.half and i.half.value == half and i.unit == unit]
        assert items[item.index - 1].parts[0].name.endswith("pack")
        assert max(i for i in own if items[i].phase == "backward") < item.index
    for item in returned:  # the next thing that the main worker does is to wait for it
        behind = next(i for i in items if item.index in i.after)
        assert behind.worker == "main"
        own = item.unit.rpartition(".")[0]
        between = items[item.index + 1 : behind.index]
        assert {i.unit.startswith(own) for i in between} <= {True}


def test_only_ranks_that_move_units_have_rows_and_bytes_are_those_of_the_closed_form(make, spec_of):
    experiment = make(4, accumulation=2)
    spec, layers = spec_of(layers=3), 3
    work = work_of(experiment, spec)
    for rank in range(4):
        items = items_of(make, spec_of, experiment, rank, ACTIONS)
        rows = Counter((i.stream, i.unit.split(".")[2]) for i in items if i.stream in ("lend", "return"))
        both = 2 * layers  # micro-batches times blocks
        expected = {
            0: {
                ("lend", "attention"): both,
                ("lend", "ffn"): both,
                ("return", "attention"): both,
                ("return", "ffn"): both,
            },
            1: {},
            3: {("lend", "ffn"): both, ("return", "ffn"): both},
        }
        expected[2] = expected[0]
        assert rows == expected[rank]
        payload = sum(i.transfer.payload_bytes for i in items if i.stream == "lend" and rank == 0)
        moved = work.unit_bytes(Half.attention) + 9 * work.unit_bytes(Half.ffn)
        assert payload == (both * moved if rank == 0 else 0)


def test_nothing_is_lent_or_pruned_in_validation_of_a_balanced_run(make, spec_of, scripted):
    from twinbed.conf.schema import TrainConf
    from twinbed.sim.simulate import simulate

    experiment = make(4, balance_name="semi", train=TrainConf(gradient_clipping=0.0, eval_every=1))
    _, factory = scripted({1: (*ACTIONS, Prune(1, 0.5))})
    record = simulate(experiment, spec=spec_of(), make_balance=factory)
    assert {row.phase for row in record.ledger if row.stream == "lend"} == {"forward"}
    assert any(row.phase == "eval" for row in record.ledger)
    plain = simulate(replace(experiment, steps=1), spec=spec_of(), make_balance=scripted({})[1])
    eval_rows = [
        [(r.layer, r.op, r.wire_bytes) for r in rec.ledger if r.phase == "eval" and r.iteration == 0]
        for rec in (record, plain)
    ]
    assert eval_rows[0] == eval_rows[1] != []


def test_a_device_kernel_of_nothing_takes_no_time_but_its_launch(make, spec_of):
    """A straggler that lends all its heads."""
    experiment = make(4, cluster_device=DeviceConf(flop_per_s=1e12, memory_Bps=1e11))
    spec = spec_of()
    work = work_of(experiment, spec)
    share = shares_of(Assignment(work, (Migrate(0, 1, Half.attention, 2),)), 0)[0]
    model = model_of(experiment, spec)
    assert share.attention == 0
    assert product_flop(model, Half.attention, share) == 0
    assert product_flop(model, Half.ffn, share) == product_flop(model, Half.ffn)
