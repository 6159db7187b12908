"""What a transformer is: its sizes, and from them every parameter tensor, grouped as FSDP shards them.

The simulator's memory and traffic, the runtime's own GPT and the importers all start from a `ModelSpec`; the
matmuls are in `model_flop`, the tensors of each family in `model_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

FAMILIES = ("gpt", "gpt2", "llama", "qwen2", "opt", "bert", "mixtral", "vit")

# What may follow the last block. The first is the default. "lm" predicts tokens, "none" is the bare stack.
HEADS: dict[str, tuple[str, ...]] = {
    "gpt": ("lm",),
    "gpt2": ("lm", "none"),
    "llama": ("lm", "none"),
    "qwen2": ("lm", "none"),
    "opt": ("lm", "none"),
    "bert": ("pretraining", "masked_lm", "pooled"),
    "mixtral": ("lm", "none"),
    "vit": ("classifier", "pooled"),
}

# (qkv_bias, out_bias, mlp_bias) of a family where a config says nothing
BIASES: dict[str, tuple[bool, bool, bool]] = {
    "gpt": (True, True, True),
    "gpt2": (True, True, True),
    "llama": (False, False, False),
    "qwen2": (True, False, False),
    "opt": (True, True, True),
    "bert": (True, True, True),
    "mixtral": (False, False, False),
    "vit": (True, True, True),
}

# As transformers defaults tie_word_embeddings; our own gpt is untied unless told
TIED: dict[str, bool] = {family: family in ("gpt2", "opt", "bert") for family in FAMILIES}

_GATED = ("llama", "qwen2", "mixtral")
_GROUPED_QUERY = ("gpt", "llama", "qwen2", "mixtral")
_FREE_HEAD_DIM = ("llama", "qwen2", "mixtral")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its name within its unit's module, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that FSDP gathers and reduces together, in the order in which torch registers them."""

    name: str  # "root", "block.0", "block.1", ...
    tensors: tuple[Tensor, ...]
    module: str = ""  # dotted path of the torch module that holds them; "" is the model itself

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A transformer's sizes. Everything else about the model is computed from them.

    Raises:
        ValueError: A size is not a positive integer, sizes do not divide as they must, or a field is set that
            the family does not have.
    """

    name: str
    family: str  # one of FAMILIES
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # = heads without grouped queries
    ffn: int  # width between the two (gated: three) matrices of the MLP
    vocab: int  # 0 for vit
    sequence: int  # positions that the model has or was made for; vit: patches + 1
    tied_embeddings: bool
    head: str  # one of HEADS[family]

    head_size: int | None = None  # null: hidden / heads
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_affine: bool = True  # opt: do its layer norms have weights
    final_norm: bool = True  # opt: absent where each block norms after itself
    embedding_size: int | None = None  # opt: width of the token embedding; null: hidden
    token_types: int = 0  # bert
    experts: int = 0  # mixtral
    experts_per_token: int = 0
    image: tuple[int, int] = (0, 0)  # vit: height, width in pixels
    patch: tuple[int, int] = (0, 0)
    channels: int = 0
    classes: int = 0
    pooler_size: int | None = None  # vit with head "pooled"; null: hidden

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model.family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        if self.head not in HEADS[self.family]:
            legal = ", ".join(HEADS[self.family])
            raise ValueError(f"model.head of family {self.family} must be one of {legal}, got {self.head!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "family", "head"):
                continue
            if str(field.type) == "bool":
                if not isinstance(value, bool):
                    raise ValueError(f"model.{field.name} must be true or false, got {value!r}")
            elif value is not None:
                for size in value if isinstance(value, tuple) else (value,):
                    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                        raise ValueError(f"model.{field.name} must be a whole number >= 0, got {value!r}")
        required = ["layers", "hidden", "heads", "kv_heads", "ffn", "sequence"]
        required += ["vocab"] if self.family != "vit" else ["channels"]
        required += ["token_types"] if self.family == "bert" else []
        required += ["experts", "experts_per_token"] if self.family == "mixtral" else []
        required += ["classes"] if self.head == "classifier" else []
        for key in required:
            if getattr(self, key) == 0:
                raise ValueError(f"model.{key} must be at least 1 for family {self.family}, got 0")
        self._check_attention()
        self._check_family()

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def embedding_width(self) -> int:
        return self.hidden if self.embedding_size is None else self.embedding_size

    @property
    def classifies(self) -> bool:
        """Does it tell the class of a picture, so that a validation counts how often it is right?"""
        return self.head == "classifier"

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def is_gated(self) -> bool:
        """Does the MLP multiply two projections (SwiGLU), so that it has three matrices?"""
        return self.family in _GATED

    @property
    def num_patches(self) -> int:
        """Patches of one image, 0 for a text model."""
        if self.family != "vit":
            return 0
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    def _check_attention(self) -> None:
        if self.head_size is None and self.hidden % self.heads:
            raise ValueError(f"model.heads={self.heads} must divide model.hidden={self.hidden}")
        if self.head_size is not None and (self.family not in _FREE_HEAD_DIM or self.head_size == 0):
            raise ValueError(
                f"model.head_size={self.head_size}: only {', '.join(_FREE_HEAD_DIM)} take a size of their"
                f" own, at least 1; leave it null (hidden / heads) for family {self.family}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}")
        if self.kv_heads != self.heads and self.family not in _GROUPED_QUERY:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} must equal model.heads={self.heads} in family {self.family};"
                f" grouped queries exist in {', '.join(_GROUPED_QUERY)}"
            )

    def _check_family(self) -> None:
        biases = (self.qkv_bias, self.out_bias, self.mlp_bias)
        free_biases = {
            "llama": self.qkv_bias == self.out_bias,
            "opt": len(set(biases)) == 1,
            "vit": biases[1:] == (True, True),
        }
        if not free_biases.get(self.family, biases == BIASES[self.family]):
            raise ValueError(
                f"model.qkv_bias, out_bias, mlp_bias = {biases} do not exist in family {self.family};"
                f" its own are {BIASES[self.family]}"
            )
        only_of = {
            "norm_affine": ("opt", True),
            "final_norm": ("opt", True),
            "embedding_size": ("opt", None),
            "token_types": ("bert", 0),
            "experts": ("mixtral", 0),
            "experts_per_token": ("mixtral", 0),
            "image": ("vit", (0, 0)),
            "patch": ("vit", (0, 0)),
            "channels": ("vit", 0),
            "classes": ("vit", 0),
            "pooler_size": ("vit", None),
        }
        for key, (family, absent) in only_of.items():
            if self.family != family and getattr(self, key) != absent:
                raise ValueError(
                    f"model.{key}={getattr(self, key)} has no effect in {self.family}; it is for {family}"
                )
        for key in ("embedding_size", "pooler_size"):
            if getattr(self, key) == 0:
                raise ValueError(f"model.{key} must be at least 1 or null, got 0")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} must be <= model.experts={self.experts}"
            )
        if self.family == "vit":
            if self.vocab:
                raise ValueError(f"model.vocab={self.vocab} has no effect in family vit; leave it null")
            if self.tied_embeddings:
                raise ValueError(
                    "model.tied_embeddings=True has no effect in family vit: it has no token embedding"
                )
            if 0 in self.patch or self.patch[0] > self.image[0] or self.patch[1] > self.image[1]:
                raise ValueError(
                    f"model.patch={self.patch} must be at least 1 and fit into model.image={self.image}"
                )
            if self.sequence != self.num_patches + 1:
                raise ValueError(
                    f"model.sequence={self.sequence} must be the number of patches plus the class token:"
                    f" {self.num_patches + 1}, or null"
                )


def parameters(spec: ModelSpec) -> tuple[Unit, ...]:
    """Every parameter, as FSDP units: "root" (all outside the blocks) and then one for each block.

    A tied output matrix is the embedding and is not listed again. Within a unit the order and the names are
    those under which torch registers them (Hugging Face families: as transformers 5 does).
    """
    from .model_tensors import block_module, block_tensors, root_tensors  # it imports the types above

    block = block_tensors(spec)
    return (
        Unit("root", root_tensors(spec)),
        *(Unit(f"block.{i}", block, block_module(spec, i)) for i in range(spec.layers)),
    )


def num_parameters(spec: ModelSpec) -> int:
    """All parameters; a tied matrix counts once."""
    root, *blocks = parameters(spec)
    return root.numel + spec.layers * blocks[0].numel  # blocks are alike; 96 sums would say the same


def num_active_parameters(spec: ModelSpec) -> int:
    """Parameters that take part in one token's forward: all but the experts it is not routed to."""
    if not spec.is_moe:
        return num_parameters(spec)
    one_expert = 3 * spec.hidden * spec.ffn
    return num_parameters(spec) - spec.layers * (spec.experts - spec.experts_per_token) * one_expert


