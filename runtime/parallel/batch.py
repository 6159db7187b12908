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
    """Of one replica, of the tokens that lie on this rank.

    Args:
        first: The replica's first sequence in the whole batch.
        weight: By which the replica's loss counts so that the mean over replicas is that over all labels.
    """

    inputs: Tensor
    targets: Tensor
    first: int
    weight: float


def share_of(
    inputs: Tensor, targets: Tensor, *, layout: ParallelLayout, mesh: Mesh, rank: int, over_all: bool
) -> Share:
    """This rank's share: its replica's sequences, one run of them, and of each its place's tokens on `sequence`.

    The loss of a replica is a mean over its own labels. Each rank has the whole batch before it is cut, so it can count
    all labels: with c of the C labels and D replicas the weight is D c / C, and the mean of weighted losses is the mean
    over all labels, wherever ignored ones lie. A replica without any label takes made-up ones, and weighs 0.

    Args:
        inputs: [B, T], or images [B, ...].
        targets: [B, T], or classes [B]; -100 is ignored.
        over_all: The loss is divided by the number of all targets, ignored or not.

    Raises:
        ValueError: If the replicas do not divide the batch, naming both numbers.
    """
    replicas = mesh.size(DATA)
    sequences = len(inputs)
    if sequences % replicas:
        raise ValueError(
            f"parallel.data={replicas} must divide the {sequences} sequences of a batch, which every rank gets whole"
        )
    each = sequences // replicas
    first = mesh.index(DATA, rank) * each
    inputs, mine = inputs[first : first + each], targets[first : first + each]
    weight = 1.0
    if not over_all:
        count, total = int((mine != _IGNORED).sum()), int((targets != _IGNORED).sum())
        if total:
            weight = replicas * count / total
            mine = mine if count else torch.zeros_like(mine)
    if layout.sequence > 1:
        here = token_index(layout, mesh, rank, inputs.shape[1]).to(inputs.device)
        inputs, mine = inputs.index_select(1, here), mine.index_select(1, here)
    return Share(inputs.contiguous(), mine.contiguous(), first, weight)


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
