"""3D tensor parallelism (Bian et al. 2021, Maximizing Parallelism in Distributed Training for Huge Neural Networks).

Ranks lie in a cube of q x q x q. Before a product an activation is cut by sequences over (x, s) and by features over f,
where (s, f) is (y, z) or (z, y); its matrix [out, in] by outputs over (s, x) and by inputs over f. The activation is
gathered over s and the matrix over x; the product is a part of the sum over f, of which each rank gets its sequences.
After it the activation is cut by sequences over (x, f) and by features over s: y and z change places with each product.
Gathered factors are kept for backward, which gathers only the output's gradient.
"""

from dataclasses import dataclass

from ...mesh import Dims
from ...plan import AllGather, Apply, Multiply, Plan, ReduceOp, ReduceScatter, Step
from ..border import Border, Cut
from ..common import BATCH, FEATURES, layer_plan, sums
from ..layers import Kind, LayerRuns, Role
from ..policy import Direction
from .mode import Cuts, Sizes
from .sizes import check_divides, legal_sides

X, Y, Z = "x", "y", "z"
GATHER_X, GATHER_W = "gather_input", "gather_weight"  # streams: both factors come at a time


@dataclass(frozen=True, slots=True)
class Cube:
    """Args:
    side: q.
    """

    side: int

    @property
    def name(self) -> str:
        return "3d"

    @property
    def dims(self) -> Dims:
        return ((X, self.side), (Y, self.side), (Z, self.side))

    @property
    def outer(self) -> Border:
        return Border(batch=(X, Y), features=(Z,))

    @property
    def by_dtensor(self) -> bool:
        return False

    @property
    def vocab_parts(self) -> int:
        return self.side * self.side

    def cuts(self, kind: Kind, role: Role, given: Border) -> Cuts:
        if kind is Kind.embedding:
            return Cuts(self.outer, Cut(((Y, X), (Z,))), Cut())
        if role is Role.whole and kind is Kind.linear:
            return Cuts(given, Cut(((given.features[0], X, given.batch[-1]),)), Cut((given.features,)))
        shared, features = _axes(given)
        output = Border(batch=(X, features), features=(shared,))
        return Cuts(output, Cut(((shared, X), (features,))), Cut(((shared,),)))

    def plan(self, event: LayerRuns) -> Plan | None:
        forward = event.direction is not Direction.backward
        if event.kind is Kind.embedding:
            return layer_plan(self._embedding() if forward else self._embedding_backward())
        if event.kind is Kind.tied and event.input != self.outer:
            raise ValueError(f"a tied product takes the border {self.outer}, got {event.input}")
        if event.role is Role.whole and event.kind is Kind.linear:
            return layer_plan(self._whole(event) if forward else self._whole_backward(event))
        return layer_plan(self._linear(event) if forward else self._linear_backward(event))

    def check(self, sizes: Sizes) -> None:
        q = self.side
        parts = {
            "batch.micro": q * q,
            "model.hidden": q * q,  # a matrix' outputs are cut over two axes
            "model.heads": q,
            "model.kv_heads": q,
            "model.ffn": q * q,
        }
        legal = [side**3 for side in legal_sides(sizes, power=2)]
        check_divides(sizes, parts, mode=self.name, ranks=q**3, legal=legal)

    # ---- products

    def _linear(self, event: LayerRuns) -> list[Step]:
        shared, features = _axes(event.input)
        steps: list[Step] = [
            AllGather(axis=shared, dim=BATCH, stream=GATHER_X, reads=("x",), writes=("x_all",)),
            AllGather(axis=X, dim=0, stream=GATHER_W, reads=("weight",), writes=("weight_all",)),
            Multiply(transpose_right=True, reads=("x_all", "weight_all"), writes=("y_part",)),
            ReduceScatter(axis=features, op=ReduceOp.sum, dim=BATCH, reads=("y_part",), writes=("y",)),
        ]
        if event.bias:
            steps.append(Apply(function="add_bias", reads=("y", "bias"), writes=("y",)))
        return steps

    def _linear_backward(self, event: LayerRuns) -> list[Step]:
        shared, features = _axes(event.input)
        steps: list[Step] = [
            AllGather(axis=features, dim=BATCH, reads=("dy",), writes=("dy_all",)),
            Multiply(reads=("dy_all", "weight_all"), writes=("dx_part",)),
            ReduceScatter(axis=shared, op=ReduceOp.sum, dim=BATCH, reads=("dx_part",), writes=("dx",)),
            Multiply(transpose_left=True, reads=("dy_all", "x_all"), writes=("dweight_part",)),
            ReduceScatter(axis=X, op=ReduceOp.sum, dim=0, reads=("dweight_part",), writes=("dweight",)),
        ]
        if event.bias:
            steps += [
                Apply(function="sum_tokens", reads=("dy_all",), writes=("dbias",)),
                *sums("dbias", (X,)),
            ]
        return steps

    def _whole(self, event: LayerRuns) -> list[Step]:
        """A product whose output has its input's border: all features come to each rank, and all inputs of its
        outputs.
        """
        shared, features = _axes(event.input)
        steps: list[Step] = [
            AllGather(axis=features, dim=FEATURES, stream=GATHER_X, reads=("x",), writes=("x_all",)),
            AllGather(axis=shared, dim=0, stream=GATHER_W, reads=("weight",), writes=("weight_rows",)),
            AllGather(axis=X, dim=0, stream=GATHER_W, reads=("weight_rows",), writes=("weight_all",)),
            Multiply(transpose_right=True, reads=("x_all", "weight_all"), writes=("y",)),
        ]
        if event.bias:
            steps.append(Apply(function="add_bias", reads=("y", "bias"), writes=("y",)))
        return steps

    def _whole_backward(self, event: LayerRuns) -> list[Step]:
        shared, features = _axes(event.input)
        steps: list[Step] = [
            Multiply(reads=("dy", "weight_all"), writes=("dx_part",)),
            ReduceScatter(axis=features, op=ReduceOp.sum, dim=FEATURES, reads=("dx_part",), writes=("dx",)),
            Multiply(transpose_left=True, reads=("dy", "x_all"), writes=("dweight_part",)),
            ReduceScatter(axis=X, op=ReduceOp.sum, dim=0, reads=("dweight_part",), writes=("dweight_rows",)),
            ReduceScatter(axis=shared, op=ReduceOp.sum, dim=0, reads=("dweight_rows",), writes=("dweight",)),
        ]
        if event.bias:
            own = Apply(function="sum_tokens", reads=("dy",), writes=("dbias",))
            steps += [own, *sums("dbias", event.input.batch)]
        return steps

    # ---- words

    def _embedding(self) -> list[Step]:
        """The table is cut by words over (y, x): each rank looks up what it holds of all sequences."""
        return [
            Apply(function="look_up", axes=(Y, X), reads=("ids", "weight"), writes=("y_part",)),
            ReduceScatter(axis=X, op=ReduceOp.sum, dim=BATCH, reads=("y_part",), writes=("y_rows",)),
            ReduceScatter(axis=Y, op=ReduceOp.sum, dim=BATCH, reads=("y_rows",), writes=("y",)),
        ]

    def _embedding_backward(self) -> list[Step]:
        return [
            AllGather(axis=Y, dim=BATCH, reads=("dy",), writes=("dy_rows",)),
            AllGather(axis=X, dim=BATCH, reads=("dy_rows",), writes=("dy_all",)),
            Apply(
                function="look_up_gradient",
                axes=(Y, X),
                reads=("ids", "dy_all", "weight"),
                writes=("dweight",),
            ),
        ]


def _axes(given: Border) -> tuple[str, str]:
    """(the inner axis of the sequences, that of the features): y and z, or z and y."""
    return given.batch[-1], given.features[0]
