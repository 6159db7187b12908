"""A model that a script goes on to call as before, of which each rank holds and computes a part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...conf.schema import ParallelConf
from ...policies.layout import ParallelLayout, build_parallel
from ...policies.mesh import DATA
from ..dispatch import activate
from ..dropout import DropoutClock
from ..gradients import clip_factor
from ..layout import LaidOut, tell_places
from ..ledger import Ledger
from ..secondary import WeightsWatch
from ..stack import Stack
from .batch import Share, check_same, share_of
from .callers import Caller
from .replicas import Replicas, Whole, local_part, whole_of_replicas


class ParallelModel(nn.Module):
    """What `parallelize` returns.

    Parameters have the names of the model that was given, and are this rank's parts: any optimizer that treats each
    number by itself (AdamW, SGD) steps them as before.

    Attributes:
        stack: The model that computes.
        rank: Of this process.
        ledger: What was communicated.
        warnings: Keys without effect.
        dropout_clock: Where the training is. A script sets it before each forward, with the first sequence of the whole
            batch; that of a foreign model counts forwards by itself.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        caller: Caller,
        conf: ParallelConf,
        layout: ParallelLayout,
        laid: LaidOut,
        replicas: Replicas,
        ledger: Ledger,
        warnings: tuple[str, ...],
        counts_forwards: bool,
    ) -> None:
        super().__init__()
        self.stack = stack
        self.ledger = ledger
        self.warnings = warnings
        self.dropout_clock = DropoutClock(stack.dropout_clock.seed)
        self._caller, self._conf, self._layout, self._laid = caller, conf, layout, laid
        self._mesh, self.rank = laid.groups.mesh, laid.groups.rank
        self._replicas = replicas
        self._counts_forwards = counts_forwards
        self._sizes: tuple[int, int] | None = None  # sequences of a replica, tokens of each, as last told
        self._stepped = False
        self._watch = WeightsWatch([stack], self._has_stepped)
        self.train(stack.training)

    def forward(self, *args: Any, **given: Any) -> Any:
        """As the model that was given, with the whole batch on every rank; the loss is that of the whole batch.

        Raises:
            ValueError: If the call or the batch's sizes cannot be served, by name.
        """
        inputs, targets = self._caller.read_batch(args, given)
        if not self._layout.is_plain and torch.is_autocast_enabled(inputs.device.type):
            raise RuntimeError(
                "autocast does not reach into matrices that are shared out over ranks: cast the model, as by "
                "model.to(torch.bfloat16), before parallelize takes it"
            )
        share = self._take(inputs, targets)
        training = torch.is_grad_enabled()
        if training and self._stepped:
            self._stepped = False
            if not self._replicas.counts_steps:
                self.ledger.at(iteration=self.ledger.labels.iteration + 1)
        activate(self.ledger)
        self.ledger.at(phase="forward" if training else "eval")
        self._set_clock(share.first)
        self._replicas.forward_begins()
        loss = self.stack(share.inputs, share.targets)
        self.ledger.at(phase="forward" if training else "eval")  # FSDP2's hooks have said backward
        return self._caller.output(_BatchLoss.apply(loss, share.weight, self))  # type: ignore[no-untyped-call]

    def forward_backward(self, *args: Any, **given: Any) -> Tensor:
        """Forward and backward of a batch, for a pipeline, whose stages work on several micro-batches at a time.

        Returns:
            The loss, without a gradient.
        """
        raise RuntimeError("forward_backward is for parallel.pipeline > 1; call the model, then backward")

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters, whole, by the names of the model that was given, which can load them. A collective."""
        with self.ledger.set_up():
            activate(self.ledger)
            parts = {n: whole_of_replicas(p.detach()) for n, p in self.stack.named_parameters()}
            return self._caller.original(self._laid.wholes(parts))

    def full_gradients(self) -> dict[str, Tensor]:
        """As `full_state_dict`, of the gradients that there are, on all ranks alike."""
        with self.ledger.set_up():
            activate(self.ledger)
            found = {n: p.grad for n, p in self.stack.named_parameters() if p.grad is not None}
            wholes = self._laid.wholes({n: whole_of_replicas(gradient) for n, gradient in found.items()})
            return self._caller.original(wholes)

    def save(self, path: str | Path) -> None:
        """Write `full_state_dict` to a file for torch.load, on rank 0; to be called on all ranks."""
        state = self.full_state_dict()
        if self.rank == 0:
            torch.save(state, path)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients so that the L2 norm of the whole model's is at most `max_norm`. A collective.

        torch.nn.utils.clip_grad_norm_ would take the norm of this rank's parts for that of the whole.

        Returns:
            The norm before.
        """
        square, parts = torch.zeros(()), []
        for name, parameter in self.stack.named_parameters():
            if parameter.grad is None:
                continue
            part = local_part(parameter.grad)
            parts.append(part)
            square = square.to(part.device) + part.float().square().sum() / self._copies(name)
        activate(self.ledger)
        self.ledger.at(phase="step")
        if self._mesh.num_ranks > 1:
            dist.all_reduce(square)
        norm = float(square.sqrt())
        factor = clip_factor(norm, max_norm)
        if factor < 1:
            torch._foreach_mul_(parts, factor)
        return norm

    # ---- a module, by its own names

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.stack.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **given: Any) -> Any:
        """Refused: it would be this rank's parts under the names of the whole."""
        raise RuntimeError(
            "state_dict() of a parallel model would hold this rank's parts; full_state_dict(), called on all ranks, "
            "gives whole parameters"
        )

    def load_state_dict(self, *args: Any, **given: Any) -> Any:
        """Refused, as `state_dict`."""
        raise RuntimeError(
            "load_state_dict() of a parallel model: load the model before parallelize takes it"
        )

    def generate(self, *args: Any, **given: Any) -> Any:
        """Refused: there is a forward that gives the loss, and nothing else."""
        raise RuntimeError(
            "generate() of a parallel model is not built: load full_state_dict() into a model of one process, or see "
            "twinbed-generate"
        )

    # ---- of one forward

    def _take(self, inputs: Tensor, targets: Tensor) -> Share:
        if self._sizes is None:
            with self.ledger.set_up():
                check_same(inputs, targets)
        over_all = bool(getattr(self.stack.get_submodule("loss"), "over_all", False))
        share = share_of(
            inputs, targets, layout=self._layout, mesh=self._mesh, rank=self.rank, over_all=over_all
        )
        spec = self.stack.spec
        sizes = (len(share.inputs), spec.sequence if spec.family == "vit" else inputs.shape[1])
        if sizes != self._sizes:
            micro, sequence = sizes
            build_parallel(
                self._conf,
                spec,
                num_ranks=self._mesh.num_ranks,
                micro=micro,
                micro_batches=self._layout.micro_batches,
                sequence=sequence,
            )  # refuses sizes that do not divide
            tell_places(self.stack, self._layout, self._mesh, self.rank, micro=micro, sequence=sequence)
            self._sizes = sizes
        return share

    def _set_clock(self, first: int) -> None:
        told, clock = self.dropout_clock, self.stack.dropout_clock
        clock.seed = told.seed
        clock.at(step=told.step, first_sequence=told.first_sequence + first)
        if self._counts_forwards and self.training and torch.is_grad_enabled():
            told.step += 1

    def _has_stepped(self) -> None:
        self._stepped = True

    def _copies(self, name: str) -> int:
        """Ranks that hold the same numbers of a parameter."""
        placed = self._laid.placed.get(name)
        cut = 1
        for axis in dict.fromkeys(placed.cut.axes) if placed is not None else ():
            cut *= self._mesh.size(axis)
        copies = self._layout.tensor // cut
        return copies * self._mesh.num_replicas if isinstance(self._replicas, Whole) else copies


class _BatchLoss(torch.autograd.Function):
    """The mean over replicas of their weighted losses; backward, each gets its own, for gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float, model: ParallelModel) -> Tensor:
        ctx.weight, ctx.model = weight, model
        mean = loss.detach() * weight
        group = model._laid.groups[DATA]
        if group.size > 1:
            dist.all_reduce(mean, group=group.handle)
            mean /= group.size
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        model: ParallelModel = ctx.model
        activate(model.ledger)
        model.ledger.at(phase="backward")
        model._replicas.backward_begins()
        return gradients[0] * ctx.weight, None, None
