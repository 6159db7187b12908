"""hpZ's secondary shards: what a rank keeps of the weights that it gathered (ZeRO++, section 3.2).

Whether a copy is good follows from the path of the program alone, which is the same on all ranks, and never
from looking at data: ranks that disagree would wait for each other for ever.
"""

from collections.abc import Callable, Iterable
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..policies.comm import Phase
from ..policies.plan import LoadCopy, Plan, StoreCopy


class SecondaryShard:
    """Of one unit."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.valid = False
        self._readers = 0  # forwards whose backward has yet to read it
        self._axis = ""
        self._shard: Tensor | None = None

    def load(self, axis: str) -> Tensor:
        if self._shard is None or axis != self._axis:
            raise RuntimeError(f"{self.unit}: no secondary shard over {axis!r} has been stored")
        return self._shard

    def store(self, axis: str, shard: Tensor) -> None:
        if self._shard is None or self._shard.shape != shard.shape or self._shard.dtype != shard.dtype:
            self._shard = shard.clone()
        else:
            self._shard.copy_(shard)
        self._axis = axis

    @property
    def nbytes(self) -> int:
        return 0 if self._shard is None else self._shard.numel() * self._shard.element_size()

    def issued(self, plan: Plan, phase: Phase, *, outlives_micro_batch: bool, training: bool = True) -> None:
        """A gather by `plan` is under way: what that does to the copy's validity.

        Without `outlives_micro_batch` a copy serves one backward for each forward that stored it: in a pipeline
        several micro-batches are under way, and the copy goes when the last of them has read it.
        """
        kinds = {type(step) for step in plan.steps}
        if LoadCopy in kinds and phase is Phase.backward and not outlives_micro_batch:
            self._readers = max(self._readers - 1, 0)
            self.valid = self._readers > 0
        if StoreCopy in kinds:
            self._readers += phase is Phase.forward and training
            self.valid = True

    def invalidate(self) -> None:
        """The weights have changed."""
        self.valid, self._readers = False, 0


class WeightsWatch:
    """Calls back when an optimizer steps or a state dict is loaded, in whatever loop that happens.

    An optimizer that holds no parameter of these modules may still change them (it steps copies of its own), so
    only one that holds those of another watched model is left out.
    """

    _all: ClassVar["WeakSet[WeightsWatch]"] = WeakSet()

    def __init__(self, modules: Iterable[nn.Module], changed: Callable[[], None]) -> None:
        self._modules, self._changed = list(modules), changed
        self._handles = [register_optimizer_step_post_hook(self._stepped)]
        self._all.add(self)
        for module in self._modules:
            watch = module.register_load_state_dict_post_hook(lambda *_: changed())  # type: ignore[no-untyped-call]
            self._handles.append(watch)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if len(self._all) > 1:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not self._holds(stepped) and any(watch._holds(stepped) for watch in self._all):
                return
        self._changed()

    def _holds(self, ids: set[int]) -> bool:
        return any(id(p) in ids for module in self._modules for p in module.parameters())

    def remove(self) -> None:
        self._all.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
