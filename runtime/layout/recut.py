"""A checkpoint of one layout, read by a run under another: parameters and optimizer states are put together whole, one
parameter at a time, and this rank's part of each is cut anew.

In a checkpoint each place of a layout has its part of each parameter, under "model.<place>/<name>", and its optimizer's
states by the parameter's number there (`runtime.checkpoint`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from ...conf.model_spec import ModelSpec
from ...conf.schema import ParallelConf
from ...policies.layout.parallel import ParallelLayout, build_parallel
from ...policies.mesh import PIPELINE, Mesh
from ..stack import Stack, build_model
from .operands import cut_parameters
from .parameters import Placed
from .stages import keep_part

Cut = Callable[[str, Tensor], Tensor]  # of the parameter of that name, from a whole tensor that lies like it
_PLACE = re.compile(r"([a-z_]+)(\d+)")


@dataclass(frozen=True, slots=True)
class _Part:
    """Of one parameter at one place."""

    place: str
    number: int  # among the parameters there
    axes: Mapping[str, int]


class WrittenLayout:
    """Where parameters lie in a checkpoint.

    Args:
        folder: The checkpoint's.
        parallel: Keys of `ParallelConf` that cut the model; {}: none does.
        replicated: Its optimizers have the root's parameters first, and then each block's, as whole weights lie.
    """

    def __init__(
        self, folder: Path, parallel: Mapping[str, Any], spec: ModelSpec, *, replicated: bool
    ) -> None:
        self._folder = folder
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        self._entries = {key: x for key, x in entries.items() if isinstance(x, TensorStorageMetadata)}
        named = [key.removeprefix("model.") for key in self._entries if key.startswith("model.")]
        places = sorted({name.partition("/")[0] for name in named}) if parallel else [""]
        self._parts: dict[str, list[_Part]] = {}
        layout = _layout(parallel, spec) if parallel else None
        self._mesh = (
            Mesh(math.prod(size for _, size in layout.dims), 1, 1, layout.dims) if layout else Mesh(1, 1)
        )
        self._placed: dict[str, Placed] = {}
        for place in places:
            axes = {axis: int(index) for axis, index in _PLACE.findall(place)}
            names: list[str] = []
            for model, chunk in _models(spec, layout, axes.get(PIPELINE, 0)):
                names += _order(model, replicated=replicated)
                if layout is not None:
                    stage = axes.get(PIPELINE, 0)
                    cut = cut_parameters(model, layout, self._mesh, stage=stage, chunk=chunk)
                    self._placed |= {name: placed for name, _, placed in cut}
            for number, name in enumerate(names):
                self._parts.setdefault(name, []).append(_Part(place, number, axes))

    def parameter(self, name: str) -> Tensor:
        """The whole of one; fp32, as it was saved."""
        return self._whole(name, None)

    def states(self, name: str) -> dict[str, Tensor]:
        """What the optimizer had of it, whole; what is no tensor of its shape is as the first place has it."""
        first = self._parts[name][0]
        prefix = ".".join(_path(first, name, ""))
        shape = self._entries[".".join(_path(first, name, None))].size
        found = {}
        for key, entry in self._entries.items():
            state = key.removeprefix(prefix)
            if state != key and entry.size == shape:
                found[state] = self._whole(name, state)
            elif state != key:
                found[state] = self._read([_path(first, name, state)])[0]
        return found

    def _whole(self, name: str, state: str | None) -> Tensor:
        parts, placed = self._parts[name], self._placed.get(name)
        if placed is None:
            return self._read([_path(parts[0], name, state)])[0]
        found = self._read([_path(part, name, state) for part in parts])
        padded = found[0].new_zeros(placed.padded)
        for part, tensor in zip(parts, found, strict=True):
            placed.put(padded, tensor, self._mesh, part.axes)
        return placed.without_padding(padded)

    def _read(self, paths: list[tuple[str, ...]]) -> list[Tensor]:
        state: dict[str, Any] = {}
        tensors = []
        for path in paths:
            entry = self._entries[".".join(path)]
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            inner = state
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = tensor
            tensors.append(tensor)
        load(state, checkpoint_id=self._folder, no_dist=True)
        return tensors


@torch.no_grad()
def read_recut(
    written: WrittenLayout,
    *,
    model: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    cut: Cut,
) -> None:
    """Fill this rank's weights and optimizer states; every rank reads for itself.

    Args:
        model: The engine's state, by name; its tensors are filled.
        parameters: What the optimizer steps, by name.
        cut: This rank's part of a whole.
    """
    for name, tensor in model.items():
        _fill(tensor, cut(name, written.parameter(name)))
    if optimizer is None:
        return
    for name, parameter in parameters.items():
        own = optimizer.state[parameter]
        for state, whole in written.states(name).items():
            target = own[state]
            _fill(target, cut(name, whole) if target.shape == parameter.shape else whole)


def _fill(target: Tensor, part: Tensor) -> None:
    """A sharded one has its shard of the part."""
    if isinstance(target, DTensor):
        (placement,), mesh = target.placements, target.device_mesh
        shards, _ = placement._split_tensor(part, mesh.size(), with_padding=False, contiguous=True)  # type: ignore[attr-defined]
        target.to_local().copy_(shards[mesh.get_local_rank()])
    else:
        target.copy_(part)


def _layout(parallel: Mapping[str, Any], spec: ModelSpec) -> ParallelLayout:
    """Of one replica, for any batch: where parameters lie does not follow from it."""
    conf = ParallelConf(**parallel)
    return build_parallel(
        conf,
        spec,
        num_ranks=conf.ranks_a_replica,
        micro=conf.tensor,
        micro_batches=conf.pipeline * conf.virtual_stages,
        sequence=spec.sequence,
    )


def _models(spec: ModelSpec, layout: ParallelLayout | None, stage: int) -> Iterator[tuple[Stack, int]]:
    """The parts of a stage, without values."""
    for chunk in range(layout.chunks if layout is not None else 1):
        with torch.device("meta"):
            model = build_model(spec, seed=None)
        yield (model if layout is None else keep_part(model, layout, stage=stage, chunk=chunk)), chunk


def _order(model: Stack, *, replicated: bool) -> list[str]:
    """Of an engine's parameters."""
    names = dict(model.named_parameters())
    if not replicated:
        return list(names)
    inside = {id(p) for block in model.stack() for p in block.parameters()}
    blocks = [[id(p) for p in block.parameters()] for block in model.stack()]
    found = [name for name, p in names.items() if id(p) not in inside]
    for block in blocks:
        found += [name for name, p in names.items() if id(p) in block]
    return found


def _path(part: _Part, name: str, state: str | None) -> tuple[str, ...]:
    """Keys under which a part of a parameter lies, or of one of its optimizer's states."""
    if state is None:
        return "model", _joined(part.place, name)
    return "optimizer", _joined(part.place, str(part.number)), state


def _joined(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
