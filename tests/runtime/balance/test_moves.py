"""Units of slow ranks that others compute: what plain tensor parallelism computes, and the rows that it adds."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from twinbed.analysis.record import LedgerRow
from twinbed.conf.compose import compose
from twinbed.policies.balance import Assignment, BlockWork, GroupMeasured, Half, Product
from twinbed.policies.balance.build import balanced_work
from twinbed.policies.layout import layout_of

Launch = Callable[..., list[Any]]
LIMIT = 1e-5  # fp32, relative L2


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_lent_units_change_nothing_but_who_computes(launch: Launch) -> None:
    ranks = launch("ranks_balance", "moved,even", 4, timeout_s=500.0)
    check_moves([found["moved"] for found in ranks])
    for found in ranks:
        assert all(found["even"].values()), found["even"]
    assert ranks[0]["moved"]["gpt"]["learned"] > 0.5  # nats


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(600)
def test_lent_units_in_every_layout(launch: Launch) -> None:
    """20 steps of three families; zero, one and several replicas, overlap, bf16, and stages of a pipeline."""
    check_moves(launch("ranks_balance", "more_moves", 4, timeout_s=550.0))


def check_moves(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        for name, case in found.items():
            (keys, answers, steps), where = case["case"], f"{name}, rank {rank}"
            errors = {key: case[key] for key in ("gradients", "parameters", "losses", "validation")}
            limit = LIMIT if "bf16" not in name else 1e-2
            assert all(value <= limit for value in errors.values()), (where, errors)
            # what all else communicates, in validations too, has the sizes and the order that it had
            assert case["same_rows"], where
            work = work_of(keys)
            check_rows(case["rows"], rank, work, keys, answers, steps, where)
            check_events(case, work, answers, steps, where)


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_columns_that_migrate_change_nothing_but_who_computes(launch: Launch) -> None:
    """On layers cut by outputs and by inputs; what moves beside is as the closed form says."""
    check_columns_of(launch("ranks_balance", "columns", 4, timeout_s=500.0))


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(600)
def test_columns_that_migrate_in_every_way(launch: Launch) -> None:
    check_columns_of(launch("ranks_balance", "more_columns", 4, timeout_s=550.0))


def check_columns_of(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        for name, case in found.items():
            (keys, answers, steps), where = case["case"], f"{name}, rank {rank}"
            errors = {key: case[key] for key in ("gradients", "parameters", "losses", "validation")}
            assert all(value <= LIMIT for value in errors.values()), (where, errors)
            assert case["same_rows"], where
            check_columns(case["rows"], rank, work_of(keys), keys, answers, steps, where)


def check_columns(
    rows: list[LedgerRow],
    rank: int,
    work: BlockWork,
    keys: tuple[str, ...],
    answers: Mapping[int, tuple[Any, ...]],
    steps: int,
    where: str,
) -> None:
    """Payload of each stream and phase: of a lender's `m` columns of a product [out, in] of N tokens, weights go out
    once; of a column product the output [N, out] comes back and its gradient goes out; of a row product [N, m] of the
    input go out and [N, m] of its gradient come back; and so do the gradients of the weights.
    """
    experiment = compose([*keys, "balance=migrate"]).experiment
    me, by_scatter = rank % work.ranks, "balance.way=scatter" in keys
    passes = work.blocks * experiment.batch.accumulation
    expected: Counter[tuple[int, str, str]] = Counter()
    for step in range(steps):
        in_force = [since for since in answers if since <= step]
        assignment = Assignment(work, answers[max(in_force)] if in_force else ())
        for product in Product:
            half = product.half
            other = Product.out if half is Half.attention else Product.fc2
            first = Product.qkv if half is Half.attention else Product.fc1
            wide = work.unit_flop[half] // (2 * work.tokens) * work.units[half]  # of both matrices
            narrow = work.columns(other, work.units[half]) * work.hidden
            out = (wide - narrow) // work.hidden if product is first else work.hidden
            for src in assignment.sources(half):
                parts = assignment.lent(half, src)
                takes_part = me == src or parts[me] > 0
                columns = work.columns(product, sum(parts))
                weights, inputs = 4 * out * columns, 4 * work.tokens * columns
                outputs = 4 * work.tokens * out
                pieces = takes_part or not by_scatter
                if product is first:
                    expected[step, "lend", "forward"] += passes * weights * pieces
                    expected[step, "return", "forward"] += passes * outputs
                    expected[step, "lend", "backward"] += passes * outputs
                    expected[step, "return", "backward"] += passes * weights * pieces
                else:
                    expected[step, "lend", "forward"] += passes * (weights + inputs) * pieces
                    expected[step, "return", "backward"] += passes * (weights + inputs) * pieces
    seen: Counter[tuple[int, str, str]] = Counter()
    for row in rows:
        if row.stream != "balance":
            seen[row.iteration, row.stream, row.phase] += row.payload_bytes
    assert seen == +expected, (where, seen - expected, expected - seen)


def work_of(keys: tuple[str, ...]) -> BlockWork:
    composed = compose([*keys, "balance=migrate"])
    work = balanced_work(composed.experiment, composed.spec, layout_of(composed.experiment, composed.spec))
    assert work is not None
    return work


def check_rows(
    rows: list[LedgerRow],
    rank: int,
    work: BlockWork,
    keys: tuple[str, ...],
    answers: Mapping[int, tuple[Any, ...]],
    steps: int,
    where: str,
) -> None:
    """By the closed form: each pass of each block's half, its units out and back once."""
    experiment = compose([*keys, "balance=migrate"]).experiment
    layers, passes = work.blocks, experiment.batch.accumulation
    me, stage = rank % work.ranks, (rank // work.ranks) % experiment.parallel.pipeline
    stages = experiment.parallel.pipeline * experiment.parallel.virtual_stages
    chunks = experiment.parallel.virtual_stages
    each = layers // chunks
    here = [
        (chunk * experiment.parallel.pipeline + stage) * each + i
        for chunk in range(chunks)
        for i in range(each)
    ]
    assert stages * each == experiment.model.layers
    expected: Counter[tuple[Any, ...]] = Counter()
    for step in range(steps):
        in_force = [since for since in answers if since <= step]
        assignment = Assignment(work, answers[max(in_force)] if in_force else ())
        for half in Half:
            for src in assignment.sources(half):
                parts = assignment.lent(half, src)
                if me != src and not parts[me]:
                    continue
                unit = work.unit_bytes(half)
                sent = {"lend": sum(parts) if me == src else 0, "return": 0 if me == src else parts[me]}
                for block in here:
                    for stream, phase, op in (
                        ("lend", "forward", "scatter"),
                        ("return", "backward", "gather"),
                    ):
                        size = (sum(parts) * unit, sent[stream] * unit, 0)
                        label = f"block.{block}.{half.value}"
                        expected[step, phase, stream, op, label, "tensor", work.ranks, *size] += passes
        expected[
            step,
            "step",
            "balance",
            "all_gather",
            "",
            "tensor",
            work.ranks,
            48 * work.ranks,
            48 * (work.ranks - 1),
            0,
        ] += 1
    seen = Counter(
        (
            row.iteration,
            row.phase,
            row.stream,
            row.op,
            row.layer,
            row.axis,
            row.group_size,
            row.payload_bytes,
            row.wire_bytes,
            row.inter_node_bytes,
        )
        for row in rows
    )
    assert seen == expected, (where, seen - expected, expected - seen)
    if "zero3" not in " ".join(keys) and layers > chunks:  # weights are there: one block ahead
        forward = [row.layer for row in rows if row.stream == "lend" and row.iteration == 1]
        first = forward.index(f"block.{here[1]}.{forward[0].split('.')[2]}")
        assert f"block.{here[0]}." in forward[first - 1], where


def check_events(
    case: Mapping[str, Any], work: BlockWork, answers: Mapping[int, tuple[Any, ...]], steps: int, where: str
) -> None:
    measured = [event for event in case["told"] if isinstance(event, GroupMeasured)]
    assert [event.step for event in measured] == list(range(1, steps + 1)), where
    for event in measured:
        assert all(time_ns > 0 for time_ns in event.ffn_ns), where
        assert all(free > 0 for free in event.free_bytes), where
    idle = [all(event.attention_ns[rank] > 0 for event in measured) for rank in range(work.ranks)]
    assert all(idle), where
    logged = {iteration: action for iteration, _, action in case["decisions"]}
    for since, actions in answers.items():
        assert ("migrate" in logged[since - 1]) == bool(actions), where
        assert (logged[since - 1] == "nothing") == (not actions), where
