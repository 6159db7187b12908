"""Reads a Hugging Face `config.json` into a `ModelSpec`: its parameters are counted without its weights.

Keys and defaults follow transformers 5 (`models/*/configuration_*.py`). A size that shapes the model must
be in the file even where transformers has a default: a count that rests on a silent default would be a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .json_file import json_type, read_json_object
from .model_spec import BIASES, TIED, ModelSpec

# What `architectures` may name, and the head that it means; the first is taken where the file names none
_ARCHITECTURES: dict[str, dict[str, str]] = {
    "gpt2": {"GPT2LMHeadModel": "lm", "GPT2Model": "none"},
    "llama": {"LlamaForCausalLM": "lm", "LlamaModel": "none"},
    "qwen2": {"Qwen2ForCausalLM": "lm", "Qwen2Model": "none"},
    "opt": {"OPTForCausalLM": "lm", "OPTModel": "none"},
    "bert": {"BertForPreTraining": "pretraining", "BertForMaskedLM": "masked_lm", "BertModel": "pooled"},
    "mixtral": {"MixtralForCausalLM": "lm", "MixtralModel": "none"},
    "vit": {"ViTForImageClassification": "classifier", "ViTModel": "pooled"},
}


def read_hf_config(path: str | Path) -> ModelSpec:
    """The model that a Hugging Face `config.json` describes.

    Supported model_type: gpt2, llama, qwen2, opt, bert, mixtral (counted; see `ModelSpec.is_moe`), vit. The
    class is the first of `architectures`; without it the one with the language-model head (BERT:
    BertForPreTraining, with pooler and next-sentence head; ViT: the image classifier).

    Raises:
        ValueError: The file cannot be read, or a key is missing, of a wrong type or impossible; the message
            names the file, the key, its value and what would be legal.
    """
    path = Path(path)
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return spec_of_config(
        read_json_object(path, what="a Hugging Face config.json"), name=name, source=str(path)
    )


def spec_of_config(data: Mapping[str, object], *, name: str, source: str) -> ModelSpec:
    """As `read_hf_config`, of what such a file holds, or transformers' `config.to_dict()` gives.

    Args:
        name: Of the model.
        source: What errors call it.

    Raises:
        ValueError: As `read_hf_config`.
    """
    config = _Config(source, data)
    family = _model_type(config)
    return _READERS[family](config, name, _head(config, family))


@dataclass(frozen=True, slots=True)
class _Config:
    """The file's keys, each read with its type checked."""

    source: str
    data: Mapping[str, object]

    def count(self, *keys: str) -> int:
        """A required whole number of at least 1; later keys are other names of the first in transformers."""
        value = self.optional_count(*keys)
        if value is None:
            named = f"{keys[0]!r}" + (f" (or {', '.join(map(repr, keys[1:]))})" if keys[1:] else "")
            given = " is null" if any(key in self.data for key in keys) else " is missing"
            raise self.error(f"the key {named}{given}; it must be a whole number of at least 1")
        return value

    def optional_count(self, *keys: str) -> int | None:
        """As `count`; None where the key is absent or null."""
        for key in keys:
            value = self.data.get(key)
            if value is not None:
                return self._whole(key, value)
        return None

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key!r} must be true or false, got {json_type(value)}")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """A required side length: one number for a square, or a list [height, width]."""
        value = self.data.get(key)
        if not isinstance(value, list):
            side = self.count(key)
            return side, side
        if len(value) != 2:
            raise self.error(f"{key!r} must be a whole number or a list of two, got a list of {len(value)}")
        return self._whole(key, value[0]), self._whole(key, value[1])

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.source}: {message}")

    def _whole(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key!r} must be a whole number of at least 1, got {json_type(value)}")
        return value


def _model_type(config: _Config) -> str:
    nested = [
        key
        for key in ("text_config", "llm_config", "language_config")
        if isinstance(config.data.get(key), dict)
    ]
    seeing = [key for key in config.data if key.startswith(("vision", "audio")) and key.endswith("_config")]
    if nested or seeing:
        found = ", ".join(repr(key) for key in (*nested, *seeing))
        way_out = f"the object under {nested[0]!r}" if nested else "its language model's object"
        raise config.error(
            f"this is a nested (vision-language) config: found {found}; save {way_out} as a file of its own"
            " and give that"
        )
    supported = ", ".join(_READERS)
    model_type = config.data.get("model_type")
    if config.flag("is_encoder_decoder", False) or config.flag("add_cross_attention", False):
        key = "is_encoder_decoder" if config.flag("is_encoder_decoder", False) else "add_cross_attention"
        raise config.error(
            f"{key!r} is true: encoder-decoder models (model_type {model_type!r}) are not supported;"
            f" supported are single stacks with model_type {supported}"
        )
    if model_type is None:
        raise config.error(f"the key 'model_type' is missing; it must be one of {supported}")
    if not isinstance(model_type, str):
        raise config.error(f"'model_type' must be a string, one of {supported}; got {json_type(model_type)}")
    if model_type not in _READERS:
        raise config.error(f"'model_type' {model_type!r} is not supported; supported are {supported}")
    return model_type


def _head(config: _Config, family: str) -> str:
    heads = _ARCHITECTURES[family]
    value = config.data.get("architectures")
    if value is None or value == []:
        return next(iter(heads.values()))
    if not isinstance(value, list) or not isinstance(value[0], str):
        raise config.error(f"'architectures' must be a list of class names, got {json_type(value)}")
    if value[0] not in heads:
        raise config.error(
            f"'architectures' names {value[0]!r}, whose head is not counted; use one of {', '.join(heads)}"
        )
    return heads[value[0]]


def _head_size(config: _Config, hidden: int, heads: int, *, hidden_key: str, heads_key: str) -> int | None:
    """An explicit head_dim, or None where it follows from the hidden size, which heads must then divide."""
    explicit = config.optional_count("head_dim")
    if explicit is None and hidden % heads:
        raise config.error(
            f"{heads_key!r} ({heads}) must divide {hidden_key!r} ({hidden}), or 'head_dim' must be given"
        )
    return explicit


def _check_heads(config: _Config, hidden: int, heads: int, *, hidden_key: str, heads_key: str) -> None:
    if hidden % heads:
        raise config.error(f"{heads_key!r} ({heads}) must divide {hidden_key!r} ({hidden})")


def _kv_heads(config: _Config, heads: int, *, required: bool) -> int:
    key = "num_key_value_heads"
    if required and key not in config.data:
        # transformers would take 32 (qwen2) or 8 (mixtral) whatever the number of heads
        raise config.error(
            f"the key {key!r} is missing; it must be a divisor of 'num_attention_heads' ({heads}),"
            f" or null for {heads}"
        )
    kv_heads = config.optional_count(key) or heads
    if heads % kv_heads:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        raise config.error(
            f"{key!r} ({kv_heads}) must divide 'num_attention_heads' ({heads}): one of {legal}"
        )
    return kv_heads


def _gpt2(config: _Config, name: str, head: str) -> ModelSpec:
    hidden, heads = config.count("n_embd", "hidden_size"), config.count("n_head", "num_attention_heads")
    _check_heads(config, hidden, heads, hidden_key="n_embd", heads_key="n_head")
    return ModelSpec(
        name=name,
        family="gpt2",
        layers=config.count("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=config.optional_count("n_inner") or 4 * hidden,
        vocab=config.count("vocab_size"),
        sequence=config.count("n_positions", "max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", TIED["gpt2"]),
        head=head,
    )


def _llama_like(config: _Config, name: str, head: str) -> ModelSpec:
    """llama, qwen2 and mixtral: rotary positions, RMS norm, grouped queries, gated MLP."""
    family = str(config.data["model_type"])
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    qkv_bias, out_bias, mlp_bias = BIASES[family]
    experts = experts_per_token = 0
    if family == "llama":
        qkv_bias = out_bias = config.flag("attention_bias", False)
        mlp_bias = config.flag("mlp_bias", False)
    if family == "mixtral":
        experts = config.count("num_local_experts", "num_experts")
        experts_per_token = config.count("num_experts_per_tok")
        if experts_per_token > experts:
            raise config.error(
                f"'num_experts_per_tok' ({experts_per_token}) must be at most 'num_local_experts' ({experts})"
            )
    return ModelSpec(
        name=name,
        family=family,
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, heads, required=family != "llama"),
        head_size=_head_size(
            config, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads"
        ),
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        sequence=config.count("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", TIED[family]),
        head=head,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        experts=experts,
        experts_per_token=experts_per_token,
    )


def _opt(config: _Config, name: str, head: str) -> ModelSpec:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    _check_heads(config, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    biased = config.flag("enable_bias", True)
    # a stack that norms after each block (opt-350m) has no norm at its end
    final_norm = config.flag("do_layer_norm_before", True) and not config.flag(
        "_remove_final_layer_norm", False
    )
    return ModelSpec(
        name=name,
        family="opt",
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=config.count("ffn_dim"),
        vocab=config.count("vocab_size"),
        sequence=config.count("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", TIED["opt"]),
        head=head,
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=biased,
        norm_affine=config.flag("layer_norm_elementwise_affine", True),
        final_norm=final_norm,
        embedding_size=config.optional_count("word_embed_proj_dim"),
    )


def _bert(config: _Config, name: str, head: str) -> ModelSpec:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    _check_heads(config, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    positions = config.data.get("position_embedding_type")
    if positions not in (None, "absolute"):
        # relative_key adds a distance table to every block, which transformers 5 no longer builds
        raise config.error(
            f"'position_embedding_type' must be \"absolute\" or absent, got {json_type(positions)}"
        )
    return ModelSpec(
        name=name,
        family="bert",
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        sequence=config.count("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", TIED["bert"]),
        head=head,
        token_types=config.count("type_vocab_size"),
    )


def _vit(config: _Config, name: str, head: str) -> ModelSpec:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    _check_heads(config, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    image, patch = config.pair("image_size"), config.pair("patch_size")
    if patch[0] > image[0] or patch[1] > image[1]:
        raise config.error(f"'patch_size' {list(patch)} must fit into 'image_size' {list(image)}")
    return ModelSpec(
        name=name,
        family="vit",
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=config.count("intermediate_size"),
        vocab=0,
        sequence=(image[0] // patch[0]) * (image[1] // patch[1]) + 1,
        tied_embeddings=False,
        head=head,
        qkv_bias=config.flag("qkv_bias", True),
        image=image,
        patch=patch,
        channels=config.count("num_channels"),
        classes=_classes(config) if head == "classifier" else 0,
        pooler_size=config.optional_count("pooler_output_size"),
    )


def _classes(config: _Config) -> int:
    """Labels of the classifier: the names in id2label, else num_labels, else transformers' default of two."""
    labels = config.data.get("id2label")
    if labels is None:
        return config.optional_count("num_labels") or 2
    if not isinstance(labels, dict) or not labels:
        raise config.error(
            f"'id2label' must be an object with a name for each class, got {json_type(labels)}"
        )
    return len(labels)


_READERS: dict[str, Callable[[_Config, str, str], ModelSpec]] = {
    "gpt2": _gpt2,
    "llama": _llama_like,
    "qwen2": _llama_like,
    "opt": _opt,
    "bert": _bert,
    "mixtral": _llama_like,
    "vit": _vit,
}
