"""Optimizer states in regions: brought in unit by unit, stepped, and written back."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .header import Layout, lay_out
from .region import Region


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """A `with` block in which the optimizer has these parameters only, under the groups' settings."""
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups
    ]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def make_states(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    shards: Layout,
    prepare: Callable[[torch.optim.Optimizer], None],
) -> Layout:
    """Make one unit's states as the first step would; the layout of those as large as their parameter.

    Counters, and other single numbers, are left out: they take no memory to speak of.

    Args:
        parameters: Of the unit, by name.
        shards: Theirs: a state is padded like its parameter, so that all ranks have equal chunks.
        prepare: Makes the states of all parameters that the optimizer has.
    """
    with only(optimizer, parameters.values()):
        prepare(optimizer)
    return lay_out(
        {
            f"{name}.{key}": (state.dtype, shards.tensors[name].shape)
            for name, key, state in _large(optimizer, parameters)
        }
    )


@torch.no_grad()
def move_states_in(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], region: Region
) -> None:
    """Let a unit's states be the region's tensors, with their values."""
    for name, key, state in _large(optimizer, parameters):
        local = _local(state)
        inside = region.tensors[f"{name}.{key}"][: local.numel()].view(local.shape)
        if bool(local.any()):  # zeros are there already, and take no memory until they are written
            inside.copy_(local)
        optimizer.state[parameters[name]][key] = _like(state, inside)


def counters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The states that `make_states` leaves out: of AdamW the number of steps, for each parameter."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if torch.is_tensor(value) and not _is_large(value, parameter):
                yield value


def _large(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[tuple[str, str, torch.Tensor]]:
    """(parameter, key, state), in an order that does not depend on the optimizer's."""
    return [
        (name, key, state)
        for name, parameter in parameters.items()
        for key, state in sorted(optimizer.state[parameter].items())
        if _is_large(state, parameter)
    ]


def _is_large(state: Any, parameter: torch.Tensor) -> bool:
    return torch.is_tensor(state) and state.shape == parameter.shape and state.ndim > 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(state: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of what `state` is a part of."""
    if not isinstance(state, DTensor):
        return local
    made: torch.Tensor = DTensor.from_local(
        local,
        state.device_mesh,
        state.placements,
        run_check=False,
        shape=state.shape,
        stride=state.stride(),
    )
    return made
