"""BERT has the parameters that its spec counts and transformers' numbers; which tokens are masked does not depend on
the ranks."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from twinbed.conf.model_spec import ModelSpec, parameters, spec_from_keys
from twinbed.conf.schema import DataConf
from twinbed.runtime.bert import BERT
from twinbed.runtime.data import Batches
from twinbed.runtime.masked import NO_TARGET, MaskedBatches
from twinbed.runtime.stack import build_model


def spec(head: str = "masked_lm", **changes: object) -> ModelSpec:
    keys = {"family": "bert", "layers": 2, "hidden": 36, "heads": 3, "vocab": 101, "sequence": 17}
    return spec_from_keys(keys | {"extra": {"head": head}} | changes)


def batch(*, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 101, (3, 17), generator=random)
    targets = torch.randint(0, 101, (3, 17), generator=random)
    targets[0, 2:], targets[1, ::2], targets[2, 1:] = -100, -100, -100  # 2, 8 and 1 are left
    return tokens, targets


def test_parameters_are_those_of_the_spec() -> None:
    made = spec()
    model = build_model(made, seed=0)
    assert isinstance(model, BERT)
    assert list(model.units()) == [unit.name for unit in parameters(made)]
    for unit in parameters(made):
        module = model.get_submodule(unit.module)
        assert module is model.units()[unit.name]
        own = [
            (name, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
            if unit.name != "root" or not name.startswith("bert.encoder.layer.")
        ]
        assert own == [(tensor.name, tensor.shape) for tensor in unit.tensors]


def test_loss_and_gradients_are_transformers_own() -> None:
    transformers = pytest.importorskip("transformers")
    model = BERT(spec(), seed=0)
    with torch.no_grad():  # biases that are 0 and weights that are 1 would hide a mistake
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1
            )
    config = transformers.BertConfig(
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=144,
        vocab_size=101,
        max_position_embeddings=17,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
    )
    theirs: Any = transformers.BertForMaskedLM(config)
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert (set(missing), unexpected) == (
        {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
        [],
    )
    tokens, targets = batch()
    loss = model(tokens, targets)
    loss.backward()
    expected = theirs(input_ids=tokens, labels=targets).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    largest = max(grad.norm() for grad in wanted.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        distance = (parameter.grad - wanted[name]).norm()
        # the bias of keys has no gradient but for rounding: it adds the same to all of a query's scores
        assert distance < 1e-5 * max(wanted[name].norm(), 1e-3 * largest), (name, distance)


def test_the_loss_is_the_mean_over_the_targets_that_there_are() -> None:
    model = BERT(spec(), seed=0)
    tokens, targets = batch()
    each = [model(tokens[i : i + 1], targets[i : i + 1]).item() for i in range(3)]
    assert model(tokens, targets).item() == pytest.approx(np.average(each, weights=[2, 8, 1]), rel=1e-6)


def test_every_token_is_seen_and_an_untrained_model_knows_nothing() -> None:
    model = BERT(spec(), seed=0)
    tokens, targets = batch()
    loss = model(tokens[:1], targets[:1]).item()
    assert loss == pytest.approx(math.log(101), rel=0.05)
    for at in range(17):
        changed = tokens[:1].clone()
        changed[0, at] = (changed[0, at] + 1) % 101
        assert model(changed, targets[:1]).item() != loss


def test_recompute_does_not_change_the_gradients() -> None:
    plain, again = (BERT(spec(), seed=0, recompute=recompute) for recompute in (False, True))
    for model in (plain, again):
        model(*batch()).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("changes", [{"head": "pretraining"}, {"head": "pooled"}, {"tied_embeddings": False}])
def test_other_heads_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a BERT is of family 'bert' with head 'masked_lm' and tied"):
        BERT(spec(**changes), seed=0)


def batches(
    kind: type[Batches], *, micro: int = 1, rank: int = 0, num_ranks: int = 1, **keys: Any
) -> Batches:
    given = {"name": "text", "vocab": 264, "accumulation": 1, "seed": 0, "sequence": 128} | keys
    return kind(DataConf(name=given.pop("name")), micro=micro, rank=rank, num_ranks=num_ranks, **given)


@pytest.mark.parametrize("name", ["text", "synthetic"])
def test_what_is_masked_follows_from_the_sequence(name: str) -> None:
    whole = batches(MaskedBatches, micro=8, name=name)
    by_ranks = [batches(MaskedBatches, rank=r, num_ranks=4, micro=2, name=name) for r in range(4)]
    for step in (0, 5):
        for part in (0, 1):
            expected = whole.train(step, 0)[part]
            assert np.array_equal(np.concatenate([b.train(step, 0)[part] for b in by_ranks]), expected)
    first, other = whole.train(0, 0), batches(MaskedBatches, micro=8, name=name, seed=1).train(0, 0)
    assert not np.array_equal(first[1] != NO_TARGET, other[1] != NO_TARGET)
    if name == "text":
        assert np.array_equal(whole.validation(0)[0], whole.validation(0)[0])


@pytest.mark.parametrize("name", ["text", "synthetic"])
def test_chosen_tokens_are_masked_drawn_or_kept(name: str) -> None:
    num = 400
    tokens, targets = batches(MaskedBatches, micro=num, name=name).train(3, 0)
    chosen = targets != NO_TARGET
    assert set(chosen.sum(1)) == {19}  # of 128
    if name == "text":
        told = batches(Batches, micro=num).train(3, 0)[0]
        assert np.array_equal(np.where(chosen, targets, tokens), told)
        assert targets.max() < 256
    assert not np.any((tokens == 263) & ~chosen)
    assert not np.any(targets == 263)
    shares = [np.mean(tokens[chosen] == 263), np.mean(tokens[chosen] == targets[chosen])]
    deviation = math.sqrt(0.8 * 0.2 / (num * 19))
    assert shares[0] == pytest.approx(0.8, abs=4 * deviation)
    assert shares[1] == pytest.approx(0.1 + 0.1 / 256, abs=4 * deviation)
    drawn = tokens[chosen & (tokens != 263) & (tokens != targets)]
    assert 256 - len(set(drawn)) < 40  # 760 draws leave out 256 exp(-760 / 256) = 13
    assert drawn.max() < (256 if name == "text" else 263)
    places = np.bincount(np.nonzero(chosen)[1], minlength=128)  # all are as likely
    chi_square = float(((places - num * 19 / 128) ** 2 / (num * 19 / 128)).sum())
    assert chi_square < 180  # 127 degrees of freedom; 0.999 lies at 181


def test_a_short_sequence_has_one_target() -> None:
    targets = batches(MaskedBatches, micro=50, name="synthetic", vocab=9, sequence=2).train(0, 0)[1]
    assert set((targets != NO_TARGET).sum(1)) == {1}
