"""Columns that a slow rank leaves out: which, what stands for their gradients, what the optimizer makes of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from twinbed.conf.schema import BalanceConf, Imputation, Selection
from twinbed.policies.balance import Assignment, BlockWork, Half, Product, Prune
from twinbed.runtime.balance.held import HeldHalf
from twinbed.runtime.balance.products import BalancedProduct
from twinbed.runtime.balance.selection import Columns

Launch = Callable[..., list[Any]]


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_ranks_prune_as_a_masked_model_would_in_one_process(launch: Launch) -> None:
    ranks = launch("ranks_balance", "pruned,frozen,changes", 4, timeout_s=300.0)
    for rank, found in enumerate(ranks):
        for name, case in found["pruned"].items():
            assert case["worst"] <= 1e-5, (name, rank)
            assert case["least"] < 0.95, (name, rank)  # of the whole matrix, of which a rank has a quarter
            assert case["validation"] == 0, (name, rank)
    # refreshed after every second step, where this rank prunes
    assert ranks[1]["pruned"]["random"]["changed"] == [True, False, True, False]
    assert not any(ranks[0]["pruned"]["random"]["changed"])

    for case in ("frozen", "frozen, scatter"):
        stayed, others = ranks[0]["frozen"][case]
        assert stayed == 0
        assert others > 0.9
    moved, _ = ranks[0]["frozen"]["moving"]
    assert moved > 0.9  # by momentum and weight decay
    assert ranks[1]["frozen"]["frozen"][1] > 0.9

    for found in (rank["changes"] for rank in ranks):
        assert [step for step, _ in found["told"]] == [2, 4]
        for (_, told), expected in zip(found["told"], found["expected"], strict=True):
            assert told == pytest.approx(expected, rel=6e-3)
            assert min(told) > 0
        payload = 4 * 16 * 4  # fp32, 4 products of 4 blocks, 4 ranks
        assert found["rows"] == [
            (step, "step", "balance", "all_gather", "tensor", payload, payload * 3 // 4) for step in (1, 3)
        ]
        assert found["decisions"] == [
            "GroupMeasured", "ChangesMeasured", "GroupMeasured", "GroupMeasured", "ChangesMeasured", "GroupMeasured",
        ]  # fmt: skip
    shares = ranks[0]["changes"]["shares"]
    assert shares[1]["block.2.fc2"] == 0.25
    assert {share for name, share in shares[1].items() if name != "block.2.fc2"} == {0.5}
    assert set(ranks[1]["changes"]["shares"][2].values()) == {0}


WORK = BlockWork(
    ranks=2,
    blocks=1,
    tokens=5,
    units={Half.attention: 2, Half.ffn: 6},
    unit_numel={Half.attention: 1, Half.ffn: 1},
    unit_features={Half.attention: 4, Half.ffn: 1},
    unit_flop={Half.attention: 1, Half.ffn: 1},
    hidden=8,
    element_bytes=4,
)


class _Two:
    """A product of two matrices that share their input, with columns of our choice."""

    def __init__(self, imputation: Imputation) -> None:
        random = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(rows, 8, generator=random).requires_grad_() for rows in (3, 4)]
        self.assignment = Assignment(WORK, (Prune(0, 0.5),))
        self.product = BalancedProduct(
            "block.0.qkv",
            Product.qkv,
            cast(HeldHalf, SimpleNamespace(units=2, moves=False)),
            BalanceConf(name="resize", imputation=imputation, selection=Selection.random),
            weights=[lambda: self.weights[0], lambda: self.weights[1]],
            biases=[],
            names=["a", "b"],
            place=0,
            seed=4,
            assignment=lambda: self.assignment,
            rate=None,
        )

    def gradients(self, x: Tensor, slopes: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = x.clone().requires_grad_()
        assert self.product.begins()
        total = sum((y * slope).sum() for y, slope in zip(self.product.outputs(x), slopes, strict=True))
        found = torch.autograd.grad(cast(Tensor, total), [x, *self.weights])
        return found[0], list(found[1:])


def _batch(seed: int) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 8, generator=random)
    return x, [torch.randn(2, 5, rows, generator=random) for rows in (3, 4)]


def test_zero_leaves_no_gradient_in_columns_that_are_left_out() -> None:
    two, (x, slopes) = _Two(Imputation.zero), _batch(0)
    kept = list(two.product.kept or ())
    assert len(kept) == 4
    dx, dw = two.gradients(x, slopes)
    wanted = sum(slope @ weight for slope, weight in zip(slopes, two.weights, strict=True))
    mask = torch.zeros(8)
    mask[kept] = 1
    torch.testing.assert_close(dx, wanted * mask)
    for slope, got in zip(slopes, dw, strict=True):
        torch.testing.assert_close(got, torch.einsum("btr,btc->rc", slope, x) * mask)


def test_average_is_the_mean_of_each_rows_computed_columns() -> None:
    two, (x, slopes) = _Two(Imputation.average), _batch(0)
    kept = list(two.product.kept or ())
    left = [column for column in range(8) if column not in kept]
    dx, dw = two.gradients(x, slopes)
    wanted = sum(slope @ weight for slope, weight in zip(slopes, two.weights, strict=True))[..., kept]
    torch.testing.assert_close(dx[..., kept], wanted)
    torch.testing.assert_close(dx[..., left], wanted.mean(-1, keepdim=True).expand(2, 5, 4))
    for slope, got in zip(slopes, dw, strict=True):
        wanted = torch.einsum("btr,btc->rc", slope, x)[:, kept]
        torch.testing.assert_close(got[:, kept], wanted)
        torch.testing.assert_close(got[:, left], wanted.mean(-1, keepdim=True).expand(-1, 4))


def test_same_is_what_was_computed_there_last() -> None:
    two = _Two(Imputation.same)
    pruned = two.assignment
    x, slopes = _batch(0)
    first_dx, first_dw = None, None
    two.assignment = Assignment(WORK)  # nothing is left out, and remembered all the same
    first_dx, first_dw = two.gradients(x, slopes)
    two.assignment = pruned
    kept = list(two.product.kept or ())
    left = [column for column in range(8) if column not in kept]
    x, slopes = _batch(1)
    dx, dw = two.gradients(x, slopes)
    torch.testing.assert_close(dx[..., left], first_dx.flatten(0, 1).mean(0)[left].expand(2, 5, 4))
    for one, got, slope in zip(first_dw, dw, slopes, strict=True):
        torch.testing.assert_close(got[:, left], one[:, left])
        torch.testing.assert_close(got[:, kept], torch.einsum("btr,btc->rc", slope, x)[:, kept])


def test_nothing_was_computed_before_the_first_time() -> None:
    two, (x, slopes) = _Two(Imputation.same), _batch(0)
    left = [column for column in range(8) if column not in (two.product.kept or ())]
    dx, (dw, _) = two.gradients(x, slopes)
    assert not dx[..., left].any()
    assert not dw[:, left].any()


def test_outputs_are_partial_sums_with_the_whole_bias() -> None:
    two, (x, _) = _Two(Imputation.zero), _batch(0)
    kept = list(two.product.kept or ())
    first, _ = two.product.outputs(x)
    torch.testing.assert_close(first, functional.linear(x[..., kept], two.weights[0][:, kept]))


# ---- which columns


def _observed(how: Selection, changes: list[float]) -> Columns:
    columns = Columns(how, len(changes), seed=0)
    columns.observe([torch.zeros(2, len(changes))])
    columns.trained(())
    columns.observe([torch.tensor([changes, [0.0] * len(changes)])])
    return columns


def test_priority_keeps_the_columns_that_changed_most() -> None:
    columns = _observed(Selection.priority, [3.0, 1.0, -2.0, 0.5])
    assert columns.choose(4, 2) == (0, 2)
    assert columns.choose(4, 3) == (0, 1, 2)
    assert columns.choose(3, 2) == (0, 2)  # of the first three alone
    assert columns.change == 1.0  # from zero


def test_a_column_that_was_left_out_keeps_its_older_score() -> None:
    columns = _observed(Selection.priority, [3.0, 1.0, 2.0, 0.5])
    columns.refresh()
    columns.trained([1, 3])
    columns.observe([torch.tensor([[3.6, 9.0, 2.7, 9.0], [0.0] * 4])])
    torch.testing.assert_close(columns.scores, torch.tensor([0.6, 1.0, 0.7, 0.5]))
    columns.refresh()
    assert columns.choose(4, 2) == (1, 2)  # the frozen one's older score is the largest now
    columns.trained(())  # another rank was slow: all were trained
    columns.observe([torch.tensor([[3.6, 9.0, 2.7, 13.0], [0.0] * 4])])
    torch.testing.assert_close(columns.scores, torch.tensor([0.0, 0.0, 0.0, 4.0]))


def test_columns_that_were_never_trained_come_first() -> None:
    """Each has been trained once before any is left out for good."""
    columns = Columns(Selection.priority, 6, seed=0)
    columns.observe([torch.zeros(1, 6)])
    kept = []
    for number in (1.0, 2.0, 3.0):
        kept.append(columns.choose(6, 2))
        columns.trained(sorted(set(range(6)) - set(kept[-1])))
        weight = torch.zeros(1, 6)
        weight[0, list(kept[-1])] = number
        columns.observe([weight])
        columns.refresh()
    assert kept == [(0, 1), (2, 3), (4, 5)]
    assert columns.scores.isfinite().all()
    assert columns.choose(6, 2) == (4, 5)


def test_the_choice_stays_until_the_refresh() -> None:
    columns = _observed(Selection.priority, [3.0, 1.0, 2.0, 0.5])
    before = columns.choose(4, 2)
    columns.trained(())
    columns.observe([torch.tensor([[3.0, 9.0, 2.0, 9.0], [0.0] * 4])])
    assert columns.choose(4, 2) == before == (0, 2)
    columns.refresh()
    assert columns.choose(4, 2) == (1, 3)


def test_contiguous_leaves_out_the_window_that_changed_least() -> None:
    columns = _observed(Selection.contiguous, [1.0, 5.0, 0.1, 3.0, 1.0, 1.0])
    assert columns.choose(6, 4) == (0, 1, 2, 3)
    assert columns.choose(6, 3) == (0, 1, 5)
    assert columns.choose(8, 6) == (0, 1, 2, 3, 6, 7)  # lent columns stay


def test_lent_columns_are_kept_as_long_as_others_can_be_left_out() -> None:
    columns = _observed(Selection.priority, [3.0, 1.0, 2.0, 0.5])
    assert columns.choose(6, 3) == (0, 4, 5)


def test_random_columns_are_drawn_anew_at_each_refresh_and_alike_for_one_seed() -> None:
    one, other = Columns(Selection.random, 64, seed=7), Columns(Selection.random, 64, seed=7)
    drawn = []
    for _ in range(3):
        drawn.append(one.choose(64, 16))
        assert drawn[-1] == one.choose(64, 16) == other.choose(64, 16)
        assert list(drawn[-1]) == sorted(set(drawn[-1]))
        one.refresh()
        other.refresh()
    assert len(set(drawn)) == 3
    assert Columns(Selection.random, 64, seed=8).choose(64, 16) != drawn[0]
