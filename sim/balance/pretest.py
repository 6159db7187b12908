"""How long units take from one rank of a tensor group to the others and back, before the first step."""

from collections.abc import Callable, Mapping

from ...policies.balance import (
    Assignment,
    BlockWork,
    Half,
    Migrate,
    MovementTimed,
    lend_plans,
    pretest_moves,
    return_plans,
)
from ...policies.mesh import TENSOR, Mesh
from ..executor import Segment
from ..program import MAIN, Program, Writer
from .rank_work import uneven

Timed = Callable[[Segment], int]  # nanoseconds until the last rank has ended it, on an empty machine


def movements_timed(work: BlockWork, mesh: Mesh, timed: Timed) -> tuple[MovementTimed, ...]:
    """For each half what is moved before the first step, of all groups of the mesh at once."""
    found = []
    for half in Half:
        moved = pretest_moves(work, half)
        few, many = (sum(action.units for action in moves) for moves in moved[:2])
        lenders = len({action.src for action in moved[-1]})
        times = [timed(Segment(0, False, _programs(work, mesh, half, moves))) for moves in moved]
        found.append(MovementTimed(half, (few, many), (times[0], times[1]), sum(times[2:]), lenders))
    return tuple(found)


def _programs(work: BlockWork, mesh: Mesh, half: Half, moves: tuple[Migrate, ...]) -> Mapping[int, Program]:
    """Ranks of each group lend units to others, which send as much back."""
    assignment = Assignment(work, moves)
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
