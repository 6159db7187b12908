"""Rows and bytes of whole experiments against closed forms, which count elements and know no plan."""

from collections import Counter

import pytest

from twinbed.policies.layout import Kind
from twinbed.sim.costs import Costs
from twinbed.sim.simulate import simulate

FP32 = 4
B, S, H, F = 8, 16, 64, 256  # sequences, tokens, hidden, MLP


def rows_of(experiment, spec, *, of="block.0", where=None):
    """Rows of all ranks in the first step, expanded."""
    record = simulate(experiment, spec=spec, fold=False)
    rows = [r for r in record.ledger if r.iteration == 0 and (not of or r.layer.startswith(f"{of}."))]
    return [r for r in rows if where is None or where(r)]


def elements(rows, ranks, *, large=0):
    """Elements on the wire a rank, mean over ranks; small sums (of norms, losses and biases) left out."""
    return sum(r.wire_bytes for r in rows if r.payload_bytes >= large) / FP32 / ranks


def products(layout, spec):
    """(inputs, outputs) of the products of a block."""
    return {
        layer.path: (layer.features_in, layer.features_out)
        for layer in layout.outline.block
        if layer.kind is Kind.linear
    }


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_1d_moves_8_bsh_a_block(make, spec_of, p, sequence):
    """8 (p - 1) / p b s h of a block, forward and backward (Korthikanti et al. 2022, section 4.2.2): two all-reduces
    each way. With sequence parallelism the same as gathers and scatters, and 2 (p - 1) / p b s h more for the inputs of
    two products that backward gathers again.
    """
    keys = {"tensor": p, "sequence": p if sequence else 1}
    rows = rows_of(make(p, micro=B, **keys), spec_of())
    large = B * S * H * FP32
    moved = (8 + 2 * sequence) * (p - 1) / p * B * S * H
    assert elements(rows, p, large=large) == pytest.approx(moved)
    ops = Counter(r.op for r in rows if r.payload_bytes >= large)
    if sequence:
        assert ops == {"all_gather": 6 * p, "reduce_scatter": 4 * p}
    else:
        assert ops == {"all_reduce": 4 * p}


@pytest.mark.parametrize("q", [2, 3, 4])
def test_2d_moves_three_times_input_and_matrix_of_a_product(make, spec_of, q):
    """3 (q - 1) / q^2 (S_X + S_W) a linear and rank: both factors broadcast forward, one each and one sum for both
    gradients (Xu et al. 2021, section 3).
    """
    spec = spec_of(hidden=12 * q, heads=q, vocab=16 * q)
    experiment = make(q * q, micro=2 * q, tensor=q * q, tensor_mode="2d")
    layout = Costs(experiment, spec, None).laid.model.layout
    rows = rows_of(experiment, spec, where=lambda r: r.op in ("broadcast", "reduce_tree"))
    for path, (inputs, outputs) in products(layout, spec).items():
        own = [r for r in rows if r.layer == f"block.0.{path}"]
        x, w = 2 * q * S * inputs, inputs * outputs
        assert elements(own, q * q) == pytest.approx(3 * (q - 1) / q**2 * (x + w)), path
        each = Counter((r.op, r.axis) for r in own if r.rank == 0)
        assert each == {
            ("broadcast", "row"): 2 * q,
            ("broadcast", "column"): 2 * q,
            ("reduce_tree", "row"): q,
            ("reduce_tree", "column"): q,
        }


@pytest.mark.parametrize(("q", "d"), [(2, 2), (2, 4), (3, 2)])
def test_2p5d_moves_a_share_of_the_input_and_sums_copies(make, spec_of, q, d):
    """3 (q - 1) / q^2 (S_X / d + S_W) + 2 (d - 1) / d S_W / q^2 (Wang et al. 2021, section 3)."""
    spec = spec_of(hidden=12 * q, heads=q, vocab=16 * q)
    ranks = q * q * d
    experiment = make(ranks, micro=q * d, tensor=ranks, tensor_mode="2.5d", depth=d)
    layout = Costs(experiment, spec, None).laid.model.layout
    for path, (inputs, outputs) in products(layout, spec).items():
        w = inputs * outputs
        rows = rows_of(experiment, spec, where=lambda r, path=path: r.layer == f"block.0.{path}")
        large = [r for r in rows if r.op != "all_reduce" or r.payload_bytes == w / q**2 * FP32]
        expected = 3 * (q - 1) / q**2 * (q * d * S * inputs / d + w) + 2 * (d - 1) / d * w / q**2
        assert elements(large, ranks) == pytest.approx(expected, rel=1e-3), path


@pytest.mark.parametrize("q", [2, 3])
def test_3d_moves_input_matrix_and_output_twice(make, spec_of, q):
    """2 (q - 1) / q^3 (S_X + S_W + S_Y) a linear and rank (Bian et al. 2021): each factor is gathered once and its
    gradient scattered, the output scattered and its gradient gathered.
    """
    spec = spec_of(hidden=4 * q * q, heads=q, vocab=16 * q * q)
    experiment = make(q**3, micro=q * q, tensor=q**3, tensor_mode="3d")
    layout = Costs(experiment, spec, None).laid.model.layout
    rows = rows_of(experiment, spec, where=lambda r: r.op in ("all_gather", "reduce_scatter"))
    for path, (inputs, outputs) in products(layout, spec).items():
        own = [r for r in rows if r.layer == f"block.0.{path}"]
        x, w, y = q * q * S * inputs, inputs * outputs, q * q * S * outputs
        assert elements(own, q**3) == pytest.approx(2 * (q - 1) / q**3 * (x + w + y)), path
        assert len(own) == 6 * q**3


