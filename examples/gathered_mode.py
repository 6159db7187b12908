"""A tensor-parallel mode of one's own: whole sequences on each rank, and matrices that are gathered for each product.

    twinbed parallel.tensor=2 parallel.tensor_mode=examples/gathered_mode.py:Gathered batch.micro=2

`docs/adding-a-dimension.md` goes through it line by line.
"""

from twinbed.conf.schema import ParallelConf
from twinbed.policies.layout.border import Border, Cut
from twinbed.policies.layout.common import BATCH, layer_plan
from twinbed.policies.layout.layers import Kind, LayerRuns, Role
from twinbed.policies.layout.modes import Cuts, Sizes
from twinbed.policies.layout.policy import Direction
from twinbed.policies.mesh import Dims
from twinbed.policies.plan import AllGather, Apply, Multiply, Plan, ReduceOp, ReduceScatter, Slice, Step

SHARE = "share"  # the axis that this mode adds to the mesh


class Gathered:
    """Matrices lie in parts [out / p, in] over the ranks; activations are cut by sequences."""

    name = "gathered"
    by_dtensor = False
    vocab_parts: int

    def __init__(self, conf: ParallelConf) -> None:
        self.size = self.vocab_parts = conf.tensor

    @property
    def dims(self) -> Dims:
        return ((SHARE, self.size),)

    @property
    def outer(self) -> Border:
        return Border(batch=(SHARE,))

    def cuts(self, kind: Kind, role: Role, given: Border) -> Cuts:
        """Everything is cut in dimension 0; a bias is too, as it goes with its rows."""
        return Cuts(self.outer, Cut(((SHARE,),)), Cut(((SHARE,),)))

    def check(self, sizes: Sizes) -> None:
        for key in ("batch.micro", "model.hidden", "model.ffn"):
            if sizes.keys()[key] % self.size:
                raise ValueError(
                    f"parallel.tensor={self.size} must divide {key}={sizes.keys()[key]} with a mode that gathers"
                )

    def plan(self, event: LayerRuns) -> Plan | None:
        forward = event.direction is not Direction.backward
        if event.kind is Kind.embedding:
            return layer_plan(self._words() if forward else self._words_backward())
        return layer_plan(self._product(event) if forward else self._product_backward(event))

    def _product(self, event: LayerRuns) -> list[Step]:
        steps: list[Step] = [
            AllGather(axis=SHARE, reads=("weight",), writes=("weight_all",)),
            Multiply(transpose_right=True, reads=("x", "weight_all"), writes=("y",)),
        ]
        if event.bias:
            steps += [
                AllGather(axis=SHARE, reads=("bias",), writes=("bias_all",)),
                Apply(function="add_bias", reads=("y", "bias_all"), writes=("y",)),
            ]
        return steps

    def _product_backward(self, event: LayerRuns) -> list[Step]:
        """Backward reads `weight_all`, so the runtime keeps it, and the simulator counts it as kept."""
        steps: list[Step] = [
            Multiply(reads=("dy", "weight_all"), writes=("dx",)),
            Multiply(transpose_left=True, reads=("dy", "x"), writes=("dweight_part",)),
            _scatter("dweight_part", "dweight"),
        ]
        if event.bias:
            steps += [
                Apply(function="sum_tokens", reads=("dy",), writes=("dbias_part",)),
                _scatter("dbias_part", "dbias"),
            ]
        return steps

    def _words(self) -> list[Step]:
        return [
            Slice(axis=SHARE, dim=BATCH, reads=("ids",), writes=("own_ids",)),
            AllGather(axis=SHARE, reads=("weight",), writes=("weight_all",)),
            Apply(function="look_up", reads=("own_ids", "weight_all"), writes=("y",)),
        ]

    def _words_backward(self) -> list[Step]:
        return [
            Apply(
                function="look_up_gradient", reads=("own_ids", "dy", "weight_all"), writes=("dweight_part",)
            ),
            _scatter("dweight_part", "dweight"),
        ]


def _scatter(partial: str, made: str) -> Step:
    return ReduceScatter(axis=SHARE, op=ReduceOp.sum, reads=(partial,), writes=(made,))
