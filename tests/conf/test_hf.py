"""Hugging Face configs: counts, names and order against transformers on the meta device; errors by name."""

import json
import re

import pytest
import torch

from twinbed.conf.hf import read_hf_config
from twinbed.conf.model_spec import num_active_parameters, num_parameters, parameters

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 6}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 12,
    "vocab_size": 11,
    "max_position_embeddings": 9,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
MIXTRAL = QWEN2 | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {key: value for key, value in LLAMA.items() if key != "intermediate_size"} | {
    "model_type": "opt",
    "ffn_dim": 12,
}
BERT = LLAMA | {"model_type": "bert", "type_vocab_size": 3}
VIT = {
    key: LLAMA[key]
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
}
VIT |= {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 3}

# Published counts
FULL_SIZE = {
    "gpt2 small": (
        {
            "model_type": "gpt2",
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
        },
        124_439_808,
    ),
    "gpt2 xl": (
        {
            "model_type": "gpt2",
            "n_layer": 48,
            "n_embd": 1600,
            "n_head": 25,
            "vocab_size": 50257,
            "n_positions": 1024,
        },
        1_557_611_200,
    ),
    "llama 2 7b": (
        LLAMA
        | {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
        },
        6_738_415_616,
    ),
    "qwen2 7b": (
        QWEN2
        | {
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "mixtral 8x7b": (
        MIXTRAL
        | {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_local_experts": 8,
        },
        46_702_792_704,
    ),
}

# Small configs that take each turn of the readers; the class is transformers' own
SMALL = [
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", GPT2 | {"n_inner": 20, "tie_word_embeddings": False}),
    ("GPT2Model", GPT2),
    ("LlamaForCausalLM", LLAMA),
    ("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    ("LlamaForCausalLM", LLAMA | {"head_dim": 6, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("LlamaModel", LLAMA),
    ("Qwen2ForCausalLM", QWEN2),
    ("Qwen2ForCausalLM", QWEN2 | {"head_dim": 8, "tie_word_embeddings": True}),
    ("OPTForCausalLM", OPT),
    ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 6, "do_layer_norm_before": False}),
    ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 6, "tie_word_embeddings": False, "enable_bias": False}),
    ("OPTForCausalLM", OPT | {"layer_norm_elementwise_affine": False}),
    ("OPTForCausalLM", OPT | {"_remove_final_layer_norm": True}),
    ("OPTModel", OPT | {"word_embed_proj_dim": 6}),
    ("BertForPreTraining", BERT),
    ("BertForPreTraining", BERT | {"tie_word_embeddings": False}),
    ("BertForMaskedLM", BERT),
    ("BertModel", BERT),
    ("MixtralForCausalLM", MIXTRAL),
    ("MixtralForCausalLM", MIXTRAL | {"head_dim": 8}),
    ("MixtralModel", MIXTRAL),
    ("ViTForImageClassification", VIT | {"id2label": {str(i): f"label {i}" for i in range(7)}}),
    ("ViTForImageClassification", VIT | {"image_size": [8, 13], "patch_size": [4, 2], "qkv_bias": False}),
    ("ViTModel", VIT | {"pooler_output_size": 5}),
]


def _write(tmp_path, data):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_models_count_as_published(tmp_path, name):
    data, count = FULL_SIZE[name]
    assert num_parameters(read_hf_config(_write(tmp_path, data))) == count


def test_mixtral_8x7b_is_counted_and_marked(tmp_path):
    spec = read_hf_config(_write(tmp_path, FULL_SIZE["mixtral 8x7b"][0]))
    assert spec.is_moe
    assert num_active_parameters(spec) == 12_879_925_248  # 2 of 8 experts: published as 12.9B


