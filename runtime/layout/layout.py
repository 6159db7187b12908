"""A model of ours laid out over ranks: each parameter becomes this rank's part of it, each layer runs its plans.

Modules keep their types, and parameters their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...policies.balance import Product
from ...policies.layout import Direction, ParallelLayout
from ...policies.layout.border import Border, num_parts
from ...policies.layout.layers import Kind, Layer, Role
from ...policies.layout.parallel import ROOT
from ...policies.mesh import TENSOR, Mesh
from ...policies.plan import Plan
from ..balance.balanced import Balanced, Matrices
from ..balance.columns import PrunedColumns
from ..balance.products import BalancedProduct
from ..collectives import Collectives
from ..dropout import Dropout
from ..groups import Groups
from ..leaves import ByPosition, CountRight, CrossEntropy, Owned, Table
from ..ledger import Ledger
from ..stack import Stack
from .autograd import Program
from .dtensor import is_served, parallelize
from .functions import Context, first_rows
from .interpreter import LayerInterpreter
from .modules import Planned, PlannedCore, PlannedLoss, PlannedPositions, Source, Together, replace_call
from .operands import cut_parameters, module_of, parameter_names, parameters_of
from .pace import Flop, Rate, attention_flop, linear_flop, patches_flop
from .parameters import Placed, gather_wholes
from .tokens import border_index, token_index

_NORMS = (Kind.layer_norm, Kind.rms_norm)
_INPUTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.embedding: ("ids",),
    Kind.patches: ("images",),
    Kind.attention: ("q", "k", "v"),
    Kind.loss: ("logits", "targets"),
}


@dataclass(frozen=True, slots=True)
class LaidOut:
    """What became of a model's parameters.

    Args:
        placed: Of those that are cut, by their names in the model.
    """

    model: nn.Module
    placed: Mapping[str, Placed]
    groups: Groups
    collectives: Collectives

    def wholes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole of each of the tensors that lie like the parameters of these names; a collective."""
        return gather_wholes(tensors, self.placed, self.groups, self.collectives)

    def gather_parameters(self) -> dict[str, Tensor]:
        """Every parameter of this stage, whole; a collective."""
        return self.wholes({name: parameter.detach() for name, parameter in self.model.named_parameters()})

    def gather_gradients(self) -> dict[str, Tensor]:
        """As `gather_parameters`, of the gradients; those that are None are left out, and must be on all ranks."""
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return self.wholes({name: gradient for name, gradient in found.items() if gradient is not None})

    @torch.no_grad()
    def scatter(self, wholes: Mapping[str, Tensor]) -> None:
        """Write this rank's part of each whole into the parameter of its name; others stay as they are."""
        mesh, rank = self.groups.mesh, self.groups.rank
        for name, parameter in self.model.named_parameters():
            if name in wholes:
                placed = self.placed.get(name)
                whole = wholes[name]
                parameter.copy_(whole if placed is None else placed.local_part(whole, mesh, rank))


def lay_out(
    model: Stack,
    layout: ParallelLayout,
    *,
    groups: Groups,
    ledger: Ledger,
    collectives: Collectives,
    micro: int,
    sequence: int,
    stage: int = 0,
    chunk: int = 0,
    library: bool = True,
    rate: Rate | None = None,
    beside: bool = True,
    balanced: Balanced | None = None,
) -> LaidOut:
    """Change `model` in place. No communication: every rank cuts its part from the whole weights that it has.

    Args:
        model: With its first weights, the same on all ranks.
        micro: Sequences of a micro-batch, of one replica of the model.
        sequence: Tokens of a whole sequence, as the model's blocks have them.
        stage, chunk: Whose layers the model has; others are not looked at.
        library: DTensor computes what it serves (`dtensor.is_served`); False: our own function everything.
        rate, beside: As `LayerInterpreter`; the rate is also that of layers that have no plan.
        balanced: Told of the products of all blocks; 1D on DTensor alone.

    Raises:
        ValueError: If the model has no module that a layer names.
    """
    interpreter = LayerInterpreter(groups, ledger, collectives, rate=rate, beside=beside)
    return _LayingOut(model, layout, groups, interpreter, micro, sequence, library, balanced).all(
        stage, chunk
    )


