"""Ring self-attention as published (Li et al. 2021, Sequence Parallelism, section 3.2): encoders, whole rows of scores.

A rank has its tokens' queries, keys and values. Keys go round, then values, N - 1 hops each; backward sends both round
again, and sums the gradients of all keys and values, of which it keeps its own: in units of B Z (L / N) A elements sent
per rank 2 (N - 1) forward and 6 (N - 1) backward. Nothing of it runs beside computation: the released code waits for
the device at each hop. A rank's scores are [tokens / N, tokens]; kernels that keep them keep a share of 1 / N.

`ring` says the same with less: no scores, 4 (N - 1) backward, sends beside computation, and causal models.
"""

from ..mesh import SEQUENCE
from ..plan import AllGather, AllReduce, Apply, ReduceOp, Slice, Step
from .layers import LayerRuns

TOKENS = 2  # dimension of queries, keys and values


def rsa(event: LayerRuns) -> list[Step]:
    """From [q, k, v] to [y, log_sums]."""
    return [
        *(_go_round(operand) for operand in ("k", "v")),
        Apply(
            function="attention",
            number=event.number,
            reads=("q", "k_all", "v_all"),
            writes=("y", "log_sums"),
        ),
    ]


def rsa_backward(event: LayerRuns) -> list[Step]:
    """From [dy, q, k, v, y, log_sums] to [dq, dk, dv]."""
    gradients = ("dk_all", "dv_all")
    return [
        *(_go_round(operand) for operand in ("k", "v")),
        Apply(
            function="attention_gradient",
            number=event.number,
            reads=("dy", "q", "k_all", "v_all", "y", "log_sums"),
            writes=("dq", *gradients),
        ),
        *(AllReduce(axis=SEQUENCE, op=ReduceOp.sum, reads=(each,), writes=(each,)) for each in gradients),
        *(
            Slice(axis=SEQUENCE, dim=TOKENS, reads=(each,), writes=(each.removesuffix("_all"),))
            for each in gradients
        ),
    ]


def _go_round(operand: str) -> Step:
    return AllGather(axis=SEQUENCE, dim=TOKENS, reads=(operand,), writes=(f"{operand}_all",))
