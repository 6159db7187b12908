"""The local shapes of one rank's operands and parameters, from the borders and cuts of a layout."""

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property

from ...conf.model_spec import ModelSpec, Tensor, Unit, parameters
from ...policies.layout import Border, Cut, Kind, Layer, ParallelLayout, num_parts
from ...policies.layout.functions import Shape
from ...policies.mesh import Mesh
from ..balance.share import Share, resized
from ..layers import Widths
from .operands import Operand

ID_BYTES = 8  # of a token's or class's number

BEFORE, BLOCK, BEHIND = (
    "before",
    "block",
    "behind",
)  # the layers of a model, as `policies.layout.outline` has them

# As torch keeps them transposed against a linear layer's [out, in]
_TRANSPOSED = {"gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


class Shapes:
    """Of one model under one layout.

    Args:
        micro: Sequences of a micro-batch of one replica.
        sequence: Tokens of a whole sequence; of a vit its patches and the class token.
        element_bytes: Of activations, and of weights when they are used.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        spec: ModelSpec,
        mesh: Mesh,
        *,
        micro: int,
        sequence: int,
        element_bytes: int,
    ) -> None:
        self.layout = layout
        self.spec = spec
        self.mesh = mesh
        self.micro = micro
        self.tokens = sequence // layout.sequence
        self.element_bytes = element_bytes
        outline = layout.outline
        self.parts = {BEFORE: outline.before, BLOCK: outline.block, BEHIND: outline.behind}
        self.widths: Widths | None = None  # of a block; None: an even share
        self._units = parameters(spec)

    def of_share(self, share: Share) -> "Shapes":
        """Of a rank that computes so much of each block."""
        made = copy(self)
        layers, made.widths = resized(self.parts[BLOCK], share, self.spec, self.layout.tensor)
        made.parts = {**self.parts, BLOCK: layers}
        return made

    # ---- activations

    def activation(self, border: Border, features: int, tokens: int | None) -> Operand:
        """[batch, tokens, features] of one rank; without tokens, of one token of each sequence."""
        batch = divided(self.micro, num_parts(self.mesh, border.batch), "sequences of a micro-batch")
        own = divided(features, num_parts(self.mesh, border.features), "features")
        if tokens is None:
            return Operand((batch, own), self.element_bytes)
        rows = divided(tokens, num_parts(self.mesh, border.tokens), "tokens")
        return Operand((batch, rows, own), self.element_bytes)

    def forward(self, layer: Layer, before: Layer | None) -> dict[str, Operand]:
        """What a layer's plan starts from, and what a layer without a plan reads.

        Args:
            before: The layer whose output it takes.
        """
        spec, weights = self.spec, self.operands_of_parameters(layer)
        match layer.kind:
            case Kind.embedding:
                return {"ids": Operand((self.micro, self.tokens), ID_BYTES), **weights}
            case Kind.patches:
                images = Operand((self.micro, spec.channels, *spec.image), self.element_bytes)
                return {"images": images, **weights}
            case Kind.attention:
                heads, kv_heads = self.widths[:2] if self.widths is not None else (None, None)
                queries = self._heads(layer, spec.heads, heads)
                keys = self._heads(layer, spec.kv_heads, kv_heads)
                return {"q": queries, "k": keys, "v": keys}
            case Kind.loss:
                assert before is not None, "a loss follows a head"
                classes = self.activation(layer.input, before.features_out, self.tokens_behind(before))
                labels = (self.micro,) if spec.classifies else (self.micro, self.tokens)
                return {"logits": classes, "targets": Operand(labels, ID_BYTES)}
            case Kind.first_token:
                return {"x": self.activation(layer.input, layer.features_out, spec.num_patches), **weights}
            case Kind.positions:
                return {"x": self.activation(layer.input, layer.features_out, self.tokens), **weights}
            case _:
                return {
                    "x": self.activation(layer.input, layer.features_in, self.tokens_behind(layer)),
                    **weights,
                }

    def output(self, layer: Layer, before: Layer | None) -> tuple[str, Operand]:
        """Its name, and what it is."""
        match layer.kind:
            case Kind.loss:
                return "loss", Operand((), 4)
            case Kind.attention:
                return "y", self.forward(layer, before)["q"]
            case Kind.layer_norm | Kind.rms_norm:
                return "y", self.forward(layer, before)["x"]
            case Kind.patches:
                return "y", self.activation(layer.output, layer.features_out, self.spec.num_patches)
            case _:
                features = layer.features_out + sum(other.features_out for other in layer.others)
                return "y", self.activation(layer.output, features, self.tokens_behind(layer))

    def tokens_behind(self, layer: Layer) -> int | None:
        """Of a layer's output; None: a classifier looks at one token only."""
        return None if self.spec.classifies and layer.path == "classifier" else self.tokens

    def _heads(self, layer: Layer, heads: int, own: int | None) -> Operand:
        """`own`: of this rank; None: its even share of `heads`."""
        batch = divided(self.micro, num_parts(self.mesh, layer.input.batch), "sequences of a micro-batch")
        tokens = divided(self.tokens, num_parts(self.mesh, layer.input.tokens), "tokens")
        if own is None:
            own = divided(heads, num_parts(self.mesh, layer.input.features), "heads")
        return Operand((batch, own, tokens, self.spec.head_dim), self.element_bytes)

    # ---- parameters

    def operands_of_parameters(self, layer: Layer) -> dict[str, Operand]:
        """Local "weight" and "bias" as a layer's plan has them: matrices [out, in], those taken together on end."""
        cuts = self.layout.parameter_cuts(layer)
        if not cuts:
            return {}
        shapes: dict[str, Shape] = {}
        hidden = layer.features_out
        match layer.kind:
            case Kind.linear | Kind.tied:
                rows = sum(
                    self._rows(each, self.layout.parameter_cuts(each)["weight"])
                    for each in (layer, *self._others(layer))
                )
                columns = divided(layer.features_in, cuts["weight"].parts(self.mesh, 1), "features")
                shapes = {"weight": (rows, columns)}
                if layer.bias:
                    biases = (
                        self._rows(each, self.layout.parameter_cuts(each)["bias"])
                        for each in (layer, *self._others(layer))
                    )
                    shapes["bias"] = (sum(biases),)
            case Kind.embedding | Kind.positions:
                shapes = {"weight": self._cut((layer.features_in, hidden), cuts["weight"])}
            case Kind.first_token:
                shapes = {"weight": self._cut((1, 1, hidden), cuts["weight"])}
            case Kind.patches:
                shape = (hidden, self.spec.channels, *self.spec.patch)
                shapes = {
                    "weight": self._cut(shape, cuts["weight"]),
                    "bias": self._cut((hidden,), cuts["bias"]),
                }
            case _:
                shapes = {"weight": self._cut((layer.features_in,), cuts["weight"])}
                if layer.bias:
                    shapes["bias"] = self._cut((layer.features_in,), cuts["bias"])
        return {name: Operand(shape, self.element_bytes) for name, shape in shapes.items()}

    def _others(self, layer: Layer) -> Iterable[Layer]:
        """The other matrices of a product: they lie between the same borders."""
        for other in layer.others:
            yield Layer(
                path=other.path,
                kind=other.kind,
                role=other.role,
                features_in=other.features_in,
                features_out=other.features_out,
                bias=other.bias,
                sections=other.sections,
                input=layer.input,
                output=layer.output,
            )

    def _rows(self, layer: Layer, cut: Cut) -> int:
        """Of a matrix [out, in], or its bias: each section is cut by itself."""
        parts = cut.parts(self.mesh, 0)
        sections = layer.sections or (layer.features_out,)
        return sum(divided(size, parts, f"outputs of {layer.path}") for size in sections)

    def root(self, *parts: str) -> Unit:
        """The root's parameters with the shapes of one rank, of BEFORE, BEHIND or both.

        A tied matrix is the embedding's where that is, else the head's own, after all others.
        """
        root, layers = self._units[0], [layer for part in parts for layer in self.parts[part]]
        found = [self._local(tensor, layers) for tensor in root.tensors]
        tensors = [tensor for tensor in found if tensor is not None]
        paths = {layer.path for layer in layers}
        for layer in layers:
            if layer.kind is Kind.tied and layer.shares not in paths:
                at = next(i for i, tensor in enumerate(tensors) if tensor.name == f"{layer.shares}.weight")
                tensors.append(Tensor(f"{layer.path}.weight", tensors.pop(at).shape))
        return Unit(root.name, tuple(tensors), root.module)

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        """All of the model's, which share their tensors' shapes."""
        _, *blocks = self._units
        found = [self._local(tensor, self.parts[BLOCK]) for tensor in blocks[0].tensors]
        own = tuple(tensor for tensor in found if tensor is not None)
        return tuple(Unit(block.name, own, block.module) for block in blocks)

    def _local(self, tensor: Tensor, layers: Sequence[Layer]) -> Tensor | None:
        """The rank's part of a parameter; None: it belongs to none of `layers`."""
        for layer in layers:
            for each in (layer, *self._others(layer)):
                for name, what in (
                    (f"{each.path}.weight", "weight"),
                    (f"{each.path}.bias", "bias"),
                    (each.path, "weight"),
                    (f"{each.shares}.weight", "weight"),
                    (f"{each.path.rpartition('.')[0]}.bias", "bias" if each.kind is Kind.tied else ""),
                ):
                    cut = self.layout.parameter_cuts(each).get(what)
                    if tensor.name == name and cut is not None:
                        return Tensor(tensor.name, self._local_shape(tensor, each, cut, what))
        return None

    def _local_shape(self, tensor: Tensor, layer: Layer, cut: Cut, what: str) -> Shape:
        if layer.kind in (Kind.linear, Kind.tied):
            rows = self._rows(layer, cut)
            if what == "bias":
                return (rows,)
            columns = divided(layer.features_in, cut.parts(self.mesh, 1), "features")
            turned = layer.path in _TRANSPOSED.get(self.spec.family, ())
            return (columns, rows) if turned else (rows, columns)
        shape = tensor.shape
        if layer.kind is Kind.embedding:
            shape = (layer.features_in, *shape[1:])  # padded
        return self._cut(shape, cut)

    def _cut(self, shape: Shape, cut: Cut) -> Shape:
        """A cut of fewer dimensions is of the last ones."""
        ahead = max(0, len(shape) - len(cut.dims)) if cut.dims and not cut.dims[0] else 0
        return tuple(
            divided(size, cut.parts(self.mesh, i - ahead) if i >= ahead else 1, f"dimension {i}")
            for i, size in enumerate(shape)
        )


def divided(size: int, parts: int, what: str) -> int:
    """`size` shared out over `parts`.

    Raises:
        ValueError: If it does not divide.
    """
    if size % parts:
        raise ValueError(f"{size} {what} cannot be shared out over {parts} ranks")
    return size // parts
