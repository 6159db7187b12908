"""Llama and Qwen2 have the parameters that their spec counts, and transformers' numbers."""

import math
from typing import Any

import pytest
import torch

from twinbed.conf.model_spec import ModelSpec, parameters, spec_from_keys
from twinbed.runtime.laps import Laps
from twinbed.runtime.leaves import Rotary
from twinbed.runtime.llama import Llama
from twinbed.runtime.stack import build_model

ODD = {"family": "llama", "layers": 2, "hidden": 36, "heads": 6, "kv_heads": 2, "ffn": 50}
ODD |= {"vocab": 101, "sequence": 17}


def spec(**changes: object) -> ModelSpec:
    return spec_from_keys(ODD | changes)


def tokens() -> torch.Tensor:
    return torch.randint(0, 101, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("more", [{}, {"tied_embeddings": True}, {"kv_heads": 6}, {"family": "qwen2"}])
def test_parameters_are_those_of_the_spec(more: dict[str, object]) -> None:
    made = spec(**more)
    model = build_model(made, seed=0)
    assert isinstance(model, Llama)
    assert list(model.units()) == [unit.name for unit in parameters(made)]
    for unit in parameters(made):
        module = model.get_submodule(unit.module)
        assert module is model.units()[unit.name]
        own = [
            (name, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
            if unit.name != "root" or not name.startswith("model.layers.")
        ]
        assert own == [(tensor.name, tensor.shape) for tensor in unit.tensors]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_loss_and_gradients_are_transformers_own(family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = Llama(spec(family=family, tied_embeddings=tied), seed=0)
    with torch.no_grad():  # biases that are 0 and weights that are 1 would hide a mistake
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1
            )
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[family]
    config = kind(
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=50,
        vocab_size=101,
        max_position_embeddings=17,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=None,
    )
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config)
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    targets = tokens().flip(1)
    loss = model(tokens(), targets)
    loss.backward()
    logits = theirs(tokens()).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        distance = (parameter.grad - wanted[name]).norm() / wanted[name].norm()
        assert distance < 1e-5, (name, distance)


def test_a_seed_gives_the_same_weights_and_an_untrained_model_knows_nothing() -> None:
    first, second, other = (Llama(spec(), seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first(tokens(), tokens()).item() == pytest.approx(math.log(101), rel=0.02)


def test_rotary_positions_may_be_told() -> None:
    """A rank that holds tokens 5, 2 and 9 turns them as one that holds all."""
    rotary = Rotary(6)
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 10, 6, generator=random), torch.randn(2, 2, 10, 6, generator=random)
    whole = rotary(q, k)
    index = torch.tensor([5, 2, 9])
    rotary.token_index = index
    part = rotary(q[:, :, index], k[:, :, index])
    for all_of, some in zip(whole, part, strict=True):
        assert torch.equal(all_of[:, :, index], some)
    assert torch.allclose(part[0].norm(dim=-1), q[:, :, index].norm(dim=-1), rtol=1e-5)
    # products depend on distances alone
    rotary.token_index = torch.arange(10) + 1000
    far = rotary(q, k)
    products = [a[:, 0] @ b[:, 0].transpose(1, 2) for a, b in (whole, far)]
    assert torch.allclose(*products, atol=1e-3)
    with pytest.raises(ValueError, match="head_size=5: rotary positions turn pairs"):
        Rotary(5)


def test_recompute_laps_and_pace_do_not_change_the_gradients() -> None:
    def gradients(model: Llama) -> list[torch.Tensor | None]:
        model(tokens(), tokens()).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(Llama(spec(), seed=0))
    model = Llama(spec(), seed=0, recompute=True)
    clock = Laps()
    model.clock = clock
    model.emulate(1e10, sequence=17)
    clock.start()
    for one, other in zip(expected, gradients(model), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert {lap.name for lap in clock.laps} >= {"forward/block.0", "backward/block.0"}


def test_other_families_and_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="model.family='llama' with head 'none': a Llama is of one of"):
        Llama(spec_from_keys(ODD | {"extra": {"head": "none"}}), seed=0)
    gpt = {"family": "gpt", "layers": 1, "hidden": 8, "heads": 2, "vocab": 9, "sequence": 4}
    with pytest.raises(ValueError, match="model.family='gpt'"):
        Llama(spec_from_keys(gpt), seed=0)