@pytest.mark.parametrize("p", [2, 4, 8])
def test_ulysses_moves_queries_keys_values_and_output(make, spec_of, p):
    """Four all-to-alls of b s h / p each way, of which (p - 1) / p leave the rank (Jacobs et al. 2023, section 3)."""
    rows = rows_of(make(p, micro=B, sequence=p, sequence_mode="ulysses"), spec_of())
    assert Counter(r.op for r in rows) == {"all_to_all": 8 * p}
    assert {r.layer for r in rows} == {"block.0.core"}
    assert elements(rows, p) == pytest.approx(8 * (p - 1) / p * B * S * H / p)


def test_rows_say_where_and_of_which_layer(make, spec_of):
    rows = rows_of(make(4, tensor=4, tensor_mode="2d"), spec_of(), of="")
    mine = [r for r in rows if r.rank == 0]
    assert [(r.phase, r.stream, r.layer, r.op, r.axis) for r in mine[:9]] == [
        ("forward", "layer", "root.embedding", "reduce_scatter", "column"),
        ("forward", "layer", "block.0.norm1", "all_reduce", "row"),
        ("forward", "row", "block.0.qkv", "broadcast", "row"),
        ("forward", "column", "block.0.qkv", "broadcast", "column"),
        ("forward", "row", "block.0.qkv", "broadcast", "row"),
        ("forward", "column", "block.0.qkv", "broadcast", "column"),
        ("forward", "row", "block.0.proj", "broadcast", "row"),
        ("forward", "column", "block.0.proj", "broadcast", "column"),
        ("forward", "row", "block.0.proj", "broadcast", "row"),
    ]
    last = mine[-1]
    assert (last.phase, last.layer, last.op) == ("backward", "root.embedding", "all_gather")


def test_the_loss_sums_largest_exponentials_and_totals(make, spec_of):
    rows = rows_of(make(4, micro=B, tensor=4), spec_of(), of="root")
    own = [(r.phase, r.op, r.payload_bytes) for r in rows if r.rank == 0 and r.layer == "root.loss"]
    assert own == [
        ("forward", "all_reduce", B * S * FP32),
        ("forward", "all_reduce", 2 * B * S * FP32),
    ]


@pytest.mark.parametrize("comm", ["ddp", "zero1", "zero3"])
def test_replicas_reduce_and_gather_local_shapes(make, spec_of, comm):
    """Two replicas of a 1D group of two: FSDP2's segments are those of the rank's own part, padded to two."""
    experiment = make(4, tensor=2, comm=comm, accumulation=2)
    rows = [r for r in rows_of(experiment, spec_of(vocab=251), of="") if r.rank == 0]
    over = [r for r in rows if r.axis.startswith("replicas")]
    assert {r.axis for r in over} == {"replicas"}
    assert {r.group_size for r in over} == {2}
    block = 2 * H + (3 * H * H + 3 * H) // 2 + H * H // 2 + H + 2 * H + (F * H + F) // 2 + F * H // 2 + H
    root = 2 * 126 * H + S * H + 2 * H  # 251 words are padded to 252
    numels = {"block.0": block, "block.1": block, "root": root}
    counts = Counter((r.op, r.layer) for r in over)
    times = {"ddp": (0, 1), "zero1": (1, 1), "zero3": (4, 2)}[comm]
    reduce = "all_reduce" if comm == "ddp" else "reduce_scatter"
    assert counts == {
        key: n
        for unit in numels
        for key, n in ((("all_gather", unit), times[0]), ((reduce, unit), times[1]))
        if n
    }
    assert all(r.payload_bytes == FP32 * numels[r.layer] for r in over)


def test_one_replica_gathers_and_reduces_nothing(make, spec_of):
    rows = rows_of(make(4, tensor=4, comm="zero3"), spec_of(), of="")
    assert {r.axis for r in rows} == {"tensor"}


@pytest.mark.parametrize(
    ("keys", "clips"),
    [
        ({"tensor": 2, "comm": "ddp"}, True),
        ({"sequence": 2, "sequence_mode": "ulysses", "comm": "ddp"}, False),
        ({"sequence": 2, "sequence_mode": "ulysses", "comm": "zero3"}, True),
    ],
)
def test_clipping_sums_one_number_over_all_ranks_that_lack_gradients(make, spec_of, keys, clips):
    experiment = make(4, **keys)
    experiment.train.gradient_clipping = 1.0
    rows = [r for r in rows_of(experiment, spec_of(), of="") if r.phase == "step" and r.rank == 3]
    expected = [("library", "", "all_reduce", "world", 4, FP32)] if clips else []
    assert [(r.stream, r.layer, r.op, r.axis, r.group_size, r.payload_bytes) for r in rows] == expected


def test_full_recomputation_repeats_the_plans_of_a_block(make, spec_of):
    """Up to what backward needs: all collectives of a block's forward are there twice."""
    from twinbed.conf.schema import Recompute

    plain, again = (
        Counter(
            (r.layer, r.op, r.axis)
            for r in rows_of(make(4, tensor=4, tensor_mode="2d", recompute=recompute), spec_of(), of="")
        )
        for recompute in (Recompute.none, Recompute.full)
    )
    forward = Counter(
        (r.layer, r.op, r.axis)
        for r in rows_of(make(4, tensor=4, tensor_mode="2d"), spec_of(), of="")
        if r.phase == "forward" and r.layer.startswith("block")
    )
    assert again == plain + forward
