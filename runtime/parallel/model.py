"""A model that a script goes on to call as before, of which each rank holds and computes a part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from ..groups import Groups
from ..layout import LaidOut, tell_places
from ..ledger import Ledger
from ..secondary import WeightsWatch
from ..stack import Stack
from .batch import Share, check_same, check_words, shares_of
from .callers import Caller
from .replicas import Replicas, Whole, local_part, whole_of_replicas


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of the model: all of it, laid out, or a chunk of its stage of a pipeline."""

    chunk: int
    stack: Stack
    laid: LaidOut
    replicas: Replicas


class ParallelModel(nn.Module):
    """What `parallelize` returns.

    Parameters have the names of the model that was given, and are this rank's parts: any optimizer that treats each
    number by itself (AdamW, SGD) steps them as before.

    Attributes:
        stacks: The parts of the model that compute here.
        rank: Of this process.
        device_mesh: torch's mesh of all axes (`Groups.device_mesh`), for a script's own collectives.
        ledger: What was communicated.
        warnings: Keys without effect.
        dropout_clock: Where the training is. A script sets it before each forward, with the first sequence of the whole
            batch; that of a foreign model counts forwards by itself.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        caller: Caller,
        conf: ParallelConf,
        layout: ParallelLayout,
        groups: Groups,
        ledger: Ledger,
        warnings: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(part.stack for part in parts)
        self.ledger = ledger
        self.warnings = warnings
        self.dropout_clock = DropoutClock(parts[0].stack.dropout_clock.seed)
        self._parts = parts
        self._caller, self._conf, self._layout = caller, conf, layout
        self._groups, self._mesh, self.rank = groups, groups.mesh, groups.rank
        self.device_mesh = groups.device_mesh(next(parts[0].stack.parameters()).device)
        self._sizes: tuple[int, int] | None = None  # sequences of a micro-batch, tokens of each, as last told
        self._stepped = False
        self._watch = WeightsWatch([part.stack for part in parts], self._has_stepped)
        self.train(parts[0].stack.training)

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
        (share,) = self._take(inputs, targets)
        self._begin_forward()
        self._set_clock(share.first)
        self._count_forward()
        (part,) = self._parts
        part.replicas.forward_begins()
        loss = part.stack(share.inputs, share.targets)
        self.ledger.at(phase=_phase())  # FSDP2's hooks have said backward
        return self._caller.output(_BatchLoss.apply(loss, share.weight, self))  # type: ignore[no-untyped-call]

    def forward_backward(self, *args: Any, **given: Any) -> Tensor:
        """A forward and its loss's backward: what a script can call whether there is a pipeline or not.

        Returns:
            The loss, without a gradient.
        """
        output = self(*args, **given)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters, whole, by the names of the model that was given, which can load them. A collective."""
        return self._wholes(
            [{n: p.detach() for n, p in part.stack.named_parameters()} for part in self._parts]
        )

    def full_gradients(self) -> dict[str, Tensor]:
        """As `full_state_dict`, of the gradients that there are, on all ranks alike."""
        return self._wholes(
            [
                {n: p.grad for n, p in part.stack.named_parameters() if p.grad is not None}
                for part in self._parts
            ]
        )

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
        for name, parameter in self.named_parameters():
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
        for part in self._parts:
            yield from part.stack.named_parameters(prefix, recurse, remove_duplicate)

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

    def _begin_forward(self) -> None:
        activate(self.ledger)
        if torch.is_grad_enabled() and self._stepped:
            self._stepped = False
            self.ledger.at(iteration=self.ledger.labels.iteration + 1)
        self.ledger.at(phase=_phase())

    def _take(self, inputs: Tensor, targets: Tensor, *, count: int = 1) -> list[Share]:
        if self._sizes is None:
            with self.ledger.set_up():
                check_same(inputs, targets)
        stack = self._parts[0].stack
        check_words(inputs, targets, known=stack.spec.vocab or stack.spec.classes)
        shares = shares_of(
            inputs,
            targets,
            layout=self._layout,
            mesh=self._mesh,
            rank=self.rank,
            over_all=bool(getattr(stack.get_submodule("loss"), "over_all", False)),
            count=count,
        )
        spec = stack.spec
        sizes = (len(shares[0].inputs), spec.sequence if spec.family == "vit" else inputs.shape[1])
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
            for part in self._parts:
                tell_places(part.stack, self._layout, self._mesh, self.rank, micro=micro, sequence=sequence)
            self._sizes = sizes
        return shares

    def _set_clock(self, first: int) -> None:
        """Sequences from `first` of the whole batch on are computed next."""
        told = self.dropout_clock
        for part in self._parts:
            part.stack.dropout_clock.seed = told.seed
            part.stack.dropout_clock.at(step=told.step, first_sequence=told.first_sequence + first)

    def _count_forward(self) -> None:
        if self._caller.counts_forwards and self.training and torch.is_grad_enabled():
            self.dropout_clock.step += 1

    def mean_of_replicas(self, loss: Tensor) -> Tensor:
        """Over `data`; written over."""
        group = self._groups[DATA]
        if group.size > 1:
            dist.all_reduce(loss, group=group.handle)
            loss /= group.size
        return loss

    def _wholes(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """By the names of the model that was given, of what lies like the parameters of each part."""
        with self.ledger.set_up():
            activate(self.ledger)
            found: dict[str, Tensor] = {}
            for part, some in zip(self._parts, tensors, strict=True):
                found |= part.laid.wholes({n: whole_of_replicas(tensor) for n, tensor in some.items()})
            return self._caller.original(self._of_all_stages(found))

    def _of_all_stages(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return found

    def _has_stepped(self) -> None:
        self._stepped = True

    def _copies(self, name: str) -> int:
        """Ranks that hold the same numbers of a parameter."""
        (part,) = self._parts
        placed = part.laid.placed.get(name)
        cut = 1
        for axis in dict.fromkeys(placed.cut.axes) if placed is not None else ():
            cut *= self._mesh.size(axis)
        copies = self._layout.tensor // cut
        return copies * self._mesh.num_replicas if isinstance(part.replicas, Whole) else copies


def _phase() -> str:
    return "forward" if torch.is_grad_enabled() else "eval"


class _BatchLoss(torch.autograd.Function):
    """The mean over replicas of their weighted losses; backward, each gets its own, for gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float, model: ParallelModel) -> Tensor:
        ctx.weight, ctx.model = weight, model
        return model.mean_of_replicas(loss.detach() * weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        model: ParallelModel = ctx.model
        activate(model.ledger)
        model.ledger.at(phase="backward")
        for part in model._parts:
            part.replicas.backward_begins()
        return gradients[0] * ctx.weight, None, None
