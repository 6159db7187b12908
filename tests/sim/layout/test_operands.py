"""Plans over operands: shapes and bytes by hand, and what is refused."""

import pytest

from twinbed.policies.mesh import Mesh
from twinbed.policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Apply,
    Broadcast,
    Dequantize,
    Multiply,
    Plan,
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    SendRecv,
    Slice,
)
from twinbed.sim.interpreter import Transfer
from twinbed.sim.layout.operands import LocalStep, Operand, beside_bytes, follow

MESH = Mesh(8, 4, dims=(("row", 4), ("column", 2)))
X = Operand((2, 3, 8), 2)  # 96 bytes


def plan_of(*steps):
    return Plan.of_operands(steps, "layer")


def transfers(followed):
    return [step.what for step in followed.steps if isinstance(step.what, Transfer)]


@pytest.mark.parametrize(
    ("step", "op", "shape", "payload", "message"),
    [
        (AllGather(axis="row", dim=0, reads=("x",), writes=("y",)), "all_gather", (8, 3, 8), 384, 96),
        (AllGather(axis="row", dim=-1, reads=("x",), writes=("y",)), "all_gather", (2, 3, 32), 384, 96),
        (ReduceScatter(axis="row", dim=-1, reads=("x",), writes=("y",)), "reduce_scatter", (2, 3, 2), 96, 24),
        (AllReduce(axis="row", reads=("x",), writes=("y",)), "all_reduce", (2, 3, 8), 96, 96),
        (
            AllReduce(axis="row", op=ReduceOp.max, reads=("x",), writes=("y",)),
            "all_reduce",
            (2, 3, 8),
            96,
            96,
        ),
        (Broadcast(axis="row", root=3, reads=("x",), writes=("y",)), "broadcast", (2, 3, 8), 96, 96),
        (ReduceTo(axis="row", reads=("x",), writes=("y",)), "reduce", (2, 3, 8), 96, 96),
        (ReduceTo(axis="row", tree=True, reads=("x",), writes=("y",)), "reduce_tree", (2, 3, 8), 96, 96),
        (
            AllToAll(axis="column", dim=2, into_dim=1, reads=("x",), writes=("y",)),
            "all_to_all",
            (2, 6, 4),
            96,
            48,
        ),
    ],
)
def test_a_collective_by_hand(step, op, shape, payload, message):
    followed = follow(plan_of(step), {"x": X}, MESH)
    assert followed.operands["y"] == Operand(shape, 2)
    (transfer,) = transfers(followed)
    assert (transfer.op, transfer.axis, transfer.group_size) == (op, step.axis, MESH.size(step.axis))
    assert (transfer.payload_bytes, transfer.message_bytes) == (payload, message)
    assert transfer.root == getattr(step, "root", 0)


def test_groups_of_one_rank_and_empty_messages_leave_nothing_and_hand_on_what_they_wait_for():
    steps = (
        AllReduce(axis="row", reads=("x",), writes=("a",)),
        AllReduce(axis="pipeline", reads=("a",), writes=("b",)),
        Slice(axis="column", dim=0, reads=("b",), writes=("c",)),
        Apply(function="add_bias", reads=("c", "bias"), writes=("d",)),
    )
    followed = follow(plan_of(*steps), {"x": X, "bias": Operand((8,), 2)}, MESH)
    assert followed.operands["d"].shape == (1, 3, 8)
    first, second = followed.steps
    assert isinstance(first.what, Transfer)
    assert second.after == (0,)
    assert not follow(plan_of(steps[0]), {"x": Operand((0, 8), 2)}, MESH).steps


def test_the_three_products_of_a_matrix():
    plan = plan_of(
        Multiply(transpose_right=True, reads=("x", "w"), writes=("y",)),
        Multiply(reads=("y", "w"), writes=("dx",)),
        Multiply(transpose_left=True, reads=("y", "x"), writes=("dw",)),
        Multiply(transpose_left=True, add=True, reads=("y", "x"), writes=("dw",)),
    )
    followed = follow(plan, {"x": X, "w": Operand((5, 8), 2)}, MESH)
    assert [followed.operands[name].shape for name in ("y", "dx", "dw")] == [(2, 3, 5), (2, 3, 8), (5, 8)]
    steps = [step.what for step in followed.steps]
    assert all(isinstance(step, LocalStep) and step.flop == 2 * 6 * 5 * 8 for step in steps)
    assert [(s.product.m, s.product.n, s.product.k) for s in steps[:3]] == [(6, 5, 8), (6, 8, 5), (5, 8, 6)]
    assert [step.tokens for step in steps] == [6] * 4
    once = 2 * (6 * 5 + 6 * 8 + 5 * 8)
    assert [step.nbytes for step in steps] == [once] * 3 + [once + 2 * 5 * 8]  # a sum is read, too


