"""Which kernels a block is made of, and what each keeps for its backward; `root_layers` has what lies around them.

A block is a list of modules; times, recomputation and activations all follow from it. `tensor` cuts it as
Megatron does: columns of the first product of each sublayer, rows of the second; with `sequence_parallel` the
tokens of what lies between them too (Korthikanti et al. 2022, section 4). Collectives are not in here.

Bytes are counted kernel by kernel: "2 + 2" reads one 16-bit tensor and writes one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..conf.model_flop import Matmul, block_matmuls, recompute_flop
from ..conf.model_spec import ModelSpec
from ..conf.schema import Attention, Engine, ExperimentConf, Fusion
from .device import Device, Tally

ATTENTION, MLP = "attention", "mlp"  # the two sublayers of a block
CORE = ("scores", "softmax", "context", "flash")  # what Megatron's selective recomputation repeats
ROTARY = ("llama", "qwen2", "mixtral")  # families with rotary positions and root-mean-square norms
CAUSAL = ("gpt", "gpt2", "llama", "qwen2", "opt", "mixtral")
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Kernels:
    """What `experiment.kernels` comes to for an engine.

    `early_stop`: a recomputation ends with the last tensor that backward needs (torch's non-reentrant
    checkpoint); Megatron's repeats the whole block. `main_gradients`: weight gradients are added to an fp32
    buffer by the product's own kernel.
    """

    flash: bool = True
    fused: bool = False
    dropout: bool = False
    early_stop: bool = True
    main_gradients: bool = False


def kernels_of(experiment: ExperimentConf) -> Kernels:
    """The options given, or what the engine's programs use."""
    given, engine = experiment.kernels, experiment.engine.value
    torch = engine == Engine.fsdp2.value
    old = engine in ("megatron", "deepspeed_2023")  # before flash attention was common
    drops = engine == "megatron" or experiment.train.dropout > 0
    return Kernels(
        flash=(given.attention is Attention.flash) if given.attention is not None else not old,
        fused=(given.fusion is Fusion.fused) if given.fusion is not None else not torch,
        dropout=given.dropout if given.dropout is not None else drops,
        early_stop=torch,
        main_gradients=engine == "megatron",
    )


@dataclass(frozen=True, slots=True)
class Module:
    """One operation of a block. `saved_bytes`: what only it keeps for its backward."""

    name: str
    sublayer: str
    forward: Tally
    backward: Tally
    saved_bytes: float = 0.0
    linear: bool = False


@dataclass(frozen=True, slots=True)
class BlockWork:
    """A block's passes. `recomputed` comes before `backward`, which is without it.

    `saved_bytes`: what a micro-batch keeps of this block until its backward; `working_bytes`: what is there
    beside while that backward runs.
    """

    forward: Tally
    recomputed: Tally
    backward: Tally
    saved_bytes: float
    working_bytes: float


def block_work(
    spec: ModelSpec,
    device: Device,
    *,
    sequence: int,
    micro: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    kernels: Kernels = Kernels(),
    sublayer: str | None = None,
    layer: int = 1,
) -> BlockWork:
    """One block of one rank.

    Args:
        sublayer: Only "attention" or "mlp", each with its norm and residual; None: both.
        layer: Index of the block: selective_layer repeats those with an odd one.

    Raises:
        ValueError: If `tensor` does not divide heads, kv_heads and ffn, or `recompute` is unknown.
    """
    modules = block_modules(
        spec,
        device,
        sequence=sequence,
        micro=micro,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        kernels=kernels,
    )
    again = recomputed_modules(modules, recompute, kernels, layer=layer)
    repeats = bool(again)
    # as published figures count it, whatever of it a kernel skips
    flop = recompute_flop(spec, sequence=sequence, recompute=recompute, micro=micro) // tensor
    flop //= spec.layers if recompute != "selective_layer" else max(1, spec.layers // 2)
    if sublayer is not None:
        modules = tuple(m for m in modules if m.sublayer == sublayer)
        again = tuple(m for m in again if m.sublayer == sublayer)
        flop = sum(m.forward.flop for m in again)
    elif recompute == "selective_layer" and not repeats:
        flop = 0
    saved = sum(m.saved_bytes for m in modules)
    kept = sum(m.saved_bytes for m in modules if m not in again)
    checkpoint = _checkpoint_bytes(
        spec, device, sequence * micro, tensor, sequence_parallel, recompute, repeats
    )
    if sublayer == MLP:
        checkpoint = 0.0
    return BlockWork(
        forward=_sum(m.forward for m in modules),
        recomputed=_sum(m.forward for m in again).with_flop(flop),
        backward=_sum(m.backward for m in modules),
        saved_bytes=kept + checkpoint,
        working_bytes=saved - kept,
    )