@pytest.mark.parametrize(("architecture", "data"), SMALL)
def test_tensors_are_those_of_transformers(tmp_path, architecture, data):
    transformers = pytest.importorskip("transformers")
    data = data | {"architectures": [architecture], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    path = _write(tmp_path, data)
    config = transformers.AutoConfig.for_model(**data)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    theirs = [(name, tuple(value.shape)) for name, value in model.named_parameters()]

    spec = read_hf_config(path)
    root, *blocks = parameters(spec)
    in_blocks = tuple(f"{block.module}." for block in blocks)
    assert [(t.name, t.shape) for t in root.tensors] == [
        tensor for tensor in theirs if not tensor[0].startswith(in_blocks)
    ]
    for block, prefix in zip(blocks, in_blocks, strict=True):
        assert [(prefix + t.name, t.shape) for t in block.tensors] == [
            tensor for tensor in theirs if tensor[0].startswith(prefix)
        ]
    assert num_parameters(spec) == model.num_parameters()


def test_the_class_defaults_to_the_one_with_the_head(tmp_path):
    heads = {
        family["model_type"]: read_hf_config(_write(tmp_path, family)).head
        for family in (GPT2, LLAMA, QWEN2, OPT, BERT, MIXTRAL, VIT)
    }
    assert heads == {
        "gpt2": "lm",
        "llama": "lm",
        "qwen2": "lm",
        "opt": "lm",
        "bert": "pretraining",
        "mixtral": "lm",
        "vit": "classifier",
    }


def test_names_come_from_the_file_or_its_folder(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_hf_config(folder / "config.json").name == "my-llama"
    assert read_hf_config(_write(tmp_path, LLAMA)).name == "model"


def _without(data, key):
    return {k: v for k, v in data.items() if k != key}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([LLAMA], "must hold a JSON object {...} as a Hugging Face config.json does, got a list"),
        (_without(LLAMA, "hidden_size"), "the key 'hidden_size' is missing; it must be a whole number"),
        (LLAMA | {"hidden_size": None}, "the key 'hidden_size' is null; it must be a whole number"),
        (_without(GPT2, "n_layer"), "the key 'n_layer' (or 'num_hidden_layers') is missing"),
        (
            LLAMA | {"hidden_size": "16"},
            "'hidden_size' must be a whole number of at least 1, got the string '16'",
        ),
        (
            LLAMA | {"hidden_size": True},
            "'hidden_size' must be a whole number of at least 1, got the boolean true",
        ),
        (
            LLAMA | {"hidden_size": 16.0},
            "'hidden_size' must be a whole number of at least 1, got the number 16.0",
        ),
        (LLAMA | {"vocab_size": -3}, "'vocab_size' must be a whole number of at least 1, got the number -3"),
        (LLAMA | {"num_hidden_layers": 0}, "'num_hidden_layers' must be a whole number of at least 1"),
        (LLAMA | {"mlp_bias": 1}, "'mlp_bias' must be true or false, got the number 1"),
        (LLAMA | {"num_attention_heads": 3}, "'num_attention_heads' (3) must divide 'hidden_size' (16)"),
        (OPT | {"num_attention_heads": 3}, "'num_attention_heads' (3) must divide 'hidden_size' (16)"),
        (GPT2 | {"n_head": 3}, "'n_head' (3) must divide 'n_embd' (8)"),
        (
            QWEN2 | {"num_key_value_heads": 3},
            "'num_key_value_heads' (3) must divide 'num_attention_heads' (4)",
        ),
        (_without(QWEN2, "num_key_value_heads"), "'num_key_value_heads' is missing; it must be a divisor of"),
        (
            MIXTRAL | {"num_experts_per_tok": 5},
            "'num_experts_per_tok' (5) must be at most 'num_local_experts' (4)",
        ),
        (
            _without(LLAMA, "model_type"),
            "the key 'model_type' is missing; it must be one of gpt2, llama, qwen2",
        ),
        (LLAMA | {"model_type": "mamba"}, "'model_type' 'mamba' is not supported; supported are gpt2, llama"),
        (LLAMA | {"model_type": 3}, "'model_type' must be a string, one of gpt2"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "use one of LlamaForCausalLM, LlamaModel",
        ),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "'architectures' must be a list of class names"),
        (
            {"model_type": "llava", "text_config": LLAMA, "vision_config": {}},
            "save the object under 'text_config' as",
        ),
        ({"model_type": "llava", "vision_config": {}}, "vision-language) config: found 'vision_config'"),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "'is_encoder_decoder' is true: encoder-decoder models",
        ),
        (GPT2 | {"add_cross_attention": True}, "'add_cross_attention' is true: encoder-decoder models"),
        (
            BERT | {"position_embedding_type": "relative_key"},
            "'position_embedding_type' must be \"absolute\"",
        ),
        (VIT | {"patch_size": 9}, "'patch_size' [9, 9] must fit into 'image_size' [8, 8]"),
        (
            VIT | {"image_size": [8, 8, 8]},
            "'image_size' must be a whole number or a list of two, got a list of 3",
        ),
        (VIT | {"id2label": []}, "'id2label' must be an object with a name for each class, got a list"),
    ],
)
def test_bad_configs_name_file_key_and_way_out(tmp_path, data, message):
    path = _write(tmp_path, data)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_hf_config(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "gpt2",\n "n_layer": ', "is cut off: the text ends at line 2, column"),
        ('{"model_type": "gp', "is cut off: a string opens and never closes at line 1, column"),
        ('{"model_type": gpt2}', "is not valid JSON: Expecting value at line 1, column 16"),
        ("", "is cut off: the text ends at line 1, column 1"),
        ('{"n_layer": 1, "n_layer": 2}', "gives the key 'n_layer' twice"),
        ("[" * 100_000, "nests too deeply"),
    ],
)
def test_broken_files_say_where(tmp_path, text, message):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_hf_config(path)
    assert str(path) in str(error.value)


def test_missing_files_directories_and_binary_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"does not exist; give the path of a Hugging Face config\.json"):
        read_hf_config(tmp_path / "absent.json")
    with pytest.raises(
        ValueError, match=r"is a directory; give the path of a Hugging Face config\.json itself"
    ):
        read_hf_config(tmp_path)
    (tmp_path / "weights.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(byte 0\)"):
        read_hf_config(tmp_path / "weights.json")
