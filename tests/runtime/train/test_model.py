"""The GPT has the parameters that its spec counts, and its laps and pace leave the numbers alone."""

import math

import pytest
import torch

from twinbed.conf.model_spec import parameters, spec_from_keys
from twinbed.runtime.laps import Lap, Laps
from twinbed.runtime.model import GPT

ODD = {"family": "gpt", "layers": 2, "hidden": 36, "heads": 6, "vocab": 101, "sequence": 17}


def totals_ns(laps: list[Lap]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for lap in laps:
        totals[lap.name] = totals.get(lap.name, 0) + lap.end_ns - lap.start_ns
    return totals


def tokens():
    return torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(0))


def gradients(model):
    loss = model(tokens(), tokens())
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("more", [{}, {"tied_embeddings": True}, {"kv_heads": 2}, {"ffn": 50}])
def test_parameters_are_those_of_the_spec(more):
    spec = spec_from_keys(ODD | more)
    model = GPT(spec, seed=0)
    assert list(model.units()) == [unit.name for unit in parameters(spec)]
    for unit in parameters(spec):
        module = model.get_submodule(unit.module)
        assert module is model.units()[unit.name]
        own = [
            (name, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
            if unit.name != "root" or not name.startswith("blocks.")
        ]
        assert own == [(tensor.name, tensor.shape) for tensor in unit.tensors]


def test_a_seed_gives_the_same_weights_and_an_untrained_model_knows_nothing():
    first, second, other = (GPT(spec_from_keys(ODD), seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    loss = first(tokens(), tokens()).item()
    assert loss == pytest.approx(math.log(101), rel=0.02)


def test_grouped_queries_are_those_of_a_model_with_repeated_keys():
    grouped = GPT(spec_from_keys(ODD | {"kv_heads": 2}), seed=0)
    whole = GPT(spec_from_keys(ODD), seed=0)
    state = grouped.state_dict()
    for i in range(2):
        for kind in ("weight", "bias"):
            query, key, value = state[f"blocks.{i}.qkv.{kind}"].split([36, 12, 12])
            repeated = [
                part.unflatten(0, (2, 6)).repeat_interleave(3, 0).flatten(0, 1) for part in (key, value)
            ]
            state[f"blocks.{i}.qkv.{kind}"] = torch.cat([query, *repeated])
    whole.load_state_dict(state)
    assert torch.allclose(whole(tokens(), tokens()), grouped(tokens(), tokens()), rtol=1e-6)


def test_the_future_is_not_seen():
    model = GPT(spec_from_keys(ODD), seed=0)
    x = tokens()
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 101
    y = torch.zeros_like(x)
    losses = [
        torch.stack([model(part[:, :9], y[:, :9]), model(part[:, :10], y[:, :10])]) for part in (x, changed)
    ]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]


def test_recompute_laps_and_pace_do_not_change_the_gradients():
    spec = spec_from_keys(ODD)
    loss, expected = gradients(GPT(spec, seed=0))
    model = GPT(spec, seed=0, recompute=True)
    model.clock = Laps()
    model.emulate(1e9, sequence=17)
    model.clock.start()
    again, got = gradients(model)
    assert again == loss
    assert all(map(torch.equal, got, expected))


def test_a_paced_unit_takes_its_time_and_laps_add_up():
    spec = spec_from_keys(ODD)
    model = GPT(spec, seed=0)
    gradients(model)
    clock = Laps()
    model.clock = clock
    model.emulate(1e7, sequence=17)  # much longer than a busy machine needs for it
    fastest = {}
    for _ in range(3):  # a neighbour can only make it longer
        clock.laps.clear()
        start_ns = clock.start()
        loss = model(tokens(), tokens())
        clock.lap("forward/root")
        loss.backward()
        end_ns = clock.stop("backward/root")
        times = totals_ns(clock.laps)
        assert sum(times.values()) == end_ns - start_ns
        fastest = {name: min(time_ns, fastest.get(name, time_ns)) for name, time_ns in times.items()}
    assert list(fastest) == [
        "forward/root",
        "forward/block.0",
        "forward/block.1",
        "backward/root",
        "backward/block.1",
        "backward/block.0",
    ]
    block_ns = 1e9 * 2 * (34 * 36 * (108 + 36 + 2 * 144) + 2 * 2 * 17 * 17 * 36) / 1e7
    for name in ("block.0", "block.1"):
        assert block_ns <= fastest[f"forward/{name}"] < 1.5 * block_ns
        assert 2 * block_ns <= fastest[f"backward/{name}"] < 2.5 * block_ns


def test_other_families_are_refused():
    spec = spec_from_keys(ODD | {"family": "gpt2"})
    with pytest.raises(ValueError, match="model.family='gpt2'"):
        GPT(spec, seed=0)