def recomputed_modules(
    modules: tuple[Module, ...], recompute: str, kernels: Kernels, *, layer: int = 1
) -> tuple[Module, ...]:
    """The modules whose forward the backward pass repeats."""
    linears = [m for m in modules if m.linear]
    # nothing after the last product's input is needed again
    needed = modules[: modules.index(linears[-1])] if kernels.early_stop else modules
    match recompute:
        case "none":
            return ()
        case "selective":
            return tuple(m for m in modules if m.name in CORE and m.name != "flash")
        case "selective_op":
            kept = (*linears[::2], *(m for m in modules if m.name == "flash"))
            return tuple(m for m in needed if m not in kept)
        case "selective_layer":
            return needed if layer % 2 else ()
        case "full":
            return needed
        case _:
            raise ValueError(f"recompute={recompute!r} is not known")


def _checkpoint_bytes(
    spec: ModelSpec,
    device: Device,
    tokens: int,
    tensor: int,
    sequence_parallel: bool,
    recompute: str,
    repeats: bool,
) -> float:
    """The block's input, where the block is repeated from it."""
    if not repeats or recompute == "selective":
        return 0.0
    cut = tensor if sequence_parallel else 1
    return float(tokens * spec.hidden * device.element_bytes) / cut


def block_modules(
    spec: ModelSpec,
    device: Device,
    *,
    sequence: int,
    micro: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    kernels: Kernels = Kernels(),
) -> tuple[Module, ...]:
    """The operations of one block of one rank, in order.

    What they keep adds up to s b h (34 + 5 a s / h) for a GPT with dropout and unfused attention, as in
    Korthikanti et al. 2022, equation 1, and to its equations 2 and 4 with `tensor`.
    """
    _check_tensor(spec, tensor)
    return Block(spec, device, sequence, micro, tensor, sequence_parallel, kernels).modules()


def _check_tensor(spec: ModelSpec, tensor: int) -> None:
    for key in ("heads", "kv_heads", "ffn"):
        if getattr(spec, key) % tensor:
            raise ValueError(f"parallel.tensor={tensor} must divide model.{key}={getattr(spec, key)}")


class Widths(NamedTuple):
    """What one rank computes of a block."""

    heads: int
    kv_heads: int
    ffn: int


