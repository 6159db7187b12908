"""Cuts a model into the parts that the stages of a pipeline hold."""

from collections.abc import Iterator

from torch import nn

from ...policies.layout.layers import Kind, Layer
from ...policies.layout.parallel import ROOT, ParallelLayout
from ..stack import Stack


def keep_part(model: Stack, layout: ParallelLayout, *, stage: int, chunk: int) -> Stack:
    """Drop from `model` whatever does not belong to one chunk of one stage; names of the rest stay as they are.

    A parameter of the root is kept where a layer before or behind the blocks uses it: a tied matrix on both ends.

    Args:
        model: Whole, with its first weights; changed in place.

    Raises:
        ValueError: A parameter of the root belongs to no layer of the outline: it would be lost without a word.
    """
    model.is_first, model.is_last = layout.is_first(stage, chunk), layout.is_last(stage, chunk)
    blocks = model.stack()
    kept_blocks = {str(i) for i in layout.layers(stage, chunk)}
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    used = {name for unit, layers in layout.units(stage, chunk) if unit == ROOT for name in _paths(layers)}
    known = set(_paths((*layout.outline.before, *layout.outline.behind)))
    root = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    for name in root:
        if not _belongs(name, known):
            raise ValueError(
                f"{type(model).__name__}: {name} is of no layer that the layout knows: {sorted(known)}"
            )
        if not _belongs(name, used):
            _drop(model, name)
    for name in [name for name, _ in blocks.named_children() if name not in kept_blocks]:
        del blocks._modules[name]
    return model


def tied_name(layout: ParallelLayout) -> str:
    """The parameter that the first and the last stage both hold; "" if there is none."""
    if not layout.tied or layout.stages == 1:
        return ""
    (path,) = {layer.shares for layer in layout.outline.behind if layer.shares}
    return f"{path}.weight"


def _paths(layers: tuple[Layer, ...]) -> Iterator[str]:
    for layer in layers:
        yield from (
            each for each in (layer.path, layer.shares, *(other.path for other in layer.others)) if each
        )
        if layer.kind is Kind.tied and layer.bias:  # the bias is of the module that has the head
            yield f"{layer.path.rpartition('.')[0]}.bias"


def _belongs(parameter: str, paths: set[str]) -> bool:
    return any(parameter == path or parameter.startswith(f"{path}.") for path in paths)


def _drop(model: nn.Module, name: str) -> None:
    where, _, leaf = name.rpartition(".")
    model.get_submodule(where).register_parameter(leaf, None)
