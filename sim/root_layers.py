"""The kernels of the embedding and the head, and what the head keeps for its backward; bytes as in `layers`."""

from ..conf.model_flop import Matmul, root_matmuls
from ..conf.model_spec import ModelSpec
from .device import Device, Tally
from .layers import FLOAT, MLP, Block, Kernels

BEFORE_BLOCKS = ("patch", "embedding_in")  # root products before the blocks; all others follow them
TEXT_HEADS = ("lm", "masked_lm", "pretraining")


def embed_work(
    spec: ModelSpec,
    device: Device,
    *,
    sequence: int,
    micro: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    kernels: Kernels,
) -> tuple[Tally, Tally]:
    """Forward and backward of what lies before the blocks. With `tensor` each rank has a part of the vocabulary."""
    tokens, e = sequence * micro, device.element_bytes
    forward, backward = Tally(), Tally()
    for product in root_matmuls(spec, sequence=sequence, micro=micro):
        if product.kind in BEFORE_BLOCKS:
            ahead, behind = device.linear(product)
            forward, backward = forward + ahead, backward + behind
    # token and position are looked up and added; backward clears the table's gradient and adds rows to it
    numel = tokens * spec.hidden
    forward += device.streamed(3.0 * numel * e, 2)
    backward += device.streamed(3.0 * numel * e + spec.vocab // tensor * spec.embedding_width * e, 2)
    if kernels.dropout:
        own = numel / tensor if sequence_parallel else float(numel)
        forward += device.streamed((2 * e + 1) * own, 1)
        backward += device.streamed((2 * e + 1) * own, 1)
    return forward, backward


def head_work(
    spec: ModelSpec,
    device: Device,
    *,
    sequence: int,
    micro: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    kernels: Kernels,
) -> tuple[Tally, Tally]:
    """Forward and backward of what lies behind the blocks: final norm, logits and loss (of an own part of the
    vocabulary with `tensor`)."""
    tokens, e = sequence * micro, device.element_bytes
    block = Block(spec, device, sequence, micro, 1, False, kernels)
    norm = block.norm("norm", MLP)
    cut = tensor if sequence_parallel else 1
    forward = device.streamed(norm.forward.nbytes / cut, norm.forward.kernels)
    backward = device.streamed(norm.backward.nbytes / cut, norm.backward.kernels)
    for product in root_matmuls(spec, sequence=sequence, micro=micro):
        if product.kind in BEFORE_BLOCKS:
            continue
        if product.kind == "logits":
            product = Matmul("logits", product.m, -(-product.n // tensor), product.k)
        gradient = 2 * FLOAT if kernels.main_gradients else None
        ahead, behind = device.linear(product, gradient_bytes=gradient)
        forward, backward = forward + ahead, backward + behind
    rows = tokens if spec.head in TEXT_HEADS else micro
    classes = -(-spec.vocab // tensor) if spec.head in TEXT_HEADS else spec.classes
    numel = float(rows * classes)
    if kernels.main_gradients:
        # Megatron's vocabulary-parallel loss: to fp32 (e + 4), maximum (4), difference (8), exponential (8), sum
        # (4), quotient (8); backward one pass over fp32 (8), to 16 bits (4 + e)
        forward += device.streamed((36 + e) * numel, 6)
        backward += device.streamed((12 + e) * numel, 2)
    else:
        # torch: to fp32 (e + 4), logarithm of softmax (8); backward: its gradient is written (4), softmax' own
        # (12), to 16 bits (4 + e)
        forward += device.streamed((12 + e) * numel, 3)
        backward += device.streamed((20 + e) * numel, 4)
    return forward, backward


def head_bytes(spec: ModelSpec, device: Device, *, sequence: int, micro: int = 1, tensor: int = 1) -> float:
    """What the head keeps for its backward: its input, the logits, and fp32 of them for the loss."""
    tokens, e = sequence * micro, device.element_bytes
    rows = tokens if spec.head in TEXT_HEADS else micro
    classes = -(-spec.vocab // tensor) if spec.head in TEXT_HEADS else spec.classes
    return float(tokens * spec.hidden * e + rows * classes * (e + FLOAT))
