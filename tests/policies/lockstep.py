"""Carries a layer's plan out on all ranks of a mesh at once, in numpy: what a plan means, without a process.

Sent elements are counted with bandwidth-optimal collectives: rings, trees in which each rank but the root sends once.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinbed.policies.layout.border import Axes, Border, Cut, part_index
from twinbed.policies.mesh import Mesh
from twinbed.policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Apply,
    Broadcast,
    Collective,
    Multiply,
    Plan,
    ReduceScatter,
    ReduceTo,
    Slice,
    Step,
)

Array = NDArray[Any]
Operands = list[dict[str, Array]]  # of each rank


class Lockstep:
    """All ranks of `mesh`. `sent`: elements by rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = range(mesh.num_ranks)
        self.sent: dict[int, int] = defaultdict(int)
        self.partners: dict[str, set[tuple[int, int]]] = defaultdict(set)

    def run(self, plan: Plan, operands: Operands) -> None:
        """Operands are added to those given. Checks that each step waits for what it reads."""
        made: dict[str, int] = {}
        for i, step in enumerate(plan.steps):
            lacking = [made[name] for name in step.reads if name in made and made[name] not in step.after]
            assert not lacking, f"step {i} of {plan.describe()} reads what it does not wait for"
            self._step(step, operands)
            made |= dict.fromkeys(step.writes, i)

    def _step(self, step: Step, operands: Operands) -> None:
        if isinstance(step, Collective):
            for group in self.mesh.groups(step.axis):
                self._collective(step, group, operands)
            return
        for rank in self.ranks:
            own = operands[rank]
            read = [own[name] for name in step.reads]
            match step:
                case Multiply():
                    left, right = read
                    left = left.reshape(-1, left.shape[-1]) if step.transpose_left else left
                    right = right.reshape(-1, right.shape[-1])
                    left = left.T if step.transpose_left else left
                    product = left @ (right.T if step.transpose_right else right)
                    (name,) = step.writes
                    own[name] = own[name] + product if step.add else product
                case Slice():
                    size, at = self.mesh.size(step.axis), self.mesh.index(step.axis, rank)
                    own[step.writes[0]] = np.split(read[0], size, axis=step.dim)[at]
                case Apply():
                    results = self._apply(step, read, rank)
                    own.update(zip(step.writes, results, strict=True))
                case _:
                    raise AssertionError(f"{type(step).__name__} is no step of a layer")

    def _apply(self, step: Apply, read: list[Array], rank: int) -> list[Array]:
        match step.function:
            case "add_bias":
                return [read[0] + read[1]]
            case "sum_tokens":
                return [read[0].reshape(-1, read[0].shape[-1]).sum(0)]
            case "look_up":
                ids, table = read
                first = part_index(self.mesh, step.axes, rank) * len(table)
                here = (ids >= first) & (ids < first + len(table))
                return [np.where(here[..., None], table[np.where(here, ids - first, 0)], 0.0)]
            case "look_up_gradient":
                ids, gradient, table = read
                first = part_index(self.mesh, step.axes, rank) * len(table)
                here = (ids >= first) & (ids < first + len(table))
                made = np.zeros_like(table)
                np.add.at(made, (ids - first)[here], gradient[here])
                return [made]
        raise AssertionError(f"{step.function} is not carried out here")

    def _collective(self, step: Collective, group: tuple[int, ...], operands: Operands) -> None:
        (read,) = step.reads
        (write,) = step.writes
        given = [operands[rank][read] for rank in group]
        size, numel = len(group), given[0].size
        made: list[Array] | None
        match step:
            case AllGather():
                made = [np.concatenate(given, axis=step.dim)] * size
                self._sends(group, (size - 1) * numel)
            case ReduceScatter():
                made = list(np.split(_sum(given), size, axis=step.dim))
                self._sends(group, (size - 1) * numel // size)
            case AllReduce():
                made = [_sum(given)] * size
                self._sends(group, 2 * (size - 1) * numel / size)
            case Broadcast():
                made = [given[step.root]] * size
                self._sends(group, (size - 1) * numel / size)
            case AllToAll():
                cut = [np.split(each, size, axis=step.dim) for each in given]
                made = [
                    np.concatenate([cut[j][i] for j in range(size)], axis=step.into_dim) for i in range(size)
                ]
                self._sends(group, (size - 1) * numel // size)
            case ReduceTo():
                assert step.tree
                operands[group[step.root]][write] = _sum(given)
                self._sends(group, (size - 1) * numel / size)
                made = None
            case _:
                raise AssertionError(f"{type(step).__name__} is not carried out here")
        self.partners[step.axis] |= {(a, b) for a in group for b in group if a != b}
        for rank, result in zip(group, made or (), strict=made is not None):
            operands[rank][write] = result

    def _sends(self, group: tuple[int, ...], numel: float) -> None:
        """Elements that each rank sends, as a mean over the group."""
        assert numel == int(numel) or len(group) > 1
        for rank in group:
            self.sent[rank] += numel  # type: ignore[assignment]


def _sum(arrays: list[Array]) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def cut_activation(mesh: Mesh, border: Border, whole: Array) -> list[Array]:
    """Each rank's piece of [batch, tokens, features]."""
    dims = (border.batch, border.tokens, border.features)
    return [_piece(mesh, rank, dims, whole) for rank in range(mesh.num_ranks)]


def cut_parameter(mesh: Mesh, cut: Cut, whole: Array) -> list[Array]:
    """Each rank's part of a parameter."""
    if not cut.sections:
        return [_piece(mesh, rank, cut.dims, whole) for rank in range(mesh.num_ranks)]
    edges = np.cumsum(cut.sections)[:-1]
    sections = [cut_parameter(mesh, Cut(cut.dims), part) for part in np.split(whole, edges, axis=0)]
    return [np.concatenate([part[rank] for part in sections]) for rank in range(mesh.num_ranks)]


def _piece(mesh: Mesh, rank: int, dims: tuple[Axes, ...], whole: Array) -> Array:
    for dim, axes in enumerate(dims):
        for axis in axes:
            whole = np.split(whole, mesh.size(axis), axis=dim)[mesh.index(axis, rank)]
    return whole


def operands_of(**each: list[Array] | Array) -> Operands:
    """By name: one array for all ranks, or one of each."""
    num_ranks = next(len(value) for value in each.values() if isinstance(value, list))
    found: Operands = []
    for rank in range(num_ranks):
        found.append({name: v[rank] if isinstance(v, list) else v for name, v in each.items()})
    return found


def total(sent: Mapping[int, float]) -> float:
    return float(sum(sent.values()))
