"""One process: hand-counted steps, and every variant against the formulas in double precision."""

import copy
import io

import numpy as np
import pytest
import torch

from twinbed.conf.schema import LambCorrection, MomentumOrder, OptimizerConf
from twinbed.runtime.optim import Lamb, Lars
from twinbed.runtime.optim.build import build_optimizer
from twinbed.runtime.optim.lamb import CORRECTIONS
from twinbed.runtime.optim.lars import MOMENTUM_ORDERS
from twinbed.runtime.optim.norms import square_sums

SHAPES = [(7, 5), (13,), (1, 3), (1,), (3, 2, 5), ()]  # matrices, biases, a scalar

LAMBS = {
    "paper": {"weight_decay": 0.01},
    "uncorrected": {"weight_decay": 0.01, "bias_correction": False},
    "deepspeed": {
        "weight_decay": 0.01,
        "correction": "rate",
        "max_coeff": 0.8,
        "min_coeff": 0.5,
        "exclude_1d": False,
        "eps": 1e-8,
    },
    "pytorch-lamb": {"bias_correction": False, "max_norm": 2.0, "exclude_1d": False},
    "lower bound": {"min_norm": 4.0, "weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decay_in_ratio": False},
    "other betas": {"betas": (0.0, 0.5)},
}
LARSES = {
    "paper": {"weight_decay": 1e-2},
    "no momentum": {"momentum": 0.0},
    "timm": {"weight_decay": 1e-2, "momentum_order": "after_ratio"},
    "larc": {"weight_decay": 1e-2, "momentum_order": "after_ratio", "clip": True, "eeta": 0.02},
    "clipped": {"clip": True, "eeta": 0.2, "eps": 1e-8},
    "colossal": {"momentum_order": "before_rate", "max_coeff": 50.0, "exclude_1d": False},
    "clipped and bounded": {"clip": True, "eeta": 0.2, "max_coeff": 0.5, "min_coeff": 0.1},
    "bounded": {"max_coeff": 2e-3, "min_coeff": 1e-3, "eps": 0.1},
}


def values(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape) for shape in shapes]


def parameters(arrays, dtype=torch.float64):
    return [torch.nn.Parameter(torch.tensor(array, dtype=dtype)) for array in arrays]


def give(params, gradients):
    for parameter, gradient in zip(params, gradients, strict=True):
        parameter.grad = torch.as_tensor(np.asarray(gradient), dtype=parameter.dtype)


def one_step(optimizer_class, weights, gradients, **keys):
    (parameter,) = parameters([np.array(weights)], torch.float32)
    optimizer = optimizer_class([parameter], **keys)
    give([parameter], [np.array(gradients)])
    optimizer.step()
    return parameter.detach(), optimizer


def test_lambs_first_step_of_a_zero_weight():
    """m = 0.1, v = 0.001: corrected 1 / 1, as they are 0.1 / sqrt(0.001); the norm of p is 0, so the ratio is 1."""
    keys = {"lr": 0.1, "betas": (0.9, 0.999), "exclude_1d": False}
    corrected, optimizer = one_step(Lamb, [0.0], [1.0], **keys)
    assert optimizer.trust_ratios == (1.0,)
    assert float(corrected) == pytest.approx(-0.1, rel=1e-5)
    assert float(one_step(Lamb, [0.0], [1.0], **keys, bias_correction=False)[0]) == pytest.approx(
        -0.1 / 1e-3**0.5 * 0.1, rel=1e-4
    )
    assert float(one_step(Lamb, [0.0], [1.0], **keys, bias_correction=False)[0]) == pytest.approx(
        -0.3162, abs=5e-5
    )
    by_rate = one_step(Lamb, [0.0], [1.0], **keys, correction="rate")[0]
    assert float(by_rate) == pytest.approx(-0.1, rel=1e-4)


def test_lambs_decay_is_inside_the_ratio():
    """u = (1, 1) + 0.5 (3, 4) = (2.5, 3); the step is as long as lr |w| whatever u is."""
    after, optimizer = one_step(Lamb, [[3.0, 4.0]], [[2.0, 7.0]], lr=0.1, weight_decay=0.5, eps=0.0)
    ratio = 5 / (2.5**2 + 3**2) ** 0.5
    assert optimizer.trust_ratios == pytest.approx((ratio,), rel=1e-6)
    assert after.tolist()[0] == pytest.approx([3 - 0.1 * ratio * 2.5, 4 - 0.1 * ratio * 3], rel=1e-6)
    assert float((after - torch.tensor([[3.0, 4.0]])).norm()) == pytest.approx(0.5, rel=1e-5)


