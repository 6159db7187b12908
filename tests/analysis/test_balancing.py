"""What is said of balancing: all groups, ranks of the world, changes and not answers, and why nothing was changed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from twinbed.analysis.balancing import BALANCE_EVENTS, balance_sentences
from twinbed.analysis.record import Decision, Record
from twinbed.policies.balance import is_balance_event

Answer = tuple[str, str]
Group = tuple[tuple[int, ...], Sequence[Answer]]
Tell = Callable[..., list[str]]
LENDS = "migrate 3 ffn from 1 to 0"


def measured(step: int, attention: str = "100/100", ffn: str = "100/100", free: str = "900/900") -> str:
    return f"GroupMeasured(step={step}, attention_ns={attention}, ffn_ns={ffn}, free_bytes={free})"


def record_of(name: str, groups: Sequence[Group], *, speedups: Sequence[float] = (), **conf: Any) -> Record:
    """Periods of all groups end at steps 2, 4 and so on."""
    periods = [{"step": 2 * i + 2, "predicted_speedup": speedup} for i, speedup in enumerate(speedups)]
    return Record(
        {
            "experiment": {"balance": {"name": name, "way": "paired", **conf}},
            "balance": {
                "groups": [
                    {"ranks": list(ranks), "periods": periods, "least_room_bytes": 500} for ranks, _ in groups
                ]
            },
        },
        decisions=[
            Decision(min(ranks, default=0), i, event, action)
            for ranks, answers in groups
            for i, (event, action) in enumerate(answers)
        ],
    )


def told(name: str, answers: Sequence[Answer], **more: Any) -> str:
    """Of a run with one group."""
    (sentence,) = balance_sentences(record_of(name, [((0, 1), answers)], **more))
    return sentence


def test_names_of_events_are_those_of_the_policies() -> None:
    assert all(is_balance_event(f"{name}(step=1)") for name in BALANCE_EVENTS)


def test_what_each_rank_does_is_told() -> None:
    actions = "prune rank 1 by 0.25, prune rank 1 by 0.5 in block.0.fc1, migrate 1 attention from 3 to 0, "
    actions += "migrate 40 ffn from 3 to 0, migrate 2 ffn from 3 to 1"
    assert told("semi", [("MovementTimed(half=ffn)", "keep"), ("GroupMeasured(step=2)", actions)]) == (
        "balance=semi: 1 change; at the end rank 1 leaves 0.25 to 0.5 of its columns out; rank 3 lends 1 key head and "
        "42 hidden features"
    )
    assert "rank 1 lends 3 ffn units (columns of every matrix)" in told(
        "migrate", [("GroupMeasured(step=2)", LENDS)], way="scatter"
    )


def test_what_is_beside_products_counts_too() -> None:
    """Half of what is around them in each half: 115 and 125 ns before, then the slower of two ranks."""
    beside = ", attention_between_ns=10/5, ffn_between_ns=20/10, around_ns=10/10)"
    first, last = measured(2)[:-1] + beside, measured(4, "50/90", "40/100")[:-1] + beside
    sentence = told("migrate", [(first, LENDS), (last, "keep")], speedups=(1.5, 1.5))
    assert "when that was decided its blocks were predicted 1.50 times as fast" in sentence
    assert "the blocks of its slowest ranks went from 2.4e-07 s to 2.15e-07 s a step, 1.12 times" in sentence


def test_all_groups_in_which_something_was_changed_are_told() -> None:
    even = [(measured(2), "keep")]
    groups: list[Group] = [
        ((0, 1, 2, 3), even),
        ((4, 5, 6, 7), [("GroupMeasured(step=2)", LENDS)]),
        ((8, 10), [("GroupMeasured(step=2)", LENDS), ("GroupMeasured(step=4)", "nothing")]),
        ((9, 11), even),
    ]
    assert balance_sentences(record_of("migrate", groups)) == [
        "balance=migrate: ranks 4 to 7: 1 change; at the end rank 5 lends 3 hidden features",
        "balance=migrate: ranks 8, 10: 2 changes; at the end all ranks do the same",
        "balance=migrate: nothing was changed in 2 of 4 groups of ranks",
    ]


def test_ranks_are_of_the_world_and_not_places_in_the_group() -> None:
    (sentence,) = balance_sentences(
        record_of("resize", [((0, 4), [("GroupMeasured(step=2)", "prune rank 1 by 0.5")])])
    )
    assert sentence == "balance=resize: 1 change; at the end rank 4 leaves 0.5 of its columns out"


def test_the_prediction_is_that_of_the_decision_and_measured_products_stand_beside() -> None:
    answers = [
        (measured(2, "100/400", "200/1600"), LENDS),
        (measured(4, "100/250", "200/900"), "keep"),
        (measured(6, "100/200", "200/800"), "keep"),
    ]
    assert told("migrate", answers, speedups=(1.75, 1.9, 7.0)) == (
        "balance=migrate: 1 change; at the end rank 1 lends 3 hidden features; when that was decided its products were "
        "predicted 1.75 times as fast as an even split's; from the first period to the last the products of its "
        "slowest ranks went from 2e-06 s to 1e-06 s a step, 2.00 times as fast"
    )


def test_a_decision_at_the_last_period_was_not_measured_since() -> None:
    answers = [(measured(2), "keep"), (measured(4, "100/400"), LENDS)]
    sentence = told("migrate", answers, speedups=(1.0, 1.5))
    assert "predicted 1.50 times as fast" in sentence
    assert sentence.endswith("; no period was measured since")
    assert "from the first period" not in sentence


def test_changes_are_counted_and_not_answers() -> None:
    same = [(f"GroupMeasured(step={step})", LENDS) for step in (2, 4, 6)]
    assert told("migrate", same).startswith("balance=migrate: 1 change;")
    # ratios that are renewed by how weights change are in force, and no change of the split
    renewed = [
        ("GroupMeasured(step=2)", "prune rank 0 by 0.5"),
        ("ChangesMeasured(step=3, changes=0.1:0.2/0.1:0.2)", "prune rank 0 by 0.25 in block.0.fc1"),
    ]
    assert told("resize", renewed) == (
        "balance=resize: 1 change; at the end rank 0 leaves 0.25 of its columns out"
    )


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("layers", "share blocks 1/1/1/1", "balance=layers: nothing was changed"),
        ("layers", "share blocks 2/2/1", "balance=layers: nothing was changed"),
        ("layers", "share blocks 1/2/2", "balance=layers: 1 change; at the end stages hold 1/2/2 blocks"),
        ("batch", "share sequences 4/4", "balance=batch: nothing was changed"),
        ("batch", "share sequences 5/3", "balance=batch: 1 change; at the end replicas take 5/3 sequences"),
    ],
)
def test_an_even_share_is_no_change(name: str, answer: str, said: str) -> None:
    record = record_of(name, [((), [("ReplicasMeasured(step=2)", answer)])])
    record.result.pop("balance")
    assert balance_sentences(record) == [said]


def test_a_rank_that_stays_slow_is_told_and_whether_memory_is_why() -> None:
    slow = measured(2, "100/150", "100/250")
    assert told("migrate", [(slow, "keep")]) == (
        "balance=migrate: nothing was changed, although rank 1 took 1.33 times the median of all in the last period"
    )
    full = measured(2, "100/150", "100/250", free="499/900")  # room is at the slow rank only
    assert told("migrate", [(full, "keep")]).endswith(
        "in the last period: no other rank has memory for a unit of it"
    )
    fits = measured(2, "100/150", "100/250", free="500/0")
    assert told("migrate", [(fits, "keep")]).endswith("in the last period")
    # a tenth slower is not slow
    assert told("migrate", [(measured(2, "100/110", "100/110"), "keep")]).endswith("nothing was changed")
    assert balance_sentences(Record({"experiment": {"balance": {"name": "migrate"}}})) == [
        "balance=migrate: nothing was changed"
    ]


def test_replicas_and_stages_that_stay_slow_are_told() -> None:
    event = "ReplicasMeasured(step=2, compute_ns=300/100/100, room=4/0/-1)"
    record = record_of("batch", [((), [(event, "keep")])])
    record.result.pop("balance")
    assert balance_sentences(record) == [
        "balance=batch: nothing was changed, although replica 0 took 3.00 times the median of all in the last period: "
        "no other replica has memory for a sequence more"
    ]
    record.decisions[:] = [
        Decision(0, 0, "StagesMeasured(block_ns=10/30/10, ends_ns=0/0)", "share blocks 1/1/1")
    ]
    record.result["experiment"]["balance"]["name"] = "layers"
    assert balance_sentences(record)[0].endswith(
        "although stage 1 took 3.00 times the median of all when stages were timed"
    )


def test_of_unchanged_groups_the_slowest_is_told_with_its_rank_of_the_world() -> None:
    groups: list[Group] = [
        ((0, 2), [(measured(2), "keep")]),
        ((1, 3), [(measured(2, "100/900", "100/900"), "keep")]),
    ]
    assert balance_sentences(record_of("migrate", groups)) == [
        "balance=migrate: nothing was changed in 2 of 2 groups of ranks, although rank 3 took 1.80 times the median of "
        "ranks 1, 3 in the last period"
    ]


@pytest.mark.parametrize(
    ("conf", "ratio", "said"),
    [
        ({"accuracy_budget": 0.5, "max_ratio": 0.9}, 0.2, "balance.accuracy_budget=0.5"),
        ({"accuracy_budget": None, "max_ratio": 0.4}, 0.4, "balance.max_ratio=0.4"),
        ({"accuracy_budget": 9.0, "max_ratio": 0.4}, 0.4, "balance.max_ratio=0.4"),
        ({"accuracy_budget": 0.5, "max_ratio": 0.4}, 0.3, "balance.accuracy_budget=0.5"),
        ({"accuracy_budget": 9.0, "max_ratio": 0.9}, 0.5, None),
    ],
)
def test_less_pruning_than_asked_names_the_key_that_bounds_it(
    conf: dict[str, Any], ratio: float, said: str | None
) -> None:
    sentence = told("resize", [("GroupMeasured(step=2)", f"prune rank 0 by {ratio}")], ratio=0.5, **conf)
    ending = "" if said is None else f", less than balance.ratio=0.5: {said} allows no more"
    assert sentence.endswith(f"leaves {ratio} of its columns out{ending}")


def test_a_budget_that_allows_no_pruning_is_told() -> None:
    slow = measured(2, "100/300", "100/300")
    sentence = told("resize", [(slow, "keep")], ratio=0.5, accuracy_budget=0.0, max_ratio=0.9)
    assert sentence.endswith(": balance.accuracy_budget=0 allows nothing of balance.ratio=0.5")
