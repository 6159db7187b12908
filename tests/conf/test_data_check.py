"""Data and model that do not fit are refused by key; epochs give steps, and test images the batches of a validation."""

import pytest

from twinbed.conf.compose import compose
from twinbed.conf.schema import DataConf

PICTURES = ("data=fashion_mnist", "model=vit_fashion")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data=fashion_mnist"],
            "data=fashion_mnist with model=gpt_tiny of family gpt: .* model=vit_fashion",
        ),
        (["data=fashion_mnist", "target=sim"], "data=fashion_mnist with model=gpt_tiny of family gpt"),
        (
            ["data=fashion_mnist", "model=vit_tiny"],
            r"model.extra.image=\(8, 8\) of model=vit_tiny: must be 28",
        ),
        ([*PICTURES, "model.extra.channels=3"], "model.extra.channels=3 of model=vit_fashion: must be 1"),
        ([*PICTURES, "model.extra.classes=7"], "model.extra.classes=7 of model=vit_fashion: must be 10"),
        (
            [*PICTURES, "+model.extra.head=pooled", "model.extra.classes=null"],
            "of family vit: pictures need family vit with a classifier",
        ),
        (["model=vit_fashion"], "data=text with model=vit_fashion of family vit: .* data=fashion_mnist"),
        (["model=vit_fashion", "target=runtime"], "data=text with model=vit_fashion of family vit"),
        (
            ["model=vit_fashion", "data=synthetic", "+model.extra.head=pooled", "model.extra.classes=null"],
            "of family vit cannot be trained here",
        ),
        (
            [*PICTURES, "batch.sequence=4"],
            r"batch.sequence=4 must be the patches \+ 1 of model=vit_fashion: 5",
        ),
        ([*PICTURES, "data.num_train=0"], "data.num_train=0: must be >= 1 with data=fashion_mnist"),
        ([*PICTURES, "data.num_test=null"], "data.num_test=None: must be >= 1"),
        (["data.num_train=5"], "data.num_train=5: must be null with data=text"),
        (["train.epochs=2"], "train.epochs=2 with data=text, which has no end: give steps"),
        ([*PICTURES, "train.epochs=0"], "train.epochs=0.0: must be > 0 or null"),
        (
            [*PICTURES, "train.epochs=2", "batch.micro=100", "steps=299"],
            "steps=299 contradicts train.epochs=2, which gives 300 steps of 400 images",
        ),
        (
            [*PICTURES, "train.eval_every=1", "train.eval_batches=9", "batch.micro=100"],
            "train.eval_batches=9 contradicts data=fashion_mnist, .*10000 images: 25 batches of 400",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(overrides)


def test_epochs_give_steps_and_tokens() -> None:
    experiment = compose([*PICTURES, "train.epochs=2", "batch.micro=128", "batch.accumulation=2"]).experiment
    assert experiment.steps == 118  # 120,000 images by 4 ranks x 128 x 2: 117.2
    assert experiment.train.tokens == 118 * 1024 * 5
    again = compose(
        [*PICTURES, "train.epochs=2", "batch.global_sequences=1024", "steps=118", "train.tokens=7"]
    )
    assert again.experiment.steps == 118
    assert again.experiment.train.tokens == 7


def test_a_validation_is_all_test_images() -> None:
    keys = [*PICTURES, "batch.micro=128"]
    assert compose([*keys, "train.eval_every=5"]).experiment.train.eval_batches == 20  # 10,000 by 512: 19.5
    few = compose([*keys, "train.eval_every=5", "data.num_test=512"]).experiment
    assert few.train.eval_batches == 1
    assert compose([*keys, "train.eval_every=5", "train.eval_batches=20"]).experiment.train.eval_batches == 20


def test_a_simulated_vit_needs_no_pictures() -> None:
    assert compose(["model=vit_1b", "target=sim"]).experiment.data.name == "text"
    assert compose([*PICTURES, "target=sim", "data.path=/no/such/folder"]).experiment.data.path is not None


def test_a_share_kept_for_validation_is_of_texts_only() -> None:
    warnings = compose([*PICTURES, "data.validation_fraction=0.5"]).warnings
    assert any("data.validation_fraction=0.5 has no effect without data=text" in told for told in warnings)
    with pytest.raises(ValueError, match=r"data.name='digits': must be one of \['text', 'synthetic', 'fash"):
        DataConf(name="digits")
