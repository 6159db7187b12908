"""The paper's way to migrate gives the whole product and its gradients, on both kinds of layers, in both ways."""

import itertools
import math
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import Way
from twinbed.policies.balance import (
    LEND_STREAM,
    RETURN_STREAM,
    Assignment,
    BlockWork,
    Half,
    Leg,
    Migrate,
    Product,
    Prune,
    block_work,
    column_work,
)
from twinbed.policies.balance.columns import column_plans, leg_plans
from twinbed.policies.plan import (
    AllReduce,
    Apply,
    Broadcast,
    Collective,
    Fill,
    Gather,
    Join,
    Keep,
    Multiply,
    Part,
    Place,
    Plan,
    ReduceTo,
    Scatter,
    Step,
)

Array = NDArray[Any]
RANKS, TOKENS, HIDDEN, FFN, HEADS = 4, 6, 32, 64, 8
WAYS = (Way.broadcast, Way.scatter)

ASSIGNMENTS = {
    "one lends to all": [(3, 0, 2), (3, 1, 2), (3, 2, 3)],
    "one lends to one": [(0, 2, 5)],
    "two lend to two": [(1, 0, 1), (1, 2, 3), (3, 0, 2), (3, 2, 2)],
}


def work() -> BlockWork:
    spec = ModelSpec(
        name="t",
        family="gpt",
        layers=2,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        ffn=FFN,
        vocab=16,
        sequence=TOKENS,
        tied_embeddings=True,
        head="lm",
    )
    even = block_work(spec, ranks=RANKS, blocks=2, micro=1, sequence=TOKENS, element_bytes=4)
    return column_work(spec, even)


