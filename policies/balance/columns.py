"""The paper's way to migrate (SEMI-migration, section 2.6 of its released code), right on both kinds of layers.

A slow rank lends the last contraction columns of each of its matrices. What is right where the released code is not:
of a layer that is cut by its inputs the lent columns of the activation go out too, and partial results join the layer's
own all-reduce, as do gradients of the input of a layer that is cut by its outputs ("reducing merging").

Two ways: `broadcast` (all that is lent goes to all ranks, results are reduced to the owner) and `scatter` (each helper
gets its columns alone, and pieces come back). Weights go out once and are kept for backward; the released code sends
them twice. Movement runs beside the rank's own product: what goes out while helpers compute of their own, and of second
products gradients come back while they do, for they compute what is borrowed first. `column_costs` counts it so.

Which columns move does not matter, as all are computed: the last ones do, so that no list of them has to be sent. A
rank that prunes leaves some of those out that it does not lend; it computes none of others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...conf.schema import Way
from ..layout.common import LAYER_STREAM
from ..mesh import TENSOR
from ..plan import (
    AllReduce,
    Apply,
    Broadcast,
    Fill,
    Gather,
    Join,
    Keep,
    Multiply,
    Part,
    Place,
    Plan,
    ReduceOp,
    ReduceTo,
    Scatter,
    Step,
)
from .assignment import Assignment, kept_columns
from .movement import LEND_STREAM, RETURN_STREAM
from .policy import Leg
from .work import Product


def column_plans(
    assignment: Assignment, product: Product, rank: int, way: Way, *, bias: bool, ratio: float = 0.0
) -> tuple[Plan, Plan]:
    """One rank's forward and backward of a product. All ranks meet in the same collectives, in the same order.

    Operands are those of `Kind.linear`: x, weight and bias make y; dy makes dx, dweight and dbias.

    Args:
        ratio: Of the columns that the rank computes, the share that it leaves out.

    Raises:
        ValueError: If the way is none of columns.
    """
    if way is Way.paired:
        raise ValueError("balance.way=paired moves heads and hidden units: must be broadcast or scatter")
    if not assignment.work.by_columns:
        raise ValueError(f"balance.way={way.value} needs units that are columns (`column_work`)")
    rank_plans = _RankPlans(assignment, product, rank, way is Way.broadcast, ratio)
    forward, backward = rank_plans.first() if product.is_first else rank_plans.second()
    if bias:
        forward = (*forward, Apply(function="add_bias", reads=("y", "bias"), writes=("y",)))
        backward = (*backward, Apply(function="sum_tokens", reads=("dy",), writes=("dbias",)))
    return Plan.of_operands(forward, LAYER_STREAM), Plan.of_operands(backward, LAYER_STREAM)


def leg_plans(assignment: Assignment, product: Product, rank: int, way: Way) -> dict[Leg, Plan]:
    """What `column_plans` moves, without the products: what one rank does in each leg, to be timed.

    Operands are x, weight, y and dy of an even split. Copies stand for what products make.
    """
    rank_plans = _RankPlans(assignment, product, rank, way is Way.broadcast)
    legs = rank_plans.first_legs() if product.is_first else rank_plans.second_legs()
    return {leg: Plan.of_operands(steps, LAYER_STREAM) for leg, steps in legs.items()}


@dataclass(frozen=True, slots=True)
class _Lender:
    """A rank that lends: `kept` of its columns stay, and each rank gets `parts` of the others."""

    rank: int
    kept: int
    parts: tuple[int, ...]

    @property
    def lent(self) -> int:
        return sum(self.parts)

    def first(self, rank: int) -> int:
        """Where a helper's columns begin among those that are lent."""
        return sum(self.parts[:rank])


Both = tuple[tuple[Step, ...], tuple[Step, ...]]


def _to_owner(lender: _Lender, name: str) -> Step:
    return ReduceTo(
        axis=TENSOR,
        root=lender.rank,
        op=ReduceOp.sum,
        stream=RETURN_STREAM,
        reads=(name,),
        writes=(name,),
    )


