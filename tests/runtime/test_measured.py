"""A probe's figures become a cluster's config: by hand."""

import pytest

from twinbed.conf.compose import compose
from twinbed.runtime.measured import cluster_with, merged
from twinbed.runtime.offload.disk_rate import measure_disk, measure_moves

MEASURED = {
    "num_ranks": 4,
    "ranks_per_node": 2,
    "cores": 8,
    "ops": [
        {
            "op": "all_to_all",
            "axis": axis,
            "group_size": 2,
            "message_bytes": nbytes,
            "numel": nbytes // 4,
            "batch_s": [seconds, seconds, 9.0],  # the median leaves the outlier out
        }
        for axis, rate in (("local", 1e9), ("node", 5e7))
        for nbytes, seconds in ((1_000, 1e-3), (1_001_000, 1e-3 + 1e6 / rate))
    ],
    "codec": {kind: {"fixed_ns": 10.4, "ns_per_element": 2.0} for kind in ("encode8", "copy")},
    "matmul": {"flop_per_s": 3e12, "flop_per_s_beside_collective": 2e12},
}


@pytest.mark.parametrize(("backend", "cores", "slowdown"), [("gloo", 8, 1.0), ("nccl", 0, 1.5)])
def test_what_was_measured_replaces_what_was_guessed(backend, cores, slowdown):
    made = compose(["target=sim", "cluster=local_2x2", f"cluster.backend={backend}"])
    cluster = cluster_with(made.resolved["cluster"], MEASURED, one_machine=True, links_known=False)
    assert cluster["intra_node"]["bandwidth_Bps"] == pytest.approx(1e9)
    assert cluster["inter_node"]["bandwidth_Bps"] == pytest.approx(2 * 5e7)  # two ranks share the node's way
    assert cluster["device"]["flop_per_s"] == 3e12
    assert cluster["device"]["busy_slowdown"] == slowdown
    assert cluster["device"]["memory_Bps"] == pytest.approx(4e9)
    assert cluster["host"]["cores"] == cores
    assert cluster["host"]["op_measured_ns"]["all_to_all/local/1000"] == 1_000_000
    assert set(cluster["guesses"]) == {"disk.read_Bps", "disk.write_Bps", "disk.latency_ns"}


def test_a_disk_that_was_measured_is_no_guess_any_more():
    moves = {"fetch_ns": 3_000, "fetch_Bps": 1.5e9, "evict_ns": 5_000, "evict_Bps": 8e8}
    probes = [
        MEASURED | {"disk": {"read_Bps": read_Bps, "write_Bps": 1e9, "latency_ns": 90_000, **moves}}
        for read_Bps in (2e9, 4e9)
    ]
    made = compose(["target=sim", "cluster=local_2x2", "offload=disk", "cluster.disk.capacity_bytes=1e12"])
    cluster = cluster_with(made.resolved["cluster"], merged(probes), one_machine=True, links_known=True)
    assert cluster["guesses"] == {}
    assert cluster["disk"] == {
        "read_Bps": 3e9,
        "write_Bps": 1e9,
        "latency_ns": 90_000,
        **moves,
        "capacity_bytes": 1e12,
    }


def test_a_disk_is_measured_and_nothing_stays_on_it(tmp_path):
    try:
        found = measure_disk(tmp_path, nbytes=16 << 20)
    except OSError as err:
        pytest.skip(f"no direct I/O here: {err}")
    assert found.read_Bps > 1e6
    assert found.write_Bps > 1e6
    assert 0 < found.latency_ns < 1e9
    stale = tmp_path / ".moves2097152"
    stale.mkdir()
    (stale / "store.json").write_text("of a probe that was killed")
    moves = measure_moves(tmp_path)
    assert 1e6 < moves.fetch_Bps < 1e12
    assert 1e6 < moves.evict_Bps < 1e12
    assert 0 <= moves.fetch_ns < 1e9
    assert 0 <= moves.evict_ns < 1e9
    assert list(tmp_path.iterdir()) == []
