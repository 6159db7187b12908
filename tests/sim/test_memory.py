"""Memory over a step, its conventions, energy and goodput."""

import math

import pytest

from twinbed.conf.compose import compose
from twinbed.conf.model_spec import num_parameters, parameters
from twinbed.conf.schema import (
    Backend,
    DeviceConf,
    Engine,
    GoodputConf,
    KernelsConf,
    PartConf,
    Precision,
    Recompute,
)
from twinbed.policies.comm import build_comm
from twinbed.sim.energy import INTER_NODE_J_PER_BYTE, INTRA_NODE_J_PER_BYTE, energy_j
from twinbed.sim.goodput import best_interval_s, goodput, goodput_of
from twinbed.sim.memory import (
    CLASSES,
    Convention,
    convention,
    memory_bytes,
    memory_over_time,
    out_of_memory,
    peak,
)
from twinbed.sim.simulate import simulate


def points_of(experiment, spec):
    cluster = experiment.cluster
    policy, _ = build_comm(
        experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
    )
    unit_bytes = [2 * unit.numel for unit in parameters(spec)]
    return (
        memory_over_time(experiment, spec, policy, unit_bytes),
        memory_bytes(experiment, spec, policy, unit_bytes),
        policy,
    )


def test_activations_grow_forward_and_shrink_backward(make_experiment, make_spec):
    points, held, _ = points_of(make_experiment(cluster_backend=Backend.nccl), make_spec(layers=3))
    assert [(p.phase, p.unit) for p in points] == [
        ("forward", "embed"),
        ("forward", "block.0"),
        ("forward", "block.1"),
        ("forward", "block.2"),
        ("forward", "root"),
        ("backward", "root"),
        ("backward", "block.2"),
        ("backward", "block.1"),
        ("backward", "block.0"),
        ("backward", "embed"),
        ("step", "all"),
    ]
    activations = [p.held["activations"] for p in points]
    assert activations[:6] == sorted(activations[:6])
    assert activations[5:] == sorted(activations[5:], reverse=True)
    gradients = [p.held["gradients"] for p in points]
    assert gradients == sorted(gradients)
    assert gradients[-1] == held["gradients"]
    assert held["peak"] == peak(points).total == max(p.total for p in points)
    assert held["peak"] <= sum(held[name] for name in CLASSES)


def test_recomputation_saves_activations(make_experiment, make_spec):
    spec = make_spec(layers=8)
    found = {
        r: points_of(make_experiment(recompute=r), spec)[1]["activations"]
        for r in (Recompute.none, Recompute.selective_layer, Recompute.full)
    }
    assert found[Recompute.full] < found[Recompute.selective_layer] < found[Recompute.none]


def test_the_reason_says_when_and_what(make_experiment, make_spec):
    points, held, _ = points_of(make_experiment(), make_spec())
    reason = out_of_memory(held, held["peak"] - 1, points)
    assert reason is not None
    assert peak(points).reason() in reason
    assert f"in {peak(points).phase} of" in reason
    assert out_of_memory(held, held["peak"], points) is None


def test_conventions(make_experiment, make_spec):
    assert [c.bytes_per_parameter for c in Convention] == [16, 18, 20, 16]
    spec = make_spec()
    _, held, policy = points_of(make_experiment("ddp"), spec)
    assert convention(make_experiment("ddp"), policy) is Convention.half_gradients
    n = num_parameters(spec)
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (2 * n, 2 * n, 12 * n)
    megatron = make_experiment("ddp", engine=Engine.megatron)
    _, held, policy = points_of(megatron, spec)
    assert convention(megatron, policy) is Convention.float_gradients
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (2 * n, 4 * n, 12 * n)
    megatron = make_experiment("ddp", engine=Engine.megatron, precision=Precision.fp16)
    _, held, policy = points_of(megatron, spec)
    assert convention(megatron, policy) is Convention.float_copies
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (2 * n, 2 * n, 16 * n)
    _, held, policy = points_of(make_experiment(), spec)
    assert convention(make_experiment(), policy) is Convention.float_shards
    shard = n / 4
    assert held["parameters"] + held["gradients"] + held["optimizer"] == pytest.approx(16 * shard, abs=16)


def test_gradients_in_fp32_need_a_larger_buffer(make_experiment, make_spec):
    spec = make_spec()
    half, whole = (
        points_of(make_experiment(kernels=KernelsConf(reduce_fp32=wide)), spec)[1]["buffers"]
        for wide in (False, True)
    )
    assert half < whole


def test_energy_of_a_hand_counted_iteration():
    device = DeviceConf(power_w=400.0, idle_w=50.0)
    ranks = [{"compute": 1.0, "quantize": 0.5, "count": 3}, {"compute": 2.0, "quantize": 0.0, "count": 1}]
    joule = energy_j(
        [device] * len(ranks), seconds=2.0, ranks=ranks, intra_node_bytes=1e9, inter_node_bytes=2e9
    )
    devices = 3 * (400 * 1.5 + 50 * 0.5) + 400 * 2.0
    assert joule == pytest.approx(devices + 1e9 * INTRA_NODE_J_PER_BYTE + 2e9 * INTER_NODE_J_PER_BYTE)
    assert (
        energy_j(
            [DeviceConf()] * len(ranks), seconds=1.0, ranks=ranks, intra_node_bytes=0, inter_node_bytes=0
        )
        is None
    )


