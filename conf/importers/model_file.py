"""A Hugging Face `config.json` as a readable file of our own, for `model=NAME`."""

from dataclasses import fields, replace
from pathlib import Path

from ..hf import read_hf_config
from ..json_file import read_json_object
from ..model_spec import BIASES, HEADS, ModelSpec, num_parameters, spec_from_keys
from .yaml_text import comment, remarked

_MAIN = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "tied_embeddings")
_BIAS_KEYS = ("qkv_bias", "out_bias", "mlp_bias")


def model_text(path: str, name: str) -> tuple[str, str, list[str]]:
    """The file's text, a summary in a line, and what was guessed.

    Raises:
        ValueError: Naming the file, where it is no config that we count, or a mixture of experts.
    """
    spec = read_hf_config(path)
    if spec.is_moe:
        raise ValueError(
            f"{path}: a mixture of experts ({num_parameters(spec):,} parameters): expert parallelism is out of scope"
        )
    given = read_json_object(path, what="a Hugging Face config.json")
    notes = _guesses(given, spec)
    if spec.head_size is not None and spec.head_size * spec.heads == spec.hidden:
        spec = replace(spec, head_size=None)  # said, but as it would be without
    keys, extra = _keys(spec)
    can_say = _can_say(spec, keys, extra)
    if not can_say:
        notes.append(f"keys of ours cannot say {', '.join(extra)}: each run reads the config itself")
        keys, extra = {"config_json": str(Path(path).absolute())}, {}
    model_type = given["model_type"]
    summary = f"{spec.family}, {num_parameters(spec):,} parameters"
    lines = [
        *comment(f"Made by twinbed-import from {path} (Hugging Face config, model_type {model_type})."),
        f"# {num_parameters(spec):,} parameters.",
        *(line for note in notes for line in comment(f"guess: {note}.")),
        remarked("name", name, ""),
        remarked("family", spec.family if can_say else "hf", ""),
        *(remarked(key, value, "") for key, value in keys.items()),
    ]
    if extra:
        lines += ["extra:", *(f"  {remarked(key, value, '')}" for key, value in extra.items())]
    return "\n".join(lines) + "\n", summary, notes


def _keys(spec: ModelSpec) -> tuple[dict[str, object], dict[str, object]]:
    """The keys of `model`, and of its `extra` those that are not what a missing key would mean."""
    keys: dict[str, object] = {key: getattr(spec, key) for key in _MAIN}
    if spec.family == "vit":
        keys |= {"vocab": None, "sequence": None}  # follow from its pictures
    usual = {field.name: field.default for field in fields(ModelSpec)}
    usual |= dict(zip(_BIAS_KEYS, BIASES[spec.family], strict=True))
    usual["head"] = HEADS[spec.family][0]
    extra: dict[str, object] = {}
    for key, default in usual.items():
        value = getattr(spec, key)
        if key in (*_MAIN, "name", "family") or value == default:
            continue
        square = isinstance(value, tuple) and value[0] == value[1]
        extra[key] = value[0] if square else value
    return keys, extra


def _can_say(spec: ModelSpec, keys: dict[str, object], extra: dict[str, object]) -> bool:
    try:
        return spec_from_keys({"name": spec.name, "family": spec.family, **keys, "extra": extra}) == spec
    except ValueError:  # a key that no file of ours has a place for
        return False


def _guesses(given: dict[str, object], spec: ModelSpec) -> list[str]:
    """What stands for keys that the file has not."""
    notes = []
    if not given.get("architectures"):
        notes.append(f"no 'architectures' in the file: head {spec.head!r}")
    if given.get("tie_word_embeddings") is None and spec.family != "vit" and spec.head != "none":
        tied = "tied" if spec.tied_embeddings else "not tied"
        notes.append(
            f"no 'tie_word_embeddings' in the file: embeddings are {tied}, as transformers has it for {spec.family}"
        )
    if spec.head == "classifier" and given.get("id2label") is None and given.get("num_labels") is None:
        notes.append(f"no 'num_labels' in the file: {spec.classes} classes, transformers' default")
    return notes
