"""2D tensor parallelism by SUMMA (Xu et al. 2021, Optimus, section 3), and 2.5D (Wang et al. 2021, Tesseract).

Ranks lie in a square of q rows and q columns; a `row` is the ranks of one row, whose index on it is their column. An
activation is cut by sequences over the rows (axis `column`) and by features over the columns (axis `row`); a matrix
[out, in] by outputs over the columns and by inputs over the rows. In step t of a product the t-th block of one factor
is broadcast along rows, that of the other along columns, beside the product of step t - 1; for a gradient the
product comes first, and is summed to the rank of the t-th block.

2.5D: `depth` such squares, each with its share of the sequences and a copy of the matrices, whose gradients are
summed over depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...mesh import Dims
from ...plan import (
    AllGather,
    Apply,
    Broadcast,
    Multiply,
    Plan,
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    Slice,
    Step,
)
from ..border import Border, Cut
from ..common import BATCH, layer_plan, sums
from ..layers import Kind, LayerRuns, Role
from ..policy import Direction
from .mode import Cuts, Sizes
from .sizes import check_divides, legal_sides

ROW, COLUMN, DEPTH = "row", "column", "depth"


@dataclass(frozen=True, slots=True)
class Summa:
    """Args:
    side: q.
    depth: Squares; 1 is 2D.
    """

    side: int
    depth: int = 1

    @property
    def name(self) -> str:
        return "2d" if self.depth == 1 else "2.5d"

    @property
    def dims(self) -> Dims:
        deep = ((DEPTH, self.depth),) if self.depth > 1 else ()
        return ((ROW, self.side), (COLUMN, self.side), *deep)

    @property
    def outer(self) -> Border:
        deep = (DEPTH,) if self.depth > 1 else ()
        return Border(batch=(*deep, COLUMN), features=(ROW,))

    @property
    def by_dtensor(self) -> bool:
        return False

    @property
    def vocab_parts(self) -> int:
        return self.side

    @property
    def ranks(self) -> int:
        return self.side * self.side * self.depth

    def cuts(self, kind: Kind, role: Role, given: Border) -> Cuts:
        if kind in (Kind.embedding, Kind.tied):  # a table [words, features]
            return Cuts(self.outer, Cut(((COLUMN,), (ROW,))), Cut(((ROW,),)))
        return Cuts(self.outer, Cut(((ROW,), (COLUMN,))), Cut(((ROW,),)))

    def plan(self, event: LayerRuns) -> Plan | None:
        forward = event.direction is not Direction.backward
        match event.kind:
            case Kind.embedding:
                return layer_plan(self._embedding() if forward else self._embedding_backward())
            case Kind.tied:
                return layer_plan(self._tied(event) if forward else self._tied_backward(event))
            case _:
                return layer_plan(self._linear(event) if forward else self._linear_backward(event))

    def check(self, sizes: Sizes) -> None:
        keys = ("model.hidden", "model.heads", "model.kv_heads", "model.ffn")
        parts = {"batch.micro": self.side * self.depth, **dict.fromkeys(keys, self.side)}
        legal = [q * q * self.depth for q in legal_sides(sizes, power=1)]
        check_divides(sizes, parts, mode=self.name, ranks=self.ranks, legal=legal)

    # ---- products

    def _linear(self, event: LayerRuns) -> list[Step]:
        steps: list[Step] = []
        for t, arrive in self._ahead(_row("x"), _column("weight")):
            product = Multiply(transpose_right=True, add=t > 0, reads=(f"x{t}", f"weight{t}"), writes=("y",))
            steps += (*arrive, product)
        return [*steps, *_add_bias(event)]

    def _linear_backward(self, event: LayerRuns) -> list[Step]:
        steps: list[Step] = []
        for t, arrive in self._ahead(_column("weight")):
            steps += (
                *arrive,
                Multiply(reads=("dy", f"weight{t}"), writes=(f"dx_part{t}",)),
                _sum_to(ROW, t, f"dx_part{t}", "dx"),
            )
        for t, arrive in self._ahead(_row("x")):
            steps += (
                *arrive,
                Multiply(transpose_left=True, reads=("dy", f"x{t}"), writes=(f"dweight_part{t}",)),
                _sum_to(COLUMN, t, f"dweight_part{t}", "dweight"),
            )
        return [*steps, *self._over_depth("dweight"), *self._bias_gradient(event)]

    def _tied(self, event: LayerRuns) -> list[Step]:
        """y = x table^T, whose words are cut over the rows and features over the columns."""
        steps: list[Step] = []
        for t, arrive in self._ahead(_column("weight")):
            steps += (
                *arrive,
                Multiply(transpose_right=True, reads=("x", f"weight{t}"), writes=(f"y_part{t}",)),
                _sum_to(ROW, t, f"y_part{t}", "y"),
            )
        return [*steps, *_add_bias(event)]

    def _tied_backward(self, event: LayerRuns) -> list[Step]:
        steps: list[Step] = []
        for t, arrive in self._ahead(_row("dy"), _column("weight")):
            steps += (
                *arrive,
                Multiply(add=t > 0, reads=(f"dy{t}", f"weight{t}"), writes=("dx",)),
                Multiply(transpose_left=True, reads=(f"dy{t}", "x"), writes=(f"dweight_part{t}",)),
                _sum_to(COLUMN, t, f"dweight_part{t}", "dweight"),
            )
        return [*steps, *self._over_depth("dweight"), *self._bias_gradient(event)]

    def _ahead(self, *factors: tuple[str, str]) -> Iterator[tuple[int, tuple[Step, ...]]]:
        """(t, broadcasts to issue before step t): those of step t + 1 too, so that they run beside it."""
        for t in range(self.side):
            wanted = (t, t + 1) if t == 0 else (t + 1,)
            yield (
                t,
                tuple(
                    Broadcast(axis=axis, root=u, stream=axis, reads=(operand,), writes=(f"{operand}{u}",))
                    for u in wanted
                    if u < self.side
                    for axis, operand in factors
                ),
            )

    def _over_depth(self, operand: str) -> tuple[Step, ...]:
        return sums(operand, (DEPTH,)) if self.depth > 1 else ()

    def _bias_gradient(self, event: LayerRuns) -> tuple[Step, ...]:
        if not event.bias:
            return ()
        own = Apply(function="sum_tokens", reads=("dy",), writes=("dbias",))
        return (own, *sums("dbias", self.outer.batch))

    # ---- words

    def _embedding(self) -> list[Step]:
        """The table is cut by words over the rows: each looks up those of all sequences of its square that it holds,
        and gets the sum of its own sequences.
        """
        ids, steps = self._own_square()
        return [
            *steps,
            Apply(function="look_up", axes=(COLUMN,), reads=(ids, "weight"), writes=("y_part",)),
            ReduceScatter(axis=COLUMN, op=ReduceOp.sum, dim=BATCH, reads=("y_part",), writes=("y",)),
        ]

    def _embedding_backward(self) -> list[Step]:
        ids, steps = self._own_square()
        return [
            *steps,
            AllGather(axis=COLUMN, dim=BATCH, reads=("dy",), writes=("dy_all",)),
            Apply(
                function="look_up_gradient",
                axes=(COLUMN,),
                reads=(ids, "dy_all", "weight"),
                writes=("dweight",),
            ),
            *self._over_depth("dweight"),
        ]

    def _own_square(self) -> tuple[str, list[Step]]:
        if self.depth == 1:
            return "ids", []
        return "ids_square", [Slice(axis=DEPTH, dim=BATCH, reads=("ids",), writes=("ids_square",))]


def _row(operand: str) -> tuple[str, str]:
    return ROW, operand


def _column(operand: str) -> tuple[str, str]:
    return COLUMN, operand


def _sum_to(axis: str, root: int, partial: str, made: str) -> Step:
    return ReduceTo(axis=axis, root=root, op=ReduceOp.sum, tree=True, reads=(partial,), writes=(made,))


def _add_bias(event: LayerRuns) -> tuple[Step, ...]:
    return (Apply(function="add_bias", reads=("y", "bias"), writes=("y",)),) if event.bias else ()