def test_larss_local_rate():
    """0.001 |w| / (|g| + 0.0001 |w|) = 0.005 / 1.0005."""
    after, optimizer = one_step(
        Lars, [[3.0, 4.0]], [[0.6, 0.8]], lr=1.0, eeta=1e-3, weight_decay=1e-4, momentum=0.0
    )
    assert optimizer.trust_ratios == pytest.approx((0.0049975,), rel=1e-5)
    rate = 0.005 / 1.0005
    assert after.tolist()[0] == pytest.approx([3 - rate * 0.6003, 4 - rate * 0.8004], rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "gradients"), [([[0.0, 0.0]], [[1.0, 2.0]]), ([[1.0, 2.0]], [[0.0, 0.0]])]
)
def test_a_norm_of_zero_gives_a_ratio_of_one(weights, gradients):
    for optimizer_class, keys in ((Lars, {"weight_decay": 0.1}), (Lars, {"clip": True}), (Lamb, {})):
        after, optimizer = one_step(optimizer_class, weights, gradients, lr=0.5, **keys)
        assert optimizer.trust_ratios == (1.0,)
        assert after.isfinite().all()
    moved = one_step(Lars, weights, gradients, lr=0.5)[0] - torch.tensor(weights)
    assert moved.tolist() == (-0.5 * torch.tensor(gradients)).tolist()


@pytest.mark.parametrize("name", list(LAMBS))
def test_every_lamb_is_its_formula(name, reference):
    follows(Lamb, reference.lamb, {"lr": 0.05, **LAMBS[name]})


@pytest.mark.parametrize("name", list(LARSES))
def test_every_lars_is_its_formula(name, reference):
    follows(Lars, reference.lars, {"lr": 0.5, **LARSES[name]})


def follows(optimizer_class, formula, keys):
    """Six steps, with a rate that changes."""
    weights = values(0)
    weights[2] = np.zeros_like(weights[2])
    params, states = parameters(weights), [{} for _ in weights]
    optimizer = optimizer_class(params, **keys)
    for step in range(6):
        gradients = values(step + 1)
        lr = keys["lr"] * (1 + step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        give(params, gradients)
        optimizer.step()
        each = zip(weights, gradients, states, strict=True)
        weights = [formula(w, g, state, **(keys | {"lr": lr})) for w, g, state in each]
        for parameter, want, gradient in zip(params, weights, gradients, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), want, rtol=1e-10, atol=1e-13)
            assert np.array_equal(parameter.grad.numpy(), gradient), "a step must leave gradients as they are"


def test_one_dimension_is_left_out_unless_asked_for():
    params = parameters(values(0))
    give(params, values(1))
    optimizer = Lars(params, lr=1.0, weight_decay=0.1)
    optimizer.step()
    assert [ratio == 1.0 for ratio in optimizer.trust_ratios] == [len(shape) < 2 for shape in SHAPES]
    groups = [{"params": params[:2], "exclude_1d": False}, {"params": params[2:]}]
    optimizer = Lars(groups, lr=1.0)
    optimizer.step()
    assert [ratio == 1.0 for ratio in optimizer.trust_ratios] == [False, False, False, True, False, True]


def test_a_parameter_without_a_gradient_stays():
    params = parameters(values(0))
    before = [parameter.detach().clone() for parameter in params]
    give(params, values(1))
    params[0].grad = params[3].grad = None
    for optimizer in (Lamb(params), Lars(params)):
        optimizer.step()
        assert torch.equal(params[0], before[0])
        assert torch.equal(params[3], before[3])
        assert not torch.equal(params[4], before[4])
        assert optimizer.trust_ratios[0] == 1.0
    for parameter in params:
        parameter.grad = None
    optimizer.step()  # nothing to do