def test_goodput_of_rare_failures_is_youngs_first_order():
    """Wasted: a checkpoint each interval, and half an interval for each failure."""
    mtbf_s, checkpoint_s = 1e7, 10.0
    found = goodput(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    assert found.interval_s == pytest.approx(math.sqrt(2 * checkpoint_s * mtbf_s), rel=1e-2)
    wasted = checkpoint_s / found.interval_s + found.interval_s / (2 * mtbf_s)
    assert 1 - found.useful == pytest.approx(wasted, rel=1e-2)
    assert found.useful + found.checkpoint + found.lost == pytest.approx(1)


@pytest.mark.parametrize("mtbf_s", [1e3, 1e4, 1e6])
def test_no_interval_beats_the_best(mtbf_s):
    best = goodput(mtbf_s=mtbf_s, checkpoint_s=60.0, restart_s=100.0)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = goodput(
            mtbf_s=mtbf_s, checkpoint_s=60.0, restart_s=100.0, interval_s=factor * best.interval_s
        )
        assert other.useful < best.useful
    assert best_interval_s(10.0, 30.0) == 10.0


def test_more_nodes_fail_more_often():
    conf = GoodputConf(node_mtbf_h=10_000.0)
    few, many = (goodput_of(conf, num_nodes=n) for n in (8, 1024))
    assert few is not None
    assert many is not None
    assert many.useful < few.useful < 1
    assert many.failures_per_day == pytest.approx(1024 * 24 / 10_000)
    assert goodput_of(GoodputConf(), num_nodes=8) is None


def test_times_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="mtbf_s=0 must be > 0"):
        goodput(mtbf_s=0, checkpoint_s=1)
    with pytest.raises(ValueError, match="interval_s"):
        goodput(mtbf_s=100, checkpoint_s=0)
    with pytest.raises(ValueError, match=r"goodput.node_mtbf_h=-1"):
        GoodputConf(node_mtbf_h=-1)
    assert goodput(mtbf_s=1.0, checkpoint_s=1.0, interval_s=1e6).useful == 0


@pytest.mark.parametrize(
    ("keys", "fits"),
    [  # torchtitan, docs/performance.md (2024): what ran on 64 A100 of 80 GB, and what was out of memory
        (("model=llama2_13b", "recompute=none", "batch.micro=2"), True),
        (("model=llama2_70b", "recompute=full", "batch.micro=2"), True),
        (("model=llama2_70b", "recompute=selective_op", "batch.micro=1"), True),
        (("model=llama2_70b", "recompute=selective_op", "batch.micro=2"), False),
        (("model=llama2_70b", "recompute=selective_layer", "batch.micro=2"), False),
    ],
)
def test_what_fitted_in_published_runs(keys, fits):
    composed = compose(("target=sim", "cluster=p4de_a100", "comm=zero3", "kernels.reduce_fp32=true", *keys))
    _, held, _ = points_of(composed.experiment, composed.spec)
    assert (out_of_memory(held, composed.experiment.cluster.device.memory_bytes) is None) == fits


def test_a_record_of_mixed_devices(make_experiment, make_spec):
    """The smallest device decides whether it fits; energy and MFU take each device as it is."""
    slow = DeviceConf(flop_per_s=1e9, memory_bytes=4e6, power_w=100.0, idle_w=10.0)
    fast = DeviceConf(flop_per_s=4e9, memory_bytes=8e9, power_w=300.0, idle_w=30.0)
    parts = [PartConf(name="a", nodes=1, device=fast), PartConf(name="b", nodes=1, device=slow)]
    goodput_keys = GoodputConf(node_mtbf_h=1000.0)
    keys = {"cluster_device": fast, "goodput": goodput_keys}
    mixed = simulate(make_experiment("ddp", cluster_parts=parts, **keys), spec=make_spec(hidden=128)).result
    assert mixed["status"] == "oom"
    assert "cluster.parts.1.device.memory_bytes is 0.00 GB" in mixed["error"]
    seconds, comm = mixed["iteration_s"]["mean"], mixed["comm"]
    joule = 4 * (
        comm["intra_node_bytes"] * INTRA_NODE_J_PER_BYTE + comm["inter_node_bytes"] * INTER_NODE_J_PER_BYTE
    )
    assert sum(rank["count"] for rank in mixed["ranks"]) == 4
    for rank in mixed["ranks"]:
        device = fast if rank["rank"] < 2 else slow
        busy = rank["compute"] + rank["quantize"]
        joule += rank["count"] * (device.power_w * busy + device.idle_w * (seconds - busy))
    assert mixed["energy_j"] == pytest.approx(joule)
    assert mixed["mfu"] == pytest.approx(mixed["tflops_per_gpu"] * 1e12 / 2.5e9)
    assert mixed["goodput"] == goodput_of(goodput_keys, num_nodes=2).plain()
    alone = simulate(make_experiment("ddp", **keys), spec=make_spec(hidden=128)).result
    assert alone["status"] == "ok"
    assert alone["mfu"] == pytest.approx(alone["tflops_per_gpu"] * 1e12 / 4e9)


def test_guesses_may_lie_in_a_part_and_the_range_holds_the_mean(make_experiment, make_spec):
    device = DeviceConf(flop_per_s=1e9)
    parts = [PartConf(name="a", nodes=2, device=device)]
    guesses = {"parts.0.device.matmul_efficiency": [0.25, 1.0]}
    made = make_experiment(cluster_parts=parts, cluster_device=device, cluster_guesses=guesses)
    result = simulate(made, spec=make_spec()).result
    took = result["iteration_s"]
    assert took["low"] < took["mean"] < took["high"]
    assert result["guessed_inputs"][0]["key"] == "cluster.parts.0.device.matmul_efficiency"
    assert result["guessed_inputs"][0]["value"] == 0.5
    made.cluster.guesses = {"parts.1.device.matmul_efficiency": [0.25, 1.0]}
    with pytest.raises(ValueError, match=r"cluster.guesses has 'parts.1.device.matmul_efficiency'"):
        simulate(made, spec=make_spec())
