"""Offload to disk: the store against the disk's own sequential rate, and what a training loses by it.

Run: python benchmarks/offload.py [FOLDER]

The page cache is out of play: both use direct I/O. FOLDER is on the disk in question (default: a temporary one).
The rates are what `cluster.disk.read_Bps` and `cluster.disk.write_Bps` mean; with them
the simulator predicts the slow-down that is measured in the same launch.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from chunks import predicted

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.runtime.case import CALIBRATE, Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.machine import BusyWatch
from twinbed.runtime.measured import merged
from twinbed.runtime.offload.disk_rate import measure_disk
from twinbed.runtime.offload.header import lay_out
from twinbed.runtime.offload.region import Region
from twinbed.runtime.offload.store import Store

PROBE = "twinbed.runtime.probe:probe_case"
ENTRY_BYTES = 64 << 20
NUM_ENTRIES = 8
ROUNDS = 3
STEPS = 6
# Much to compute for each byte of states, and little
SHAPES = {"large": ["batch.micro=4"], "small": ["batch.micro=1", "batch.sequence=32"]}
# Blocks of 12.6 MB: large enough that transfers, and not their number, take the time
TRAINED = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 256, "sequence": 256}


def main(argv: Sequence[str] = ()) -> None:
    """Print the disk's rates, the store's beside them, and a training's iteration with and without."""
    with tempfile.TemporaryDirectory(dir=argv[0] if argv else None) as name:
        folder = Path(name)
        print(f"{'':34}{'read GB/s':>11}{'write GB/s':>12}")
        shares: list[tuple[float, float]] = []
        for _ in range(ROUNDS):  # beside each other: a shared disk changes its mind
            disk = measure_disk(folder)
            read_Bps, write_Bps, direct = _store_rates(folder)
            print(f"{'disk, direct, sequential':34}{disk.read_Bps / 1e9:11.3f}{disk.write_Bps / 1e9:12.3f}")
            how = "direct" if direct else "through the cache"
            print(f"{f'store, with checksums, {how}':34}{read_Bps / 1e9:11.3f}{write_Bps / 1e9:12.3f}")
            shares.append((read_Bps / disk.read_Bps, write_Bps / disk.write_Bps))
        read, write = (statistics.median(share) for share in zip(*shares, strict=True))
        print(f"{'store / disk, median (goal 0.7)':34}{read:11.2f}{write:12.2f}")
        for title, keys in SHAPES.items():
            _training(folder / title, title, keys)


def _store_rates(folder: Path) -> tuple[float, float, bool]:
    """Bytes a second, read and written, one entry after the other with the next one queued."""
    layout = lay_out({"x": (torch.float32, (ENTRY_BYTES // 4,))})
    entries = [f"entry_{i}" for i in range(NUM_ENTRIES)]
    store = Store.create(folder / "store", dict.fromkeys(entries, layout), {})
    regions = [Region(layout), Region(layout)]
    for region in regions:
        region.tensors["x"].uniform_()
    for _ in range(2):  # both slots: the first write to a block costs more than those after it
        for entry in entries:
            store.write(entry, regions[0]).result()
        store.commit({})
    start = time.monotonic()
    for entry in entries:
        store.write(entry, regions[0])
    store.wait_for_writes()
    written = time.monotonic()
    reads = []
    for i, entry in enumerate(entries):
        reads.append(store.read(entry, regions[i % 2], after=reads[i - 2 : i - 1] if i > 1 else ()))
    for read in reads:
        read.result()
    end = time.monotonic()
    direct = store.direct
    store.remove()
    whole = NUM_ENTRIES * ENTRY_BYTES
    return whole / (end - written), whole / (written - start), direct


def _training(folder: Path, title: str, keys: Sequence[str]) -> None:
    common = [
        "target=runtime",
        "model=gpt",
        *(f"model.{key}={value}" for key, value in TRAINED.items()),
        "cluster.nodes=1",
        "cluster.devices_per_node=1",
        "cluster.shaped=false",
        "comm=zero3",
        "precision=fp32",
        "data=synthetic",
        *keys,
        f"steps={STEPS}",
    ]
    places = {"none": [], "disk": ["offload=disk"]}
    composed = {name: compose([*common, *overrides]) for name, overrides in places.items()}
    disk = composed["disk"].resolved
    cases = [
        Case(name="probe0", folder="probe0", experiment=disk, kind=PROBE),
        Case(name="calibration", folder="calibration", experiment=disk, kind=CALIBRATE),
        *(Case(name=name, folder=name, experiment=one.resolved) for name, one in composed.items()),
        Case(name="probe1", folder="probe1", experiment=disk, kind=PROBE),
    ]
    runs, watch = folder / "runs", BusyWatch()
    cluster = composed["disk"].experiment.cluster
    outcome = launch_local(runs, cluster=cluster, cases=cases, timeout_s=600, show_progress=False)
    void = watch.reason()
    if outcome.exit_code:
        raise SystemExit(outcome.error)
    probes = [json.loads((runs / name / "probe.json").read_text()) for name in ("probe0", "probe1")]
    calibration = json.loads((runs / "calibration" / "calibration.json").read_text())
    real = {name: read_record(runs / name).result for name in composed}
    said = {name: predicted(one, merged(probes), calibration).result for name, one in composed.items()}
    same = real["none"]["loss"] == real["disk"]["loss"]
    slow_down = {}
    for what, results in (("measured", real), ("predicted", said)):
        seconds = {name: result["iteration_s"]["p50"] for name, result in results.items()}
        slow_down[what] = seconds["disk"] / seconds["none"]
        print(
            f"{title} batch, {what:9}: {seconds['none']:.3f} s an iteration, with offload=disk {seconds['disk']:.3f}, "
            f"slow-down {slow_down[what]:.2f}"
        )
    peaks = {name: result["memory_bytes"]["peak"] / 1e6 for name, result in real.items()}
    print(f"peak of the process {peaks['none']:.0f} MB, with offload=disk {peaks['disk']:.0f} MB")
    off = slow_down["predicted"] / slow_down["measured"] - 1
    print(
        f"predicted slow-down off by {off:+.1%} (limit 15%); losses {'equal bit by bit' if same else 'DIFFER'}"
    )
    if void is not None:
        print(f"void: {void}")


if __name__ == "__main__":
    main(sys.argv[1:])
