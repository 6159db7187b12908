"""One rank's part in balancing its tensor group: it measures, tells the policy, and puts what that answers in force.

All ranks of a group have equal policies and are told the same, so all answer alike; `outcome` compares them.

A run that goes on from a checkpoint begins anew: with an even split, no scores of columns, and a policy that has been
told nothing. Parameters and optimizer states lie as in an even split throughout, so nothing of balancing is saved.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...conf.schema import PrunedState, Selection, Way
from ...policies.balance import (
    MEASURE_STREAM,
    Assignment,
    BalanceAction,
    BalanceEvent,
    BalancePolicy,
    ChangesMeasured,
    GroupMeasured,
    Half,
    describe_balance_actions,
    least_room_bytes,
)
from ...policies.mesh import TENSOR
from ..collectives import Collectives
from ..groups import Groups
from ..ledger import Ledger
from .balanced import Balanced
from .frozen import frozen
from .pretest import time_columns, time_movements
from .pretest_products import time_products
from .stopwatch import Stopwatch

CHANGES_LAYER = "changes"


@dataclass(slots=True)
class BalanceReport:
    """What a rank has to tell of a run. A period is what one measurement ends.

    Attributes:
        ranks: Of the tensor group.
        periods: Steps that were done, times and free memory of all ranks, what is in force from then on, and
            what the policy predicts of it (None: it does not say).
        gather_s, decide_s: Of each period: until all had told their times, which is mostly a wait for the slowest; and
            what deciding took.
        least_room_bytes: Free memory in which a rank of the group can borrow one unit.
    """

    ranks: tuple[int, ...]
    policy: str
    periods: list[dict[str, Any]] = field(default_factory=list)
    gather_s: list[float] = field(default_factory=list)
    decide_s: list[float] = field(default_factory=list)
    least_room_bytes: int = 0


class Balancer:
    """Told by the trainer where its steps begin and end.

    Args:
        balanced: Whose assignment it changes.
        policy: Of the tensor group.
        free_bytes: What memory is left on this rank, now.
        device: Of this rank.
    """

    def __init__(
        self,
        balanced: Balanced,
        policy: BalancePolicy,
        *,
        stopwatch: Stopwatch,
        groups: Groups,
        ledger: Ledger,
        collectives: Collectives,
        free_bytes: Callable[[], int],
        device: torch.device,
    ) -> None:
        self.balanced, self._policy, self._conf = balanced, policy, balanced.conf
        self._stopwatch, self._free_bytes, self._device = stopwatch, free_bytes, device
        self._group, self._ledger, self._collectives = groups[TENSOR], ledger, collectives
        self._first_step: int | None = None
        self._since = 0  # steps since the last measurement
        self.report = BalanceReport(
            self._group.ranks, policy.name, least_room_bytes=least_room_bytes(self.assignment.work)
        )

    @property
    def assignment(self) -> Assignment:
        return self.balanced.assignment

    def run_begins(self, first_step: int) -> None:
        """Before the first step, on all ranks at once: movements are timed where units may move, and products, but by
        columns.
        """
        if not self._conf.pretest:
            return
        self._ledger.at(iteration=first_step, phase="setup", layer="")
        events: list[BalanceEvent] = []
        if self._conf.moves:
            timed = time_movements if self._conf.way is Way.paired else time_columns
            events += timed(self.balanced, device=self._device)
        if not self.balanced.work.by_columns:
            events += time_products(self.balanced, device=self._device)
        for event in events:
            self._decide(event)

    def step_begins(self, step: int) -> None:
        if self._first_step is None:
            self._first_step = step
            self._stopwatch.read()  # what came before is of no step
        if self._conf.prunes and (step == self._first_step or self._refreshes(step)):
            for product in self.balanced.products():
                product.looks = product.columns.is_observed

    def stepping(
        self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[object]:
        """Around the optimizer's step: what it does to columns that were left out is undone, if that is wanted.

        Args:
            parameters: What it steps, by name.
        """
        if self._conf.pruned_state is not PrunedState.frozen or not self._conf.prunes:
            return nullcontext()
        return frozen(self.balanced.products(), parameters, optimizer)

    def step_ends(self, step: int) -> None:
        """After the optimizer's step: what is decided now holds from the next one on."""
        self._ledger.at(iteration=step, phase="step", layer="")
        self._since += 1
        if self._conf.prunes:
            self._columns_of(step)
        if (step + 1) % self._conf.period == 0:
            self._measure(step)

    # ---- columns

    def _refreshes(self, step: int) -> bool:
        """Weights are looked at in the forward of the last step before a refresh."""
        return (step + 1) % self._conf.refresh == 0

    def _columns_of(self, step: int) -> None:
        products = list(self.balanced.products())
        for product in products:
            product.columns.trained(product.left_out)
        if not self._refreshes(step):
            return
        for product in products:
            product.columns.refresh()
        if self._conf.selection is Selection.differentiated:
            own = torch.tensor([product.columns.change for product in products], device=self._device)
            changes = self._of_all(own, CHANGES_LAYER)
            shown = tuple(tuple(float(f"{x:.3g}") for x in rank) for rank in changes.tolist())
            self._decide(ChangesMeasured(step + 1, shown))

    # ---- times

    def _measure(self, step: int) -> None:
        began = time.perf_counter()
        took, steps, self._since = self._stopwatch.read(), self._since, 0
        products = [took.products[half] // steps for half in Half]
        beside = [took.between[half] // steps for half in Half] + [took.around // steps]
        own = torch.tensor([*products, self._free_bytes(), *beside], device=self._device)
        told = self._of_all(own, "").tolist()
        gathered = time.perf_counter()
        columns = [tuple(column) for column in zip(*told, strict=True)]
        if self.assignment.work.by_columns:  # what is between products has movement in it
            columns = columns[: -len(beside)]
        event = GroupMeasured(step + 1, *columns)
        self._decide(event)
        self.report.gather_s.append(gathered - began)
        self.report.decide_s.append(time.perf_counter() - gathered)
        self.report.periods.append(
            {
                "step": step + 1,
                "attention_ns": list(event.attention_ns),
                "ffn_ns": list(event.ffn_ns),
                "attention_between_ns": list(event.attention_between_ns),
                "ffn_between_ns": list(event.ffn_between_ns),
                "around_ns": list(event.around_ns),
                "free_bytes": list(event.free_bytes),
                "actions": describe_balance_actions(self.assignment.actions),
                "predicted_speedup": getattr(self._policy, "predicted_speedup", None),
            }
        )

    def _of_all(self, own: Tensor, layer: str) -> Tensor:
        """[ranks, numbers]."""
        group = self._group
        out = own.new_empty(group.size, len(own))
        with self._ledger.collective(
            op="all_gather",
            axis=group.axis,
            group=group.ranks,
            payload_bytes=out.numel() * out.element_size(),
            stream=MEASURE_STREAM,
            layer=layer,
        ):
            self._collectives.all_gather(group, own, out.view(-1))
        return out

    # ---- decisions

    def _decide(self, event: BalanceEvent) -> None:
        """
        Raises:
            ValueError: If what the policy answers cannot be carried out.
        """
        actions: tuple[BalanceAction, ...] | None = self._policy.decide(event)
        self._ledger.decided_balance(event, actions)
        if actions is None:
            return
        try:
            assignment = Assignment(self.balanced.work, tuple(actions))
        except ValueError as err:
            raise ValueError(f"policy {self._policy.name!r}: {err}") from err
        self.balanced.assignment = assignment
