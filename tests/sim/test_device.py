"""Kernels on a device: published products, tiles and waves, attention, what the host and collectives cost."""

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from twinbed.conf.compose import compose
from twinbed.conf.model_flop import Matmul
from twinbed.conf.schema import Backend, DeviceConf, Precision
from twinbed.sim.busy import Busy, beside_collectives
from twinbed.sim.device import Device, Tally, slowest_of
from twinbed.sim.interpreter import LocalWork, Work
from twinbed.sim.simulate import simulate

PLAIN = DeviceConf(flop_per_s=1e12, matmul_efficiency=1.0, memory_Bps=1e15)
TILED = DeviceConf(flop_per_s=100e12, matmul_efficiency=1.0, memory_Bps=1e15, sms=100)


def device_of(conf, **keys):
    return Device(conf, element_bytes=2, **keys)


def cluster_device(name):
    return device_of(compose(("target=sim", f"cluster={name}")).experiment.cluster.device)


@pytest.mark.parametrize(
    ("cluster", "shape", "tflop_per_s"),
    [
        ("dgx_a100", (8192, 8192, 8192), 257.0),  # He 2024, normally distributed numbers
        ("dgx_h100", (2048, 2048, 13312), 794.5 * 0.95),  # ml-engineering's table, less the long run's clock
        ("pcie_a100", (2048, 5120, 6144), 252.9),
    ],
)
def test_published_products(cluster, shape, tflop_per_s):
    product = Matmul("product", *shape)
    assert product.flop / cluster_device(cluster).matmul_ns(product) / 1e3 == pytest.approx(
        tflop_per_s, rel=0.02
    )


@pytest.mark.parametrize(
    ("cluster", "tflop_per_s"),
    [("dgx_a100", 19.5), ("dgx2_v100", 15.7), ("dgx_h100", 66.9), ("p100_single", 9.3)],  # data sheets
)
def test_fp32_has_a_peak_of_its_own(cluster, tflop_per_s):
    """Without TF32, as torch has it by default; a run in fp32 is slower by so much, and its MFU is of that peak."""
    conf = compose(("target=sim", f"cluster={cluster}")).experiment.cluster.device
    assert conf.peak_flop_per_s(4) == pytest.approx(tflop_per_s * 1e12)
    assert conf.peak_flop_per_s(2) == conf.flop_per_s
    product = Matmul("product", 8192, 8192, 8192)
    wide, narrow = (Device(conf, element_bytes=n).matmul_ns(product) for n in (4, 2))
    assert wide == pytest.approx(narrow * conf.flop_per_s / conf.flop_per_s_fp32, rel=0.01)


def test_a_guessed_peak_in_fp32_is_said(make_experiment, make_spec):
    found = {}
    for fp32 in (None, 1e9):
        device = DeviceConf(flop_per_s=4e9, flop_per_s_fp32=fp32, memory_Bps=1e12)
        keys = {"cluster_backend": Backend.nccl, "cluster_device": device, "precision": Precision.fp32}
        found[fp32] = simulate(make_experiment("ddp", **keys), spec=make_spec()).result
    (warning,) = found[None]["warnings"]
    assert "cluster.device.flop_per_s_fp32 is null" in warning
    assert found[1e9]["warnings"] == []
    assert found[1e9]["phases_s"]["compute"] > 3 * found[None]["phases_s"]["compute"]
    assert found[1e9]["mfu"] == pytest.approx(found[1e9]["tflops_per_gpu"] * 1e12 / 1e9)
    with pytest.raises(ValueError, match=r"cluster.device.flop_per_s_fp32=0: must be > 0, or null"):
        DeviceConf(flop_per_s_fp32=0)


def test_one_tile_more_is_one_wave_more():
    device = device_of(TILED)
    full = device.matmul_ns(Matmul("product", 256 * 10, 128 * 10, 4096))  # 100 tiles on 100 multiprocessors
    more = device.matmul_ns(Matmul("product", 256 * 10 + 1, 128 * 10, 4096))
    assert full == pytest.approx(2 * 256 * 128 * 4096 / 1e12 * 1e9)
    assert 1.1 * full < more <= 2 * full  # a smaller tile wastes less of the second wave


def test_a_sum_is_split_where_tiles_are_few():
    device = device_of(TILED)
    few = Matmul("product", 256, 256, 65536)
    assert device.matmul_ns(few) < 0.5 * 2 * 256 * 128 * 65536 / 1e12 * 1e9


def test_bytes_bound_a_thin_product():
    device = device_of(DeviceConf(flop_per_s=1e15, matmul_efficiency=1.0, memory_Bps=1e9))
    thin = Matmul("product", 1, 4096, 4096)
    assert device.matmul_ns(thin) == pytest.approx((4096 + 4096 * 4096 + 4096) * 2)


