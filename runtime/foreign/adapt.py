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
    file, adapted = CLASSES[name]
    made: Foreign = getattr(import_module(f".{file}", __package__), adapted)(module, seed=seed)
    made.check_parameters()
    return made
