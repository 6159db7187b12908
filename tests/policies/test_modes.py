"""Tensor-parallel modes: their plans give the whole product and its gradients on any mesh, and send what is published.

Closed forms: docs of Colossal-AI and the papers of each mode, re-derived from the calls (shared formulas in the
docstrings of `policies.layout.modes`).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from twinbed.conf.schema import ParallelConf
from twinbed.policies.layout.border import Border, num_parts
from twinbed.policies.layout.layers import (
    Kind,
    LayerRuns,
    Role,
    describe_layer_event,
    parse_layer_event,
)
from twinbed.policies.layout.modes import Cube, Megatron, Sizes, Summa, TensorMode, build_mode, legal_1d
from twinbed.policies.layout.policy import Direction
from twinbed.policies.mesh import Mesh

from .lockstep import Array, Lockstep, cut_activation, cut_parameter, operands_of, total

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

MODES: dict[str, TensorMode] = {
    "1d of 4": Megatron(4),
    "1d of 3": Megatron(3),
    "1d of 4, sequence": Megatron(4, sequence=True),
    "2d of 4": Summa(2),
    "2d of 9": Summa(3),
    "2d of 16": Summa(4),
    "2.5d of 8": Summa(2, 2),
    "2.5d of 18": Summa(3, 2),
    "3d of 8": Cube(2),
    "3d of 27": Cube(3),
    "one's own, of 3": build_mode(
        ParallelConf(tensor=3, tensor_mode=f"{EXAMPLES / 'gathered_mode.py'}:Gathered")
    ),
}
BATCH, TOKENS, IN, OUT = 36, 12, 36, 216


def mesh_of(mode: TensorMode) -> Mesh:
    ranks = int(np.prod([size for _, size in mode.dims]))
    return Mesh(ranks, 1, dims=(*mode.dims, ("data", 1)))


def sizes_of(mode: TensorMode) -> tuple[int, int, int, int]:
    """Batch, tokens, inputs, outputs that every mode here can cut."""
    fours = any(size == 4 for _, size in mode.dims)
    return (16, 8, 32, 64) if fours else (BATCH, TOKENS, IN, OUT)


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


@pytest.mark.parametrize("role", [Role.columns, Role.rows, Role.whole])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_product_and_its_gradients_are_the_whole_ones(mode: TensorMode, role: Role) -> None:
    batch, tokens, inputs, outputs = sizes_of(mode)
    mesh, given = mesh_of(mode), mode.outer
    if role is Role.rows:  # the second of a pair
        given = mode.cuts(Kind.linear, Role.columns, mode.outer).output
    x, weight, bias = random(batch, tokens, inputs), random(outputs, inputs), random(outputs)
    dy = random(batch, tokens, outputs, seed=1)
    cuts = mode.cuts(Kind.linear, role, given)
    ranks, lockstep = mesh.num_ranks, Lockstep(mesh)
    operands = operands_of(
        x=cut_activation(mesh, given, x),
        weight=cut_parameter(mesh, cuts.weight, weight),
        bias=cut_parameter(mesh, cuts.bias, bias),
    )
    event = LayerRuns(Kind.linear, Direction.forward, given, role, bias=True)
    forward = mode.plan(event)
    backward = mode.plan(replace(event, direction=Direction.backward))
    if forward is None or backward is None:
        assert isinstance(mode, Megatron)
        assert role is Role.whole
        return
    lockstep.run(forward, operands)
    for rank, part in enumerate(cut_activation(mesh, cuts.output, x @ weight.T + bias)):
        assert_allclose(operands[rank]["y"], part, rtol=1e-9, atol=1e-9)
        operands[rank]["dy"] = cut_activation(mesh, cuts.output, dy)[rank]
    lockstep.run(backward, operands)
    rows = dy.reshape(-1, outputs)
    wanted = {
        "dx": cut_activation(mesh, given, dy @ weight),
        "dweight": cut_parameter(mesh, cuts.weight, rows.T @ x.reshape(-1, inputs)),
        "dbias": cut_parameter(mesh, cuts.bias, rows.sum(0)),
    }
    for name, parts in wanted.items():
        for rank in range(ranks):
            assert_allclose(operands[rank][name], parts[rank], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_words_are_looked_up_and_their_table_serves_as_head(mode: TensorMode) -> None:
    batch, tokens, hidden, vocab = sizes_of(mode)
    mesh = mesh_of(mode)
    ids = np.random.default_rng(3).integers(0, vocab, (batch, tokens))
    table, dy = random(vocab, hidden), random(batch, tokens, hidden, seed=1)
    words = mode.cuts(Kind.embedding, Role.columns, mode.outer)
    lockstep = Lockstep(mesh)
    operands = operands_of(ids=ids, weight=cut_parameter(mesh, words.weight, table))
    for direction in (Direction.forward, Direction.backward):
        if direction is Direction.backward:
            for rank, part in enumerate(cut_activation(mesh, words.output, dy)):
                operands[rank]["dy"] = part
        plan = mode.plan(LayerRuns(Kind.embedding, direction, mode.outer))
        assert plan is not None
        lockstep.run(plan, operands)
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids, dy)
    for rank, part in enumerate(cut_activation(mesh, words.output, table[ids])):
        assert_allclose(operands[rank]["y"], part)
        assert_allclose(operands[rank]["dweight"], cut_parameter(mesh, words.weight, gradient)[rank])

    head = mode.cuts(Kind.tied, Role.columns, mode.outer)
    assert head.weight == words.weight  # one matrix, cut one way
    x, dlogits = random(batch, tokens, hidden, seed=2), random(batch, tokens, vocab, seed=4)
    operands = operands_of(
        x=cut_activation(mesh, mode.outer, x),
        weight=cut_parameter(mesh, head.weight, table),
        dy=cut_activation(mesh, head.output, dlogits),
    )
    for direction in (Direction.forward, Direction.backward):
        plan = mode.plan(LayerRuns(Kind.tied, direction, mode.outer))
        assert plan is not None
        lockstep.run(plan, operands)
        if direction is Direction.forward:
            logits = [operands[rank]["y"] for rank in range(mesh.num_ranks)]
    dtable = dlogits.reshape(-1, vocab).T @ x.reshape(-1, hidden)
    for rank, part in enumerate(cut_activation(mesh, head.output, x @ table.T)):
        assert_allclose(logits[rank], part, atol=1e-9)
        assert_allclose(
            operands[rank]["dx"], cut_activation(mesh, mode.outer, dlogits @ table)[rank], atol=1e-9
        )
        assert_allclose(operands[rank]["dweight"], cut_parameter(mesh, head.weight, dtable)[rank], atol=1e-9)


def sent_by_a_product(mode: TensorMode, role: Role = Role.columns) -> tuple[float, Lockstep]:
    """Elements that a rank sends in forward and backward of one product without bias, mean over ranks."""
    batch, tokens, inputs, outputs = sizes_of(mode)
    given = mode.outer if role is Role.columns else mode.cuts(Kind.linear, Role.columns, mode.outer).output
    mesh, cuts = mesh_of(mode), mode.cuts(Kind.linear, role, given)
    lockstep = Lockstep(mesh)
    operands = operands_of(
        x=cut_activation(mesh, given, random(batch, tokens, inputs)),
        weight=cut_parameter(mesh, cuts.weight, random(outputs, inputs)),
        dy=cut_activation(mesh, cuts.output, random(batch, tokens, outputs)),
    )
    for direction in (Direction.forward, Direction.backward):
        plan = mode.plan(LayerRuns(Kind.linear, direction, given, role))
        assert plan is not None
        lockstep.run(plan, operands)
    return total(lockstep.sent) / mesh.num_ranks, lockstep


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_a_product_sends(mode: TensorMode) -> None:
    batch, tokens, inputs, outputs = sizes_of(mode)
    s_x, s_w, s_y = batch * tokens * inputs, inputs * outputs, batch * tokens * outputs
    sent, _ = sent_by_a_product(mode)
    if isinstance(mode, Megatron):
        p = mode.size
        # all-reduce of the input's gradient; with sequence parallelism two gathers and a scatter
        assert sent == pytest.approx((3 if mode.sequence else 2) * (p - 1) / p * s_x)
    elif isinstance(mode, Summa):
        q, d = mode.side, mode.depth
        depth = 2 * (d - 1) / d * s_w / q**2
        assert sent == pytest.approx(3 * (q - 1) / q**2 * (s_x / d + s_w) + depth)
    elif isinstance(mode, Cube):
        q = mode.side
        assert sent == pytest.approx(2 * (q - 1) / q**3 * (s_x + s_w + s_y))
    else:
        assert sent == pytest.approx(2 * 2 / 3 * s_w)  # gathered once, scattered once


def test_a_block_in_1d_sends_8_parts_of_its_activation() -> None:
    """Four all-reduces, two forward and two backward: 8 (p - 1) / p b s h."""
    mode = Megatron(4)
    batch, tokens, inputs, outputs = sizes_of(mode)
    first, _ = sent_by_a_product(mode)
    second, _ = sent_by_a_product(mode, Role.rows)
    size = batch * tokens
    assert 2 * first == pytest.approx(4 * 3 / 4 * size * inputs)
    assert 2 * second == pytest.approx(4 * 3 / 4 * size * outputs)


def test_partners_of_100_ranks() -> None:
    """Ordered pairs of ranks that ever exchange something: 9,900 of all, 900 along rows, 1,800 along both."""
    side = 10
    mode = Summa(side)
    mesh = mesh_of(mode)
    pairs = {axis: len(mesh.groups(axis)) * side * (side - 1) for axis in ("row", "column")}
    assert pairs == {"row": 900, "column": 900}
    lockstep = Lockstep(mesh)
    operands = operands_of(
        x=cut_activation(mesh, mode.outer, random(10, 1, 10)),
        weight=cut_parameter(mesh, mode.cuts(Kind.linear, Role.columns, mode.outer).weight, random(10, 10)),
    )
    plan = mode.plan(LayerRuns(Kind.linear, Direction.forward, mode.outer))
    assert plan is not None
    lockstep.run(plan, operands)
    assert {axis: len(found) for axis, found in lockstep.partners.items()} == pairs
    assert len(lockstep.partners["row"] | lockstep.partners["column"]) == 1_800
    ring = Megatron(100)
    everybody = Mesh(100, 1, dims=(*ring.dims, ("data", 1))).groups("tensor")
    assert sum(len(group) * (len(group) - 1) for group in everybody) == 9_900


def test_the_next_broadcasts_run_beside_a_product() -> None:
    """Said in the plan: those of step t + 1 stand before the product of step t, on streams of their own."""
    plan = Summa(3).plan(LayerRuns(Kind.linear, Direction.forward, Summa(3).outer))
    assert plan is not None
    words = [type(step).__name__ for step in plan.steps]
    assert words == ["Broadcast"] * 4 + ["Multiply"] + ["Broadcast"] * 2 + ["Multiply"] * 2
    assert [plan.is_beside(i) for i in range(len(words))] == [word == "Broadcast" for word in words]
    assert plan.steps[4].after == (0, 1)  # the first product waits for its own factors only
    assert plan.steps[5].after == (4,)  # and those of the last step are not sent before it


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_borders_share_out_what_modes_promise(mode: TensorMode) -> None:
    """2D and 3D cut activations in as many parts as there are ranks, 1D leaves the residual stream whole."""
    mesh = mesh_of(mode)
    outer = mode.outer
    parts = num_parts(mesh, outer.axes)
    assert parts == (1 if isinstance(mode, Megatron) and not mode.sequence else mesh.num_ranks)
    weight = mode.cuts(Kind.linear, Role.columns, outer).weight
    copies = mode.depth if isinstance(mode, Summa) else 1
    assert num_parts(mesh, weight.axes) * copies == mesh.num_ranks
    inner = mode.cuts(Kind.linear, Role.columns, outer).output
    assert mode.cuts(Kind.linear, Role.rows, inner).output == outer


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tensor": 2, "tensor_mode": "2d"},
            r"parallel\.tensor=2 .* must be a square q \* q; use one of \[1, 4",
        ),
        ({"tensor": 8, "tensor_mode": "2d"}, r"parallel\.tensor=8 .* must be a square"),
        (
            {"tensor": 12, "tensor_mode": "2.5d", "depth": 2},
            r"tensor=12 .*depth=2 leaves 12/2, which .* one of \[3, 12\]",
        ),
        (
            {"tensor": 4, "tensor_mode": "3d"},
            r"parallel\.tensor=4 .* must be a cube q \* q \* q; use one of \[1, 8",
        ),
        ({"tensor": 4, "tensor_mode": "nowhere:Mode"}, r"tensor_mode='nowhere:Mode' cannot be loaded"),
    ],
)
def test_ranks_that_do_not_fit_a_mode_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_mode(ParallelConf(**keys))  # type: ignore[arg-type]


QWEN2_7B = Sizes(batch=1, tokens=64, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064)
GPT2_XL = Sizes(batch=1, tokens=64, hidden=1600, heads=25, kv_heads=25, ffn=6400, vocab=50257)


def test_tensor_degrees_that_a_model_allows() -> None:
    assert legal_1d(QWEN2_7B) == [1, 2, 4]
    assert legal_1d(GPT2_XL) == [1, 5, 25]
    with pytest.raises(ValueError, match=r"parallel\.tensor=8 .*model\.heads=28 in 8 parts.*\[1, 2, 4\]"):
        Megatron(8).check(QWEN2_7B)
    with pytest.raises(ValueError, match=r"parallel\.tensor=2 .*model\.heads=25 in 2 parts.*\[1, 5, 25\]"):
        Megatron(2).check(GPT2_XL)
    with pytest.raises(
        ValueError, match=r"parallel\.tensor=4 .*tensor_mode=2d cuts batch\.micro=1 in 2 parts"
    ):
        Summa(2).check(GPT2_XL)
    with pytest.raises(ValueError, match=r"tensor_mode=3d cuts model\.heads=25 in 2 parts"):
        Cube(2).check(replace(GPT2_XL, batch=4))


def test_events_survive_the_log() -> None:
    for border in (Border(), Border(batch=("depth", "column"), features=("row",))):
        event = LayerRuns(Kind.loss, Direction.backward, border, Role.rows, bias=True, number=257)
        assert parse_layer_event(describe_layer_event(event)) == event