def test_wide_results_have_four_bytes_and_others_those_of_what_they_come_from():
    plan = plan_of(
        Apply(function="layer_norm_sums", reads=("x",), writes=("sums",)),
        AllReduce(axis="row", op=ReduceOp.sum, reads=("sums",), writes=("sums",)),
        Apply(function="layer_norm", reads=("x", "weight", "bias", "sums"), writes=("y",)),
        Apply(function="look_up", reads=("ids", "table"), writes=("z",)),
    )
    own = Operand((8,), 2)
    table, ids = Operand((10, 8), 2), Operand((2, 3), 8)
    given = {"x": X, "weight": own, "bias": own, "table": table, "ids": ids}
    followed = follow(plan, given, MESH)
    assert followed.operands["sums"] == Operand((2, 2, 3), 4)
    assert transfers(followed)[0].payload_bytes == 4 * 12
    assert followed.operands["y"] == X
    assert followed.operands["z"] == X


def test_a_ring_sends_and_receives_under_one_tag_and_only_the_send_is_listed():
    plan = plan_of(
        SendRecv(axis="row", shift=1, stream="ring", reads=("x",), writes=("y",)),
        Multiply(transpose_left=True, reads=("x", "x"), writes=("z",)),
        Multiply(transpose_left=True, reads=("y", "y"), writes=("z2",)),
    )
    send, receipt, beside, behind = follow(plan, {"x": X}, MESH).steps
    assert (send.what.op, send.what.peer, send.what.message_bytes, send.what.listed) == ("send", 1, 96, True)
    assert (receipt.what.op, receipt.what.peer, receipt.what.listed) == ("recv", -1, False)
    assert (send.stream, receipt.stream, send.beside, receipt.beside) == ("ring", "ring/recv", True, True)
    assert receipt.pair == 0
    assert (beside.after, behind.after) == ((), (0, 1, 2))


def test_collectives_beside_are_marked_and_those_that_add_up_are_not():
    plan = plan_of(
        Broadcast(axis="row", stream="row", reads=("x",), writes=("a",)),
        ReduceTo(axis="row", stream="row", tree=True, reads=("x",), writes=("b",)),
        ReduceScatter(axis="row", stream="row", dim=2, reads=("x",), writes=("c",)),
    )
    assert [step.beside for step in follow(plan, {"x": X}, MESH).steps] == [True, False, False]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((AllReduce(axis="row", reads=("z",), writes=("y",)),), ["reads 'z'", "not there", "['x']"]),
        ((ReduceScatter(axis="row", dim=1, reads=("x",), writes=("y",)),), ["dim=1", "(2, 3, 8)", "4 ranks"]),
        ((ReduceScatter(axis="row", dim=3, reads=("x",), writes=("y",)),), ["dim=3", "no such dimension"]),
        ((AllGather(axis="row", dim=5, reads=("x",), writes=("y",)),), ["dim=5", "no such dimension"]),
        ((AllReduce(axis="depth", reads=("x",), writes=("y",)),), ["axis='depth'", "not on the mesh"]),
        ((Broadcast(axis="row", root=4, reads=("x",), writes=("y",)),), ["root=4", "[0, 3]"]),
        ((Multiply(reads=("x", "x"), writes=("y",)),), ["(2, 3, 8)", "8 meets 6"]),
        (
            (Multiply(transpose_right=True, add=True, reads=("x", "x"), writes=("y",)),),
            ["adds", "'y', which is None"],
        ),
        ((Multiply(reads=("x",), writes=("y",)),), ["reads ['x'], and takes 2"]),
        ((Apply(function="gelu", reads=("x",), writes=("y",)),), ["gelu", "layer_norm"]),
        (
            (Apply(function="layer_norm_sums", reads=("x",), writes=("a", "b")),),
            ["writes ['a', 'b']", "makes 1"],
        ),
        ((Dequantize(reads=("x",), writes=("y",)),), ["Dequantize"]),
        ((AllGather(axis="row", chunks=2, reads=("x",), writes=("y",)),), ["chunks=2"]),
        (
            (ReduceScatter(axis="row", hop_bits=4, reads=("x",), writes=("y",)),),
            ["hop_bits=4", "not quantized"],
        ),
    ],
)
def test_a_wrong_plan_is_refused_by_its_name(steps, words):
    plan = plan_of(*steps)
    with pytest.raises(ValueError, match="^plan 'layer: ") as err:
        follow(plan, {"x": X}, MESH)
    for word in (*words, plan.describe()):
        assert word in str(err.value)


def test_what_lies_beside_is_freed_when_it_is_read_last():
    """Blocks of a SUMMA product come one ahead of their use: two of each factor at a time, and the sum."""
    x, w = Operand((4, 4), 4), Operand((8, 4), 4)
    steps = []
    for t in range(4):
        ahead = range(2) if t == 0 else range(t + 1, min(t + 2, 4))
        steps += [Broadcast(axis="row", root=u, stream="row", reads=("x",), writes=(f"x{u}",)) for u in ahead]
        steps.append(Multiply(transpose_right=True, add=t > 0, reads=(f"x{t}", "w"), writes=("y",)))
    plan = plan_of(*steps)
    operands = follow(plan, {"x": x, "w": w}, MESH).operands
    assert beside_bytes(plan, operands, ["y"]) == 2 * x.nbytes
    assert beside_bytes(plan, operands, ["y", "x0", "x1"]) == 2 * x.nbytes
    assert beside_bytes(plan, operands, []) == 2 * x.nbytes + operands["y"].nbytes
