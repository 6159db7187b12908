"""What the simulator refuses, as the runtime does: plans that cannot be carried out, and runs without an end."""

from dataclasses import dataclass, replace

import pytest

import twinbed
from twinbed.conf.schema import InterNodeConf, Target
from twinbed.policies.comm import GradientsReady, Placement, WeightsNeeded
from twinbed.policies.plan import AllGather, AllReduce, LoadCopy, Plan, ReduceScatter, Reorder, StoreCopy
from twinbed.sim import run
from twinbed.sim.simulate import check_plans, simulate

GATHER = (AllGather(axis="world"),)
SCATTER = (ReduceScatter(axis="world"),)


@dataclass(frozen=True)
class Own:
    """A policy of one gather and one reduction; None: it answers None."""

    gather: tuple = GATHER
    reduce: tuple | None = SCATTER
    backward: tuple | None = None
    name: str = "own"
    placement: Placement = Placement.sharded
    reshard_after_forward: bool = True
    hpz_size: int = 2
    copy_outlives_micro_batch: bool = False

    def decide(self, event):
        if isinstance(event, WeightsNeeded):
            steps = self.gather
            if self.backward is not None and event.phase.value == "backward":
                steps = self.backward
            return Plan(steps, "gather")
        if isinstance(event, GradientsReady):
            return None if self.reduce is None else Plan(self.reduce, "reduce")
        return None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Own(backward=(LoadCopy(axis="hpz"), AllGather(axis="hpz"))), r"copy_valid=False\).*no copy to load"),
        (
            Own(
                gather=(*GATHER, StoreCopy(axis="local")),
                backward=(LoadCopy(axis="hpz"), AllGather(axis="hpz")),
            ),
            "no secondary shard over 'hpz' has been stored, but one over 'local'",
        ),
        (Own(reduce=None), "never reduces the gradients of any unit: it answers None"),
        (Own(placement=Placement.replicated, reduce=None), "never reduces the gradients of any unit"),
        (Own(reduce=(*SCATTER, StoreCopy(axis="hpz"))), "keeps a copy, but only a gather can"),
        (Own(gather=(Reorder(), *GATHER)), "Reorder takes one slice a rank, got 1"),
        (Own(gather=(AllGather(axis="data"),)), "axis='data' is not on the mesh"),
    ],
)
def test_plans_that_the_runtime_refuses(make_experiment, make_spec, policy, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_experiment(), spec=make_spec(), policy=policy)
    with pytest.raises(ValueError, match=message):  # before any rank starts
        check_plans(make_experiment(), spec=make_spec(), policy=policy)


def test_one_unit_that_is_never_reduced_is_named(make_experiment, make_spec):
    class AllButOne(Own):
        def decide(self, event):
            if isinstance(event, GradientsReady) and (event.unit == "block.1" or event.micro_batch == 0):
                return None
            return super().decide(event)

    with pytest.raises(ValueError, match=r"never reduces the gradients of 'block\.1'"):
        simulate(make_experiment(accumulation=2), spec=make_spec(), policy=AllButOne())

    class Last(Own):
        def decide(self, event):
            if isinstance(event, GradientsReady) and event.micro_batch == 0:
                return None
            return super().decide(event)

    assert simulate(make_experiment(accumulation=2), spec=make_spec(), policy=Last()).result["status"] == "ok"


def test_whole_weights_can_be_reduced_by_a_policy_of_ones_own(make_experiment, make_spec):
    policy = Own(placement=Placement.replicated, reduce=(AllReduce(axis="world"),), hpz_size=1)
    assert simulate(make_experiment(), spec=make_spec(), policy=policy).result["status"] == "ok"


def test_a_ledger_that_nobody_could_read_is_refused_before_it_is_made(
    make_experiment, make_spec, monkeypatch
):
    experiment = make_experiment()
    rows = len(simulate(experiment, spec=make_spec()).ledger) // experiment.steps
    monkeypatch.setattr(run, "MAX_LEDGER_ROWS", rows * experiment.steps)
    assert len(simulate(experiment, spec=make_spec()).ledger) == rows * experiment.steps
    long = replace(experiment, steps=experiment.steps + 1)
    message = (
        rf"steps=4: the ledger would have {rows * 4} rows, {rows} a step; simulated, it must be at most 3"
    )
    with pytest.raises(ValueError, match=message):
        simulate(long, spec=make_spec())
    policy = run.Run(experiment, make_spec(), None, None, lambda setup: _engine(setup)).policy
    with pytest.raises(ValueError, match=message):
        check_plans(replace(long, target=Target.both), spec=make_spec(), policy=policy)
    check_plans(replace(long, target=Target.runtime), spec=make_spec(), policy=policy)


def _engine(setup):
    from twinbed.sim.simulate import make_engine

    return make_engine(setup)


def test_a_bandwidth_too_small_to_count_with_is_named(make_experiment, make_spec):
    slow = make_experiment(cluster_inter_node=InterNodeConf(bandwidth_Bps=1e-300))
    with pytest.raises(ValueError, match=r"too small, as cluster\.inter_node\.bandwidth_Bps=1e-300"):
        simulate(slow, spec=make_spec())


def test_a_long_run_keeps_what_its_record_shows(make_experiment, make_spec):
    """Steps that repeat themselves are shifted, most of them without their items."""
    short = simulate(make_experiment(steps=12), spec=make_spec())
    long = simulate(make_experiment(steps=40), spec=make_spec())
    assert long.result["phases_s"] == short.result["phases_s"]
    assert long.spans == short.spans
    assert long.result["iteration_s"]["n"] == 39


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"cluster: must be given \(missing: \['cluster', 'comm', 'data', 'model', 'optimizer'\]"),
        ({"foo": 1}, "foo: Key 'foo' not in 'ExperimentConf'"),
        ({"model": {"name": "x", "bar": 1}}, r"model\.bar: "),
        ({"steps": "many"}, "steps: Value 'many'"),
    ],
)
def test_predict_names_the_key_that_is_wrong(config, message):
    with pytest.raises(ValueError, match=message):
        twinbed.predict(config)
