"""Whole balanced runs: the same as without balance where nothing is done, events in and decisions out, and the layouts
around tensor groups.
"""

import json
import time
from dataclasses import asdict, replace

import pytest

from twinbed.analysis.record import Decision
from twinbed.conf.schema import (
    Backend,
    BalanceConf,
    DeviceConf,
    Engine,
    HostConf,
    InterNodeConf,
    IntraNodeConf,
    OptimizerConf,
    Selection,
    SlowdownBy,
    TrainConf,
)
from twinbed.policies.balance import (
    ChangesMeasured,
    GroupMeasured,
    Half,
    Migrate,
    MovementTimed,
    ProductsTimed,
    Prune,
    describe_balance_actions,
    parse_balance_event,
)
from twinbed.sim.simulate import simulate

DEVICE = DeviceConf(flop_per_s=1e12, memory_Bps=1e11, launch_ns=1_000)
LAYOUTS = {
    "tensor": {},
    "data": {"ranks": 8, "per_node": 4, "tensor": 4},
    "sharded": {"ranks": 8, "per_node": 4, "tensor": 4, "comm": "zero3"},
    "pipeline": {"ranks": 8, "per_node": 8, "tensor": 4, "pipeline": 2, "accumulation": 2},
    "interleaved": {
        "ranks": 4,
        "tensor": 2,
        "pipeline": 2,
        "accumulation": 2,
        "virtual_stages": 2,
        "pipeline_schedule": "interleaved",
    },
    "ring": {"ranks": 4, "tensor": 2, "sequence": 2, "sequence_mode": "ring"},
}
ACTIONS = (Migrate(0, 1, Half.attention, 1), Migrate(0, 1, Half.ffn, 10), Prune(1, 0.25))


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture(params=list(Backend))
def backend(request):
    return request.param


def spec_for(spec_of):
    return spec_of(layers=4)


def test_nothing_done_takes_as_long_as_no_balance_but_for_the_measuring_rows(
    make, spec_of, unbalanced, scripted, layout, backend
):
    spec = spec_for(spec_of)
    experiment = make(
        **layout,
        cluster_backend=backend,
        cluster_device=DEVICE,
        balance_name="resize",
        balance_period=2,
        steps=4,
        train=TrainConf(gradient_clipping=1.0, eval_every=3),
    )
    plain = simulate(unbalanced(experiment), spec=spec, fold=None)
    _, factory = scripted({2: (Prune(0, 0.0),)})
    record = simulate(experiment, spec=spec, make_balance=factory)
    rows = [row for row in record.ledger if row.stream == "balance"]
    assert {(r.iteration, r.phase, r.layer, r.op, r.axis) for r in rows} == {
        (i, "step", "", "all_gather", "tensor") for i in (1, 3)
    }
    ranks = experiment.parallel.tensor
    assert {r.payload_bytes for r in rows} == {48 * ranks}
    # the first step measures nothing; the fourth tells as the second does
    never = simulate(
        replace(experiment, balance=replace(experiment.balance, period=100)), spec=spec, make_balance=factory
    )
    assert never.result["iteration_s"] == plain.result["iteration_s"]
    assert never.result["phases_s"] == pytest.approx(
        plain.result["phases_s"], rel=1e-12
    )  # sums of more terms
    own = [row for row in record.ledger if row.stream != "balance"]
    assert _by_rank(never.ledger) == _by_rank(_expanded(plain)) == _by_rank(own)


def _expanded(record):
    ranks = {c["rank"]: [r for run in c["ranks"] for r in range(*run)] for c in record.result["classes"]}
    return [replace(row, rank=rank, count=1) for row in record.ledger for rank in ranks[row.rank]]


def _by_rank(rows):
    return sorted((r.rank, i, *(list(asdict(r).values())[1:])) for i, r in _numbered(rows))


def _numbered(rows):
    seen = {}
    for row in rows:
        seen[row.rank] = seen.get(row.rank, -1) + 1
        yield seen[row.rank], row


