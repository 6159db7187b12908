"""What LAMB and LARS share: a step in which norms of whole parameters set the rate of each."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .norms import AllReduce, Holders, WholeNorms, all_reduce, local

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


@dataclass(slots=True)
class Part:
    """The parameters of one group that have a gradient, and this rank's parts of them."""

    group: dict[str, Any]
    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    adapted: list[bool]  # whether decay and trust ratio are for it


class TrustRatioOptimizer(Optimizer):
    """A step takes each parameter along a direction, at its own rate: the group's, times a trust ratio.

    Norms are those of whole parameters, also where FSDP2 cuts them: then `step` holds one all-reduce of two fp32
    numbers a parameter that is adapted, and all ranks must call it together. Where a norm is 0 the ratio is 1.
    Lists of tensors are handled in one call each (`torch._foreach_*`). Ratios are read back by the host: one wait
    for the device a step.

    Attributes:
        trust_ratios: Of the last step, for each parameter in the order of the groups; 1 where none applies.
    """

    # On the class, for a copy of an optimizer takes its groups and states along, and nothing else
    trust_ratios: tuple[float, ...] = ()
    _norms: tuple[list[int], WholeNorms] | None = None  # and the parameters that they are of, by identity
    _all_reduce: AllReduce = staticmethod(all_reduce)
    _holders: Holders | None = None

    def __init__(
        self,
        params: Parameters,
        defaults: dict[str, Any],
        all_reduce: AllReduce,
        holders: Holders | None = None,
    ) -> None:
        super().__init__(params, defaults)
        self._all_reduce, self._holders = all_reduce, holders

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step.

        Args:
            closure: Computes the loss and its gradients again, as torch's optimizers have it.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = [self._part(group) for group in self.param_groups]
        directions = [self._directions(part) if part.parameters else [] for part in parts]
        ratios = self._find_ratios(parts, directions)
        for part, direction in zip(parts, directions, strict=True):
            if part.parameters:
                self._move(part, direction, [ratios.get(id(p), 1.0) for p in part.parameters])
        everything = (p for group in self.param_groups for p in group["params"])
        self.trust_ratios = tuple(ratios.get(id(p), 1.0) for p in everything)
        return loss

    @torch.no_grad()
    def skip_step(self) -> None:
        """In place of a step that all ranks skip: sends what it would, so that the steps of a run are alike."""
        adapted = self._adapted()
        nothing = [local(parameter).new_empty(0) for parameter in adapted]
        self._whole_norms(adapted).of(nothing, nothing)

    def prepare_states(self) -> None:
        """Make the states that the first step would make, so that they can be loaded, and counted, before it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(group, parameter)

    # ---- of one optimizer

    @abstractmethod
    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """What is kept for one parameter, before its first step."""

    @abstractmethod
    def _directions(self, part: Part) -> list[Tensor]:
        """Take the gradients in; what stands below the weights in the trust ratio, one for each parameter."""

    @abstractmethod
    def _ratios(self, group: dict[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        """Trust ratios from two vectors of norms; what comes of a norm that is 0 is not used."""

    @abstractmethod
    def _move(self, part: Part, directions: list[Tensor], ratios: list[float]) -> None:
        """Change the weights. `directions` are as `_directions` gave them."""

    # ---- of both

    def _state_of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self._new_state(group, parameter))
        return state

    def _states(self, part: Part, name: str) -> list[Tensor]:
        """This rank's parts of one kind of state."""
        return [local(self._state_of(part.group, parameter)[name]) for parameter in part.parameters]

    def _part(self, group: dict[str, Any]) -> Part:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        return Part(
            group,
            parameters,
            [local(parameter) for parameter in parameters],
            [_gradient(parameter) for parameter in parameters],
            [_adapts(group, parameter) for parameter in parameters],
        )

    def _adapted(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if _adapts(group, p)]

    def _whole_norms(self, adapted: list[Tensor]) -> WholeNorms:
        which = [id(parameter) for parameter in adapted]
        if self._norms is None or self._norms[0] != which:
            self._norms = which, WholeNorms(adapted, self._all_reduce, self._holders)
        return self._norms[1]

    def _find_ratios(self, parts: list[Part], directions: list[list[Tensor]]) -> dict[int, float]:
        """Trust ratios by the parameter's identity.

        A parameter without a gradient takes part as well, with nothing: ranks may differ in what they lack.
        """
        adapted = self._adapted()
        found = {
            id(parameter): direction
            for part, own in zip(parts, directions, strict=True)
            for parameter, direction in zip(part.parameters, own, strict=True)
        }
        weights = [local(parameter) for parameter in adapted]
        given = [found.get(id(p), w.new_empty(0)) for p, w in zip(adapted, weights, strict=True)]
        norms = self._whole_norms(adapted).of(weights, given)
        ratios, first = [], 0
        for group in self.param_groups:
            end = first + sum(_adapts(group, parameter) for parameter in group["params"])
            of_weights, of_directions = norms[0, first:end], norms[1, first:end]
            ratio = self._ratios(group, of_weights, of_directions)
            ratios.append(torch.where((of_weights > 0) & (of_directions > 0), ratio, 1.0))
            first = end
        return dict(zip(map(id, adapted), torch.cat(ratios).tolist(), strict=True))


def _adapts(group: dict[str, Any], parameter: Tensor) -> bool:
    """Biases and the weights of norms have one dimension; a shard's number of dimensions is the whole's."""
    return parameter.ndim > 1 or not group["exclude_1d"]


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "only of parameters that have one"
    if gradient.is_sparse:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: use dense ones"
        )
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local(gradient)


def check_argument(ok: bool, name: str, value: object, legal: str) -> None:
    """Raise ValueError where an argument of an optimizer is not legal."""
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {legal}")


def check_bounds(low: float, high: float | None, *, names: tuple[str, str]) -> None:
    """Of a ratio or a norm: 0 <= low <= high; None: no upper one."""
    check_argument(0 <= low < inf, names[0], low, ">= 0 and finite")
    if high is not None:
        check_argument(high > 0, names[1], high, "> 0 or None")
        check_argument(low <= high, names[0], low, f"<= {names[1]}={high}")
