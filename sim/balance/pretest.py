"""What is timed before the first step: units on their way from one rank of a tensor group to the others and back, and
products of several sizes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...conf.schema import BalanceConf, Way
from ...policies.balance import (
    FEW_KEPT,
    KEPT,
    Assignment,
    BlockWork,
    ColumnsTimed,
    Half,
    Leg,
    Migrate,
    MovementTimed,
    Product,
    ProductsTimed,
    lend_plans,
    pretest_moves,
    return_plans,
    sizes_of,
)
from ...policies.balance.columns import leg_plans
from ...policies.mesh import TENSOR, Mesh
from ..executor import Segment
from ..interpreter import Transfer, Work
from ..layout.operands import Followed, Operand, follow
from ..program import COMPUTE, MAIN, Program, Writer
from .rank_work import RankWork, uneven
from .share import PRODUCTS, Share

Timed = Callable[[Segment], int]  # nanoseconds until the last rank has ended it, on an empty machine


def movements_timed(
    work: BlockWork, mesh: Mesh, way: Way, timed: Timed
) -> tuple[MovementTimed | ColumnsTimed, ...]:
    """For each half of which units can move: what is moved before the first step, of all groups of the mesh at once."""
    found: list[MovementTimed | ColumnsTimed] = []
    for half in Half:
        moved = pretest_moves(work, half)
        if not moved:
            continue
        few, many = (sum(action.units for action in moves) for moves in moved[:2])
        lenders = len({action.src for action in moved[-1]})
        if way is not Way.paired:
            times = [_legs_ns(Assignment(work, moves), half, mesh, way, timed) for moves in moved]
            together = times[2] if len(times) > 2 else (0,) * len(Leg)
            found.append(ColumnsTimed(half, (few, many), times[0], times[1], together, lenders))
            continue
        took = [timed(Segment(0, False, _programs(work, mesh, half, moves))) for moves in moved]
        found.append(MovementTimed(half, (few, many), (took[0], took[1]), sum(took[2:]), lenders))
    return tuple(found)


# ---- products

WriteFor = Callable[[int, RankWork], Program]  # of a rank that computes such shares, a step
EachTimed = Callable[[Segment], Mapping[int, int]]  # nanoseconds until a rank has ended it


def products_timed(
    work: BlockWork, mesh: Mesh, conf: BalanceConf, write: WriteFor, timed: EachTimed
) -> tuple[tuple[ProductsTimed, ...], ...]:
    """[tensor groups], for each half of which there is a unit: what the products of one block take, alone."""
    groups = mesh.groups(TENSOR)
    found: list[list[ProductsTimed]] = [[] for _ in groups]
    for half in Half:
        sizes = sizes_of(work, half)
        if not sizes:
            continue
        if not conf.moves:
            sizes = (work.units[half],)
        kept = KEPT if conf.prunes else ()

        def times(units: int, left_out: float, half: Half = half) -> Mapping[int, int]:
            counts = {**work.units, half: units}
            ratios = (left_out,) * len(PRODUCTS)
            share = Share(counts[Half.attention], counts[Half.ffn], ratios)
            of_rank = RankWork((share,) * work.blocks)
            programs = {rank: _products_alone(write(rank, of_rank), half) for rank in range(mesh.num_ranks)}
            return timed(Segment(0, False, programs))

        whole = [times(units, 0.0) for units in sizes]
        pruned = [times(work.units[half], 1 - share) for share in kept]
        few = [times(sizes[0], 1 - FEW_KEPT)] if kept and conf.moves else []
        for group, ranks in enumerate(groups):
            by_units, by_kept, of_few = (
                tuple(tuple(of_size[rank] // work.passes for rank in ranks) for of_size in each)
                for each in (whole, pruned, few)
            )
            found[group].append(ProductsTimed(half, sizes, by_units, kept, by_kept, *of_few))
    return tuple(tuple(events) for events in found)


def _products_alone(program: Program, half: Half) -> Program:
    """Of its first block."""
    of_half = [item for item in program.items if item.half is half]
    own = [item for item in of_half if item.unit == of_half[0].unit]
    return Program([replace(item, index=index, after=()) for index, item in enumerate(own)])


# ---- whole units


def _programs(work: BlockWork, mesh: Mesh, half: Half, moves: tuple[Migrate, ...]) -> Mapping[int, Program]:
    """Ranks of each group lend units to others, which send as much back."""
    assignment = Assignment(work, moves)
    plans = [*lend_plans(assignment, half), *return_plans(assignment, half)]
    steps = [uneven(plan, work.unit_bytes(half)) for plan in plans]
    by_place: list[Program] = []
    for place in range(work.ranks):
        writer = Writer(merge=False)
        for number, (step, transfer) in enumerate(steps):
            if step.takes_part(place):
                writer.transfer(MAIN, MAIN, "setup", half.value, transfer, tag=("pretest", number))
        by_place.append(writer.program)
    return _of_all(by_place, mesh)


def _of_all(by_place: Sequence[Program], mesh: Mesh) -> dict[int, Program]:
    return {rank: by_place[mesh.index(TENSOR, rank)] for rank in range(mesh.num_ranks)}


# ---- by columns


def _legs_ns(assignment: Assignment, half: Half, mesh: Mesh, way: Way, timed: Timed) -> tuple[int, ...]:
    """[legs], of one half of a block; each begins when the one before it has ended."""
    work = assignment.work
    followed: dict[Leg, list[Followed]] = {leg: [] for leg in Leg}
    for product in Product:
        if product.half is half:
            operands = _operands(work, product)
            for place in range(work.ranks):
                for leg, plan in leg_plans(assignment, product, place, way).items():
                    begin = {name: operands[name] for name in plan.operands}
                    followed[leg].append(follow(plan, begin, mesh, place=place))
    return tuple(
        timed(Segment(0, False, _of_all([_leg_program(half, each) for each in followed[leg]], mesh)))
        for leg in Leg
    )


def _operands(work: BlockWork, product: Product) -> dict[str, Operand]:
    """Of one rank: [tokens, columns], [rows, columns] and twice [tokens, rows]."""
    columns, rows = work.columns(product, work.units[product.half]), work.rows(product)
    shapes = {"x": (work.tokens, columns), "weight": (rows, columns)}
    shapes |= dict.fromkeys(("y", "dy"), (work.tokens, rows))
    return {name: Operand(shape, work.element_bytes) for name, shape in shapes.items()}


def _leg_program(half: Half, followed: Followed) -> Program:
    """Copies on the main worker; what moves beside it on one of each stream, first in, first out."""
    writer = Writer(merge=False)
    index: list[int] = []
    numbers: Counter[tuple[str, int]] = Counter()
    for step in followed.steps:
        after = [index[at] for at in step.after]
        if isinstance(step.what, Transfer):
            which = (step.what.op, step.what.root)
            numbers[which] += 1
            worker, tag = step.stream if step.beside else MAIN, ("pretest", *which, numbers[which])
            index.append(writer.transfer(worker, step.stream, "setup", half.value, step.what, after, tag=tag))
        else:
            copy = Work("traffic", step.what.name, 0, step.what.nbytes)
            index.append(writer.local(MAIN, COMPUTE, "setup", half.value, step.what.name, copy, after))
    return writer.program