def test_movements_and_pruning_in_every_layout(make, spec_of, scripted, layout, backend):
    """Bytes that are lent are those that come back, only those who move have rows, and folding changes little."""
    spec = spec_for(spec_of)
    experiment = make(
        **layout,
        cluster_backend=backend,
        cluster_device=DEVICE,
        balance_name="semi",
        cluster_slowdown={0: 3.0},
        train=TrainConf(gradient_clipping=1.0),
    )
    made, factory = scripted({1: ACTIONS})
    records = [simulate(experiment, spec=spec, make_balance=factory, fold=fold) for fold in (True, False)]
    assert [record.result["status"] for record in records] == ["ok", "ok"]
    groups = experiment.cluster.num_ranks // experiment.parallel.tensor
    assert len(made) == 2 * groups
    lend, back = ([row for row in records[0].ledger if row.stream == stream] for stream in ("lend", "return"))
    assert sum(r.wire_bytes for r in lend) == sum(r.wire_bytes for r in back) > 0
    assert sum(r.wire_bytes for r in lend) == sum(r.payload_bytes for r in lend) // 2  # one sends, one gets
    assert records[0].ledger == records[1].ledger
    if backend is Backend.nccl:
        times = [record.result["iteration_s"]["mean"] for record in records]
        assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize("cores", [0, 4])
def test_a_policy_is_told_what_the_products_of_each_rank_took(make, spec_of, scripted, cores):
    """flop / rate, times the factor, mean over the period; who sleeps needs no core."""
    spec = spec_of()
    rate = 1e9
    experiment = make(
        4,
        cluster_emulated_flops_per_s=rate,
        cluster_slowdown=[{"rank": 2, "factor": 3.0, "from_step": 1, "until_step": 3}],
        cluster_slowdown_by=SlowdownBy.sleep,
        cluster_host=HostConf(cores=cores),
        balance_period=2,
        accumulation=2,
        steps=4,
    )
    made, factory = scripted({})
    simulate(experiment, spec=spec, make_balance=factory)
    first, second = (event for event in made[0].events if isinstance(event, GroupMeasured))
    tokens, hidden = 4 * 16, 64
    # forward, and both gradients, of matrices of one rank, 2 blocks, 2 micro-batches
    even = {
        Half.attention: 3 * 2 * tokens * hidden * (3 + 1) * hidden // 4 * 2 * 2 / rate * 1e9,
        Half.ffn: 3 * 2 * tokens * hidden * 2 * 4 * hidden // 4 * 2 * 2 / rate * 1e9,
    }
    assert (first.step, second.step) == (2, 4)
    for half in Half:
        for event in (first, second):
            times = event.time_ns(half)
            assert times[0] == pytest.approx(even[half], rel=1e-5)
            assert times[2] == pytest.approx(2 * even[half], rel=1e-5)  # one step of two at a third


def test_movements_are_timed_before_the_first_step(make, spec_of, scripted):
    """All groups at once: both share the NIC."""
    keys = {
        "cluster_backend": Backend.nccl,
        "cluster_device": DeviceConf(),
        "cluster_intra_node": IntraNodeConf(bandwidth_Bps=1e12, latency_ns=0),
        "cluster_inter_node": InterNodeConf(bandwidth_Bps=1e8, latency_ns=0),
    }
    times = []
    for order in (["tensor", "data", "sequence", "pipeline"], ["data", "sequence", "tensor", "pipeline"]):
        made, factory = scripted({})
        experiment = make(4, per_node=2, tensor=2, order=order, **keys)
        simulate(experiment, spec=spec_of(), make_balance=factory)
        events = [event for event in made[0].events if isinstance(event, MovementTimed)]
        assert [event.half for event in events] == list(Half)
        times.append(events[1])
    inside, across = times
    assert inside.units == across.units == (1, 64)  # of 128
    unit_bytes = (64 * 2 + 1) * 4
    for which, units in enumerate((1, 64)):  # out and back, and two groups at one NIC
        assert across.time_ns[which] == pytest.approx(2 * 2 * units * unit_bytes / 0.1, abs=4)
        assert inside.time_ns[which] == pytest.approx(2 * units * unit_bytes / 1000, abs=4)