def test_a_product_over_nothing_reads_nothing():
    """Of a rank that lends all heads: without a result there is no kernel, without columns zeros are written."""
    device = cluster_device("v100_8")
    no_rows, no_columns = Matmul("qkv", 4096, 0, 2048), Matmul("out", 4096, 2048, 0)
    assert device.product(no_rows, tokens=4096) == Tally()
    written = device.product(no_columns, tokens=4096)
    assert (written.flop, written.kernels) == (0, 1)
    assert written.nbytes == 4096 * 2048 * device.element_bytes
    assert written.matmul_ns < device.product(Matmul("out", 4096, 2048, 1), tokens=4096).matmul_ns


def test_fixed_tokens_cost_as_many_more():
    product = Matmul("product", 1000, 64, 64)
    plain = device_of(PLAIN).linear(product)
    fixed = device_of(DeviceConf(**(vars(PLAIN) | {"matmul_fixed_tokens": 637}))).linear(product)
    assert fixed[0].matmul_ns == pytest.approx(1.637 * plain[0].matmul_ns)
    assert fixed[1].matmul_ns == pytest.approx(1.637 * 2 * plain[0].matmul_ns)
    assert fixed[1].flop == 2 * product.flop


def test_the_slower_of_host_and_device_counts():
    device = device_of(DeviceConf(host_ns=1_000))
    assert device.time_ns(Tally(matmul_ns=3_000, other_ns=2_000, kernels=4)) == 5_000
    assert device.time_ns(Tally(matmul_ns=3_000, other_ns=2_000, kernels=7)) == 7_000


def test_a_causal_mask_halves_attention():
    device = device_of(TILED)
    keys = {"sequence": 8192, "head_dim": 128, "num": 8, "flop": 1}
    (causal, _), (whole, backward) = (device.flash(causal=c, **keys) for c in (True, False))
    assert causal.matmul_ns == pytest.approx(whole.matmul_ns * (1 + 128 / 8192) / 2)
    assert backward.matmul_ns == pytest.approx(2.5 * whole.matmul_ns)


def test_the_slowest_of_many_sets_the_pace():
    assert slowest_of(1) == 0
    assert slowest_of(2) == pytest.approx(0.5642, rel=0.05)  # 1 / sqrt(pi)
    conf = DeviceConf(**(vars(PLAIN) | {"spread": 0.1}))
    product = Matmul("product", 100, 100, 100)
    times = [device_of(conf, num_devices=n).matmul_ns(product) for n in (1, 8, 64, 512)]
    assert times == sorted(times)
    assert times[0] == product.flop / 1e12 * 1e9


def test_products_slow_down_beside_a_collective():
    conf = DeviceConf(**(vars(TILED) | {"collective_sms": 20}))
    forward, _ = device_of(conf).linear(
        Matmul("product", 256 * 40, 128 * 40, 4096)
    )  # 1600 tiles: 16, then 20 waves
    assert forward.busy_ns == pytest.approx(1.25 * forward.matmul_ns)
    assert device_of(conf).slowdown(Tally(matmul_ns=80, busy_ns=100, other_ns=20)) == pytest.approx(1.2)


@given(m=st.integers(1, 4096), n=st.integers(1, 4096), k=st.integers(1, 8192), faster=st.floats(1.0, 10.0))
def test_a_faster_device_is_never_slower(m, n, k, faster):
    product = Matmul("product", m, n, k)
    quick = DeviceConf(**(vars(TILED) | {"flop_per_s": faster * TILED.flop_per_s}))
    slow_ns, quick_ns = device_of(TILED).matmul_ns(product), device_of(quick).matmul_ns(product)
    assert quick_ns <= slow_ns * (1 + 1e-12)
    assert slow_ns >= product.flop / TILED.flop_per_s * 1e9 * (1 - 1e-12)  # never beyond the peak


class _Slow:
    """Costs of work that takes 1000 ns, and twice as long beside a collective."""

    def ns(self, work):
        return work.amount

    def slowdown(self, work):
        return 2.0


@pytest.mark.parametrize(
    ("begin", "end", "takes"),
    [(5_000, 6_000, 1_000), (0, 400, 1_200), (0, 10_000, 2_000), (600, 900, 1_150), (900, 950, 1_025)],
)
def test_work_beside_a_collective_goes_slower(begin, end, takes):
    env = simpy.Environment()
    busy = Busy()

    def collective():
        yield env.timeout(begin)
        busy.begin()
        yield env.timeout(end - begin)
        busy.end()

    ended = []

    def computation():
        yield from beside_collectives(env, busy, [LocalWork("work", Work("compute", amount=1_000))], _Slow())
        ended.append(env.now)

    env.process(collective())
    env.process(computation())
    env.run()
    assert ended[0] == pytest.approx(takes, abs=2)
