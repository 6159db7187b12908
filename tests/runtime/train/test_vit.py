"""The ViT has the parameters that its spec counts, and each output row depends on its own picture alone."""

import math

import pytest
import torch

from twinbed.conf.model_spec import ModelSpec, parameters, spec_from_keys
from twinbed.runtime.images import NO_CLASS
from twinbed.runtime.laps import Laps
from twinbed.runtime.stack import build_model
from twinbed.runtime.vit import ViT


def spec(**extra: object) -> ModelSpec:
    given = {"image": 28, "patch": 9, "channels": 1, "classes": 10} | extra
    keys: dict[str, object] = {"family": "vit", "layers": 2, "hidden": 36, "heads": 3}
    return spec_from_keys(keys | {"extra": given})


def pictures(num: int = 5, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return (
        torch.randn(num, channels, 28, 28, generator=random),
        torch.randint(0, 10, (num,), generator=random),
    )


@pytest.mark.parametrize("extra", [{}, {"channels": 3}, {"patch": 4}, {"classes": 7}])
def test_parameters_are_those_of_the_spec(extra: dict[str, object]) -> None:
    made = spec(**extra)
    model = ViT(made, seed=0)
    assert list(model.units()) == [unit.name for unit in parameters(made)]
    for unit in parameters(made):
        module = model.get_submodule(unit.module)
        assert module is model.units()[unit.name]
        own = [
            (name, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
            if unit.name != "root" or not name.startswith("vit.layers.")
        ]
        assert own == [(tensor.name, tensor.shape) for tensor in unit.tensors]


def test_a_seed_gives_the_same_weights_and_an_untrained_model_knows_nothing() -> None:
    first, second, other = (ViT(spec(), seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    assert first(*pictures()).item() == pytest.approx(math.log(10), rel=0.1)


def test_the_loss_is_that_of_the_pictures_with_a_class() -> None:
    model = ViT(spec(), seed=0)
    images, labels = pictures(6)
    each = torch.stack([model(images[i : i + 1], labels[i : i + 1]) for i in range(6)])
    assert model(images, labels).item() == pytest.approx(each.mean().item(), rel=1e-6)
    labels[4:] = NO_CLASS
    assert model(images, labels).item() == pytest.approx(each[:4].sum().item() / 6, rel=1e-6)
    labels[:] = NO_CLASS
    assert model(images, labels).item() == 0.0


def test_right_answers_are_counted_without_gradients_only() -> None:
    model = ViT(spec(), seed=0)
    images, labels = pictures(6)
    with torch.no_grad():
        x_BTD = model.through_blocks(model.vit.embeddings(images))
        told = model.classifier(model.vit.layernorm(x_BTD)[:, 0]).argmax(-1)
        labels[:3], labels[3:5], labels[5] = told[:3], (told[3:5] + 1) % 10, NO_CLASS
        model(images, labels)
    assert model.num_right.item() == 3
    model(images, told)
    assert model.num_right.item() == 3


def test_every_patch_is_seen_and_what_is_beyond_them_is_not() -> None:
    model = ViT(spec(), seed=0)
    images, labels = pictures(1)
    loss = model(images, labels).item()
    for row in range(3):
        for column in range(3):
            changed = images.clone()
            changed[:, :, 9 * row + 4, 9 * column + 4] += 5
            assert model(changed, labels).item() != loss
    images[:, :, 27:], images[:, :, :, 27:] = 9.0, 9.0
    assert model(images, labels).item() == loss


def test_recompute_laps_and_pace_do_not_change_the_gradients() -> None:
    def gradients(model: ViT) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        loss = model(*pictures())
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    loss, expected = gradients(ViT(spec(), seed=0))
    model = ViT(spec(), seed=0, recompute=True)
    clock = Laps()
    model.clock = clock
    model.emulate(1e10, sequence=10)
    clock.start()
    again, got = gradients(model)
    assert again == loss
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert {lap.name for lap in clock.laps} >= {"forward/block.0", "backward/block.0"}


def test_it_is_transformers_own_in_numbers() -> None:
    transformers = pytest.importorskip("transformers")
    made = spec(patch=7)
    model = ViT(made, seed=0)
    config = transformers.ViTConfig(
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=144,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
    )
    theirs = transformers.ViTForImageClassification(config)
    theirs.load_state_dict(model.state_dict())
    images, labels = pictures()
    logits = theirs(images).logits
    expected = torch.nn.functional.cross_entropy(logits, labels)
    assert model(images, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_family_chooses_the_model() -> None:
    assert isinstance(build_model(spec(), seed=None), ViT)
    with pytest.raises(ValueError, match="model.family='gpt2': a GPT is of family 'gpt'"):
        build_model(
            spec_from_keys(
                {"family": "gpt2", "layers": 1, "hidden": 8, "heads": 2, "vocab": 9, "sequence": 4}
            ),
            seed=0,
        )
    with pytest.raises(ValueError, match="model.family='vit' with model.head='pooled'"):
        ViT(spec(head="pooled", classes=0), seed=0)