class _RankPlans:
    def __init__(
        self, assignment: Assignment, product: Product, rank: int, broadcast: bool, ratio: float = 0.0
    ) -> None:
        work, half = assignment.work, product.half
        each = work.columns(product, 1)
        self._rank, self._broadcast = rank, broadcast
        self._columns = work.columns(product, work.units[half])
        self._lenders = tuple(
            _Lender(
                src,
                each * assignment.kept(half, src),
                tuple(each * units for units in assignment.lent(half, src)),
            )
            for src in assignment.sources(half)
        )
        self._own = next((lender for lender in self._lenders if lender.rank == rank), None)
        self._home = self._columns if self._own is None else self._own.kept  # columns that are not lent
        self._computed = kept_columns(self._home, ratio)

    def _helped(self) -> Sequence[_Lender]:
        """Those some of whose columns this rank computes."""
        return [lender for lender in self._lenders if lender.parts[self._rank]]

    # ---- a product that is cut by its outputs: all ranks have x

    def first(self) -> Both:
        forward: list[Step] = []
        for lender in self._lenders:
            forward += self._send(lender, "weight")
        forward += self._own_product("y")
        for lender in self._lenders:
            forward += self._partial_output(lender)
        backward = [self._output_gradient(lender) for lender in self._lenders]
        backward += self._own_gradients("dx_part")
        if self._own is not None:
            backward.append(Place(first=0, total=self._columns, reads=("dx_home",), writes=("dx_part",)))
        for lender in self._helped():
            backward += self._helper_gradients(lender, f"dy_{lender.rank}")
            at = lender.kept + lender.first(self._rank)
            backward.append(
                Place(
                    first=at,
                    total=self._columns,
                    add=True,
                    reads=(f"dx_{lender.rank}",),
                    writes=("dx_part",),
                )
            )
        for lender in self._lenders:
            backward += self._return(lender, "dweight", like="weight")
        backward.append(AllReduce(axis=TENSOR, op=ReduceOp.sum, reads=("dx_part",), writes=("dx",)))
        if self._own is not None:
            backward.append(Join(reads=("dweight_home", "dweight_back"), writes=("dweight",)))
        return tuple(forward), tuple(backward)

    def _partial_output(self, lender: _Lender) -> list[Step]:
        """What a helper makes of columns that are not its own goes to their owner."""
        name = "y" if lender is self._own else f"y_{lender.rank}"
        steps: list[Step] = []
        if lender.parts[self._rank]:
            steps = self._helper_product(lender, name, x="x", first=lender.kept, add=False)
        elif lender is not self._own:
            steps = [Apply(function="zeros", reads=("y",), writes=(name,))]
        return [*steps, _to_owner(lender, name)]

    @staticmethod
    def _output_gradient(lender: _Lender) -> Step:
        """All ranks' dy has one shape, so each reads its own as a place for another's."""
        return Broadcast(
            axis=TENSOR,
            root=lender.rank,
            stream=LEND_STREAM,
            reads=("dy",),
            writes=(f"dy_{lender.rank}",),
        )

    def first_legs(self) -> dict[Leg, list[Step]]:
        outputs: list[Step] = []
        for lender in self._lenders:
            name = f"y_{lender.rank}"
            outputs += [Apply(function="zeros", reads=("y",), writes=(name,)), _to_owner(lender, name)]
        return {
            Leg.weights: [step for lender in self._lenders for step in self._send(lender, "weight")],
            Leg.outputs: outputs,
            Leg.output_gradients: [self._output_gradient(lender) for lender in self._lenders],
            Leg.weight_gradients: self._returned({"dweight": "weight"}),
        }

    # ---- a product that is cut by its inputs: y is summed anyway

    def second(self) -> Both:
        forward: list[Step] = []
        for lender in self._lenders:
            forward += self._send(lender, "weight") + self._send(lender, "x")
        forward += self._own_product("y_part")
        for lender in self._helped():
            x = f"x_lent_{lender.rank}"
            forward += self._helper_product(lender, "y_part", x=x, first=0, add=True)
        forward.append(AllReduce(axis=TENSOR, op=ReduceOp.sum, reads=("y_part",), writes=("y",)))
        backward: list[Step] = []
        for lender in self._helped():
            backward += self._helper_gradients(lender, "dy")
        for lender in self._lenders:
            backward += self._return(lender, "dx", like="x") + self._return(lender, "dweight", like="weight")
        backward += self._own_gradients("dx")
        if self._own is not None:
            backward.append(Join(reads=("dx_home", "dx_back"), writes=("dx",)))
            backward.append(Join(reads=("dweight_home", "dweight_back"), writes=("dweight",)))
        return tuple(forward), tuple(backward)

    def second_legs(self) -> dict[Leg, list[Step]]:
        sent = [self._send(lender, what) for lender in self._lenders for what in ("weight", "x")]
        return {
            Leg.operands: [step for steps in sent for step in steps],
            Leg.gradients: self._returned({"dx": "x", "dweight": "weight"}),
        }

    # ---- what both share

    def _returned(self, likes: Mapping[str, str]) -> list[Step]:
        """What comes back, without the products that make it."""
        steps: list[Step] = []
        for lender in self._lenders:
            for what, like in likes.items():
                made = (f"{what}_{lender.rank}", lender.parts[self._rank])
                if lender is self._own:
                    made = (f"{like}_home", 1)  # of which a gather reads how large a column is
                if made[1]:
                    steps.append(Part(first=0, size=made[1], reads=(like,), writes=made[:1]))
                steps += self._return(lender, what, like=like)
        return steps

    def _send(self, lender: _Lender, what: str) -> list[Step]:
        """The lent columns of a lender's weights or activation."""
        name = f"{what}_lent_{lender.rank}"
        lent = Part(first=lender.kept, size=lender.lent, reads=(what,), writes=(name,))
        if self._broadcast:
            return [
                lent,
                Broadcast(axis=TENSOR, root=lender.rank, stream=LEND_STREAM, reads=(name,), writes=(name,)),
            ]
        owns = lender is self._own
        scatter = Scatter(
            axis=TENSOR,
            root=lender.rank,
            parts=lender.parts,
            dim=-1,
            stream=LEND_STREAM,
            reads=(name if owns else what,),  # of its own a helper reads how large a column is
            writes=(name,),
        )
        return [lent, scatter] if owns else [scatter]

    @property
    def _prunes(self) -> bool:
        return self._computed < self._home

    def _own_product(self, made: str) -> list[Step]:
        if self._own is None and not self._prunes:
            return [Multiply(transpose_right=True, reads=("x", "weight"), writes=(made,))]

        def home(what: str) -> Step:
            if self._prunes:
                return Keep(size=self._computed, of=self._home, reads=(what,), writes=(f"{what}_home",))
            return Part(first=0, size=self._home, reads=(what,), writes=(f"{what}_home",))

        product = Multiply(transpose_right=True, reads=("x_home", "weight_home"), writes=(made,))
        return [home("x"), home("weight"), product]

    def _own_gradients(self, dx: str) -> list[Step]:
        """Of a lender: of the columns that it does not lend, "dx_home" and "dweight_home"."""
        lends = self._own is not None
        dx, dweight = ("dx_home", "dweight_home") if lends else (dx, "dweight")
        home = "_home" if lends or self._prunes else ""
        steps: list[Step] = [
            Multiply(reads=("dy", f"weight{home}"), writes=(dx,)),
            Multiply(transpose_left=True, reads=("dy", f"x{home}"), writes=(dweight,)),
        ]
        if self._prunes:
            steps += [
                Fill(of=self._home, of_input=made == dx, reads=(made,), writes=(made,))
                for made in (dx, dweight)
            ]
        return steps

    def _helper_product(self, lender: _Lender, made: str, *, x: str, first: int, add: bool) -> list[Step]:
        """Of a helper's part of what was lent: `x` holds it from `first` on (a scatter brought that part alone)."""
        who, at = lender.rank, lender.first(self._rank)
        size = lender.parts[self._rank]
        lent = f"weight_lent_{who}"
        taken = 0 if not self._broadcast else at
        taken_x = first + at if x == "x" or self._broadcast else 0
        return [
            Part(first=taken_x, size=size, reads=(x,), writes=(f"x_{who}",)),
            Part(first=taken, size=size, reads=(lent,), writes=(f"weight_{who}",)),
            Multiply(transpose_right=True, add=add, reads=(f"x_{who}", f"weight_{who}"), writes=(made,)),
        ]

    def _helper_gradients(self, lender: _Lender, dy: str) -> list[Step]:
        who = lender.rank
        return [
            Multiply(reads=(dy, f"weight_{who}"), writes=(f"dx_{who}",)),
            Multiply(transpose_left=True, reads=(dy, f"x_{who}"), writes=(f"dweight_{who}",)),
        ]

    def _return(self, lender: _Lender, what: str, *, like: str) -> list[Step]:
        """Gradients of lent columns come back, at their owner "dweight_back" or "dx_back"."""
        who, owns, helps = lender.rank, lender is self._own, bool(lender.parts[self._rank])
        back = f"{what}_back" if owns else f"{what}_all_{who}"
        piece = f"{what}_{who}"
        if not self._broadcast:
            steps: list[Step] = []
            if not helps:  # the owner's says the other sizes
                piece = f"{like}_home" if owns else like
            steps.append(
                Gather(
                    axis=TENSOR,
                    root=who,
                    parts=lender.parts,
                    dim=-1,
                    stream=RETURN_STREAM,
                    reads=(piece,),
                    writes=(back,),
                )
            )
            return steps
        if helps:
            steps = [Place(first=lender.first(self._rank), total=lender.lent, reads=(piece,), writes=(back,))]
        else:
            steps = [
                Part(first=lender.kept, size=lender.lent, reads=(like,), writes=(f"{back}_like",)),
                Apply(function="zeros", reads=(f"{back}_like",), writes=(back,)),
            ]
        return [
            *steps,
            ReduceTo(
                axis=TENSOR, root=who, op=ReduceOp.sum, stream=RETURN_STREAM, reads=(back,), writes=(back,)
            ),
        ]