def describe(spec: ModelSpec) -> dict[str, object]:
    """What a listing shows: parameters in all and active, elements of each unit, bytes of bf16 weights."""
    total = num_parameters(spec)
    return {
        "name": spec.name,
        "family": spec.family,
        "parameters": total,
        "active_parameters": num_active_parameters(spec),
        "units": {unit.name: unit.numel for unit in parameters(spec)},
        "bf16_bytes": 2 * total,
    }


# Keys that `model.extra` may hold: what only some families have
_EXTRA_KEYS = ("head", "token_types", "experts", "experts_per_token", "image", "patch", "channels", "classes")

_KEYS = (
    "name",
    "family",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "sequence",
    "tied_embeddings",
)


def spec_from_keys(keys: Mapping[str, object]) -> ModelSpec:
    """The spec that the keys of a `conf/model/*.yaml` describe; a null or absent key takes its usual value.

    kv_heads: heads. ffn: 4 hidden. tied_embeddings and head: as the family has them. sequence of vit:
    patches + 1. `extra` holds the keys of single families; its image and patch are one number, for squares.

    Raises:
        ValueError: An unknown or missing key, or sizes that `ModelSpec` refuses.
    """
    keys = {key: value for key, value in keys.items() if value is not None}
    extra = keys.pop("extra", {})
    if not isinstance(extra, Mapping):
        raise ValueError(f"model.extra must hold keys and values, got {extra!r}")
    for where, found, legal in (("model.", keys, _KEYS), ("model.extra.", extra, _EXTRA_KEYS)):
        for key in sorted(set(map(str, found)) - set(legal)):
            raise ValueError(f"{where}{key} is no key of a model; the keys are {', '.join(legal)}")
    given = keys | {key: value for key, value in extra.items() if value is not None}
    family = given.get("family")
    if family == "hf":
        raise ValueError(
            "model.config_json must be given for model=hf: the path of a Hugging Face config.json"
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model.family must be one of {', '.join(FAMILIES)}, got {family!r}")
    required = ["layers", "hidden", "heads"]
    required += ["image", "patch", "channels"] if family == "vit" else ["vocab", "sequence"]
    required += ["ffn"] if family in _GATED else []  # a gated MLP is narrower than 4 hidden, by no fixed rule
    for key in required:
        if key not in given:
            where = "model.extra" if key in _EXTRA_KEYS else "model"
            raise ValueError(f"{where}.{key} must be given for family {family}")
    hidden = given["hidden"]
    usual: dict[str, object] = {
        "name": family,
        "kv_heads": given["heads"],
        "ffn": 4 * hidden if isinstance(hidden, int) else 0,
        "vocab": 0,
        "tied_embeddings": TIED[family],
        "head": HEADS[family][0],
        "token_types": 2 if family == "bert" else 0,
        **dict(zip(("qkv_bias", "out_bias", "mlp_bias"), BIASES[family], strict=True)),
    }
    if family == "vit":
        usual["sequence"] = 1 + _square_patches(given["image"], given["patch"])
        for key in ("image", "patch"):
            given[key] = (given[key], given[key])
    return ModelSpec(**{**usual, **given})  # ModelSpec checks each type itself


def _square_patches(side: object, step: object) -> int:
    """Patches of a square image, 0 where the sizes make no sense (which `ModelSpec` then says)."""
    if isinstance(side, int) and isinstance(step, int) and 0 < step <= side:
        return (side // step) ** 2
    return 0
