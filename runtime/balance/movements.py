"""Rows of units on their way between the ranks of a tensor group, beside computation."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...policies.mesh import TENSOR
from ...policies.plan import Gather, Plan, Scatter
from ..collectives import Collectives, Pending
from ..groups import Groups
from ..ledger import Collecting, Ledger


@dataclass(slots=True)
class Moving:
    """Under way."""

    row: Collecting
    pending: Pending | None
    arrives: Tensor | None  # where rows come to; None at a rank that only sends
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.done = True
            if self.pending is not None:
                self.pending.wait()
            self.row.over()


class Movements:
    """Carries `lend_plans` and `return_plans` out on this rank: plans of one scatter or gather."""

    def __init__(self, groups: Groups, ledger: Ledger, collectives: Collectives) -> None:
        self._group, self._ledger, self._collectives = groups[TENSOR], ledger, collectives

    @property
    def index(self) -> int:
        """This rank's place in the tensor group."""
        return self._group.index

    def takes_part(self, plan: Plan) -> bool:
        return _step(plan).takes_part(self.index)

    def begin(self, plan: Plan, rows: Tensor | None, *, like: Tensor, numel: int, layer: str) -> Moving:
        """Start it; to be called where it `takes_part`.

        Args:
            rows: [units, numbers of one], at a rank that sends.
            like: Of the kind and on the device of what arrives.
            numel: Numbers of a unit.
        """
        step = _step(plan)
        here, whole = self.index == step.root, sum(step.parts)
        receives = here == isinstance(step, Gather)
        arrives = like.new_empty(whole if here else step.parts[self.index], numel) if receives else None
        scatters = isinstance(step, Scatter)
        row = self._ledger.collective(
            op="scatter" if scatters else "gather",
            axis=step.axis,
            group=self._group.ranks,
            payload_bytes=whole * numel * like.element_size(),
            stream=plan.stream,
            layer=layer,
            later=True,
        )
        call = self._collectives.scatter if scatters else self._collectives.gather
        with row:
            pending = call(self._group, rows, arrives, step.root, step.parts, later=True)
        return Moving(row, pending, arrives)


def _step(plan: Plan) -> Scatter | Gather:
    (step,) = plan.steps
    if not isinstance(step, Scatter | Gather):
        raise TypeError(f"plan '{plan.describe()}': units move by one scatter or gather")
    return step


def wait_for(moving: Sequence[Moving]) -> None:
    for each in moving:
        each.wait()
