"""What foreign language models share: the root around their own blocks, and how they are called.

Only blocks keep their own forward. What lies around them (positions, masks, caches, the shift of labels, the loss) is
done here, with the same numbers: a rank holds a part of tokens, words and heads only.

Shapes: B sequences, T tokens, D hidden, H heads, K key heads, E head size, V words.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from ...conf.hf import spec_of_config
from ...conf.model_spec import ModelSpec
from ...policies.layout import ParallelLayout
from ...policies.layout.layers import Kind, Layer
from ...policies.layout.outline import outline
from ...policies.mesh import Mesh
from ..dropout import Dropout
from ..leaves import CrossEntropy, TiedHead
from ..stack import Stack

IGNORED: Final = -100  # a label that does not count
_BIASED: Final = (Kind.layer_norm,)


class Foreign(Stack):
    """A causal language model of transformers. Its loss is that of its own class.

    Args:
        module: Gives its parameters and blocks away.
        seed: Of dropout.

    Attributes:
        config: The module's.

    Raises:
        ValueError: If something in the module cannot be laid out, by name.
    """

    counts_forwards = True
    blocks_path: str  # dotted, of the blocks
    table_path: str  # dotted, of the embedding

    def __init__(self, module: Any, *, seed: int) -> None:
        self.kind = type(module).__name__
        config = module.config
        super().__init__(
            spec_of(module),
            recompute=any(getattr(inner, "gradient_checkpointing", False) for inner in module.modules()),
        )
        self.config = config
        self.dropout_clock.seed = seed
        self.loss = CrossEntropy()
        self._transposed: set[str] = set()  # weights that the module has as [in, out]

    @abstractmethod
    def before_blocks(self, inputs: Tensor) -> Tensor:
        """[B, T, D] from words [B, T]."""

    @abstractmethod
    def logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, V] from what the last block gave."""

    def behind_blocks(self, x_BTD: Tensor, targets: Tensor) -> Tensor:
        """The loss, from what the last block gave."""
        loss: Tensor = self.loss(self.logits(x_BTD), targets)
        return loss

    def stack(self) -> nn.ModuleList:
        blocks = self.get_submodule(self.blocks_path)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def first_deviation(self, name: str, weight: Tensor) -> float:
        raise RuntimeError(f"{self.kind} comes with its weights")

    def laid_out(self, layout: ParallelLayout, mesh: Mesh) -> None:
        """Blocks have become parts: tell what in them knows the whole's sizes."""

    # ---- as its own class is called

    def read_batch(self, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(words [B, T], the next word of each [B, T]) of a call of the class's forward.

        Raises:
            ValueError: If an argument would have an effect that is not built, by name, or labels are missing.
        """
        given = dict(given)
        if len(args) > 1:
            raise ValueError(
                f"{self.kind} takes input_ids by position, and all else by name, under parallelize"
            )
        ids = args[0] if args else given.pop("input_ids", None)
        labels, mask = given.pop("labels", None), given.pop("attention_mask", None)
        given = {
            name: value
            for name, value in given.items()
            if value is not None and not (name == "use_cache" and value is False)
        }
        if given:
            raise ValueError(
                f"{self.kind}({next(iter(given))}=...): parallelize takes input_ids, labels, and an attention_mask of "
                "ones; caches and outputs other than the loss are not built"
            )
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ValueError(f"{self.kind} needs input_ids [sequences, tokens], got {_said(ids)}")
        if not isinstance(labels, Tensor) or labels.shape != ids.shape:
            raise ValueError(
                f"{self.kind} needs labels of the shape of input_ids, {list(ids.shape)}: under parallelize it gives a "
                f"loss, and nothing else; got {_said(labels)}"
            )
        if mask is not None and not bool((mask == 1).all()):
            raise ValueError(
                f"{self.kind}(attention_mask=...) has {int((mask != 1).sum())} entries other than 1: padding is not "
                "masked under parallelize; sequences of a batch must have one length (labels of -100 are ignored)"
            )
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        return ids, targets

    def output(self, loss: Tensor) -> CausalLMOutput:
        """What its forward returns; without logits, of which a rank has a part."""
        return CausalLMOutput(loss=loss)

    def original(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters as the class's state_dict has them."""
        found = {
            name: whole.t().contiguous() if name in self._transposed else whole
            for name, whole in wholes.items()
        }
        if self.spec.tied_embeddings:
            found["lm_head.weight"] = found[f"{self.table_path}.weight"]
        return found

    # ---- for adapters of one class

    def head_of(self, module: nn.Module) -> nn.Module:
        """Its head, or one that uses the embedding's table."""
        head, table = module.get_submodule("lm_head"), module.get_submodule(self.table_path)
        self.expect(head, nn.Linear, "lm_head")
        self.expect(table, nn.Embedding, self.table_path)
        tied = head.weight is table.weight
        if tied != self.spec.tied_embeddings:
            raise ValueError(
                f"{self.kind}.config.tie_word_embeddings={self.spec.tied_embeddings}, but lm_head.weight is "
                f"{'' if tied else 'not '}that of {self.table_path}"
            )
        padding = getattr(table, "padding_idx", None)
        if padding is not None:
            raise ValueError(
                f"{self.kind}.config.pad_token_id={padding}: the row of a padding word has no gradient, "
                "which is not built; set it to None (sequences of a batch have one length)"
            )
        return TiedHead(self, self.table_path) if tied else head

    def expect(self, module: nn.Module, kind: type, path: str) -> None:
        """Raises ValueError if the module is another class than that of its model: it may compute something else."""
        if type(module) is not kind:
            raise ValueError(
                f"{self.kind}: {path} is a {type(module).__qualname__}; parallelize knows what a {kind.__qualname__} "
                "does there, and nothing else"
            )

    def refuse(self, **settings: tuple[object, object]) -> None:
        """Raises ValueError for the first key of the config that is not (found) what is built (wanted)."""
        for key, (found, wanted) in settings.items():
            if found != wanted:
                raise ValueError(
                    f"{self.kind}.config.{key}={found!r}: must be {wanted!r} under parallelize, which builds nothing "
                    "else"
                )

    def dropout_at(self, place: str, module: nn.Module) -> Dropout:
        """In place of torch's, which draws other numbers on each rank."""
        assert isinstance(module, nn.Dropout)
        return Dropout(module.p, place=place, clock=self.dropout_clock)

    def check_parameters(self) -> None:
        """Raises ValueError for a parameter that no layer of the outline has: it would be trained wrongly."""
        known = set(self._known_parameters())
        for name, _ in self.named_parameters():
            if name not in known:
                path = name.rpartition(".")[0]
                kind = type(self.get_submodule(path)).__qualname__
                raise ValueError(
                    f"{self.kind}: {path} ({kind}) has the parameter {name}, and is no layer of a {self.spec.family} "
                    "model that parallelize knows; take it out, or train without parallelize"
                )

    def _known_parameters(self) -> Iterator[str]:
        layers = outline(self.spec)
        for layer in (*layers.before, *layers.behind):
            yield from _names(layer, "")
        for i in range(self.spec.layers):
            for layer in layers.block:
                yield from _names(layer, f"{self.blocks_path}.{i}.")


def spec_of(module: Any) -> ModelSpec:
    """Its shapes, from its config.

    Raises:
        ValueError: If a key of it is not one that is laid out.
    """
    kind = type(module).__name__
    data = module.config.to_dict() | {"architectures": [kind]}
    return spec_of_config(data, name=kind, source=f"{kind}.config")


def _names(layer: Layer, prefix: str) -> Iterator[str]:
    for each in (layer, *layer.others):
        if not each.shares:
            yield f"{prefix}{each.path}.weight"
        if each.bias or each.kind in _BIASED:
            yield f"{prefix}{each.path}.bias"


def _said(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