def tell_places(
    model: Stack, layout: ParallelLayout, mesh: Mesh, rank: int, *, micro: int, sequence: int
) -> None:
    """Tell positions and dropouts of a model that is laid out which sequences, tokens and features are here.

    To be told anew before a forward of other sizes.

    Args:
        micro, sequence: As of `lay_out`.
    """
    outer = layout.mode.outer if layout.tensor > 1 else Border()
    if not outer.axes and layout.sequence == 1:
        return  # all of them are
    batch_B, tokens_T, features_D = border_index(
        layout, mesh, rank, outer, batch=micro, tokens=sequence, features=model.spec.hidden
    )
    within_T = token_index(layout, mesh, rank, sequence)  # between a pair of products
    for module in model.modules():
        if isinstance(module, Dropout):
            module.batch_index, module.token_index, module.feature_index = batch_B, tokens_T, features_D
        elif isinstance(module, Table):
            module.token_index = tokens_T
        elif isinstance(module, ByPosition) and (outer.tokens or layout.sequence > 1):
            module.token_index = within_T


@dataclass(slots=True)
class _LayingOut:
    model: Stack
    layout: ParallelLayout
    groups: Groups
    interpreter: LayerInterpreter
    micro: int
    sequence: int
    library: bool
    balanced: Balanced | None
    products: dict[tuple[str, str], BalancedProduct] = field(default_factory=dict, init=False)

    def all(self, stage: int, chunk: int) -> LaidOut:
        units, names = self.model.units(), parameter_names(self.model)
        placed: dict[str, Placed] = {}
        for name, owned, cut in cut_parameters(self.model, self.layout, self.mesh, stage=stage, chunk=chunk):
            placed[name] = cut
            self._replace(owned, cut)
        if self.balanced is not None:
            self._balance(self.balanced, units, stage, chunk, names)
        for unit, layers in self.layout.units(stage, chunk):
            for layer in layers:
                self._plan(unit, units[unit], layer)
        tell_places(
            self.model, self.layout, self.mesh, self.groups.rank, micro=self.micro, sequence=self.sequence
        )
        self.model.recompute_to_end = not self.layout.is_plain
        return LaidOut(self.model, placed, self.groups, self.interpreter.collectives)

    def _replace(self, owned: Owned, placed: Placed) -> None:
        whole = owned.tensor
        part = placed.local_part(whole.detach(), self.mesh, self.groups.rank)
        module = owned.owner
        module._parameters[owned.name] = nn.Parameter(part, requires_grad=whole.requires_grad)
        if isinstance(module, nn.Linear) and owned.name == "weight":
            module.out_features, module.in_features = part.shape
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = part.shape

    # ---- balancing

    def _balance(
        self,
        balanced: Balanced,
        units: Mapping[str, nn.Module],
        stage: int,
        chunk: int,
        names: Mapping[tuple[int, str], str],
    ) -> None:
        """Tell it of the blocks: the first pair of products of each is attention's, the second the FFN's."""
        found, paths = [], []
        for unit, layers in self.layout.units(stage, chunk):
            paired = [layer for layer in layers if layer.kind is Kind.linear and layer.role is not Role.whole]
            if unit == ROOT:
                continue
            matrices = {
                product: self._matrices(units[unit], layer, product, balanced, names)
                for product, layer in zip(Product, paired, strict=True)
            }
            found.append((unit, units[unit], matrices))
            paths.append([layer.path for layer in paired])
        for (unit, _, _), of, block in zip(found, paths, balanced.add_part(found), strict=True):
            self.products |= {
                (unit, path): block.products[product] for path, product in zip(of, Product, strict=True)
            }

    def _matrices(
        self,
        module: nn.Module,
        layer: Layer,
        product: Product,
        balanced: Balanced,
        names: Mapping[tuple[int, str], str],
    ) -> Matrices:
        members = (layer, *layer.others)
        held = [parameters_of(module, each) for each in members]
        units = self.layout.tensor * balanced.work.units[product.half]
        sections = [
            [features // units for features in each.sections or (each.features_out,)] for each in members
        ]
        return Matrices(
            weights=[_source(each["weight"]) for each in held],
            biases=[_source(each["bias"]) for each in held if "bias" in each],
            names=[names[id(each["weight"].owner), "weight"] for each in held],
            sections=sections if product.is_first else (),
        )

    # ---- plans

    def _plan(self, unit: str, module: nn.Module, layer: Layer) -> None:
        forward = self.layout.decide(layer.runs(Direction.forward))
        backward = self.layout.decide(layer.runs(Direction.backward))
        if forward is None or backward is None:
            self._pace(module, layer)
            return
        target = module_of(module, layer)
        members = (layer, *layer.others)
        found = [parameters_of(module, each) for each in members]
        operands = tuple(found[0])
        label = f"{unit}.{layer.path}"
        balanced = self.products.get((unit, layer.path))

        def new_program(forward: Plan, backward: Plan) -> Program:
            return Program(
                interpreter=self.interpreter,
                forward=forward,
                backward=backward,
                label=label,
                context=self._context(target, None if balanced is None else balanced.pruned),
                inputs=(*_INPUTS.get(layer.kind, ("x",)), *(name for name in operands for _ in members)),
                output="loss" if layer.kind is Kind.loss else "y",
                widths=self._widths(layer),
                runs=self._runs(layer, "weight"),
                bias_in_runs=layer.bias and self._runs(layer, "bias") > 1,
                half=None if balanced is None else balanced.half,
            )

        if self.library and is_served(self.layout, layer):
            if balanced is not None:
                balanced.by_columns.make, balanced.by_columns.bias = new_program, layer.bias
            parallelize(
                module,
                layer,
                mesh=self.groups.device_mesh(next(self.model.parameters()).device)[TENSOR],
                ledger=self.interpreter.ledger,
                label=label,
                weights=[_source(each["weight"]) for each in found],
                biases=[_source(each["bias"]) for each in found if "bias" in each],
                rate=self.interpreter.rate,
                balanced=balanced,
            )
            return
        program = new_program(forward, backward)
        sources: list[Source] = [_source(each[name]) for name in operands for each in found]
        if layer.others:
            together = Together(lambda x: program(x, *(source() for source in sources)), program.label)
            for place, each in enumerate(members):
                replace_call(module.get_submodule(each.path), together.member(place))
            return
        match layer.kind:
            case Kind.attention:
                replace_call(target, PlannedCore(program))
            case Kind.loss:
                copies = [axis for axis, _ in self.layout.mode.dims if axis not in layer.input.positions]
                counts = all(self.mesh.index(axis, self.groups.rank) == 0 for axis in copies)
                loss = PlannedLoss(program, counts)
                replace_call(target, loss)
                for counter in self.model.modules():
                    if isinstance(counter, CountRight):
                        replace_call(counter, loss.count_right)
            case Kind.positions:
                replace_call(target, PlannedPositions(program, sources))
            case _:
                replace_call(target, Planned(program, sources))

    def _pace(self, unit: nn.Module, layer: Layer) -> None:
        """A layer without a plan takes its time."""
        rate = self.interpreter.rate
        if rate is None:
            return
        for each in (layer, *layer.others):
            module = module_of(unit, each)
            flop: Flop
            match layer.kind:
                case Kind.linear | Kind.tied:
                    flop = linear_flop
                case Kind.attention:
                    flop = attention_flop
                case Kind.patches:
                    flop = patches_flop(_source(parameters_of(unit, each)["weight"]))
                case _:
                    return
            replace_call(module, rate.around(module.forward, flop))

    def _context(self, module: nn.Module, pruned: PrunedColumns | None) -> Context:
        eps = getattr(module, "eps", None)
        return Context(
            mesh=self.mesh,
            rank=self.groups.rank,
            eps=float(eps) if eps is not None else 0.0,
            rows=module.rows if isinstance(module, Table) else first_rows,
            over_all=module.over_all if isinstance(module, CrossEntropy) else False,
            pruned=pruned,
        )

    def _widths(self, layer: Layer) -> tuple[int, ...]:
        """Features that are here of each part of the output."""
        widths = layer.sections
        if layer.others:
            widths = tuple(each.features_out for each in (layer, *layer.others))
        parts = num_parts(self.mesh, layer.output.features)
        return tuple(width // parts for width in widths)

    def _runs(self, layer: Layer, operand: str) -> int:
        """A matrix (or bias) that is cut further than its output is gathered before the product, and its parts' shares
        of queries, keys and values come in as many runs.
        """
        if not layer.sections and not layer.others:
            return 1
        cut = self.layout.parameter_cuts(layer)[operand]
        return cut.parts(self.mesh, 0) // num_parts(self.mesh, layer.output.features)

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh


def _source(owned: Owned) -> Source:
    return lambda: owned.tensor
