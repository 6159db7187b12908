"""What a probe measures for a layout is what its plans ask for; laps of its calibration, by hand."""

import pytest

from twinbed.conf.compose import compose
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import Direction, layout_of
from twinbed.policies.mesh import LOCAL, NODE, OF_REPLICAS, WORLD
from twinbed.runtime.calibrate import split_root
from twinbed.runtime.laps import PIPELINE_LAP, Lap
from twinbed.runtime.layer_probe import collectives_of, op_of
from twinbed.runtime.probe import probed_mesh
from twinbed.sim.costs import Costs
from twinbed.sim.interpreter import Transfer
from twinbed.sim.layout.shapes import BEFORE, BEHIND, BLOCK

LAYOUTS = {
    "1d": ({("all_reduce", "tensor")}, ("parallel.tensor=4",)),
    "1d, sequence": (
        {(op, "tensor") for op in ("all_reduce", "all_gather", "reduce_scatter")},
        ("parallel.tensor=4", "parallel.sequence=4"),
    ),
    "2d": (
        {(op, axis) for op in ("broadcast", "reduce_tree", "all_reduce") for axis in ("row", "column")}
        | {(op, "column") for op in ("all_gather", "reduce_scatter")},  # of biases
        ("parallel.tensor=4", "parallel.tensor_mode=2d"),
    ),
    "ring": (
        {("send", "sequence"), ("all_reduce", "sequence")},
        ("parallel.sequence=4", "parallel.sequence_mode=ring"),
    ),
    "ulysses": (
        {("all_to_all", "sequence"), ("all_reduce", "sequence")},
        ("parallel.sequence=4", "parallel.sequence_mode=ulysses"),
    ),
    "pipeline": ({("send", "pipeline")}, ("parallel.pipeline=4", "batch.accumulation=4")),
}


def composed(*keys):
    return compose(["target=sim", "cluster=local_2x2", "model=gpt_tiny", "batch.micro=4", *keys])


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_that_the_layers_communicate_is_measured(name):
    own, keys = LAYOUTS[name]
    one = composed(*keys)
    layout = layout_of(one.experiment, one.spec)
    mesh = probed_mesh(4, 2, layout.dims)
    measured = {(op_of(step), step.axis) for step in collectives_of(layout) if mesh.size(step.axis) > 1}
    shared = {("all_reduce", WORLD), *(("all_to_all", axis) for axis in (LOCAL, NODE, WORLD))}
    assert measured - shared == own
    policy, _ = build_comm(one.experiment.comm, num_ranks=1, ranks_per_node=1)
    model = Costs(one.experiment, one.spec, policy).laid.model
    steps = [
        step.what
        for part in (BEFORE, BLOCK, BEHIND)
        for direction in (Direction.forward, Direction.backward)
        for step in model.steps(part, direction)
    ]
    asked = {(what.op, what.axis) for what in steps if isinstance(what, Transfer) and what.listed}
    assert asked <= measured


def test_a_policys_axes_are_those_of_the_replicas():
    one = composed("parallel.tensor=2")
    mesh = probed_mesh(4, 2, layout_of(one.experiment, one.spec).dims)
    assert mesh.of_replicas().num_ranks == mesh.size(OF_REPLICAS[WORLD]) == 2
    assert probed_mesh(4, 2, ()).hpz_size == 2


def test_the_ends_of_the_root_are_told_apart():
    """Of a model in one part, and of the first and the last stage of a pipeline with messages before each pass."""

    def split(*names):
        laps = [Lap(name, i, i + 1) for i, name in enumerate(names)]
        return [lap.name for lap in split_root(laps)]

    forward, backward = ["forward/root", "forward/block.0"], ["backward/block.0", "backward/root"]
    whole = ["step", *forward, "forward/root", "backward/root", *backward]
    there = [
        "step",
        "forward/embed",
        "forward/block.0",
        "forward/head",
        "backward/head",
        "backward/block.0",
        "backward/embed",
    ]
    assert split(*whole, *whole, "step") == [*there, *there, "step"]
    first = ["step", PIPELINE_LAP, *forward, PIPELINE_LAP, "backward/root", *backward, PIPELINE_LAP, "step"]
    assert [name for name in split(*first) if "block" not in name and "/" in name] == [
        "forward/embed",
        "backward/head",  # a moment before the block's gradient
        "backward/embed",
    ]
    last = [PIPELINE_LAP, *forward, "forward/root", PIPELINE_LAP, "backward/root", *backward, PIPELINE_LAP]
    assert [name for name in split(*last) if "block" not in name and "/" in name] == [
        "forward/embed",  # a moment
        "forward/head",
        "backward/head",
        "backward/embed",  # a moment
    ]
