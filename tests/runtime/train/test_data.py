"""Which sequence is trained on when does not depend on the ranks; bad text is refused early."""

import numpy as np
import pytest

from twinbed.conf.compose import compose
from twinbed.conf.schema import DataConf
from twinbed.runtime.data import Batches, check_data


def batches(*, rank=0, num_ranks=1, micro=1, accumulation=1, seed=0, name="text", vocab=256, **conf):
    return Batches(
        DataConf(name=name, **conf),
        vocab=vocab,
        sequence=16,
        micro=micro,
        accumulation=accumulation,
        seed=seed,
        rank=rank,
        num_ranks=num_ranks,
    )


@pytest.mark.parametrize("name", ["text", "synthetic"])
def test_a_step_holds_the_same_sequences_on_any_number_of_ranks(name):
    whole = batches(micro=8, name=name)
    by_ranks = [batches(rank=r, num_ranks=4, micro=2, name=name) for r in range(4)]
    by_micro_batches = batches(micro=2, accumulation=4, name=name)
    for step in (0, 5):
        expected = whole.train(step, 0)[0]
        assert np.array_equal(np.concatenate([b.train(step, 0)[0] for b in by_ranks]), expected)
        assert np.array_equal(
            np.concatenate([by_micro_batches.train(step, i)[0] for i in range(4)]), expected
        )
    assert not np.array_equal(whole.train(0, 0)[0], whole.train(1, 0)[0])
    assert not np.array_equal(whole.train(0, 0)[0], batches(micro=8, name=name, seed=1).train(0, 0)[0])


def test_targets_are_the_tokens_that_follow():
    tokens, targets = batches(micro=3).train(2, 0)
    assert tokens.shape == targets.shape == (3, 16)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])


def test_text_is_english_and_validation_lies_apart(tmp_path):
    assert b" the " in bytes(np.concatenate(list(batches(micro=200).train(0, 0)[0])).astype(np.uint8))
    path = tmp_path / "text"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    mine = batches(path=str(path), micro=50)
    assert set(mine.train(0, 0)[0].ravel()) == {ord("a")}
    assert set(mine.validation(0)[1].ravel()) == {ord("b")}
    assert np.array_equal(mine.validation(1)[0], batches(path=str(path), micro=50).validation(1)[0])


def test_synthetic_tokens_fill_the_vocabulary():
    tokens = batches(name="synthetic", vocab=50, micro=100).train(0, 0)[0]
    assert set(tokens.ravel()) == set(range(50))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"", "is empty"), (b"short", "has 5 bytes to train on: must be at least")],
)
def test_a_bad_text_file_is_refused(tmp_path, content, message):
    path = tmp_path / "text"
    path.write_bytes(content or b"")
    composed = compose(["target=runtime", f"data.path={path}"])
    if content is None:
        path.unlink()
    with pytest.raises(ValueError, match=message) as caught:
        check_data(composed.experiment, spec=composed.spec)
    assert "data.path" in str(caught.value)


def test_too_little_for_a_validation_is_refused():
    overrides = ["target=runtime", "train.eval_every=1"]
    composed = compose(overrides)
    check_data(composed.experiment, spec=composed.spec)
    experiment = compose([*overrides, "data.validation_fraction=0.0001"]).experiment
    with pytest.raises(ValueError, match=r"data.validation_fraction=0.0001 keeps 4\d bytes"):
        check_data(experiment, spec=composed.spec)


def test_bytes_need_a_vocabulary_of_256():
    with pytest.raises(ValueError, match="model.vocab=255"):
        batches(vocab=255)
