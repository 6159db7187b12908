"""Shapes, counts and FLOP of the model specs, against hand counts and torch's own counter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from twinbed.conf.model_flop import (
    RECOMPUTE,
    block_matmuls,
    forward_flop,
    forward_flop_per_token,
    recompute_flop,
    train_flop_per_token,
)
from twinbed.conf.model_spec import (
    ModelSpec,
    describe,
    num_active_parameters,
    num_parameters,
    parameters,
    spec_from_keys,
)

MODELS = Path(__file__).parents[2] / "conf" / "model"

# What the group's files must count to; the closed form for GPT is in a test below
COUNTS = {
    "gpt_tiny": 3_323_392,
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "gpt_18b": 18_434_813_952,
    "gpt_49b": 49_551_126_528,
    "gpt_91b": 91_229_405_184,
    "gpt_138b": 138_343_981_056,
    "gpt3_175b": 174_604_836_864,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "bert_large": 336_226_108,
    "llama_tiny": 3_082_496,
    "bert_tiny": 3_326_984,
    "vit_tiny": 797_578,
    "vit_fashion": 32_298,
    "vit_1b": 1_208_858_634,
    "vit_3b": 2_719_257_610,
}


def _from_group(name: str) -> ModelSpec:
    return spec_from_keys(yaml.safe_load((MODELS / f"{name}.yaml").read_text()))


def _gpt(**changes: object) -> ModelSpec:
    keys = {"family": "gpt", "layers": 2, "hidden": 8, "heads": 4, "vocab": 11, "sequence": 6}
    return spec_from_keys(keys | changes)


@pytest.mark.parametrize("name", COUNTS)
def test_each_model_of_the_group_counts_as_expected(name):
    spec = _from_group(name)
    assert spec.name == name
    assert num_parameters(spec) == COUNTS[name]
    assert sum(unit.numel for unit in parameters(spec)) == COUNTS[name]


def test_the_group_holds_no_other_sized_model():
    assert {path.stem for path in MODELS.glob("*.yaml")} == {*COUNTS, "gpt", "hf"}


@pytest.mark.parametrize("name", ["gpt_tiny", "gpt_18b", "gpt_49b", "gpt_91b", "gpt_138b", "gpt3_175b"])
def test_gpt_counts_follow_the_closed_form(name):
    spec = _from_group(name)
    h = spec.hidden
    blocks = spec.layers * (12 * h * h + 13 * h)  # 4 matrices with biases 3h, h, 4h, h; two norms of 2h
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab * h + spec.sequence * h
    assert num_parameters(spec) == blocks + tables + 2 * h


def test_gpt_units_list_names_and_shapes_in_order():
    root, block, _ = parameters(_gpt(kv_heads=2, ffn=12))
    assert [(t.name, t.shape) for t in root.tensors] == [
        ("embedding.weight", (11, 8)),
        ("position.weight", (6, 8)),
        ("norm.weight", (8,)),
        ("norm.bias", (8,)),
        ("head.weight", (11, 8)),
    ]
    assert [(t.name, t.shape) for t in block.tensors] == [
        ("norm1.weight", (8,)),
        ("norm1.bias", (8,)),
        ("qkv.weight", (16, 8)),  # 4 query heads and 2 + 2 key and value heads of 2
        ("qkv.bias", (16,)),
        ("proj.weight", (8, 8)),
        ("proj.bias", (8,)),
        ("norm2.weight", (8,)),
        ("norm2.bias", (8,)),
        ("fc1.weight", (12, 8)),
        ("fc1.bias", (12,)),
        ("fc2.weight", (8, 12)),
        ("fc2.bias", (8,)),
    ]
    assert (root.name, root.module, block.name, block.module) == ("root", "", "block.0", "blocks.0")


def test_tied_embeddings_count_once():
    tied, untied = _gpt(tied_embeddings=True), _gpt()
    assert not untied.tied_embeddings
    assert num_parameters(untied) - num_parameters(tied) == 11 * 8


def test_describe_adds_up():
    spec = _from_group("gpt_tiny")
    listing = describe(spec)
    units = listing["units"]
    assert list(units) == ["root", "block.0", "block.1", "block.2", "block.3"]
    assert sum(units.values()) == listing["parameters"] == listing["active_parameters"] == 3_323_392
    assert listing["bf16_bytes"] == 6_646_784


def test_a_mixture_counts_all_experts_and_the_active_ones():
    keys = {
        "family": "mixtral",
        "layers": 3,
        "hidden": 8,
        "heads": 2,
        "ffn": 5,
        "vocab": 7,
        "sequence": 4,
        "extra": {"experts": 4, "experts_per_token": 1},
    }
    spec = spec_from_keys(keys)
    assert spec.is_moe
    assert num_parameters(spec) - num_active_parameters(spec) == 3 * 3 * (3 * 8 * 5)
    assert not _gpt().is_moe


class _Block(nn.Module):
    """A GPT block of plain matmuls, for torch's FLOP counter to count."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        h, keys = spec.hidden, spec.kv_heads * spec.head_dim
        self.qkv, self.proj = nn.Linear(h, h + 2 * keys), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, spec.ffn), nn.Linear(spec.ffn, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        batch, sequence, _ = x.shape
        keys = spec.kv_heads * spec.head_dim
        q, k, v = self.qkv(x).split([spec.hidden, keys, keys], dim=-1)
        q = q.view(batch, sequence, spec.heads, spec.head_dim).transpose(1, 2)
        k, v = (
            t.view(batch, sequence, spec.kv_heads, spec.head_dim)
            .transpose(1, 2)
            .repeat_interleave(spec.heads // spec.kv_heads, dim=1)
            for t in (k, v)
        )
        attended = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.fc2(self.fc1(self.proj(attended)))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_block_flop_equal_what_torch_counts(kv_heads):
    spec = _gpt(hidden=16, kv_heads=kv_heads, ffn=20)
    with FlopCounterMode(display=False) as counter:
        _Block(spec)(torch.zeros(3, 5, 16))
    assert sum(p.flop for p in block_matmuls(spec, sequence=5, micro=3)) == counter.get_total_flops()


def test_flop_by_kind_against_a_hand_count():
    # h 8, s 6, 2 layers, vocab 11; per token and layer 2 m n k with m = 1
    assert forward_flop_per_token(_gpt(), 6) == {
        "qkv": 2 * 2 * 24 * 8,
        "scores": 2 * 2 * 6 * 8,  # every head together: s x h
        "context": 2 * 2 * 6 * 8,
        "out": 2 * 2 * 8 * 8,
        "fc1": 2 * 2 * 32 * 8,
        "fc2": 2 * 2 * 8 * 32,
        "logits": 2 * 11 * 8,
    }


def test_training_costs_three_forwards_and_recompute_the_blocks_again():
    spec = _gpt()
    forward = sum(forward_flop(spec, sequence=6).values())
    logits = forward_flop(spec, sequence=6)["logits"]
    assert train_flop_per_token(spec, 6) * 6 == 3 * forward
    assert train_flop_per_token(spec, 6, "full") * 6 == 4 * forward - logits
    attention = recompute_flop(spec, sequence=6, recompute="selective")
    assert attention == 6 * (192 + 192)
    assert recompute_flop(spec, sequence=6, recompute="selective_layer") * 2 == forward - logits
    # linears in order: qkv, out, fc1, fc2; the second and the fourth
    assert recompute_flop(spec, sequence=6, recompute="selective_op") == 6 * 2 * 2 * (8 * 8 + 8 * 32)


def test_138b_trains_at_eight_operations_a_parameter_and_token():
    spec = _from_group("gpt_138b")
    per_parameter = train_flop_per_token(spec, 512, "full") / num_parameters(spec)
    assert per_parameter == pytest.approx(8, rel=0.02)  # attention adds s / 6h of it


def test_unknown_recompute_names_the_legal_ones():
    with pytest.raises(ValueError, match=f"recompute must be one of {', '.join(RECOMPUTE)}, got 'half'"):
        train_flop_per_token(_gpt(), 6, "half")


def test_vit_takes_its_own_sequence_only():
    spec = _from_group("vit_tiny")
    assert spec.sequence == 17
    assert forward_flop(spec, sequence=17)["patch"] == 2 * 16 * 128 * 4
    with pytest.raises(ValueError, match=r"sequence=16 must be the patches \+ 1 of vit_tiny: 17"):
        forward_flop(spec, sequence=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "model.heads=3 must divide model.hidden=8"),
        ({"kv_heads": 3}, "model.kv_heads=3 must divide model.heads=4"),
        ({"layers": 0}, "model.layers must be at least 1 for family gpt, got 0"),
        ({"layers": -1}, "model.layers must be a whole number >= 0, got -1"),
        ({"layers": True}, "model.layers must be a whole number >= 0, got True"),
        ({"hidden": "8"}, "model.hidden must be a whole number >= 0, got '8'"),
        ({"tied_embeddings": 1}, "model.tied_embeddings must be true or false, got 1"),
        ({"family": "gtp"}, "model.family must be one of gpt, gpt2, .* got 'gtp'"),
        ({"vocab": None}, "model.vocab must be given for family gpt"),
        ({"widht": 8}, "model.widht is no key of a model"),
        ({"extra": {"heads": 2}}, "model.extra.heads is no key of a model"),
        ({"extra": {"head": "pooled"}}, "model.head of family gpt must be one of lm, got 'pooled'"),
        ({"extra": {"patch": 2}}, "model.patch=.* has no effect in gpt; it is for vit"),
        ({"family": "gpt2", "kv_heads": 2}, "model.kv_heads=2 must equal model.heads=4 in family gpt2"),
        ({"family": "llama"}, "model.ffn must be given for family llama"),
        ({"family": "hf"}, "model.config_json must be given for model=hf"),
        ({"family": "vit"}, "model.extra.image must be given for family vit"),
    ],
)
def test_impossible_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _gpt(**changes)


def test_a_bias_that_the_family_does_not_have_is_refused():
    with pytest.raises(ValueError, match="do not exist in family gpt"):
        replace(_gpt(), qkv_bias=False)


def test_a_patch_larger_than_the_image_is_refused():
    keys = yaml.safe_load((MODELS / "vit_tiny.yaml").read_text())
    keys["extra"]["patch"] = 9
    with pytest.raises(ValueError, match=r"model.patch=\(9, 9\) must be at least 1 and fit into"):
        spec_from_keys(keys)
