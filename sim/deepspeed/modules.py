"""A model as DeepSpeed's hooks see it: modules that hold parameters, in the order in which they are called."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...conf.model_spec import ModelSpec, Unit, parameters
from ...conf.schema import Recompute
from ..costs import EMBED, HEAD

# Modules of a block that have hooks, those without parameters of their own included: Megatron's layer, attention,
# core attention, softmax, dropout, MLP, two norms and four linears
HOOKED_IN_BLOCK = 12


class Pass(Enum):
    """Why a module is called. Recomputation calls the forward again, with its hooks."""

    forward = "forward"
    recompute = "recompute"
    backward = "backward"

    @property
    def forward_hook(self) -> bool:
        """Whether DeepSpeed's forward hook runs; else it is the backward hook."""
        return self is not Pass.backward


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor; its place in `Network.parameters` is its name here."""

    unit: str
    name: str
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Module:
    """`holds`: places of its parameters.

    `computes`: the key of its computation (`sim.costs.Costs`) without the pass: "embed", "head" or such as
    "block.0#qkv"; empty where another module's holds its part.
    """

    unit: str
    name: str
    holds: tuple[int, ...]
    computes: str


@dataclass(frozen=True, slots=True)
class Visit:
    """One call of a module, `hooked` modules with it: those without parameters around it."""

    module: Module
    asked: Pass
    hooked: int


@dataclass(frozen=True, slots=True)
class Network:
    """All parameters of a model and the calls of one micro-batch."""

    parameters: tuple[Parameter, ...]
    visits: tuple[Visit, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


# Modules of a block in the order of their calls, where that is not the order of registration
_CALLED = {
    "llama": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "qwen2": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "opt": ("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc1", "fc2"),
    "vit": ("layernorm_before", "attention", "layernorm_after", "mlp"),
}

# The product of a linear, by the end of its name
_PRODUCTS = {
    **dict.fromkeys(("qkv", "c_attn"), "qkv"),
    **dict.fromkeys(("q_proj", "query"), "q"),
    **dict.fromkeys(("k_proj", "key"), "k"),
    **dict.fromkeys(("v_proj", "value"), "v"),
    **dict.fromkeys(("proj", "attn.c_proj", "o_proj", "out_proj", "attention.output.dense"), "out"),
    **dict.fromkeys(("fc1", "c_fc", "intermediate.dense"), "fc1"),
    **dict.fromkeys(("fc2", "mlp.c_proj", "output.dense"), "fc2"),
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def network(spec: ModelSpec, recompute: Recompute) -> Network:
    """The modules of `spec` and the order of their calls in one micro-batch.

    Recomputation repeats a block's forward just before its backward, whatever part of it `recompute` saves:
    DeepSpeed's hooks see whole calls of modules.

    Raises:
        ValueError: If recompute is neither "none" nor "full".
    """
    if recompute not in (Recompute.none, Recompute.full):
        raise ValueError(
            f"recompute={recompute.value!r}: must be one of ['none', 'full'] with engine=deepspeed or "
            "deepspeed_2023"
        )
    root, *blocks = parameters(spec)
    held: list[Parameter] = []
    embedding, last = _root(spec, root, held)
    inside = [_block(spec, unit, held) for unit in blocks]
    again = recompute is Recompute.full
    visits = [Visit(module, Pass.forward, 1) for module in embedding]
    for modules in inside:
        visits += _calls(modules, Pass.forward)
    visits += [Visit(module, Pass.forward, 1) for module in last]
    visits += [Visit(module, Pass.backward, 1) for module in reversed(last)]
    for modules in reversed(inside):
        if again:
            visits += _calls(modules, Pass.recompute)
        visits += _calls(tuple(reversed(modules)), Pass.backward)
    visits += [Visit(module, Pass.backward, 1) for module in reversed(embedding)]
    return Network(tuple(held), tuple(visits))


def largest_module(spec: ModelSpec) -> int:
    """Elements of the module that holds most by itself: what DeepSpeed's estimator calls the largest layer."""
    found: dict[tuple[str, str], int] = {}
    for unit in parameters(spec):
        for tensor in unit.tensors:
            key = (unit.name, tensor.name.rpartition(".")[0])
            found[key] = found.get(key, 0) + tensor.numel
    return max(found.values())


def _calls(modules: Sequence[Module], asked: Pass) -> list[Visit]:
    """The block's hooked modules without parameters are counted with its first."""
    bare = max(0, HOOKED_IN_BLOCK - len(modules))
    return [Visit(module, asked, 1 + (bare if i == 0 else 0)) for i, module in enumerate(modules)]


def _block(spec: ModelSpec, unit: Unit, held: list[Parameter]) -> tuple[Module, ...]:
    members = _members(unit, held)
    names = list(members)
    order = _CALLED.get(spec.family)
    if order is not None:
        names.sort(key=lambda name: next(i for i, start in enumerate(order) if name.startswith(start)))
    modules = []
    norms = 0
    for name in names:
        product = _product(name)
        if not product:
            norms += 1
            product = f"norm{norms}"
        modules.append(Module(unit.name, name, members[name], f"{unit.name}#{product}"))
    return tuple(modules)


def _product(name: str) -> str:
    """The longest end that is known: "attention.output.dense" is no "output.dense"."""
    found = [key for key in _PRODUCTS if name == key or name.endswith(f".{key}")]
    return _PRODUCTS[max(found, key=len)] if found else ""


def _root(
    spec: ModelSpec, root: Unit, held: list[Parameter]
) -> tuple[tuple[Module, ...], tuple[Module, ...]]:
    """Modules before the blocks, and those after them; a tied embedding is called on both sides."""
    members = _members(root, held)
    first = ("position", "wte", "wpe", "project_in")
    before = [name for name in members if "embed" in name or name.rpartition(".")[2] in first]
    after = [name for name in members if name not in before]
    if spec.tied_embeddings and spec.head in ("lm", "masked_lm", "pretraining"):
        after.append(max(before, key=lambda name: sum(held[at].numel for at in members[name])))
    # all before the blocks is one computation, all behind them another
    embedding = [Module(root.name, n, members[n], "" if i else EMBED) for i, n in enumerate(before)]
    last = [Module(root.name, n, members[n], HEAD if n == after[-1] else "") for n in after]
    return tuple(embedding), tuple(last)


def _members(unit: Unit, held: list[Parameter]) -> dict[str, tuple[int, ...]]:
    """Places of the tensors of each torch module, in the order of registration."""
    members: dict[str, tuple[int, ...]] = {}
    for tensor in unit.tensors:
        name = tensor.name.rpartition(".")[0]
        members[name] = (*members.get(name, ()), len(held))
        held.append(Parameter(unit.name, tensor.name, tensor.shape, tensor.numel))
    return members
