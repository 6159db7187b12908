"""What local work takes of a device: steps of plans by their shapes, layers without a plan, and what lies between.

Modules that no plan names are those of `layers.Block`; each is cut by the border at which it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...conf.model_flop import Matmul
from ...policies.layout import Border, Kind, Layer, num_parts
from ...policies.layout.ring import BLOCK_GRADIENTS, BLOCKS
from ...policies.layout.tokens import block_pairs
from ..device import Device, Tally
from ..layers import FLOAT, MLP, ROTARY, Block, Kernels, Module
from .operands import LocalStep, Operand
from .shapes import Shapes

# Kernels of a function that is not one, and the bytes that they move for each element of the first operand besides
# reading and writing their operands once. In torch's own passes: logits to fp32 (e + 4, of which e is read anyhow),
# less the largest (8), exponentials (8), their sum (4); in backward the same and the quotient (8), back (4).
_PASSES = {
    "layer_norm_sums": (2, 0),
    "layer_norm_gradient_sums": (2, 0),
    "layer_norm_gradient": (2, 0),
    "rms_norm_gradient": (2, 0),
    "look_up_gradient": (2, 0),
    "exponentials": (4, 24),
    "loss_gradient": (5, 32),
}


@dataclass(frozen=True, slots=True)
class Between:
    """A module that no plan names, with what it keeps for backward."""

    name: str
    forward: Tally
    backward: Tally
    saved_bytes: float


class Works:
    """Of one model, layout and device.

    Args:
        shapes: Local shapes.
    """

    def __init__(self, shapes: Shapes, device: Device, kernels: Kernels) -> None:
        self._shapes = shapes
        self._device = device
        self._kernels = kernels

    # ---- steps of a plan

    def step(self, step: LocalStep) -> Tally:
        """A product by its shape; attention by its heads; other functions by what they read and write."""
        if step.product is not None:
            return self._product(step)
        if step.name in ("attention", "attention_gradient"):
            return self._attention_step(step)
        if step.name in BLOCKS or step.name in BLOCK_GRADIENTS:
            return _share_of_places(self.by_place(step))
        kernels, extra = _PASSES.get(step.name, (1, 0))
        largest = max((operand.numel for operand in step.reads), default=0)
        return self._device.streamed(float(step.nbytes + extra * largest), kernels)

    def passes(self, nbytes: int, kernels: int) -> Tally:
        """Kernels that copy; nothing where there are none."""
        return self._device.streamed(float(nbytes), kernels) if kernels else Tally()

    def _product(self, step: LocalStep) -> Tally:
        product = step.product
        assert product is not None
        operands = sum(operand.nbytes for operand in (*step.reads, *step.writes))
        made = sum(operand.numel for operand in step.writes)
        again = (step.nbytes - operands) // made if made else 0  # a sum is read too
        element = step.writes[0].element_bytes
        return self._device.product(product, tokens=step.tokens, result_bytes=element + again)

    def by_place(self, step: LocalStep) -> tuple[Tally, ...]:
        """Attention of a block of a ring: what each place on it sees of the block's keys. (): all do the same.

        Operations are counted as published figures do, causal ones over the whole square.
        """
        masks = BLOCKS.get(step.name) or BLOCK_GRADIENTS.get(step.name)
        if masks is None:
            return ()
        backward = step.name in BLOCK_GRADIENTS
        q, keys = (step.reads[i + backward] for i in (0, 1))
        k = Operand(keys.shape[1:], keys.element_bytes)  # keys and values are stacked
        whole = self._attention(q, k, causal=False)[backward]
        causal, zigzag = masks
        size = self._shapes.layout.sequence
        found = []
        for place in range(size):
            seen = block_pairs(size=size, zigzag=zigzag, causal=causal, rank=place, step=step.number)
            found.append(_scaled(whole, seen).with_flop(round(whole.flop * seen * (2 if causal else 1))))
        return tuple(found)

    def _attention_step(self, step: LocalStep) -> Tally:
        backward = "gradient" in step.name
        q, k = (step.reads[i + backward] for i in (0, 1))
        return self._attention(q, k, causal=bool(step.number))[backward]

    def scores_bytes(self, step: LocalStep) -> float:
        """What attention keeps of its scores besides operands: probabilities, and with dropout also what is left of
        them and a mask of one byte. 0 of one kernel, and of a ring's blocks, which work them out again.
        """
        if step.name != "attention" or self._kernels.flash:
            return 0.0
        q, k = step.reads[:2]
        batch, heads, tokens, _ = q.shape
        each = 2 * q.element_bytes + 1 if self._kernels.dropout else q.element_bytes
        return float(each * batch * heads * tokens * k.shape[2])

    def _attention(self, q: Operand, k: Operand, *, causal: bool) -> tuple[Tally, Tally]:
        """Forward and backward. Shapes: [batch, heads, tokens, head size]."""
        batch, heads, tokens, head_dim = q.shape
        keys = k.shape[2]
        flop = 4 * batch * heads * tokens * keys * head_dim
        if self._kernels.flash and tokens == keys:
            return self._device.flash(
                sequence=tokens, head_dim=head_dim, num=batch * heads, causal=causal, flop=flop
            )
        scores = self._device.batched(Matmul("scores", tokens, keys, head_dim, batch * heads))
        context = self._device.batched(Matmul("context", tokens, head_dim, keys, batch * heads))
        numel = batch * heads * tokens * keys
        forward = self._device.streamed(6.0 * q.element_bytes * numel, 3)
        backward = self._device.streamed(7.0 * q.element_bytes * numel, 3)
        if self._kernels.dropout and not self._kernels.flash:  # as `layers` has it
            mask = self._device.streamed((2.0 * q.element_bytes + 1) * numel, 1)
            forward, backward = forward + mask, backward + mask
        return scores[0] + forward + context[0], scores[1] + backward + context[1]

    # ---- layers without a plan

    def layer(self, layer: Layer, before: Layer | None) -> tuple[Tally, Tally, float]:
        """Forward, backward, and what it keeps for backward besides its parameters."""
        operands = self._shapes.forward(layer, before)
        _, made = self._shapes.output(layer, before)
        match layer.kind:
            case Kind.linear | Kind.tied:
                return self._linear(operands, made)
            case Kind.embedding:
                table = operands["weight"].nbytes
                forward = self._device.streamed(2.0 * made.nbytes, 1)
                return forward, self._device.streamed(2.0 * made.nbytes + table, 2), 0.0
            case Kind.patches:
                return self._patches(operands, made)
            case Kind.positions | Kind.first_token:
                moved = self._device.streamed(float(made.nbytes), 1)
                return moved, moved, 0.0
            case Kind.layer_norm | Kind.rms_norm:
                norm = self._whole_block.norm("norm", MLP)
                return self._share_of(norm, self._share(layer.input, layer.features_in))
            case Kind.attention:
                modules = self._core(layer)
                forward, backward, saved = Tally(), Tally(), 0.0
                for module in modules:
                    forward, backward = forward + module.forward, backward + module.backward
                    saved += module.saved_bytes
                return forward, backward, saved
            case Kind.loss:
                logits = operands["logits"]
                each = logits.element_bytes
                forward = self._device.streamed(float((12 + each) * logits.numel), 3)
                backward = self._device.streamed(float((20 + each) * logits.numel), 4)
                return forward, backward, float((each + FLOAT) * logits.numel)
            case _:
                return Tally(), Tally(), 0.0

    def _linear(self, operands: dict[str, Operand], made: Operand) -> tuple[Tally, Tally, float]:
        x, weight = operands["x"], operands["weight"]
        rows, columns = weight.shape
        forward, backward = self._device.linear(Matmul("linear", prod(x.shape[:-1]), rows, columns))
        if "bias" in operands:
            backward += self._device.streamed(float(made.nbytes), 1)
        return forward, backward, float(x.nbytes)

    def _patches(self, operands: dict[str, Operand], made: Operand) -> tuple[Tally, Tally, float]:
        weight = operands["weight"].shape
        product = Matmul("patch", prod(made.shape[:-1]), weight[0], prod(weight[1:]))
        forward, backward = self._device.linear(product)
        return forward, backward, float(operands["images"].nbytes)

    def _core(self, layer: Layer) -> list[Module]:
        """Attention's modules as one rank has them: its sequences, its heads."""
        mesh, border = self._shapes.mesh, layer.input
        micro = self._shapes.micro // num_parts(mesh, border.batch)
        heads = num_parts(mesh, border.features)
        widths = self._shapes.widths
        block = Block(
            self._shapes.spec, self._device, self._tokens, micro, heads, False, self._kernels, widths
        )
        return block.core()

    # ---- between the layers of a block

    def between(self, layers: tuple[Layer, ...]) -> dict[int, tuple[Between, ...]]:
        """What follows each layer of a block, by its position: rotations, an activation, residuals."""
        found: dict[int, tuple[Between, ...]] = {}
        linears = [i for i, layer in enumerate(layers) if layer.kind is Kind.linear]
        if len(linears) != 4:
            return found
        qkv, out, widens, narrows = linears
        inner, wide = layers[qkv].output, layers[widens].output
        if self._shapes.spec.family in ROTARY:
            found[qkv] = (self._of(self._cut_block(inner).rotary()),)
        found[widens] = (self._of(self._cut_block(wide).activation()),)
        for at, name in ((out, "residual1"), (narrows, "residual2")):
            border, hidden = layers[at].output, layers[at].features_out
            residual = self._whole_block.residual(name, MLP)
            found[at] = (Between(name, *self._share_of(residual, self._share(border, hidden))),)
        return found

    def _of(self, module: Module) -> Between:
        return Between(module.name, module.forward, module.backward, module.saved_bytes)

    def _cut_block(self, border: Border) -> Block:
        """A block with the sequences, tokens and features of one rank."""
        mesh = self._shapes.mesh
        micro = self._shapes.micro // num_parts(mesh, border.batch)
        tokens = self._tokens // num_parts(mesh, border.tokens)
        features = num_parts(mesh, border.features)
        spec, widths = self._shapes.spec, self._shapes.widths
        return Block(spec, self._device, tokens, micro, features, False, self._kernels, widths)

    @property
    def _tokens(self) -> int:
        return self._shapes.tokens

    @property
    def _whole_block(self) -> Block:
        """Of what the ranks of a tensor group hold together."""
        shapes = self._shapes
        return Block(shapes.spec, self._device, shapes.tokens, shapes.micro, 1, False, self._kernels)

    def _share(self, border: Border, features: int) -> float:
        whole = self._shapes.micro * self._shapes.tokens * features
        return self._shapes.activation(border, features, self._shapes.tokens).numel / whole

    def _share_of(self, module: Module, share: float) -> tuple[Tally, Tally, float]:
        forward, backward = (
            self._device.streamed(tally.nbytes * share, tally.kernels)
            for tally in (module.forward, module.backward)
        )
        return forward, backward, module.saved_bytes * share


def _scaled(tally: Tally, share: float) -> Tally:
    """A part of the work of one kernel; nothing launches none."""
    if not share:
        return Tally()
    return Tally(
        tally.flop,
        tally.matmul_ns * share,
        tally.busy_ns * share,
        tally.other_ns,
        tally.nbytes * share,
        tally.kernels,
    )


def _share_of_places(tallies: Sequence[Tally]) -> Tally:
    """The mean."""
    total = Tally()
    for tally in tallies:
        total += tally
    count = len(tallies)
    return Tally(
        total.flop // count,
        total.matmul_ns / count,
        total.busy_ns / count,
        total.other_ns / count,
        total.nbytes / count,
        total.kernels // count,
    )
