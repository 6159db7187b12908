"""Cutting and gathering parameters, without ranks: what all hold together is the whole."""

import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinbed.policies.layout.border import Cut
from twinbed.policies.layout.layers import Kind, Role
from twinbed.policies.layout.modes import Cube, Megatron, Summa, TensorMode
from twinbed.policies.mesh import DATA, Mesh
from twinbed.runtime.layout.parameters import Placed

MODES: list[TensorMode] = [
    Megatron(1),
    Megatron(4),
    Megatron(3, sequence=True),
    Summa(2),
    Summa(3),
    Summa(2, 2),
    Cube(2),
]


@st.composite
def placed_parameters(draw: st.DrawFn) -> tuple[Mesh, Placed]:
    """A matrix or bias of any mode, with sections or with rows of padding, on a mesh with two replicas."""
    mode = draw(st.sampled_from(MODES))
    dims = (*mode.dims, (DATA, 2))
    ranks = 2
    for _, size in mode.dims:
        ranks *= size
    mesh = Mesh(ranks, ranks, dims=dims)
    kind = draw(st.sampled_from([Kind.linear, Kind.tied, Kind.embedding]))
    role = draw(st.sampled_from([Role.columns, Role.rows, Role.whole]))
    cuts = mode.cuts(kind, role, mode.outer)
    cut = draw(st.sampled_from([cuts.weight, cuts.bias]))
    if kind is Kind.linear:
        cut = Cut(cut.dims, sections=draw(st.sampled_from([(), (1, 1, 1), (4, 2, 2)])))
    each = 36 if mode.name != "3d" else 16
    sections = tuple(each * size for size in cut.sections)
    cut = Cut(cut.dims, sections)
    padded = (sum(sections) or each * draw(st.integers(1, 3)), each)[
        : max(1, draw(st.integers(1, 2)), len(cut.dims))
    ]
    lacking = 0 if sections else draw(st.integers(0, 5))
    return mesh, Placed((padded[0] - lacking, *padded[1:]), padded, cut)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(placed_parameters())
def test_the_parts_of_all_ranks_are_the_whole(drawn: tuple[Mesh, Placed]) -> None:
    mesh, placed = drawn
    count = 1
    for size in placed.shape:
        count *= size
    whole = torch.arange(1, count + 1).view(placed.shape)
    padded = torch.full(placed.padded, -1)
    written = torch.zeros(placed.padded, dtype=torch.int64)
    axes = tuple(dict.fromkeys(placed.cut.axes))
    seen = set()
    for rank in range(mesh.num_ranks):
        part = placed.local_part(whole, mesh, rank)
        place = {axis: mesh.index(axis, rank) for axis in axes}
        placed.put(padded, part, mesh, place)
        key = tuple(place.items())
        if key not in seen:
            seen.add(key)
            mark = torch.zeros(placed.padded, dtype=torch.int64)
            placed.put(mark, torch.ones_like(part), mesh, place)
            written += mark
    assert torch.equal(placed.without_padding(padded), whole)
    assert torch.equal(written, torch.ones_like(written)), "each element lies at one place"
    assert len(seen) == len(list(itertools.product(*(range(mesh.size(axis)) for axis in axes))))


def test_a_section_is_cut_by_itself() -> None:
    mesh = Mesh(2, 2, dims=(("tensor", 2), (DATA, 1)))
    placed = Placed((8,), (8,), Cut((("tensor",),), sections=(4, 2, 2)))
    assert placed.local_part(torch.arange(8), mesh, 1).tolist() == [2, 3, 5, 7]
