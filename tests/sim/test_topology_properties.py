"""What must hold for the numbers of a topology: each that is crossed counts, and a better one is never slower."""

from dataclasses import dataclass, replace

import pytest
import simpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import (
    Backend,
    BatchConf,
    ClusterConf,
    CommConf,
    DataConf,
    DeviceConf,
    Engine,
    ExperimentConf,
    InterNodeConf,
    IntraNodeConf,
    ModelConf,
    NodeKind,
    OptimizerConf,
    ParallelConf,
)
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import Mesh
from twinbed.sim.collectives import PerStep
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import Topology

SPEC = spec_from_keys({"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "sequence": 32})
DEVICE = DeviceConf(flop_per_s=1e10, memory_Bps=1e11, memory_bytes=1e12)
GATHERS = ("all_gather", "reduce_scatter", "all_to_all")
OPS = (*GATHERS, "all_reduce", "broadcast", "reduce", "reduce_tree")
COMM = {
    "zero3": {},
    "ddp": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zeropp": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": None,
    },
}


def experiment_of(cluster, comm="zero3", **keys):
    return ExperimentConf(
        cluster=cluster,
        model=ModelConf(name="m"),
        comm=CommConf(name=comm, **COMM[comm]),
        data=DataConf(name="synthetic"),
        optimizer=OptimizerConf(name="adamw"),
        **({"steps": 2, "warmup_steps": 1} | keys),
    )


# ---- each number that a collective crosses counts


@dataclass(frozen=True)
class Shape:
    """A topology in which one number is the narrowest by far: `low` to `high` are its values.

    `axes`: over which collectives cross it. `rises`: more of it is slower.
    """

    part: str  # inner, outer or cluster
    key: str
    low: float
    high: float
    axes: tuple[str, ...]
    rises: bool = False
    around: dict[str, dict[str, object]] | None = None

    def cluster(self, value):
        around = self.around or {}
        inner = {"bandwidth_Bps": 1e12, "latency_ns": 0} | around.get("inner", {})
        outer = {"bandwidth_Bps": 1e11, "latency_ns": 0} | around.get("outer", {})
        keys = dict(around.get("cluster", {}))
        {"inner": inner, "outer": outer, "cluster": keys}[self.part][self.key] = value
        return ClusterConf(
            name="c",
            nodes=4,
            devices_per_node=4,
            backend=Backend.nccl,
            device=DEVICE,
            intra_node=IntraNodeConf(**inner),
            inter_node=InterNodeConf(**outer),
            **keys,
        )


ALL, OUTSIDE = ("world", "local", "node"), ("world", "node")
_HOST = {"bandwidth_Bps": 1e12, "kind": NodeKind.pcie, "host_Bps": 1e12}
_PAIRS = {"kind": NodeKind.nvlink_pairs, "pcie_Bps": 1e12, "host_Bps": 1e12}
_RAILS = {"rails": True, "links": 4}
_SITES = {"sites": 2, "wan_Bps": 1e12}
SHAPES = {
    "GPU bandwidth": Shape("inner", "bandwidth_Bps", 1e6, 1e9, ALL),
    # over the world an exchange of all with all waits for other nodes, whatever it takes inside
    "GPU latency": Shape("inner", "latency_ns", 0, 1e6, ("local",), rises=True),
    "host memory": Shape("inner", "host_Bps", 1e6, 1e9, ALL, around={"inner": _HOST}),
    "PCIe beside pairs": Shape("inner", "pcie_Bps", 1e6, 1e9, ALL, around={"inner": _PAIRS}),
    "NIC bandwidth": Shape("outer", "bandwidth_Bps", 1e6, 1e9, OUTSIDE),
    "NIC efficiency": Shape(
        "outer", "efficiency", 0.01, 1, OUTSIDE, around={"outer": {"bandwidth_Bps": 1e9}}
    ),
    "NIC latency": Shape("outer", "latency_ns", 0, 1e7, OUTSIDE, rises=True),
    "links": Shape("outer", "links", 1, 16, OUTSIDE, around={"outer": {"bandwidth_Bps": 1e8}}),
    "NIC bandwidth with rails": Shape(
        "outer", "bandwidth_Bps", 1e6, 1e9, OUTSIDE, around={"outer": {"rails": True, "links": 4}}
    ),
    # four links up for eight down, and a ring sends on one of them: the spine is the narrowest from 2 on
    "oversubscription": Shape(
        "outer",
        "oversubscription",
        2,
        64,
        OUTSIDE,
        rises=True,
        around={"outer": {"nodes_per_leaf": 2, "bandwidth_Bps": 1e8}},
    ),
    "WAN bandwidth": Shape("cluster", "wan_Bps", 1e6, 1e9, OUTSIDE, around={"cluster": {"sites": 2}}),
    "WAN latency": Shape(
        "cluster", "wan_latency_ns", 0, 1e8, OUTSIDE, rises=True, around={"cluster": _SITES}
    ),
}


def collective_ns(cluster, op, axis, part_bytes, *, fold):
    experiment = experiment_of(cluster)
    per_node = cluster.devices_per_node
    policy, _ = build_comm(experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=per_node)
    mesh = Mesh(cluster.num_ranks, per_node)
    machine = Machine(simpy.Environment(), Costs(experiment, SPEC, policy), Topology(cluster), folded=fold)
    size = mesh.size(axis)
    whole = size * part_bytes
    writer = Writer(merge=False)
    transfer = Transfer(op, axis, size, whole, part_bytes if op in GATHERS else whole, whole // 4, 4)
    writer.transfer(MAIN, "gather", "forward", "a", transfer)
    ranks = [0] if fold else range(mesh.num_ranks)
    run = Executor(machine, (Folded if fold else PerStep)(machine, mesh), ranks)
    timings = run.run([Segment(0, False, {0: writer.program})])
    return max(own[0].end_ns for own in timings.values())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(deadline=None, max_examples=8)
@given(data=st.data(), op=st.sampled_from(OPS), part=st.integers(1 << 14, 1 << 18).map(lambda n: 4 * n))
def test_a_number_that_is_crossed_counts(shape, data, op, part):
    """Two values give two times, the worse one the longer, folded and step by step."""
    whole = isinstance(shape.low, int) and shape.key != "oversubscription"
    values = st.integers(int(shape.low), int(shape.high)) if whole else st.floats(shape.low, shape.high)
    few, many = sorted((data.draw(values), data.draw(values)))
    assume(many > 1.01 * few and many - few > (100 if shape.key.endswith("_ns") else 0.01))
    axis = data.draw(st.sampled_from(shape.axes))
    for fold in (True, False):
        with_few, with_many = (
            collective_ns(shape.cluster(v), op, axis, part, fold=fold) for v in (few, many)
        )
        assert (with_few < with_many) if shape.rises else (with_few > with_many)


# ---- whole iterations: better is never slower

LAYOUTS = (
    ("fsdp2", "zero3", {}),
    ("fsdp2", "ddp", {}),
    ("fsdp2", "zeropp", {}),
    ("deepspeed", "zero3", {}),
    ("deepspeed", "zeropp", {}),
    ("deepspeed_2023", "zeropp", {}),
    ("megatron", "ddp", {"pipeline": 2}),
    ("megatron", "zero1", {"tensor": 2}),
    ("megatron", "zero1", {"pipeline": 2, "tensor": 2}),
)


@st.composite
def clusters(draw):
    """Of 4 or 8 ranks, on which every layout fits."""
    nodes, ranks = draw(st.sampled_from([(2, 2), (2, 4), (4, 2), (1, 4)]))
    outer = {"links": draw(st.integers(1, 4)), "rails": draw(st.booleans())}
    if nodes == 4 and draw(st.booleans()):
        outer |= {"nodes_per_leaf": 2, "oversubscription": draw(st.floats(1, 8))}
    return ClusterConf(
        name="c",
        nodes=nodes,
        devices_per_node=ranks,
        backend=Backend.nccl,
        device=DEVICE,
        intra_node=IntraNodeConf(
            bandwidth_Bps=draw(st.floats(1e9, 3e11)), latency_ns=draw(st.integers(0, 50_000))
        ),
        inter_node=InterNodeConf(
            bandwidth_Bps=draw(st.floats(1e7, 5e10)), latency_ns=draw(st.integers(0, 1_000_000)), **outer
        ),
    )


def better(cluster, factor):
    inner, outer = cluster.intra_node, cluster.inter_node
    return {
        "inter_node.bandwidth_Bps": replace(
            cluster, inter_node=replace(outer, bandwidth_Bps=outer.bandwidth_Bps * factor)
        ),
        "intra_node.bandwidth_Bps": replace(
            cluster, intra_node=replace(inner, bandwidth_Bps=inner.bandwidth_Bps * factor)
        ),
        "inter_node.latency_ns": replace(
            cluster, inter_node=replace(outer, latency_ns=int(outer.latency_ns / factor))
        ),
        "intra_node.latency_ns": replace(
            cluster, intra_node=replace(inner, latency_ns=int(inner.latency_ns / factor))
        ),
    }


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "step by step"])
@pytest.mark.parametrize(("engine", "comm", "parallel"), LAYOUTS)
@settings(deadline=None, max_examples=5)
@given(cluster=clusters(), factor=st.floats(1.01, 10))
def test_an_iteration_is_never_slower_on_a_better_network(engine, comm, parallel, fold, cluster, factor):
    keys = {
        "engine": Engine(engine),
        "parallel": ParallelConf(**parallel),
        "batch": BatchConf(accumulation=2),
    }

    def took(on):
        return simulate(experiment_of(on, comm, **keys), spec=SPEC, fold=fold).result["iteration_s"]["mean"]

    before = took(cluster)
    for key, on in better(cluster, factor).items():
        assert took(on) <= before * (1 + 1e-3), key
