"""The matmul over kept columns: values and both gradients against plain indexing, and how often it gathers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import twinbed.kernels.pruned as pruned
from twinbed.kernels import prepare, pruned_matmul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert prepare().backend == "native", prepare().reason


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
    st.data(),
)
def test_values_and_gradients_equal_plain_indexing(m, k, n, dtype, transposed, data):
    kept = tuple(data.draw(st.permutations(range(k)))[: data.draw(st.integers(0, k))])
    generator = torch.Generator().manual_seed(m * 10007 + k * 101 + n)
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = torch.randn(n, k, generator=generator).to(dtype).t() if transposed else torch.randn(k, n).to(dtype)
    results = []
    for reference in (False, True):
        a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        assert b.stride() == w.stride() or 1 in (k, n)
        y = pruned_matmul(a, b, kept, reference=reference)
        y.backward(torch.linspace(-1, 1, m * n).view(m, n).to(dtype))
        results.append((y, a.grad, b.grad))
    for ours, plain in zip(*results, strict=True):
        assert ours.shape == plain.shape
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)
    left_out = sorted(set(range(k)) - set(kept))
    _, dx, dw = results[0]
    assert not dx[:, left_out].any()
    assert not dw[left_out].any()


def test_all_columns_kept_is_the_matmul_and_leading_dimensions_stay():
    x, w = torch.randn(2, 3, 8), torch.randn(5, 8)
    y = pruned_matmul(x, w.t(), tuple(range(8)))
    torch.testing.assert_close(y, x @ w.t())
    assert pruned_matmul(x[..., :0], w[:, :0].t(), ()).shape == (2, 3, 5)


def test_each_operand_is_gathered_once(monkeypatch):
    gathered = []
    original = pruned.gather_columns
    monkeypatch.setattr(pruned, "gather_columns", lambda x, i: gathered.append(x.shape) or original(x, i))
    x = torch.randn(6, 16, requires_grad=True)
    weight = torch.randn(4, 16, requires_grad=True)
    pruned_matmul(x, weight.t(), (3, 1, 12)).sum().backward()
    assert gathered == [(6, 16), (4, 16)]
    assert weight.grad is not None
    assert weight.grad.shape == (4, 16)
    assert weight.grad[:, [3, 1, 12]].all()


def test_only_wanted_gradients_are_computed():
    x, w = torch.randn(3, 8), torch.randn(8, 2, requires_grad=True)
    pruned_matmul(x, w, (0, 7)).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(w.grad[[0, 7]], x[:, [0, 7]].sum(0)[:, None].expand(2, 2))


def test_a_part_of_a_wider_matrix_is_read_in_place():
    wide = torch.randn(5, 30)
    w = torch.randn(10, 4)
    torch.testing.assert_close(
        pruned_matmul(wide[:, 7:17], w, (9, 0, 4)), wide[:, [16, 7, 11]] @ w[[9, 0, 4]]
    )


def test_wrong_input_is_named():
    x, w = torch.ones(2, 8), torch.ones(8, 3)
    with pytest.raises(ValueError, match="kept names column 8, but x has 8"):
        pruned_matmul(x, w, (0, 8))
    with pytest.raises(ValueError, match="twice"):
        pruned_matmul(x, w, (0, 0))
    with pytest.raises(ValueError, match=r"they must be \[..., K\] and \[K, N\]"):
        pruned_matmul(x, w[:7], (0,))
    with pytest.raises(ValueError, match="one dtype"):
        pruned_matmul(x, w.double(), (0,))
    with pytest.raises(ValueError, match="whole numbers"):
        pruned_matmul(x, w, (1.5,))  # type: ignore[arg-type]


def test_a_second_derivative_is_an_error_and_no_wrong_number():
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(pruned_matmul(x, w, (6, 1, 3)).pow(3).sum(), x, create_graph=True)


def test_under_autocast_it_does_what_a_matmul_does():
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    found = []
    for reference in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y = pruned_matmul(x, w, (6, 1, 3), reference=reference)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), (x, w))))
    assert found[0][0].dtype == torch.bfloat16
    for ours, plain in zip(*found, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, atol=2e-2, rtol=2e-2)
