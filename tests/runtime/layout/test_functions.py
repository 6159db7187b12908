"""What each function of a plan makes, against the shapes and kinds by which policies and simulator know it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from twinbed.policies.layout import functions as rules
from twinbed.policies.layout.ring import BLOCK_GRADIENTS, BLOCKS
from twinbed.policies.mesh import Mesh
from twinbed.policies.plan import Apply
from twinbed.runtime.layout import functions
from twinbed.runtime.layout.functions import Context, apply_function

B, T, D, S, V, H, E = 2, 4, 6, 5, 7, 3, 8  # E: a size that torch's fused attention takes

MESH = Mesh(3, 3, dims=(("tensor", 3), ("data", 1)))

_ids = torch.tensor([[0, 5, 14, 9], [6, 6, 2, 12]])
_targets = torch.tensor([[0, -100, 11, 9], [6, 6, -100, 12]])


def _r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _sums(rows: int) -> Tensor:
    return _r(rows, B, T).abs() + torch.tensor([0.0, 20.0][-rows:])[:, None, None]


OPERANDS: dict[str, list[Tensor]] = {
    "add_bias": [_r(B, T, D), _r(D)],
    "sum_tokens": [_r(B, T, D)],
    "look_up": [_ids, _r(S, D)],
    "look_up_gradient": [_ids, _r(B, T, D), _r(S, D)],
    "layer_norm_sums": [_r(B, T, D)],
    "layer_norm": [_r(B, T, D), _r(D), _r(D), _sums(2)],
    "layer_norm_gradient_sums": [_r(B, T, D), _r(B, T, D), _r(D), _sums(2)],
    "layer_norm_gradient": [_r(B, T, D), _r(B, T, D), _r(D), _sums(2), _r(2, B, T)],
    "rms_norm_sums": [_r(B, T, D)],
    "rms_norm": [_r(B, T, D), _r(D), _sums(1)],
    "rms_norm_gradient_sums": [_r(B, T, D), _r(B, T, D), _r(D), _sums(1)],
    "rms_norm_gradient": [_r(B, T, D), _r(B, T, D), _r(D), _sums(1), _r(1, B, T)],
    "rows_apart": [_r(2, D)],
    "add_rows": [_r(B, T, D), _r(S, D)],
    "add_rows_gradient": [_r(B, T, D), _r(S, D)],
    "patches": [_r(B, 3, 9, 13), _r(D, 3, 4, 4), _r(D)],
    "patches_gradient": [_r(B, 6, D), _r(B, 3, 9, 13), _r(D, 3, 4, 4)],
    "prepend": [_r(B, T, D), _r(1, 1, D)],
    "prepend_gradient": [_r(B, T, D), _r(1, 1, D)],
    "largest": [_r(B, T, S)],
    "exponentials": [_r(B, T, S), _targets, _r(B, T)],
    "losses": [_r(2, B, T).abs(), _r(B, T), _targets],
    "mean_loss": [_r(2)],
    "scale": [_r(1)[0]],
    "loss_gradient": [_r(1)[0], _r(B, T, S), _targets, _r(B, T), _r(2, B, T), _r(2)],
    "attention": [_r(B, H, T, E), _r(B, H, T, E), _r(B, H, T, E)],
    "attention_gradient": [*(_r(B, H, T, E) for _ in range(5)), _r(B, H, T)],
    **{name: [_r(B, H, T, E), _r(2, B, H, T, E)] for name in BLOCKS},
    **{
        name: [_r(B, H, T, E), _r(B, H, T, E), _r(2, B, H, T, E), _r(B, H, T, E), _r(B, H, T) + 5]
        for name in BLOCK_GRADIENTS
    },
    "stack": [_r(B, T), _r(B, T)],
    "merge": [_r(B, H, T, E), _r(B, H, T), _r(B, H, T, E), _r(B, H, T)],
    "merge_last": [_r(B, H, T, E), _r(B, H, T), _r(B, H, T, E), _r(B, H, T)],
    "accumulate": [_r(B, T), _r(B, T)],
    "add": [_r(B, T), _r(B, T)],
    "zeros": [_r(B, T)],
}


def _context(rank: int = 1) -> Context:
    return Context(mesh=MESH, rank=rank, eps=1e-5)


def test_runtime_and_policies_know_the_same_functions() -> None:
    assert set(functions._FUNCTIONS) == set(rules._RULES) == set(OPERANDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPERANDS)
def test_shapes_and_dtypes_are_as_the_rules_say(name: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ran = [
        x if x.dtype == torch.int64 else x.to(wide if _is_wide(name, i) else dtype)
        for i, x in enumerate(OPERANDS[name])
    ]
    before = [x.clone() for x in ran]
    made = apply_function(Apply(function=name, number=13, axes=("tensor",)), _context(), ran)
    expected = rules.results(name, [tuple(x.shape) for x in ran])
    assert [tuple(x.shape) for x in made] == [one.shape for one in expected]
    kinds = {rules.SAME: ran[0].dtype, rules.WIDE: wide, rules.PARAMETER: ran[-1].dtype}
    if name == "patches_gradient":
        kinds[rules.PARAMETER] = dtype
    if name in ("loss_gradient",):  # of the logits, behind the loss' own gradient
        kinds[rules.SAME] = dtype
    assert [x.dtype for x in made] == [kinds[one.kind] for one in expected]
    assert all(torch.equal(x, y) for x, y in zip(ran, before, strict=True)), "operands are left as they are"


def _is_wide(name: str, i: int) -> bool:
    """Operands that another function made, as wide sums."""
    if name.endswith(("norm", "norm_gradient", "norm_gradient_sums")):
        return i >= {"layer_norm": 3, "rms_norm": 2}.get(name, 3)
    first = {
        "exponentials": 2,
        "losses": 0,
        "mean_loss": 0,
        "rows_apart": 0,
        "scale": 0,
        "attention_gradient": 5,
    }
    if name == "loss_gradient":
        return i != 1
    if name in ("merge", "merge_last", "accumulate"):
        return i >= 1
    if name in BLOCK_GRADIENTS:
        return i == 4
    return i >= first.get(name, 9)


def test_a_loss_over_cut_and_padded_classes_is_torchs() -> None:
    """13 classes over 3 ranks of 5: the last holds two that are padding."""
    logits, targets = _r(B, T, 15), _targets
    logits.requires_grad_()
    expected = functional.cross_entropy(logits[..., :13].flatten(0, 1), targets.flatten())
    (truth,) = torch.autograd.grad(expected, logits)
    parts = [part.detach() for part in logits.chunk(3, -1)]

    def each(name: str, *operands: list[Tensor]) -> list[tuple[Tensor, ...]]:
        step = Apply(function=name, number=13, axes=("tensor",))
        return [
            apply_function(step, _context(rank), [operand[rank] for operand in operands]) for rank in range(3)
        ]

    largest = torch.stack([made[0] for made in each("largest", parts)]).amax(0)
    alike = [targets] * 3
    exponentials = sum(made[0] for made in each("exponentials", parts, alike, [largest] * 3))
    assert isinstance(exponentials, Tensor)
    total = each("losses", [exponentials] * 3, [largest] * 3, alike)[0][0]
    loss = each("mean_loss", [total] * 3)[0][0]
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=0)
    gradients = each(
        "loss_gradient",
        [torch.ones((), dtype=torch.float64)] * 3,
        parts,
        alike,
        [largest] * 3,
        [exponentials] * 3,
        [total] * 3,
    )
    torch.testing.assert_close(torch.cat([made[0] for made in gradients], -1), truth, rtol=1e-12, atol=1e-16)


def test_labels_that_are_all_ignored_give_torchs_nan() -> None:
    total = torch.zeros(2)
    (loss,) = apply_function(Apply(function="mean_loss"), _context(), [total])
    assert loss.isnan()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradient_are_torchs(causal: bool) -> None:
    q, k, v = _r(B, 4, T, E), _r(B, 2, T, E), _r(B, 2, T, E) + 1
    for x in (q, k, v):
        x.requires_grad_()
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    dy = _r(B, 4, T, E) - 0.3
    truth = torch.autograd.grad(expected, (q, k, v), dy)
    q, k, v = (x.detach() for x in (q, k, v))
    y, log_sums = apply_function(Apply(function="attention", number=int(causal)), _context(), [q, k, v])
    torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-14)
    step = Apply(function="attention_gradient", number=int(causal))
    for found, true in zip(apply_function(step, _context(), [dy, q, k, v, y, log_sums]), truth, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-13)


def test_an_unknown_function_and_a_taken_name_are_refused() -> None:
    with pytest.raises(ValueError, match="Apply\\(function='none'\\): must be one of"):
        apply_function(Apply(function="none"), _context(), [])
    with pytest.raises(ValueError, match="'add_bias' is there already"):
        functions.register("add_bias", functions._FUNCTIONS["add_bias"])
