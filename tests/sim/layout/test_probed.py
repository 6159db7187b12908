"""Predictions of layouts from what a local cluster measured, by hand."""

import pytest
import simpy

from twinbed.conf.schema import Backend, HostConf
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import Direction
from twinbed.sim import constants
from twinbed.sim.costs import Costs
from twinbed.sim.interpreter import Transfer, Work
from twinbed.sim.layout.shapes import BLOCK
from twinbed.sim.machine import ARRIVAL_SKEW_NS, Machine
from twinbed.sim.topology import Topology


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ({"tensor": 4, "tensor_mode": "2d"}, ("broadcast/row", "broadcast/column", "reduce_tree/row")),
        ({"tensor": 4}, ("all_reduce/tensor", "all_reduce/world")),
        ({"sequence": 4, "sequence_mode": "ring"}, ("send/sequence", "all_reduce/sequence")),
        ({"pipeline": 2, "accumulation": 2}, ("send/pipeline", "all_gather/replicas")),
    ],
)
def test_fixed_costs_repeat_the_probe_on_a_layouts_axes(make, spec_of, layout, keys):
    measured = {f"{key}/{size}": ns for key in keys for size, ns in ((512, 6_000_000), (65_536, 250_000_000))}
    host = HostConf(op_measured_ns=measured)
    experiment = make(4, per_node=2, micro=4, cluster_host=host, cluster_backend=Backend.gloo, **layout)
    policy, _ = build_comm(experiment.comm, num_ranks=2, ranks_per_node=1)
    made = constants.with_fixed_costs(experiment, spec_of(), policy)
    for key, took_ns in measured.items():
        assert 0 < made.cluster.host.op_ns[key] < took_ns
        op, axis, size = key.split("/")
        again = constants.collective_ns(made, spec_of(), policy, op=op, axis=axis, message_bytes=int(size))
        # in a group that the skew of arrivals holds up alike, a fixed cost hides some of it
        assert again == pytest.approx(took_ns, abs=ARRIVAL_SKEW_NS)


def test_what_a_unit_took_beyond_its_products_is_shared_out_among_the_rest(make, spec_of):
    """At a rate products take their own time and no more; the steps of a unit add up to what was measured of it."""
    rate, measured_ns = 1e9, 50_000_000
    host = HostConf(compute_ns={"forward/block": measured_ns, "backward/block": measured_ns})
    experiment = make(
        4, tensor=4, tensor_mode="2d", micro=4, cluster_host=host, cluster_emulated_flops_per_s=rate
    )
    policy, _ = build_comm(experiment.comm, num_ranks=1, ranks_per_node=1)
    costs = Costs(experiment, spec_of(), policy)
    assert costs.laid is not None
    total = 0
    for number, step in enumerate(costs.laid.model.steps(BLOCK, Direction.forward)):
        if isinstance(step.what, Transfer):
            continue
        work = Work("compute", f"forward/block.0#{number}")
        total += costs.ns(work)
        if step.what.flop:
            assert costs.ns(work) == costs.slept_ns(work) == round(step.what.flop / rate * 1e9)
        else:
            assert costs.ns(work) > costs.slept_ns(work) == 0
    assert total == pytest.approx(measured_ns, rel=1e-4)
    assert costs.ns(Work("compute", "forward/block.0")) == pytest.approx(measured_ns, rel=1e-4)


def test_computation_that_was_timed_in_a_pipeline_had_some_cores_for_itself(make, spec_of):
    """Two cores, four stages of which 4 / 7 compute at a time: one that computes alone takes 7 / 8 as long."""
    measured_ns = 7_000_000

    def took_ns(**layout):
        host = HostConf(
            cores=2, all_nodes=True, compute_ns={"forward/block": measured_ns, "backward/block": 0}
        )
        experiment = make(4, per_node=2, micro=4, cluster_host=host, cluster_backend=Backend.gloo, **layout)
        policy, _ = build_comm(experiment.comm, num_ranks=1, ranks_per_node=1)
        costs = Costs(experiment, spec_of(layers=4), policy)
        env = simpy.Environment()
        machine = Machine(env, costs, Topology(experiment.cluster), folded=False)
        whole = [Work("compute", "forward/block.0")]
        env.run(until=env.process(machine.work(0, whole)))
        return env.now

    assert took_ns(tensor=4) == pytest.approx(measured_ns / 2, rel=0.01)
    assert took_ns(pipeline=4, accumulation=4) == pytest.approx(measured_ns * 7 / 8, rel=0.01)