def test_who_lends_at_once_shares_a_nic_and_no_switch(make, spec_of, scripted):
    latency = {"latency_ns": 0}
    times = []
    for per_node in (4, 2):
        made, factory = scripted({})
        experiment = make(
            4,
            per_node=per_node,
            cluster_backend=Backend.nccl,
            cluster_intra_node=IntraNodeConf(bandwidth_Bps=1e8, **latency),
            cluster_inter_node=InterNodeConf(bandwidth_Bps=1e8, **latency),
        )
        simulate(experiment, spec=spec_of(), make_balance=factory)
        times.append([event for event in made[0].events if isinstance(event, MovementTimed)])
    for inside, across in zip(*times, strict=True):
        assert inside.together_ns == pytest.approx(inside.time_ns[1], rel=1e-3)
        # both lend to the other node
        nbytes = inside.units[1] * {Half.attention: 64 * 4 * 8, Half.ffn: 64 * 2 + 1}[inside.half] * 4
        assert across.lenders == 2
        assert across.time_ns[1] == pytest.approx(2 * nbytes / 0.1, rel=0.02)
        assert across.together_ns == pytest.approx(2 * across.time_ns[1], rel=0.01)


def test_recorded_events_give_the_same_programs_whatever_is_measured(make, spec_of):
    """A run on one machine, told to a simulation of another: the same rows, entry by entry."""

    class ByTimes:
        """Answers with what depends on measured numbers."""

        name = "by_times"

        def __init__(self, work):
            self.work = work

        def decide(self, event):
            if not isinstance(event, GroupMeasured):
                return None
            slow = max(range(4), key=lambda rank: event.ffn_ns[rank])
            if event.ffn_ns[slow] < 1.5 * min(event.ffn_ns):
                return ()
            return (Migrate(slow, (slow + 1) % 4, Half.ffn, 1 + event.ffn_ns[slow] % 7), Prune(slow, 0.3))

    spec = spec_of()
    slowdown = [{"rank": 1, "factor": 3.0, "until_step": 2}, {"rank": 2, "factor": 4.0, "from_step": 3}]
    run = make(4, balance_name="semi", cluster_slowdown=slowdown, cluster_emulated_flops_per_s=1e8, steps=5)
    real = simulate(run, spec=spec, make_balance=ByTimes)
    other = replace(run, cluster=replace(run.cluster, slowdown=None, emulated_flops_per_s=3e8))
    told = simulate(other, spec=spec, make_balance=ByTimes, balance_events=real.decisions)
    own = simulate(other, spec=spec, make_balance=ByTimes)
    assert told.ledger == real.ledger != own.ledger
    assert told.decisions == real.decisions != own.decisions
    assert len({d.action for d in real.decisions if d.event.startswith("GroupMeasured")}) > 2
    # and a policy that is told the log's events answers as it says
    replayed = ByTimes(None)
    for decision in real.decisions:
        if decision.event.startswith(("GroupMeasured", "MovementTimed")):
            answer = replayed.decide(parse_balance_event(decision.event))
            assert describe_balance_actions(answer) == decision.action


def test_recorded_events_of_another_experiment_are_refused(make, spec_of, scripted):
    spec, experiment = spec_of(), make(4)
    _, factory = scripted({})
    record = simulate(experiment, spec=spec, make_balance=factory)
    with pytest.raises(ValueError, match="end before GroupMeasured"):
        simulate(
            replace(experiment, steps=4), spec=spec, make_balance=factory, balance_events=record.decisions
        )
    other = replace(experiment, balance=replace(experiment.balance, pretest=False))
    with pytest.raises(ValueError, match="have MovementTimed.* where this experiment has GroupMeasured"):
        simulate(other, spec=spec, make_balance=factory, balance_events=record.decisions)


