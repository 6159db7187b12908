"""How long units take from one rank of a tensor group to the others and back, before the first step."""

from collections.abc import Callable, Mapping, Sequence

from ...policies.balance import (
    Assignment,
    BlockWork,
    Half,
    MovementTimed,
    lend_plans,
    moves,
    pretest_parts,
    return_plans,
)
from ...policies.mesh import TENSOR, Mesh
from ..executor import Segment
from ..program import MAIN, Program, Writer
from .rank_work import uneven

Timed = Callable[[Segment], int]  # nanoseconds until the last rank has ended it, on an empty machine


def movements_timed(work: BlockWork, mesh: Mesh, timed: Timed) -> tuple[MovementTimed, ...]:
    """For each half: all groups of the mesh at once, first few units and then many."""
    found = []
    for half in Half:
        both = few, many = pretest_parts(work, half)
        times = tuple(timed(Segment(0, False, _programs(work, mesh, half, parts))) for parts in both)
        found.append(MovementTimed(half, (sum(few), sum(many)), (times[0], times[1])))
    return tuple(found)


def _programs(work: BlockWork, mesh: Mesh, half: Half, parts: Sequence[int]) -> Mapping[int, Program]:
    """The first rank of each group lends `parts` units to the others, which send as much back."""
    assignment = Assignment(work, tuple(moves(half, 0, parts)))
    plans = [*lend_plans(assignment, half), *return_plans(assignment, half)]
    steps = [uneven(plan, work.unit_bytes(half)) for plan in plans]
    by_place: dict[int, Program] = {}
    for place in range(work.ranks):
        writer = Writer(merge=False)
        for number, (step, transfer) in enumerate(steps):
            if step.takes_part(place):
                writer.transfer(MAIN, MAIN, "setup", half.value, transfer, tag=("pretest", number))
        by_place[place] = writer.program
    return {rank: by_place[mesh.index(TENSOR, rank)] for rank in range(mesh.num_ranks)}