class Block:
    """Builds the modules of one block. All sizes are of one rank.

    Args:
        widths: None: an even share of `tensor` ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        sequence: int,
        micro: int,
        tensor: int,
        sequence_parallel: bool,
        kernels: Kernels,
        widths: Widths | None = None,
    ) -> None:
        self.widths = widths
        self.spec, self.device, self.kernels = spec, device, kernels
        self.element = device.element_bytes
        self.tensor, self.sequence, self.micro = tensor, sequence, micro
        self.tokens = sequence * micro
        self.own_tokens = self.tokens / tensor if sequence_parallel else float(self.tokens)
        if widths is None:
            self.query = spec.heads * spec.head_dim // tensor
            self.keys = spec.kv_heads * spec.head_dim // tensor
        else:
            self.query, self.keys = widths.heads * spec.head_dim, widths.kv_heads * spec.head_dim
        self.products = {p.kind: p for p in block_matmuls(spec, sequence=sequence, micro=micro)}

    def modules(self) -> tuple[Module, ...]:
        attention = [self.norm("norm1", ATTENTION)]
        names = ("qkv",) if "qkv" in self.products else ("q", "k", "v")
        # q, k and v read one tensor, and keep it once
        attention += [self._column(name, ATTENTION, keeps=name == names[0]) for name in names]
        if self.spec.family in ROTARY:
            attention.append(self.rotary())
        attention += self.core()
        attention += [self._row("out", ATTENTION), self.residual("residual1", ATTENTION)]
        wide = ("gate", "up") if self.spec.is_gated else ("fc1",)
        mlp = [self.norm("norm2", MLP)]
        mlp += [self._column(name, MLP, keeps=name == wide[0]) for name in wide]
        mlp += [
            self.activation(),
            self._row("down" if self.spec.is_gated else "fc2", MLP),
            self.residual("residual2", MLP),
        ]
        return (*attention, *mlp)

    def _column(self, name: str, sublayer: str, *, keeps: bool) -> Module:
        p = self.products[name]
        cut = Matmul(name, p.m, p.n // self.tensor, p.k)
        if keeps:
            return self._linear(cut, sublayer, self.own_tokens * p.k * self.element)
        # its input's gradient meets that of the product before it
        made = self._linear(cut, sublayer, 0.0)
        meet = self.device.streamed(3 * self.element * self.tokens * p.k, 1)
        return replace(made, backward=made.backward + meet)

    def _row(self, name: str, sublayer: str) -> Module:
        p = self.products[name]
        cut = Matmul(name, p.m, p.n, p.k // self.tensor)
        # its input is the output that the activation keeps as its own
        return self._linear(cut, sublayer, 0.0)

    def _linear(self, product: Matmul, sublayer: str, saved_bytes: float) -> Module:
        gradient = 2 * FLOAT if self.kernels.main_gradients else None
        forward, backward = self.device.linear(product, gradient_bytes=gradient)
        bias = self.spec.mlp_bias if sublayer == MLP else self.spec.qkv_bias
        if bias:  # its gradient is a sum over the tokens
            backward += self.device.streamed(product.m * product.n * self.element, 1)
        return Module(product.kind, sublayer, forward, backward, saved_bytes, linear=True)

    def norm(self, name: str, sublayer: str) -> Module:
        e, numel = self.element, self.own_tokens * self.spec.hidden
        if self.spec.family in ROTARY and not self.kernels.fused:
            # Meta's RMSNorm, one kernel an operation: to fp32 (e + 4), square (8), mean (4), scale (8), back
            # (4 + e), weight (2 e). Backward: weight (6 e), back (4 + e), scale (24), square (28), sum (12),
            # from fp32 (4 + e). Kept: x in fp32 for both products, and the normed x for the weight.
            forward = self.device.streamed((28 + 4 * e) * numel, 8)
            backward = self.device.streamed((72 + 8 * e) * numel, 17)
            return Module(name, sublayer, forward, backward, (FLOAT + e) * numel)
        # one kernel reads x and writes; backward reads x and the gradient and writes, twice for the weight's
        forward = self.device.streamed(2 * e * numel, 1)
        backward = self.device.streamed((3 + 2) * e * numel, 2)
        return Module(name, sublayer, forward, backward, e * numel)

    def rotary(self) -> Module:
        e, numel = self.element, self.tokens * (self.query + self.keys)
        if self.kernels.fused:
            each = self.device.streamed(2 * e * numel, 2)
        else:  # to fp32 (e + 4), complex product (8), back (4 + e), of queries and of keys
            each = self.device.streamed((16 + 2 * e) * numel, 6)
        return Module("rotary", ATTENTION, each, each)

    def core(self) -> list[Module]:
        spec, e, device = self.spec, self.element, self.device
        heads = spec.heads // self.tensor if self.widths is None else self.widths.heads
        causal = spec.family in CAUSAL
        num = self.micro * heads
        scores = Matmul("scores", self.sequence, self.sequence, spec.head_dim, num)
        context = Matmul("context", self.sequence, spec.head_dim, self.sequence, num)
        io = self.tokens * self.query * e  # one of q, k, v for all query heads, and the context
        modules: list[Module] = []
        repeated = spec.kv_heads != spec.heads and not self.kernels.fused
        keys = io if repeated else self.tokens * self.keys * e
        if repeated:  # keys and values are written once for each query head that shares them
            few = self.tokens * self.keys * e
            copy = device.streamed(2 * (few + io), 2)
            modules.append(Module("repeat", ATTENTION, copy, copy))
        if self.kernels.flash:
            flop = scores.flop + context.flop
            forward, backward = device.flash(
                sequence=self.sequence, head_dim=spec.head_dim, num=num, causal=causal, flop=flop
            )
            # q, k, v and the context, which `out` reads
            return [*modules, Module("flash", ATTENTION, forward, backward, 2 * io + 2 * keys)]
        num_scores = num * self.sequence * self.sequence
        forward, backward = device.batched(scores)
        # queries, keys and values laid out by head
        layout = device.streamed(2 * (io + 2 * keys), 3)
        modules.append(Module("layout", ATTENTION, layout, layout, io + 2 * keys))
        modules.append(Module("scores", ATTENTION, forward, backward))
        modules.append(self._softmax(num_scores, causal))
        forward, backward = device.batched(context)
        modules.append(Module("context", ATTENTION, forward, backward))
        merge = device.streamed(2 * io, 1)
        modules.append(Module("merge", ATTENTION, merge, merge, io))
        return modules

    def _softmax(self, numel: int, causal: bool) -> Module:
        e = self.element
        if self.kernels.fused:  # scale, mask and softmax in one; a causal one reads only what is left
            share = 0.5 if causal else 1.0
            forward = self.device.streamed((share + 1) * e * numel, 1)
            backward = self.device.streamed((2 * share + 1) * e * numel, 1)
        else:  # scale, mask and softmax, each its own kernel
            forward = self.device.streamed(6 * e * numel, 3)
            backward = self.device.streamed(7 * e * numel, 3)
        saved = float(e * numel)
        if self.kernels.dropout:  # reads, writes, and writes a mask of one byte, which backward reads
            forward += self.device.streamed((2 * e + 1) * numel, 1)
            backward += self.device.streamed((2 * e + 1) * numel, 1)
            saved += (e + 1) * numel
        return Module("softmax", ATTENTION, forward, backward, saved)

    def residual(self, name: str, sublayer: str) -> Module:
        """Added to what came in; with dropout and a bias before it, which Megatron does in one kernel."""
        e, numel = self.element, self.own_tokens * self.spec.hidden
        forward = self.device.streamed(3 * e * numel, 1)
        backward = self.device.streamed(3 * e * numel, 1)  # two gradients meet
        saved = 0.0
        if self.kernels.dropout:
            saved = numel
            mask = numel if self.kernels.fused else (2 * e + 1) * numel
            forward += self.device.streamed(mask, 0 if self.kernels.fused else 1)
            backward += self.device.streamed((2 * e + 1) * numel, 1)
        return Module(name, sublayer, forward, backward, saved)

    def activation(self) -> Module:
        e, numel = self.element, self.tokens * self.spec.ffn // self.tensor
        if self.widths is not None:
            numel = self.tokens * self.widths.ffn
        if not self.spec.is_gated:  # one kernel, and it keeps its input and its output
            forward = self.device.streamed(2 * e * numel, 1)
            backward = self.device.streamed(3 * e * numel, 1)
            return Module("activation", MLP, forward, backward, 2 * e * numel)
        if self.kernels.fused:
            forward = self.device.streamed(3 * e * numel, 1)
            backward = self.device.streamed(5 * e * numel, 1)
            return Module("activation", MLP, forward, backward, 3 * e * numel)
        # silu (2 e), product (3 e); backward: both factors (6 e), silu (3 e)
        forward = self.device.streamed(5 * e * numel, 2)
        backward = self.device.streamed(9 * e * numel, 3)
        return Module("activation", MLP, forward, backward, 4 * e * numel)


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total += tally
    return total
