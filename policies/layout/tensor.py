"""The plans of 1D tensor parallelism, with and without Megatron's sequence parallelism.

Shoeybi et al. 2019, section 3: the first matrix of a pair is cut in columns and the second in rows, so that
one sum over the tensor group ends each pair in forward (g), and one begins it in backward (f). Korthikanti
et al. 2022, section 4.2.2: between the pairs each rank has some tokens only, so the sum becomes a
reduce-scatter and an all-gather, and what ran on all ranks alike is shared out.
"""

from dataclasses import dataclass

from ..mesh import TENSOR
from ..plan import (
    AllGather,
    AllReduce,
    Compute,
    Cut,
    Gradient,
    Matmul,
    Plan,
    ReduceOp,
    ReduceScatter,
    Step,
)
from .policy import Direction, Part

MAIN_STREAM = "layout"
SIDE_STREAM = "tensor"  # collectives that run beside a product

# (norm, first matrix, what lies between, second matrix, dropout and residual) of a block's two halves
HALVES = (
    ("attention_norm", "attention_in", "attention", "attention_out", "attention_residual"),
    ("mlp_norm", "mlp_in", "mlp_activation", "mlp_out", "mlp_residual"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlans:
    """Plans of each part of the model.

    Args:
        size: Ranks of a tensor group; with 1 there are no collectives.
        sequence: Megatron's sequence parallelism.
        overlap: A collective that the input's gradient of a first matrix needs runs beside a product that
            does not wait for it, as Megatron's LinearWithGradAccumulationAndAsyncCommunication does.
        recompute: "none", "selective" (attention between its two matrices) or "full" (whole blocks).
    """

    size: int
    sequence: bool
    overlap: bool
    recompute: str

    def plan(self, part: Part, direction: Direction) -> Plan | None:
        """None: nothing to do."""
        steps = self._steps(part, direction)
        return Plan(steps, MAIN_STREAM) if steps else None

    def _steps(self, part: Part, direction: Direction) -> tuple[Step, ...]:
        forward = direction is Direction.forward
        if direction is Direction.recompute:
            if part is not Part.block or self.recompute == "none":
                return ()
            if self.recompute == "selective":
                return (Compute(name="attention", cut=Cut.columns),)
            return self._block()
        match part:
            case Part.embedding:
                return self._embedding() if forward else self._embedding_backward()
            case Part.block:
                return self._block() if forward else self._block_backward()
            case Part.head:
                return self._head() if forward else self._head_backward()
            case Part.loss:
                return self._loss() if forward else (Compute(name="loss", cut=Cut.columns, backward=True),)

    @property
    def _outside(self) -> Cut:
        """What a rank does of the work outside the pairs of matrices."""
        return Cut.tokens if self.sequence else Cut.whole

    def _block(self) -> tuple[Step, ...]:
        steps: list[Step] = []
        for norm, first, between, second, residual in HALVES:
            steps += [
                Compute(name=norm, cut=self._outside),
                *self._enter(),
                Matmul(product=first, cut=Cut.columns),
                Compute(name=between, cut=Cut.columns),
                Matmul(product=second, cut=Cut.rows),
                *self._leave(),
                Compute(name=residual, cut=self._outside),
            ]
        return tuple(steps)

    def _block_backward(self) -> tuple[Step, ...]:
        steps: list[Step] = []
        for norm, first, between, second, residual in reversed(HALVES):
            steps += [
                Compute(name=residual, cut=self._outside, backward=True),
                *self._enter(),  # of the output's gradient
                Matmul(product=second, cut=Cut.rows, gradient=Gradient.input),
                Matmul(product=second, cut=Cut.rows, gradient=Gradient.weight),
                Compute(name=between, cut=Cut.columns, backward=True),
            ]
            steps += self._first_backward(first, len(steps))
            steps.append(Compute(name=norm, cut=self._outside, backward=True, after=self._ends(len(steps))))
        return tuple(steps)

    def _first_backward(self, first: str, at: int) -> list[Step]:
        """The two products of a matrix cut in columns, from position `at` on; `_ends` are its last steps.

        With sequence parallelism the input is gathered again, for each rank kept its own tokens only.
        """
        into_input = Matmul(product=first, cut=Cut.columns, gradient=Gradient.input)
        into_weight = Matmul(product=first, cut=Cut.columns, gradient=Gradient.weight)
        if self.size == 1:
            return [into_input, into_weight]
        if not self.overlap:
            return [*self._enter(), into_input, *self._leave(), into_weight]
        before = (at - 1,) if at else ()
        if not self.sequence:
            return [
                into_input,
                AllReduce(axis=TENSOR, op=ReduceOp.sum, stream=SIDE_STREAM),
                Matmul(product=first, cut=Cut.columns, gradient=Gradient.weight, after=(at,)),
            ]
        return [
            AllGather(axis=TENSOR, stream=SIDE_STREAM),
            Matmul(product=first, cut=Cut.columns, gradient=Gradient.input, after=before),
            ReduceScatter(axis=TENSOR, op=ReduceOp.sum, stream=SIDE_STREAM),
            Matmul(product=first, cut=Cut.columns, gradient=Gradient.weight, after=(at, at + 1)),
        ]

    def _ends(self, at: int) -> tuple[int, ...] | None:
        """After `_first_backward`: None, the step before; with overlap, collective and product alike."""
        return (at - 2, at - 1) if self.size > 1 and self.overlap else None

    def _embedding(self) -> tuple[Step, ...]:
        """Words cut by rows of the table: a rank looks up what it holds, and the sum is the whole."""
        look_up = Compute(name="embedding", cut=Cut.rows)
        total = (AllReduce(axis=TENSOR, op=ReduceOp.sum),) if self.size > 1 else ()
        return (look_up, *total, Compute(name="embedding_dropout", cut=self._outside))

    def _embedding_backward(self) -> tuple[Step, ...]:
        dropout = Compute(name="embedding_dropout", cut=self._outside, backward=True)
        return (dropout, *self._enter(), Compute(name="embedding", cut=Cut.rows, backward=True))

    def _head(self) -> tuple[Step, ...]:
        norm = Compute(name="head_norm", cut=self._outside)
        return (norm, *self._enter(), Matmul(product="logits", cut=Cut.columns))

    def _head_backward(self) -> tuple[Step, ...]:
        steps = self._first_backward("logits", 0)
        norm = Compute(name="head_norm", cut=self._outside, backward=True, after=self._ends(len(steps)))
        return (*steps, norm)

    def _loss(self) -> tuple[Step, ...]:
        """Each rank has the logits of some words: largest logit, the right word's logit, sum of exponentials."""
        sums = (ReduceOp.max, ReduceOp.sum, ReduceOp.sum) if self.size > 1 else ()
        return (Compute(name="loss", cut=Cut.columns), *(AllReduce(axis=TENSOR, op=op) for op in sums))

    def _enter(self) -> tuple[Step, ...]:
        """Before a first matrix: the identity, or all tokens from those that hold some (g-bar)."""
        return (AllGather(axis=TENSOR),) if self.sequence and self.size > 1 else ()

    def _leave(self) -> tuple[Step, ...]:
        """After partial sums: all of the sum for every rank, or some tokens of it for each."""
        if self.size == 1:
            return ()
        if self.sequence:
            return (ReduceScatter(axis=TENSOR, op=ReduceOp.sum),)
        return (AllReduce(axis=TENSOR, op=ReduceOp.sum),)
