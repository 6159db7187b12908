"""What is dropped is as chance would have it, and depends on where a number lies in the training alone."""

import math
from collections.abc import Mapping

import pytest
import torch

from twinbed.conf.model_spec import ModelSpec, spec_from_keys
from twinbed.runtime.dropout import Dropout, DropoutClock
from twinbed.runtime.stack import Stack, build_model

MODELS: Mapping[str, dict[str, object]] = {
    "gpt": {},
    "llama": {"ffn": 50, "kv_heads": 2},
    "bert": {"extra": {"head": "masked_lm"}},
}


def spec(family: str) -> ModelSpec:
    keys = {"family": family, "layers": 2, "hidden": 32, "heads": 4, "vocab": 101, "sequence": 17}
    return spec_from_keys(keys | MODELS[family])


def tokens(num: int = 4) -> torch.Tensor:
    return torch.randint(0, 101, (num, 17), generator=torch.Generator().manual_seed(0))


def dropped(*, p: float = 0.1, shape: tuple[int, int, int] = (8, 128, 256), **keys: object) -> torch.Tensor:
    given: dict[str, object] = {"seed": 7, "place": "block.0.mlp", "step": 0, "first": 0} | keys
    clock = DropoutClock(int(str(given["seed"])))
    clock.at(step=int(str(given["step"])), first_sequence=int(str(given["first"])))
    return Dropout(p, place=str(given["place"]), clock=clock).dropped(torch.empty(shape))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_p_along_every_index(p: float) -> None:
    mask = dropped(p=p).double()
    assert mask.mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / mask.numel()))
    for dims in ((0, 1), (0, 2), (1, 2)):
        counts = mask.sum(dims)
        each = mask.numel() / len(counts)
        chi_square = ((counts - p * each) ** 2 / (p * (1 - p) * each)).sum().item()
        n = len(counts)
        assert abs(chi_square - n) < 4.5 * math.sqrt(2 * n), (dims, chi_square, n)


def test_groups_of_neighbours_are_as_independent_ones() -> None:
    """The 2^4 patterns of 4 neighbours along each index, at p = 1/2: chi-square with 15 degrees of freedom."""
    mask = dropped(p=0.5, shape=(64, 64, 64))
    for dim in range(3):
        bits = mask.movedim(dim, -1).reshape(-1, 4).long()
        counts = torch.bincount((bits * torch.tensor([1, 2, 4, 8])).sum(1), minlength=16).double()
        expected = len(bits) / 16
        assert ((counts - expected) ** 2 / expected).sum().item() < 45, dim  # 0.9999 lies at 44.3


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"seed": 7 + (1 << 40)},
        {"place": "block.1.mlp"},
        {"place": "block.0.attention"},
        {"step": 1},
        {"step": 2**33},
        {"first": 8},
    ],
)
def test_masks_of_other_places_and_times_are_independent(other: dict[str, object]) -> None:
    p = 0.3
    one, two = dropped(p=p).double(), dropped(p=p, **other).double()
    correlation = ((one - p) * (two - p)).mean().item() / (p * (1 - p))
    assert abs(correlation) < 4 / math.sqrt(one.numel())


def test_rows_are_independent_of_shifted_rows() -> None:
    p = 0.5
    mask = dropped(p=p, shape=(4, 64, 512)).double() - p
    for shift in range(1, 8):
        for dim in range(3):
            if shift >= mask.shape[dim]:
                continue
            correlation = (mask * mask.roll(shift, dim)).mean().item() / (p * (1 - p))
            assert abs(correlation) < 5 / math.sqrt(mask.numel()), (shift, dim)


def test_a_part_is_dropped_as_it_is_within_the_whole() -> None:
    drop = Dropout(0.4, place="here", clock=DropoutClock(3))
    x = torch.randn(6, 10, 12)
    whole = drop(x)
    drop.batch_index = torch.tensor([4, 1])
    drop.token_index, drop.feature_index = torch.tensor([9, 0, 5]), torch.arange(6, 12)
    part = drop(x[[4, 1]][:, [9, 0, 5]][:, :, 6:])
    assert torch.equal(part, whole[[4, 1]][:, [9, 0, 5]][:, :, 6:])


def test_what_is_kept_is_scaled_and_eval_leaves_all() -> None:
    drop = Dropout(0.25, place="here", clock=DropoutClock())
    x = torch.randn(2, 3, 1000, dtype=torch.float64, requires_grad=True)
    out = drop(x)
    kept = ~drop.dropped(x)
    assert torch.allclose(out[kept], x[kept] / 0.75)
    assert not out[~kept].any()
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, kept.double() / 0.75)
    assert drop.eval()(x) is x
    for p in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
            Dropout(p, place="here", clock=DropoutClock())


def loss_and_gradients(model: Stack, *parts: tuple[int, int]) -> tuple[float, list[torch.Tensor]]:
    """Mean over parts of the batch, each begin and end."""
    total = 0.0
    for begin, end in parts:
        model.dropout_clock.at(step=5, first_sequence=begin)
        rows = tokens()[begin:end]
        loss = model(rows, rows.flip(1)) / len(parts)
        loss.backward()
        total += loss.item()
    return total, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_the_same_in_any_micro_batches_and_under_recomputation(family: str) -> None:
    def made(dropout: float = 0.1, *, recompute: bool = False) -> Stack:
        return build_model(spec(family), seed=0, recompute=recompute, dropout=dropout)

    loss, gradients = loss_and_gradients(made(), (0, 4))
    assert loss != loss_and_gradients(made(0.0), (0, 4))[0]
    assert loss != loss_and_gradients(made(), (1, 4))[0]
    for model, parts in (
        (made(), ((0, 2), (2, 4))),
        (made(recompute=True), ((0, 4),)),
        (made(recompute=True), ((0, 1), (1, 2), (2, 3), (3, 4))),
    ):
        other, theirs = loss_and_gradients(model, *parts)
        assert other == pytest.approx(loss, rel=1e-6)
        for one, two in zip(gradients, theirs, strict=True):
            assert (one - two).norm() <= 1e-5 * one.norm() + 1e-9
    model = made()
    assert model.eval()(tokens(), tokens()) == made(0.0)(tokens(), tokens())


def test_each_place_of_a_model_is_another() -> None:
    for family in MODELS:
        model = build_model(spec(family), seed=0, dropout=0.1)
        places = [module.place for module in model.modules() if isinstance(module, Dropout)]
        assert sorted(places) == [
            "block.0.attention",
            "block.0.mlp",
            "block.1.attention",
            "block.1.mlp",
            "embedding",
        ]