def test_groups_without_recorded_events_decide_by_themselves(make, spec_of, scripted):
    experiment = make(4, tensor=2, cluster_emulated_flops_per_s=1e8)
    record = simulate(experiment, spec=spec_of(), make_balance=scripted({})[1])
    changed = [
        Decision(
            d.rank,
            d.iteration,
            d.event.replace("step=1,", "step=1, ").replace("step=1,  ", "step=1, "),
            d.action,
        )
        for d in record.decisions
        if d.rank == 0
    ]
    made, factory = scripted({})
    faster = replace(experiment, cluster=replace(experiment.cluster, emulated_flops_per_s=2e8))
    simulate(faster, spec=spec_of(), make_balance=factory, balance_events=changed)
    told, measured = (
        next(event for event in policy.events if isinstance(event, GroupMeasured)) for policy in made
    )
    assert {d.rank for d in record.decisions} == {0, 2}
    assert told.ffn_ns[0] == pytest.approx(2 * measured.ffn_ns[0], rel=1e-3)


def test_changes_are_told_before_times(make, spec_of, scripted):
    experiment = make(
        4,
        balance_name="resize",
        balance_selection=Selection.differentiated,
        balance_refresh=2,
        balance_period=2,
        steps=2,
    )
    made, factory = scripted({})
    record = simulate(experiment, spec=spec_of(), make_balance=factory)
    rows = [
        (r.layer, r.payload_bytes, r.iteration)
        for r in record.ledger
        if r.stream == "balance" and r.rank == 0
    ]
    assert rows == [("changes", 4 * 8 * 4, 1), ("", 48 * 4, 1)]  # 4 products of 2 blocks
    *products, changes, times = made[0].events
    assert all(isinstance(event, ProductsTimed) for event in products)
    assert isinstance(changes, ChangesMeasured)
    assert isinstance(times, GroupMeasured)
    assert len(changes.changes) == 4
    assert len(changes.changes[0]) == 8
    assert changes.step == 2


def test_memory_that_is_lent_is_not_free(make, spec_of, scripted):
    spec = spec_of()
    experiment = make(4, cluster_device=DeviceConf(memory_bytes=1e9))
    _, factory = scripted({1: (Migrate(0, 3, Half.ffn, 5),)})
    periods = simulate(experiment, spec=spec, make_balance=factory).result["balance"]["groups"][0]["periods"]
    before, after = periods[0]["free_bytes"], periods[1]["free_bytes"]
    assert [a - b for a, b in zip(before, after, strict=True)] == [0, 0, 0, 2 * 5 * (64 * 2 + 1) * 4]


def test_one_seed_gives_one_result(make, spec_of, scripted):
    experiment = make(8, per_node=4, tensor=4, cluster_slowdown={1: 2.0}, balance_name="semi")
    texts = [
        json.dumps(simulate(experiment, spec=spec_of(), make_balance=scripted({1: ACTIONS})[1]).result)
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "guessed"),
    [
        ({"name": "semi", "accuracy_budget": 0.5}, True),
        ({"name": "semi", "accuracy_budget": 0.5, "loss_points": [[0.5, 1.0]]}, False),
        ({"name": "resize"}, False),  # no budget: nothing rests on it
        ({"name": "migrate"}, False),
    ],
)
def test_what_pruning_cost_in_another_training_is_listed_as_a_guess(make, spec_of, changes, guessed):
    experiment = replace(make(4), balance=BalanceConf(**changes))
    result = simulate(experiment, spec=spec_of()).result
    found = [each for each in result["guessed_inputs"] if each["key"] == "balance.loss_points"]
    assert len(found) == guessed


