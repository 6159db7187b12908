"""The operands of a layer's plans: whose parameters they are, and which of them ranks hold in parts."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from ...policies.layout import ParallelLayout
from ...policies.layout.border import num_parts
from ...policies.layout.layers import Kind, Layer
from ...policies.mesh import Mesh
from ..leaves import FirstToken, Owned, PositionsOf, TiedHead
from ..stack import Stack
from .parameters import Placed


def cut_parameters(
    model: Stack, layout: ParallelLayout, mesh: Mesh, *, stage: int, chunk: int
) -> Iterator[tuple[str, Owned, Placed]]:
    """Each parameter of a part of a model that ranks hold in parts, with its name, and how: as it is before that.

    Raises:
        ValueError: If the model has no module that a layer names.
    """
    units, names = model.units(), parameter_names(model)
    seen: set[str] = set()
    for unit, layers in layout.units(stage, chunk):
        if unit not in units:
            raise ValueError(f"stage {stage} has {unit!r}, which the model lacks; it has {list(units)}")
        for layer in layers:
            for each in (layer, *layer.others):
                for owned, cut in _cuts(layout, mesh, units[unit], layer, each):
                    name = names[id(owned.owner), owned.name]
                    if name not in seen:  # a shared one, on the stage that has its layer too
                        seen.add(name)
                        yield name, owned, cut


def _cuts(
    layout: ParallelLayout, mesh: Mesh, unit: nn.Module, layer: Layer, each: Layer
) -> Iterator[tuple[Owned, Placed]]:
    """Parameters of a layer (or of one of its `others`) that are cut."""
    cuts = layout.parameter_cuts(replace(each, input=layer.input, output=layer.output))
    for operand, owned in parameters_of(unit, each).items():
        cut, shape = cuts[operand], tuple(owned.tensor.shape)
        if layer.kind in (Kind.positions, Kind.first_token):  # cut in their last dimension
            cut = replace(cut, dims=((),) * (len(shape) - 1) + (cut.dims[-1],))
        padded = shape
        if layer.kind is Kind.embedding:
            padded = (layer.features_in, *shape[1:])
        elif layer.kind in (Kind.linear, Kind.tied):
            padded = (each.features_out, *shape[1:])
        if num_parts(mesh, cut.axes) > 1 or padded != shape:
            yield owned, Placed(shape, padded, cut)


def parameter_names(model: nn.Module) -> dict[tuple[int, str], str]:
    """Of each parameter by the module that has it, and what it is called there."""
    return {
        (id(module), name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._parameters
    }


def module_of(unit: nn.Module, layer: Layer) -> nn.Module:
    """Whose call is the layer: the module of its path, or the one that uses the parameter of that path."""
    where, _, name = layer.path.rpartition(".")
    parent = unit.get_submodule(where)
    if layer.kind is Kind.patches:
        return parent  # it puts what its convolution gives in order
    if name in parent._parameters:
        for module in unit.modules():
            if isinstance(module, PositionsOf | FirstToken) and (module.owned.owner, module.owned.name) == (
                parent,
                name,
            ):
                return module
        raise ValueError(f"{layer.path!r} is a parameter that no module says it uses")
    return unit.get_submodule(layer.path)


def parameters_of(unit: nn.Module, layer: Layer) -> dict[str, Owned]:
    """Of each operand of the plans, the parameter."""
    if layer.kind in (Kind.attention, Kind.loss, Kind.local):
        return {}
    module = unit.get_submodule(layer.path) if layer.kind is Kind.patches else module_of(unit, layer)
    if isinstance(module, PositionsOf | FirstToken):
        return {"weight": module.owned}
    if isinstance(module, TiedHead):
        bias = module.owned_bias
        return {"weight": Owned(module.embedding, "weight")} | ({} if bias is None else {"bias": bias})
    return {name: Owned(module, name) for name, held in module._parameters.items() if held is not None}
