"""Checkpoints of what lies on disk: torch.distributed.checkpoint asks for one tensor after the other.

A checkpoint has the same form as without offload, so a training may go on with the other.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from .residency import Residency


class PagedSavePlanner(DefaultSavePlanner):
    """Brings in the chunk whose tensor is written next. Close it afterwards."""

    def __init__(self, residency: Residency) -> None:
        super().__init__()
        self._visit = _Visit(residency, changed=False)

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        if isinstance(found, torch.Tensor):
            self._visit.go_to(found)
        return found

    def close(self) -> None:
        self._visit.leave()


class PagedLoadPlanner(DefaultLoadPlanner):
    """Brings in the chunk whose tensor is read next, and writes the one before. Close it afterwards."""

    def __init__(self, residency: Residency) -> None:
        super().__init__()
        self._visit = _Visit(residency, changed=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found: torch.Tensor = super().resolve_tensor(read_item)
        self._visit.go_to(found)
        return found

    def close(self) -> None:
        self._visit.leave()


class _Visit:
    """At one chunk after the other."""

    def __init__(self, residency: Residency, *, changed: bool) -> None:
        self._residency = residency
        self._changed = changed
        self._chunks = {
            next(iter(region.tensors.values())).untyped_storage().data_ptr(): chunk
            for chunk, region in residency.regions.items()
        }
        self._at: str | None = None
        self._stack = ExitStack()

    def go_to(self, tensor: torch.Tensor) -> None:
        chunk = self._chunks.get(tensor.untyped_storage().data_ptr())
        if chunk is None or chunk == self._at:  # None: a counter, which is always near
            return
        self.leave()
        self._stack.enter_context(self._residency.visit(chunk, changed=self._changed))
        self._at = chunk

    def leave(self) -> None:
        self._at = None
        self._stack.close()
