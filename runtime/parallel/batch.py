"""What of a batch, which a script gives whole to every rank, is a rank's.

Shapes: B sequences, T tokens.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...policies.layout import ParallelLayout
from ...policies.mesh import DATA, Mesh
from ..layout import token_index

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch of one replica, of the tokens that lie on this rank.

    Args:
        first: Its first sequence in the whole batch.
        weight: By which its loss counts so that the mean over replicas of their sums is the mean over all labels.
    """

    inputs: Tensor
    targets: Tensor
    first: int
    weight: float


def shares_of(
    inputs: Tensor,
    targets: Tensor,
    *,
    layout: ParallelLayout,
    mesh: Mesh,
    rank: int,
    over_all: bool,
    count: int = 1,
) -> list[Share]:
    """This rank's share: its replica's sequences, one run of them in `count` micro-batches, and of each sequence its
    place's tokens on `sequence`.

    The loss of a micro-batch is a mean over its own labels. Each rank has the whole batch before it is cut, so it can
    count all labels: with c of the C labels and D replicas the weight is D c / C, and the mean over replicas of
    weighted losses is the mean over all labels, wherever ignored ones lie. A micro-batch without any label takes
    made-up ones, and weighs 0.

    Args:
        inputs: [B, T], or images [B, ...].
        targets: [B, T], or classes [B]; -100 is ignored.
        over_all: The loss is divided by the number of all targets, ignored or not.

    Raises:
        ValueError: If replicas and micro-batches do not divide the batch, naming the numbers.
    """
    replicas = mesh.size(DATA)
    sequences = len(inputs)
    if not sequences:
        raise ValueError(
            "a batch has no sequence: every rank is given the whole batch, of at least one a replica"
        )
    if sequences % (replicas * count):
        micro = f" times batch.accumulation={count}" if count > 1 else ""
        raise ValueError(
            f"parallel.data={replicas}{micro} must divide the {sequences} sequences of a batch, which every rank gets "
            "whole"
        )
    each = sequences // (replicas * count)
    total = int((targets != _IGNORED).sum())
    here = token_index(layout, mesh, rank, inputs.shape[1]) if layout.sequence > 1 else None
    found = []
    for i in range(count):
        first = (mesh.index(DATA, rank) * count + i) * each
        mine, labels = inputs[first : first + each], targets[first : first + each]
        weight = 1 / count
        if total and not over_all:
            here_labelled = int((labels != _IGNORED).sum())
            weight = replicas * here_labelled / total
            labels = labels if here_labelled else torch.zeros_like(labels)
        if here is not None:
            mine, labels = (x.index_select(1, here.to(x.device)) for x in (mine, labels))
        found.append(Share(mine.contiguous(), labels.contiguous(), first, weight))
    return found


def check_words(inputs: Tensor, targets: Tensor, *, known: int) -> None:
    """Refuse what has no row in a table: where its rows are shared out, each rank would take it for another's.

    Args:
        inputs: [B, T] of ids, or images [B, ...], which are not looked at.
        targets: [B, T], or classes [B]; -100 is ignored.
        known: Words, or classes, of the model.

    Raises:
        ValueError: Naming the smallest or largest id and what is legal.
    """
    ids = ((inputs, "an input"),) if inputs.ndim == 2 else ()
    for tensor, what in (*ids, (targets[targets != _IGNORED], "a label")):
        if not tensor.numel():
            continue
        low, high = (int(x) for x in torch.aminmax(tensor))
        if low < 0 or high >= known:
            ignored = f", or {_IGNORED}" if what == "a label" else ""
            raise ValueError(
                f"{what} is {low if low < 0 else high}: must be from 0 to {known - 1}{ignored}: the model has {known}"
            )


def check_same(inputs: Tensor, targets: Tensor) -> None:
    """Refuse a batch that differs between ranks: each would train on a part of something else. A collective.

    Raises:
        ValueError: On all ranks, if one has another batch.
    """
    sums = []
    for tensor in (inputs, targets):
        flat = tensor.detach().double().flatten()
        places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
        sums += [torch.tensor(float(len(flat)), device=flat.device), flat.sum(), (flat * places).sum()]
    seen = torch.stack([s.double() for s in sums])
    extremes = torch.cat([seen, -seen])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if not torch.equal(extremes[: len(seen)], -extremes[len(seen) :]):
        raise ValueError(
            "ranks were given different batches: under parallelize each is given the whole batch, and takes its part; "
            "seed the shuffling alike, and leave samplers that share the data out away"
        )