def test_units_are_columns_of_every_matrix() -> None:
    found = work()
    assert found.units == {Half.attention: 8, Half.ffn: 8}
    assert [found.columns(product, 8) for product in Product] == [32, 8, 32, 16]
    assert [found.columns(product, 1) for product in Product] == [4, 1, 4, 2]
    # of a rank: 24 rows of qkv and 32 of the matrix behind, one unit is an eighth of their columns
    assert found.unit_numel[Half.attention] == (24 * 32 + 32 * 8) // 8
    assert found.unit_numel[Half.ffn] == (16 * 32 + 32 * 16) // 8


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("product", list(Product))
def test_the_product_and_its_gradients_are_whole(product: Product, name: str, way: Way) -> None:
    half = product.half
    actions = tuple(Migrate(src, dst, half, units) for src, dst, units in ASSIGNMENTS[name])
    assignment = Assignment(work(), actions)
    columns, out = work().columns(product, 8), 12
    random = np.random.default_rng(1)
    weights = [random.standard_normal((out, columns)) for _ in range(RANKS)]
    biases = [random.standard_normal(out) for _ in range(RANKS)]
    xs = [random.standard_normal((2, TOKENS, columns)) for _ in range(RANKS)]
    gradients = [random.standard_normal((2, TOKENS, out)) for _ in range(RANKS)]
    if product.is_first:
        xs = [xs[0]] * RANKS
    else:
        gradients = [gradients[0]] * RANKS
    ways = [column_plans(assignment, product, rank, way, bias=True) for rank in range(RANKS)]
    values = [
        {"x": x, "weight": weight, "bias": bias} for x, weight, bias in zip(xs, weights, biases, strict=True)
    ]
    lockstep([plans[0] for plans in ways], values)
    partial = [x @ weight.T for x, weight in zip(xs, weights, strict=True)]
    for rank in range(RANKS):
        want = (partial[rank] if product.is_first else sum(partial)) + biases[rank]
        assert_allclose(values[rank]["y"], want, err_msg=f"y of rank {rank}")
        values[rank]["dy"] = gradients[rank]
    lockstep([plans[1] for plans in ways], values)
    inputs = [dy @ weight for dy, weight in zip(gradients, weights, strict=True)]
    for rank in range(RANKS):
        want = sum(inputs) if product.is_first else inputs[rank]
        assert_allclose(values[rank]["dx"], want, err_msg=f"dx of rank {rank}")
        flat = gradients[rank].reshape(-1, out).T @ xs[rank].reshape(-1, columns)
        assert_allclose(values[rank]["dweight"], flat, err_msg=f"dweight of rank {rank}")
        assert_allclose(values[rank]["dbias"], gradients[rank].sum((0, 1)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("product", list(Product))
def test_pruning_leaves_columns_out_that_are_not_lent(product: Product, way: Way) -> None:
    """As a product whose weights are masked there: of a rank that lends the others, and of one that lends none."""
    half, ratios = product.half, (0.0, 0.5, 0.25, 0.5)
    actions = (Migrate(3, 0, half, 3), *(Prune(rank, ratio) for rank, ratio in enumerate(ratios) if ratio))
    assignment = Assignment(work(), actions)
    columns, out = work().columns(product, 8), work().rows(product)
    each = columns // 8
    random = np.random.default_rng(2)
    homes = [columns] * 3 + [5 * each]
    # which of them are left out
    masks = [np.ones(columns) for _ in range(RANKS)]
    for rank, (home, ratio) in enumerate(zip(homes, ratios, strict=True)):
        masks[rank][random.permutation(home)[: int(home * ratio)]] = 0
    weights = [random.standard_normal((out, columns)) for _ in range(RANKS)]
    xs = [random.standard_normal((TOKENS, columns)) for _ in range(RANKS)]
    gradients = [random.standard_normal((TOKENS, out)) for _ in range(RANKS)]
    if product.is_first:
        xs = [xs[0]] * RANKS
    else:
        gradients = [gradients[0]] * RANKS
    ways = [
        column_plans(assignment, product, rank, way, bias=False, ratio=ratio)
        for rank, ratio in enumerate(ratios)
    ]
    values = [
        {"x": x, "weight": weight, "kept": np.flatnonzero(mask[:home])}
        for x, weight, mask, home in zip(xs, weights, masks, homes, strict=True)
    ]
    shapes = [[step.size for step in forward.steps if isinstance(step, Keep)] for forward, _ in ways]
    assert shapes == [[], [columns // 2] * 2, [3 * columns // 4] * 2, [math.ceil(5 * each / 2)] * 2]
    lockstep([plans[0] for plans in ways], values)
    masked = [weight * mask for weight, mask in zip(weights, masks, strict=True)]
    partial = [x @ weight.T for x, weight in zip(xs, masked, strict=True)]
    for rank in range(RANKS):
        assert_allclose(values[rank]["y"], partial[rank] if product.is_first else sum(partial))
        values[rank]["dy"] = gradients[rank]
    lockstep([plans[1] for plans in ways], values)
    inputs = [dy @ weight for dy, weight in zip(gradients, masked, strict=True)]
    for rank in range(RANKS):
        assert_allclose(values[rank]["dx"], sum(inputs) if product.is_first else inputs[rank])
        assert_allclose(values[rank]["dweight"], (gradients[rank].T @ xs[rank]) * masks[rank])


def test_a_rank_that_prunes_is_lent_no_columns() -> None:
    with pytest.raises(ValueError, match="rank 1 both prunes and is lent columns of ffn"):
        Assignment(work(), (Prune(1, 0.5), Migrate(0, 1, Half.ffn, 2)))
    Assignment(work(), (Prune(1, 0.0), Prune(0, 0.5), Migrate(0, 1, Half.ffn, 2)))


@pytest.mark.parametrize("way", WAYS)
def test_legs_are_what_plans_move(way: Way) -> None:
    """Of each rank the same collectives, in the same order, of operands that are as large."""
    for name, half in itertools.product(ASSIGNMENTS, Half):
        moves = tuple(Migrate(src, dst, half, units) for src, dst, units in ASSIGNMENTS[name])
        assignment = Assignment(work(), moves)
        for product, rank in itertools.product((p for p in Product if p.half is half), range(RANKS)):
            legs = leg_plans(assignment, product, rank, way)
            whole = column_plans(assignment, product, rank, way, bias=False)
            streams = (LEND_STREAM, RETURN_STREAM)
            found = [
                [_moved(step) for leg in legs for step in legs[leg].steps if step.stream == stream]
                for stream in streams
            ]
            assert found == [
                [_moved(step) for plan in whole for step in plan.steps if step.stream == stream]
                for stream in streams
            ]
            assert set(legs) <= set(Leg)
            assert {name for plan in legs.values() for name in plan.operands} <= {"x", "weight", "y", "dy"}
            assert not any(isinstance(step, Multiply) for plan in legs.values() for step in plan.steps)


def _moved(step: Step) -> tuple[object, ...]:
    assert isinstance(step, Collective)
    return type(step), getattr(step, "root", None), getattr(step, "parts", None)


def test_paired_units_are_no_columns() -> None:
    with pytest.raises(ValueError, match=r"balance.way=paired .* must be broadcast or scatter"):
        column_plans(Assignment(work()), Product.fc1, 0, Way.paired, bias=False)
    with pytest.raises(ValueError, match="must keep one unit"):
        Assignment(work(), (Migrate(0, 1, Half.ffn, 8),))


# ---- all ranks at once, each with a plan of its own


def lockstep(plans: list[Plan], values: list[dict[str, Array]]) -> None:
    """Each rank goes on to its next collective; those that take part in it meet there."""
    ranks = [_rank(plan, own) for plan, own in zip(plans, values, strict=True)]
    waiting: list[Collective | None] = [next(rank, None) for rank in ranks]
    while any(step is not None for step in waiting):
        step = next(step for step in waiting if step is not None)
        group = [rank for rank, other in enumerate(waiting) if other is not None and _same(other, step)]
        meets = group
        if isinstance(step, Scatter | Gather):
            assert len(group) == RANKS
            meets = [rank for rank in group if step.takes_part(rank)]
        else:
            assert len(group) == RANKS, f"ranks {group} alone are at {step}"
        _collective(step, meets, waiting, values)
        for rank in group:
            waiting[rank] = next(ranks[rank], None)


def _same(one: Collective, other: Collective) -> bool:
    def word(step: Collective) -> tuple[object, ...]:
        return type(step), getattr(step, "root", None), getattr(step, "parts", None), step.stream

    return word(one) == word(other)


def _collective(
    step: Collective, meets: list[int], waiting: list[Collective | None], values: list[dict[str, Array]]
) -> None:
    def own(rank: int) -> Collective:
        found = waiting[rank]
        assert found is not None
        return found

    given = {rank: values[rank][own(rank).reads[0]] for rank in meets}
    writes = {rank: own(rank).writes[0] for rank in meets}
    match step:
        case AllReduce():
            total = sum(given.values())
            for rank in meets:
                values[rank][writes[rank]] = total
        case Broadcast():
            assert len({x.shape for x in given.values()}) == 1
            for rank in meets:
                values[rank][writes[rank]] = given[step.root]
        case ReduceTo():
            assert len({x.shape for x in given.values()}) == 1
            values[step.root][writes[step.root]] = sum(given.values())
            for rank in meets:
                if rank != step.root:
                    values[rank].pop(writes[rank], None)
        case Scatter():
            at = 0
            for rank in range(RANKS):
                size = step.parts[rank]
                if size:
                    values[rank][writes[rank]] = given[step.root].take(range(at, at + size), step.dim)
                at += size
        case Gather():
            parts = [given[rank] for rank in range(RANKS) if step.parts[rank]]
            assert [x.shape[step.dim] for x in parts] == [size for size in step.parts if size]
            values[step.root][writes[step.root]] = np.concatenate(parts, step.dim)
        case _:
            raise AssertionError(step)


def _rank(plan: Plan, own: dict[str, Array]) -> Generator[Collective, None, None]:
    for step in plan.steps:
        if isinstance(step, Collective):
            yield step
        else:
            _local(step, own)


def _local(step: Step, own: dict[str, Array]) -> None:
    read = [own[name] for name in step.reads]
    (name,) = step.writes
    match step:
        case Multiply():
            left, right = read
            left = left.reshape(-1, left.shape[-1]).T if step.transpose_left else left
            right = right.reshape(-1, right.shape[-1])
            product = left @ (right.T if step.transpose_right else right)
            own[name] = own[name] + product if step.add else product
        case Part():
            own[name] = read[0].take(range(step.first, step.first + step.size), step.dim)
        case Place():
            pads = [(0, 0)] * read[0].ndim
            pads[step.dim] = (step.first, step.total - step.first - read[0].shape[step.dim])
            placed = np.pad(read[0], pads)
            own[name] = own[name] + placed if step.add else placed
        case Keep():
            assert len(own["kept"]) == step.size
            assert own["kept"].max() < step.of
            own[name] = read[0][..., own["kept"]]
        case Fill():
            own[name] = np.zeros((*read[0].shape[:-1], step.of))
            own[name][..., own["kept"]] = read[0]
        case Join():
            own[name] = np.concatenate(read, step.dim)
        case Apply(function="zeros"):
            own[name] = np.zeros_like(read[0])
        case Apply(function="add_bias"):
            own[name] = read[0] + read[1]
        case Apply(function="sum_tokens"):
            own[name] = read[0].reshape(-1, read[0].shape[-1]).sum(0)
        case _:
            raise AssertionError(step)
