"""Which foreign models are known."""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from torch import nn

from .model import Foreign

# Exact classes: a class derived from one of them may compute something else
CLASSES: Final[Mapping[str, tuple[str, str]]] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": ("gpt2", "ForeignGPT2"),
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": ("llama", "ForeignLlama"),
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM": ("llama", "ForeignLlama"),
}

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def adapt(module: nn.Module, *, seed: int = 0) -> Foreign:
    """The model as a stack, which takes its parameters over; `module` must not be used any more.

    Args:
        seed: Of its dropouts.

    Raises:
        ValueError: If its class is not known, or something in it cannot be laid out, by name.
    """
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in CLASSES:
        raise ValueError(
            f"{name} is not known: parallelize takes twinbed's own models (runtime.stack.build_model), and exactly "
            f"{', '.join(path.rpartition('.')[2] for path in CLASSES)} of transformers"
        )
    _check_unchanged(module)
    file, adapted = CLASSES[name]
    made: Foreign = getattr(import_module(f".{file}", __package__), adapted)(module, seed=seed)
    made.check_parameters()
    return made


def _check_unchanged(module: nn.Module) -> None:
    """Raises ValueError for what a script has hung into the model and that would be lost, or see parts only."""
    kind = type(module).__name__
    if getattr(module, "_loss_function", None) is not None:
        raise ValueError(f"{kind}.loss_function was replaced: under parallelize the loss is the class's own")
    if getattr(module, "_require_grads_hooks", None):
        # The class's own, for checkpoints that need an input with a gradient; a stack's do not.
        module.disable_input_require_grads()  # type: ignore[operator]
    for path, inner in module.named_modules():
        where = path or "the model itself"
        hooks = [hook for kept in _HOOKS for hook in getattr(inner, kept).values()]
        if hooks:
            raise ValueError(
                f"{kind}: {where} has the hook {hooks[0]!r}, which would see a rank's part of what it expects; "
                "parallelize takes models without hooks"
            )
        if "forward" in inner.__dict__:
            raise ValueError(
                f"{kind}: {where} has another forward than its class, which parallelize cannot lay out"
            )