@pytest.mark.parametrize("make", [lambda p: Lamb(p, weight_decay=0.01), lambda p: Lars(p, weight_decay=0.01)])
def test_a_loaded_state_goes_on_bit_by_bit(make):
    """Through torch.save; and a deep copy of the optimizer and its parameters does as well."""
    params = parameters(values(0), torch.float32)
    optimizer = make(params)
    give(params, values(1))
    optimizer.step()
    others = copy.deepcopy(params)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = make(others)
    other.load_state_dict(torch.load(file))
    third_params, third = copy.deepcopy((params, optimizer))
    for step in range(2, 5):
        for own in (params, others, third_params):
            give(own, values(step))
        for each in (optimizer, other, third):
            each.step()
    for a, b, c in zip(params, others, third_params, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_prepared_states_are_those_of_the_first_step():
    for optimizer_class in (Lamb, Lars):
        params = parameters(values(0), torch.float32)
        optimizer = optimizer_class(params)
        optimizer.prepare_states()
        kept = {p: dict(optimizer.state[p]) for p in params}
        give(params, values(1))
        optimizer.step()
        for parameter, state in kept.items():
            assert state.keys() == optimizer.state[parameter].keys() != set()
            assert all(optimizer.state[parameter][key] is value for key, value in state.items())
    assert not Lars(params, momentum=0.0).state


def test_a_closure_is_called_with_gradients_on():
    (parameter,) = parameters([np.ones((2, 2))])
    optimizer = Lamb([parameter])

    def closure():
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 4.0
    assert float(parameter.detach().sum()) < 4.0


def test_16_bit_weights_have_norms_in_32():
    parameter = torch.nn.Parameter(torch.full((300, 300), 0.01, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.0)
    optimizer = Lars([parameter], lr=1.0, eeta=1.0)
    optimizer.step()
    assert optimizer.trust_ratios == pytest.approx((float(torch.tensor(0.01).bfloat16()),), rel=1e-5)


def test_a_sparse_gradient_is_refused():
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"of shape \(3, 2\) is sparse"):
        Lamb([parameter]).step()


@pytest.mark.parametrize(
    ("optimizer_class", "keys", "message"),
    [
        (Lamb, {"lr": -1.0}, "lr=-1.0: must be >= 0"),
        (Lamb, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): must be two numbers in \[0, 1\)"),
        (Lamb, {"correction": "both"}, r"correction='both': must be one of \['moments', 'rate'\]"),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff=2.0: must be <= max_coeff=1.0"),
        (Lamb, {"max_norm": 0.0}, "max_norm=0.0: must be > 0 or None"),
        (Lars, {"eeta": 0.0}, "eeta=0.0: must be > 0"),
        (Lars, {"momentum": -0.1}, r"momentum=-0.1: must be in \[0, 1\)"),
        (Lars, {"momentum": 1.5}, r"momentum=1.5: must be in \[0, 1\)"),
        (Lamb, {"lr": float("inf")}, "lr=inf: must be >= 0 and finite"),
        (Lars, {"weight_decay": float("inf")}, "weight_decay=inf: must be >= 0 and finite"),
        (Lars, {"momentum_order": "never"}, "momentum_order='never': must be one of"),
        (Lars, {"min_coeff": -1.0}, "min_coeff=-1.0: must be >= 0"),
    ],
)
def test_illegal_arguments_are_named(optimizer_class, keys, message):
    with pytest.raises(ValueError, match=message):
        optimizer_class(parameters(values(0)), **keys)


def test_a_config_gives_its_optimizer():
    params = parameters(values(0), torch.float32)
    lamb = build_optimizer(
        OptimizerConf(name="lamb", correction=LambCorrection.rate, max_coeff=9.0, weight_decay=0.5), params
    )
    assert isinstance(lamb, Lamb)
    assert {"correction": "rate", "max_coeff": 9.0, "weight_decay": 0.5}.items() <= lamb.defaults.items()
    lars = build_optimizer(
        OptimizerConf(name="lars", momentum=0.5, momentum_order=MomentumOrder.before_rate, clip=True), params
    )
    assert isinstance(lars, Lars)
    assert {"momentum": 0.5, "momentum_order": "before_rate", "clip": True}.items() <= lars.defaults.items()
    assert isinstance(build_optimizer(OptimizerConf(name="sgd"), params), torch.optim.SGD)
    assert isinstance(build_optimizer(OptimizerConf(name="adamw"), params), torch.optim.AdamW)
    assert build_optimizer(OptimizerConf(name="lamb"), []) is None
    assert tuple(each.value for each in LambCorrection) == CORRECTIONS
    assert tuple(each.value for each in MomentumOrder) == MOMENTUM_ORDERS


@pytest.mark.parametrize("numel", [0, 1, 255, 1024, 1025, 90_001, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares_do_not_lose_what_comes_late(numel, dtype):
    """Equal elements are the worst case: every addition rounds the same way."""
    tensors = [torch.full((numel,), 0.01, dtype=dtype), torch.ones(2, 3, dtype=dtype).t()]
    sums = square_sums(tensors, torch.float32)
    want = [float(tensor.double().square().sum()) for tensor in tensors]
    assert sums.tolist() == pytest.approx(want, rel=2e-6)