def test_every_guess_has_policies_of_its_own(make, spec_of, scripted):
    experiment = make(4, cluster_guesses={"device.flop_per_s": [5e11, 2e12]}, cluster_device=DEVICE)
    made, factory = scripted({1: ACTIONS[:2]})
    record = simulate(experiment, spec=spec_of(), make_balance=factory)
    assert len(made) == 3
    # the record is the nominal one's
    periods = record.result["balance"]["groups"][0]["periods"]
    assert [tuple(p["ffn_ns"]) for p in periods] == [
        e.ffn_ns for e in made[0].events if isinstance(e, GroupMeasured)
    ]
    assert record.result["iteration_s"]["low"] < record.result["iteration_s"]["high"]


@pytest.mark.parametrize(
    ("by", "slow"),
    [
        (SlowdownBy.device, {"products", "attention", "rest", "step"}),
        (SlowdownBy.quota, {"products", "attention", "rest", "step"}),
        (SlowdownBy.sleep, {"products", "attention"}),
        (SlowdownBy.repeat, {"products"}),
    ],
)
def test_what_a_slowdown_is_of(make, spec_of, unbalanced, by, slow):
    from twinbed.sim.run import Run
    from twinbed.sim.simulate import make_engine

    experiment = unbalanced(
        make(4, cluster_backend=Backend.nccl, cluster_device=DEVICE, cluster_slowdown={2: 4.0})
    )
    experiment = replace(experiment, cluster=replace(experiment.cluster, slowdown_by=by))
    run = Run(experiment, spec_of(), None, None, make_engine)
    simulated = run.simulate(experiment.cluster)
    program = run.segments[0].program(0)
    took = {}
    for rank in (0, 2):
        timing = simulated.timings[simulated.fold.representative(rank)][0]
        for item in program.items:
            if item.transfer is None:
                kind = "step" if item.phase == "step" else "products" if item.half else "rest"
                kind = (
                    "attention" if kind == "rest" and item.product and "core" in item.parts[0].name else kind
                )
                if kind == "rest" and item.product:
                    continue  # the head's product
                took.setdefault(kind, [0, 0])[rank // 2] += (
                    timing.ends_ns[item.index] - timing.starts_ns[item.index]
                )
    for kind, (full, own) in took.items():
        assert own == pytest.approx((4.0 if kind in slow else 1.0) * full, rel=1e-3), kind


def test_a_slowdown_by_steps_holds_in_these_steps(make, spec_of, unbalanced):
    slow = [{"rank": 1, "factor": 3.0, "from_step": 1, "until_step": 3}]
    experiment = unbalanced(make(4, cluster_backend=Backend.nccl, cluster_device=DEVICE, steps=5))
    slowed = replace(experiment, cluster=replace(experiment.cluster, slowdown=slow))
    plain = simulate(experiment, spec=spec_of()).result["iteration_s"]["mean"]
    always = replace(experiment, cluster=replace(experiment.cluster, slowdown={1: 3.0}))
    most = simulate(always, spec=spec_of()).result["iteration_s"]["mean"]
    stats = simulate(slowed, spec=spec_of()).result["iteration_s"]
    assert (stats["min"], stats["max"]) == (plain, most)
    assert stats["mean"] == pytest.approx((3 * plain + 2 * most) / 5, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": Engine.megatron}, "cluster.slowdown_by=repeat with engine=megatron"),
        ({"tensor": 1}, "cluster.slowdown_by=repeat with parallel.tensor=1"),
    ],
)
def test_slowdowns_that_have_no_place_are_refused(make, spec_of, unbalanced, changes, message):
    experiment = make(4, cluster_slowdown={0: 2.0}, cluster_slowdown_by=SlowdownBy.repeat, **changes)
    with pytest.raises(ValueError, match=message):
        simulate(unbalanced(experiment), spec=spec_of())


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((Migrate(0, 1, Half.attention, 3),), "policy 'scripted': rank 0 is to lend 3 units of attention"),
        ((Prune(0, 1.0),), "policy 'scripted'.*ratio=1.0 must be in"),
        ((Migrate(0, 4, Half.ffn, 1),), "rank 4 must be in"),
    ],
)
def test_actions_that_cannot_be_carried_out_are_refused(make, spec_of, scripted, actions, message):
    with pytest.raises(ValueError, match=message):
        simulate(make(4), spec=spec_of(), make_balance=scripted({1: actions})[1])


