"""1D tensor parallelism (Shoeybi et al. 2019, section 3), with Megatron's sequence parallelism if wanted.

The first matrix of a pair is cut by its outputs, the second by its inputs: one sum over the group ends each pair in
forward, and one begins it in backward. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) each rank
has some tokens only between the pairs, and the sum becomes a reduce-scatter and an all-gather.
"""

from dataclasses import dataclass

from ...mesh import TENSOR, Dims
from ...plan import AllGather, AllReduce, Apply, Multiply, Plan, ReduceOp, ReduceScatter, Step
from ..border import Border, Cut
from ..common import TOKENS, layer_plan, sums
from ..layers import Kind, LayerRuns, Role
from ..policy import Direction
from .mode import Cuts, Sizes
from .sizes import check_divides, legal_1d


@dataclass(frozen=True, slots=True)
class Megatron:
    """Args:
    size: Ranks of the group.
    sequence: Whether each keeps some tokens only between pairs of matrices.
    """

    size: int
    sequence: bool = False

    @property
    def name(self) -> str:
        return "1d"

    @property
    def dims(self) -> Dims:
        return ((TENSOR, self.size),)

    @property
    def outer(self) -> Border:
        return Border(tokens=(TENSOR,)) if self.sequence else Border()

    @property
    def inner(self) -> Border:
        return Border(features=(TENSOR,))

    @property
    def by_dtensor(self) -> bool:
        return self.size > 1 and not self.sequence  # which gathers inputs anew in backward

    @property
    def vocab_parts(self) -> int:
        return self.size

    def cuts(self, kind: Kind, role: Role, given: Border) -> Cuts:
        if kind is Kind.embedding:
            return Cuts(self.outer, Cut(((TENSOR,),)), Cut())
        if kind is Kind.tied or role is Role.columns:
            return Cuts(self.inner, Cut(((TENSOR,),)), Cut(((TENSOR,),)))
        if role is Role.rows:
            return Cuts(self.outer, Cut(((), (TENSOR,))), Cut())
        return Cuts(given, Cut(), Cut())

    def plan(self, event: LayerRuns) -> Plan | None:
        forward = event.direction is not Direction.backward
        if event.kind is Kind.embedding:
            return layer_plan(self._embedding() if forward else self._embedding_backward())
        if event.kind is Kind.tied or event.role is Role.columns:
            return layer_plan(self._columns(event) if forward else self._columns_backward(event))
        if event.role is Role.rows:
            return layer_plan(self._rows(event) if forward else self._rows_backward(event))
        if not self.sequence:
            return None
        return layer_plan(self._whole(event) if forward else self._whole_backward(event))

    def check(self, sizes: Sizes) -> None:
        keys = ["model.heads", "model.kv_heads", "model.ffn"]
        if self.sequence:
            keys.append("batch.sequence")
        parts = dict.fromkeys(keys, self.size)
        check_divides(sizes, parts, mode=self.name, ranks=self.size, legal=legal_1d(sizes))

    # ---- products

    def _enter(self, operand: str) -> tuple[tuple[Step, ...], str]:
        """All tokens of what each rank has some of; the operand that holds them."""
        if not self.sequence:
            return (), operand
        return (
            AllGather(axis=TENSOR, dim=TOKENS, reads=(operand,), writes=(f"{operand}_all",)),
        ), f"{operand}_all"

    def _leave(self, partial: str, made: str) -> tuple[Step, ...]:
        """The sum of partial results: for every rank, or some tokens of it for each."""
        if self.sequence:
            return (
                ReduceScatter(axis=TENSOR, op=ReduceOp.sum, dim=TOKENS, reads=(partial,), writes=(made,)),
            )
        return (AllReduce(axis=TENSOR, op=ReduceOp.sum, reads=(partial,), writes=(made,)),)

    def _columns(self, event: LayerRuns) -> tuple[Step, ...]:
        gather, x = self._enter("x")
        return (
            *gather,
            Multiply(transpose_right=True, reads=(x, "weight"), writes=("y",)),
            *_add_bias(event),
        )

    def _columns_backward(self, event: LayerRuns) -> tuple[Step, ...]:
        gather, x = self._enter("x")  # kept its own tokens only
        return (
            *gather,
            Multiply(reads=("dy", "weight"), writes=("dx_part",)),
            Multiply(transpose_left=True, reads=("dy", x), writes=("dweight",)),
            *_bias_gradient(event),
            *self._leave("dx_part", "dx"),
        )

    def _rows(self, event: LayerRuns) -> tuple[Step, ...]:
        product = Multiply(transpose_right=True, reads=("x", "weight"), writes=("y_part",))
        return (product, *self._leave("y_part", "y"), *_add_bias(event))

    def _rows_backward(self, event: LayerRuns) -> tuple[Step, ...]:
        gather, dy = self._enter("dy")
        bias = _bias_gradient(event)
        if event.bias and self.sequence:
            bias = (Apply(function="sum_tokens", reads=("dy",), writes=("dbias",)), *sums("dbias", (TENSOR,)))
        return (
            *gather,
            Multiply(reads=(dy, "weight"), writes=("dx",)),
            Multiply(transpose_left=True, reads=(dy, "x"), writes=("dweight",)),
            *bias,
        )

    def _whole(self, event: LayerRuns) -> tuple[Step, ...]:
        """Each rank has its tokens, and all of the matrix."""
        return (Multiply(transpose_right=True, reads=("x", "weight"), writes=("y",)), *_add_bias(event))

    def _whole_backward(self, event: LayerRuns) -> tuple[Step, ...]:
        bias = _bias_gradient(event)
        return (
            Multiply(reads=("dy", "weight"), writes=("dx",)),
            Multiply(transpose_left=True, reads=("dy", "x"), writes=("dweight",)),
            *sums("dweight", (TENSOR,)),
            *bias,
            *(sums("dbias", (TENSOR,)) if bias else ()),
        )

    # ---- words

    def _embedding(self) -> tuple[Step, ...]:
        """A rank looks up what it holds, and the sum is the whole."""
        look_up = Apply(function="look_up", axes=(TENSOR,), reads=("ids", "weight"), writes=("y_part",))
        return (look_up, *self._leave("y_part", "y"))

    def _embedding_backward(self) -> tuple[Step, ...]:
        gather, dy = self._enter("dy")
        return (
            *gather,
            Apply(
                function="look_up_gradient", axes=(TENSOR,), reads=("ids", dy, "weight"), writes=("dweight",)
            ),
        )


def _add_bias(event: LayerRuns) -> tuple[Step, ...]:
    return (Apply(function="add_bias", reads=("y", "bias"), writes=("y",)),) if event.bias else ()


def _bias_gradient(event: LayerRuns) -> tuple[Step, ...]:
    return (Apply(function="sum_tokens", reads=("dy",), writes=("dbias",)),) if event.bias else ()
