"""Ring self-attention: keys and values go round, each rank keeps its queries.

Li et al. 2021 (RSA, section 3.2) send keys round once and values round once, hold the scores of all tokens in between,
and all-reduce the whole dK and dV in backward: in units of B Z (L / N) A elements sent per rank, 2 (N - 1) forward and
6 (N - 1) backward. Here a block of keys and values travels as one message, and blocks of the output are merged by the
logarithm of each row's sum of exponentials (Liu et al. 2023, ring attention; the sums are those of FlashAttention), so
that no scores are kept: 2 (N - 1) forward. In backward keys and values go round again, and the gradient of each block
of them is a ring reduce-scatter: it starts at the rank behind the block's owner, each rank adds what its queries give,
and after N - 1 hops it is the owner's: 4 (N - 1). So a rank takes the blocks in the order r - 1, r - 2, ..., r, whose
keys are one hop ahead of those gradients.

Every message but the first one of backward is on its way beside the attention of a block. With fewer key heads than
heads, key heads alone travel. Which queries see which keys, and how zigzag balances it, is in `tokens` (Brandon et al.
2023, striped attention, is the other way to balance).
"""

from typing import Final

from ..mesh import SEQUENCE
from ..plan import Apply, SendRecv, Step
from .layers import LayerRuns
from .tokens import block_pairs

RING_STREAM: Final = "ring"

# Apply(number=s): the block of keys that lies s ranks before this one -> (causal, zigzag)
BLOCKS: Final = {
    "attention_block": (False, False),
    "causal_attention_block": (True, False),
    "zigzag_attention_block": (True, True),
}
BLOCK_GRADIENTS: Final = {f"{name}_gradient": masks for name, masks in BLOCKS.items()}


def ring(event: LayerRuns, *, size: int, zigzag: bool) -> list[Step]:
    """From [q, k, v] to [y, log_sums], each of T tokens of a rank."""
    function = _block_function(event, zigzag)
    steps: list[Step] = [Apply(function="stack", reads=("k", "v"), writes=("kv0",))]
    for s in range(size):
        if s + 1 < size:
            steps.append(_pass_on(f"kv{s}", f"kv{s + 1}"))
        block = ("y_block", "log_sums_block") if s else ("y_sum", "log_sums")
        steps.append(_on_block(function, s, reads=("q", f"kv{s}"), writes=block))
        if s:
            last = s + 1 == size
            steps.append(
                Apply(
                    function="merge_last" if last else "merge",
                    reads=(*block, "y_sum", "log_sums"),
                    writes=("y" if last else "y_sum", "log_sums"),
                )
            )
    return steps


def ring_backward(event: LayerRuns, *, size: int, zigzag: bool) -> list[Step]:
    """From [dy, q, kv0, y, log_sums] to [dq, dk, dv]; `kv0` is the rank's own block, which forward made.

    dq is added up here in fp32 (`accumulate`); what travels is rounded to the dtype of the keys at each hop.
    """
    function = f"{_block_function(event, zigzag)}_gradient"
    steps: list[Step] = [_pass_on("kv0", "kv1")]
    for t in range(size):
        s = (t + 1) % size  # whose keys
        if s and s + 1 < size:
            steps.append(_pass_on(f"kv{s}", f"kv{s + 1}"))
        made = ("dq_block", "dkv_block") if t else ("dq_sum", "dkv0")
        steps.append(_on_block(function, s, reads=("dy", "q", f"kv{s}", "y", "log_sums"), writes=made))
        if t:
            arrived = f"dkv_arrived{t}"
            steps.append(Apply(function="add", reads=("dkv_block", arrived), writes=(f"dkv{t}",)))
        if t + 1 < size:
            steps.append(_pass_on(f"dkv{t}", f"dkv_arrived{t + 1}"))
        if t:
            last = t + 1 == size
            steps.append(
                Apply(
                    function="add" if last else "accumulate",
                    reads=("dq_block", "dq_sum"),
                    writes=("dq" if last else "dq_sum",),
                )
            )
    return [*steps, Apply(function="rows_apart", reads=(f"dkv{size - 1}",), writes=("dk", "dv"))]


def step_pairs(step: Apply, *, size: int, rank: int) -> float | None:
    """How much of a full block of scores a step computes on the `rank`-th of the ring, as `block_pairs`.

    None if it is not attention of a block.
    """
    masks = BLOCKS.get(step.function) or BLOCK_GRADIENTS.get(step.function)
    if masks is None:
        return None
    causal, zigzag = masks
    return block_pairs(size=size, zigzag=zigzag, causal=causal, rank=rank, step=step.number)


def _block_function(event: LayerRuns, zigzag: bool) -> str:
    masks = (event.number == 1, zigzag and event.number == 1)
    return next(name for name, held in BLOCKS.items() if held == masks)


def _on_block(function: str, s: int, *, reads: tuple[str, ...], writes: tuple[str, ...]) -> Step:
    return Apply(function=function, number=s, axes=(SEQUENCE,), reads=reads, writes=writes)


def _pass_on(operand: str, made: str) -> Step:
    return SendRecv(axis=SEQUENCE, shift=1, stream=RING_STREAM, reads=(operand,), writes=(made,))