def test_a_resizing_policy_moves_nothing(make, spec_of, scripted):
    _, factory = scripted({1: (Migrate(0, 1, Half.ffn, 1),)})
    with pytest.raises(ValueError, match="migrates with balance=resize: use balance=migrate"):
        simulate(make(4, balance_name="resize"), spec=spec_of(), make_balance=factory)


def test_a_helper_that_dies_while_it_is_lent_units_is_named(make, spec_of, scripted):
    experiment = make(4, cluster_device=DEVICE, cluster_backend=Backend.nccl)
    _, factory = scripted({1: ACTIONS[:2]})
    second_s = simulate(experiment, spec=spec_of(), make_balance=factory).result["iteration_s"]["min"]
    failing = replace(
        experiment, cluster=replace(experiment.cluster, failures=[{"rank": 1, "at_s": 1.2 * second_s}])
    )
    record = simulate(failing, spec=spec_of(), make_balance=factory)
    assert record.result["status"] == "failed"
    assert "rank 1 failed" in record.result["error"]
    assert "rank 0 waits for rank 1" in record.result["error"]


def test_probed_computation_follows_shares(make, spec_of, scripted):
    """A probe times an even split; the products of a share take their part of it."""
    probe = {f"{way}/{what}": 10_000_000 for way in ("forward", "backward") for what in ("block", "root")}
    experiment = make(
        4, cluster_host=HostConf(compute_ns=probe | {"step": 1_000}), cluster_device=DEVICE, steps=2
    )
    made, factory = scripted({1: (Migrate(0, 1, Half.ffn, 32),)})
    simulate(experiment, spec=spec_of(), make_balance=factory)
    before, after = (event for event in made[0].events if isinstance(event, GroupMeasured))
    # 64 units each: half of them go; memory-bound parts and launches stay
    assert after.ffn_ns[2] == before.ffn_ns[2]
    assert after.attention_ns == before.attention_ns
    assert after.ffn_ns[0] < before.ffn_ns[0] < after.ffn_ns[1]
    assert after.ffn_ns[0] + after.ffn_ns[1] == pytest.approx(2 * before.ffn_ns[0], rel=0.02)


def test_simulating_a_balanced_run_is_quick(make, spec_of, scripted):
    """8 ranks, 24 blocks, 10 steps, decisions in each."""
    experiment = make(8, tensor=8, cluster_backend=Backend.nccl, cluster_device=DEVICE, steps=10)
    _, factory = scripted({step: (Migrate(0, 1, Half.ffn, step),) for step in range(1, 10)})
    began = time.perf_counter()
    record = simulate(experiment, spec=spec_of(layers=24, heads=8), make_balance=factory)
    assert record.result["status"] == "ok"
    assert time.perf_counter() - began < 30


def test_timelines_show_streams_of_their_own(make, spec_of, scripted):
    experiment = make(4, optimizer=OptimizerConf(name="adamw"))
    record = simulate(experiment, spec=spec_of(), make_balance=scripted({1: ACTIONS[:2]})[1])
    assert {"lend", "return", "balance"} <= {span.stream for span in record.spans if span.rank == 0}
    assert {"lend", "return"} & {span.stream for span in record.spans if span.rank == 3} == set()


def test_events_come_in_order(make, spec_of, scripted):
    made, factory = scripted({})
    simulate(make(2), spec=spec_of(), make_balance=factory)
    assert [type(e).__name__ for e in made[0].events] == [
        *["MovementTimed"] * 2,
        *["ProductsTimed"] * 2,
        *["GroupMeasured"] * 3,
    ]
