"""Bytes that one rank sends in a collective, by the algorithm that the library takes.

Both targets account with these functions: the simulator from planned shapes, the runtime from the
tensors that reach `torch.distributed`. The interfaces' own counters check them on the shaped cluster.

Sources: gloo's ring all-gather and all-reduce, binomial broadcast, ring reduce with a gather to the root;
NCCL's ring for bandwidth-bound sizes. Volumes are the ring's in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends: all of it, and the part that leaves its node."""

    wire_bytes: int
    inter_node_bytes: int


def to_peers(mesh: Mesh, rank: int, messages: Sequence[tuple[int, int]]) -> Sent:
    """Explicit messages, as (destination rank, bytes)."""
    here, per_node = mesh.node_of(rank), mesh.ranks_per_node
    nodes, cyclic = mesh.num_ranks // per_node, mesh.cyclic
    total = outside = 0
    for peer, nbytes in messages:  # plain: every collective of a run passes here
        total += nbytes
        if (peer % nodes if cyclic else peer // per_node) != here:
            outside += nbytes
    return Sent(total, outside)


def all_gather(mesh: Mesh, rank: int, group: Sequence[int], shard_bytes: int) -> Sent:
    """Ring: g - 1 times a shard to the next rank."""
    return to_peers(mesh, rank, [(_next(mesh, group, rank), (len(group) - 1) * shard_bytes)])


def reduce_scatter(mesh: Mesh, rank: int, group: Sequence[int], slice_bytes: int) -> Sent:
    """Ring on sends and receives: g - 1 times one slice (one rank's share) to the next rank."""
    return to_peers(mesh, rank, [(_next(mesh, group, rank), (len(group) - 1) * slice_bytes)])


def all_reduce(mesh: Mesh, rank: int, group: Sequence[int], numel: int, element_bytes: int) -> Sent:
    """Ring: a reduce-scatter and an all-gather of chunks of ceil(numel / g) elements."""
    chunk = -(-numel // len(group)) * element_bytes
    return to_peers(mesh, rank, [(_previous(mesh, group, rank), 2 * (len(group) - 1) * chunk)])


def all_to_all(mesh: Mesh, rank: int, group: Sequence[int], message_bytes: int) -> Sent:
    """Pairwise: one message to each other rank of the group."""
    return to_peers(mesh, rank, [(peer, message_bytes) for peer in group if peer != rank])


def broadcast(mesh: Mesh, rank: int, group: Sequence[int], root: int, nbytes: int) -> Sent:
    """Binomial tree, the whole buffer stored and forwarded at each node of the tree."""
    return to_peers(mesh, rank, [(peer, nbytes) for peer in binomial_children(group, root, rank)])


def reduce_to(mesh: Mesh, rank: int, group: Sequence[int], root: int, numel: int, element_bytes: int) -> Sent:
    """Ring reduce-scatter, then every rank's chunk goes to the root."""
    chunk = -(-numel // len(group)) * element_bytes
    messages = [(_previous(mesh, group, rank), (len(group) - 1) * chunk)]
    if rank != root:
        messages.append((root, chunk))
    return to_peers(mesh, rank, messages)


def reduce_tree(mesh: Mesh, rank: int, group: Sequence[int], root: int, nbytes: int) -> Sent:
    """Up a binomial tree, a broadcast's mirror: every rank but the root sends the whole once."""
    if rank == root:
        return Sent(0, 0)
    return to_peers(mesh, rank, [(binomial_parent(group, root, rank), nbytes)])


def scatter(mesh: Mesh, rank: int, group: Sequence[int], root: int, parts_bytes: Sequence[int]) -> Sent:
    """One message from the root to each rank whose part is not empty. `parts_bytes`: in the group's order."""
    if rank != root:
        return Sent(0, 0)
    return to_peers(
        mesh, rank, [(peer, nbytes) for peer, nbytes in zip(group, parts_bytes, strict=True) if nbytes]
    )


def gather(mesh: Mesh, rank: int, group: Sequence[int], root: int, parts_bytes: Sequence[int]) -> Sent:
    """One message to the root from each rank whose part is not empty."""
    own = parts_bytes[group.index(rank)]
    return to_peers(mesh, rank, [(root, own)] if own and rank != root else [])


def binomial_parent(group: Sequence[int], root: int, rank: int) -> int:
    """From whom `rank`, which is not the root, gets its copy in a binomial broadcast."""
    size, offset = len(group), group.index(root)
    me = (group.index(rank) - offset) % size
    return group[(me - (1 << (me.bit_length() - 1)) + offset) % size]


def binomial_children(group: Sequence[int], root: int, rank: int) -> list[int]:
    """Ranks to which `rank` forwards in a binomial broadcast, in order of sending."""
    size = len(group)
    offset = group.index(root)
    me = (group.index(rank) - offset) % size
    children = []
    bit = 1
    while bit < size:
        if me < bit and me + bit < size:
            children.append(group[(me + bit + offset) % size])
        bit <<= 1
    return children


def encoded_bytes(segments: Sequence[int], bits: int, block: int) -> int:
    """Codes and fp32 scales of one slice whose `segments` are quantized each on its own.

    Blocks are full length on the wire: the last one of a segment is padded. `block` 0 means one scale for
    each segment.
    """
    total = 0
    for numel in segments:
        if not numel:
            continue
        blocks = -(-numel // block) if block else 1
        padded = blocks * block if block else numel + numel % 2
        total += -(-padded * bits // 8) + 4 * blocks
    return total


def _next(mesh: Mesh, group: Sequence[int], rank: int) -> int:
    ring = mesh.ring(group)
    return ring[(ring.index(rank) + 1) % len(ring)]


def _previous(mesh: Mesh, group: Sequence[int], rank: int) -> int:
    ring = mesh.ring(group)
    return ring[(ring.index(rank) - 1) % len(ring)]
