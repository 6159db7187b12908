"""A block whose leaves hold a part of the heads and of the MLP gives a part of the sum: nothing in it counts on whole
widths. What replaces a leaf is what the model then uses."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from twinbed.conf.model_spec import ModelSpec, spec_from_keys
from twinbed.runtime.leaves import CrossEntropy, Positions
from twinbed.runtime.stack import Stack, build_model

TEXT = {"layers": 1, "hidden": 48, "heads": 4, "vocab": 11, "sequence": 9}
FAMILIES: Mapping[str, dict[str, object]] = {
    "gpt": TEXT | {"kv_heads": 2},
    "llama": TEXT | {"kv_heads": 2, "ffn": 50},
    "qwen2": TEXT | {"kv_heads": 4, "ffn": 50},
    "bert": TEXT | {"extra": {"head": "masked_lm"}},
    "vit": {
        "layers": 1,
        "hidden": 48,
        "heads": 4,
        "extra": {"image": 8, "patch": 4, "channels": 1, "classes": 3},
    },
}
# Products by rows (outputs are parted) and by columns (inputs are), as Megatron's tensor parallelism has them
BY_ROWS = ("qkv", "fc1", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value")
BY_COLUMNS = ("proj", "fc2", "o_proj", "down_proj")


def spec(family: str, **changes: object) -> ModelSpec:
    return spec_from_keys(FAMILIES[family] | {"family": family} | changes)


def part_of(name: str, linear: nn.Linear, part: int, made: ModelSpec) -> nn.Linear:
    """One of two halves; a bias behind a sum belongs to the first."""
    leaf = name.rpartition(".")[2]
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if leaf in BY_ROWS or name == "intermediate.dense":
        keys = made.kv_heads * made.head_dim
        widths = [made.hidden, keys, keys] if leaf == "qkv" else [len(weight)]

        def rows(whole: Tensor) -> Tensor:
            return torch.cat([each.chunk(2)[part] for each in whole.split(widths)])

        weight, bias = rows(weight), None if bias is None else rows(bias)
    else:
        assert leaf in BY_COLUMNS or name.endswith("output.dense"), name
        weight, bias = weight.chunk(2, dim=1)[part], None if bias is None or part else bias
    half = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    half.weight.data.copy_(weight)
    if bias is not None:
        half.bias.data.copy_(bias)
    return half


class Summed(nn.Module):
    """The second product of a sublayer, over all ranks: the sum of what each gives to its part of the input."""

    def __init__(self, partial: nn.Linear, others: list[Tensor], given: list[Tensor]) -> None:
        super().__init__()
        self._partial, self._others, self._given = partial, others, given

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self._partial(x)
        self._given.append(own)
        return own + self._others[len(self._given) - 1] if self._others else own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_with_half_of_the_heads_gives_half_of_the_sum(family: str) -> None:
    made = spec(family)

    def block() -> nn.Module:
        model = build_model(made, seed=0).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1
                )
        return model.stack()[0]

    random = torch.Generator().manual_seed(2)
    x = torch.randn(2, made.sequence, made.hidden, generator=random, dtype=torch.float64)
    whole = block()
    expected = whole(x)
    # attention first: its sum is needed before the MLP's parts are right
    halves = [block() for _ in range(2)]
    given: list[list[Tensor]] = [[], []]
    for part, half in enumerate(halves):
        for name, linear in list(half.named_modules()):
            if isinstance(linear, nn.Linear):
                replacement: nn.Module = part_of(name, linear, part, made)
                leaf = name.rpartition(".")[2]
                if leaf in BY_COLUMNS or name.endswith("output.dense"):
                    assert isinstance(replacement, nn.Linear)
                    replacement = Summed(replacement, [], given[part])
                half.set_submodule(name, replacement)
    exchanged: list[list[Tensor]] = [[], []]
    for _ in range(3):  # each time one sublayer more has seen the other half's sum
        for part, half in enumerate(halves):
            given[part].clear()
            for module in half.modules():
                if isinstance(module, Summed):
                    module._others = exchanged[1 - part]
            out = half(x)
        exchanged = [[each.detach() for each in own] for own in given]
    assert len(given[0]) == 2
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_a_tied_head_uses_the_embedding_that_is_there(family: str) -> None:
    model = build_model(spec(family, tied_embeddings=True), seed=0)
    names = dict(model.named_parameters())
    assert sum(p.shape == (11, 48) for p in names.values()) == 1
    path = next(name for name, module in model.named_modules() if getattr(module, "num_embeddings", 0) == 11)
    tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))
    before = model(tokens, tokens)
    other = nn.Embedding(11, 48)
    other.weight.data.copy_(names[f"{path}.weight"].detach() * 3)
    model.set_submodule(path, other)
    after = model(tokens, tokens)
    assert after != before
    after.backward()
    assert other.weight.grad is not None
    assert names[f"{path}.weight"].grad is None


@pytest.mark.parametrize("family", ["gpt", "bert", "vit"])
def test_positions_may_be_told_and_their_table_keeps_its_name(family: str) -> None:
    model: Stack = build_model(spec(family), seed=0)
    name = {
        "gpt": "position.weight",
        "bert": "bert.embeddings.position_embeddings.weight",
        "vit": "vit.embeddings.position_embeddings",
    }[family]
    table = dict(model.named_parameters())[name].detach().reshape(-1, 48)
    module = next(m for m in model.modules() if hasattr(m, "table"))
    x = torch.zeros(2, 3, 48)
    assert torch.equal(module(x)[1], table[:3])
    module.token_index = torch.tensor([4, 0, 2])
    assert torch.equal(module(x)[0], table[[4, 0, 2]])
    if isinstance(module, Positions):
        with pytest.raises(ValueError, match="first=2 has no effect"):
            module(x, 2)
        module.token_index = None
        assert torch.equal(module(x, 2)[0], table[2:5])


def test_the_loss_is_torchs_over_any_leading_sizes() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=random)
    targets = torch.randint(0, 7, (2, 5), generator=random)
    targets[0, :4] = -100
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert CrossEntropy()(logits, targets).item() == pytest.approx(summed.item() / 6)
    assert CrossEntropy(over_all=True)(logits[0], targets[0]).item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits[0, 4:], targets[0, 4:]).item() / 5
    )
    assert CrossEntropy()(logits.bfloat16(), targets).dtype == torch.float32
    assert CrossEntropy()(logits, torch.full_like(targets, -100)).isnan()
