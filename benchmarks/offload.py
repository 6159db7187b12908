"""Offload to disk: the store against the disk's own sequential rate, and what a training loses by it.

Run: python benchmarks/offload.py [FOLDER]

The page cache is out of play: both use direct I/O. FOLDER is on the disk in question (default: a temporary one).
Each launch probes the disk and the moves of chunks, measures the computation of both settings, then trains both; the
simulator predicts the slow-down from the launch's own constants. Launches on a busy machine are void, and repeated.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
LAUNCHES, ATTEMPTS = 3, 3
# Much to compute for each byte of states, and little
SHAPES = {
    "large": ["batch.micro=4", "steps=8"],
    "small": ["batch.micro=1", "batch.sequence=32", "steps=24"],
}
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
            _report(title, list(_launches(folder / title, keys)))


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


@dataclass(frozen=True)
class Launch:
    """What one launch found: seconds of an iteration by offload, and peak bytes of the process."""

    measured_s: dict[str, float]
    predicted_s: dict[str, float]
    peak_bytes: dict[str, int]
    same_losses: bool


def _launches(folder: Path, keys: Sequence[str]) -> Iterator[Launch]:
    for number in range(LAUNCHES):
        for attempt in range(ATTEMPTS):
            found, void = _launch(folder / f"{number}_{attempt}", keys)
            if void is None:
                yield found
                break
            print(f"launch {number}: void, {void}", file=sys.stderr)


def _launch(folder: Path, keys: Sequence[str]) -> tuple[Launch, str | None]:
    """(what it found, why it is void)."""
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
    ]
    composed = {name: compose([*common, f"offload={name}"]) for name in ("none", "disk")}
    disk = composed["disk"].resolved
    cases = [Case(name="probe0", folder="probe0", experiment=disk, kind=PROBE)]
    for name, one in composed.items():
        cases.append(Case(name=f"c {name}", folder=f"c {name}", experiment=one.resolved, kind=CALIBRATE))
        cases.append(Case(name=name, folder=name, experiment=one.resolved))
    cases.append(Case(name="probe1", folder="probe1", experiment=disk, kind=PROBE))
    watch = BusyWatch()
    cluster = composed["disk"].experiment.cluster
    outcome = launch_local(folder, cluster=cluster, cases=cases, timeout_s=600, show_progress=False)
    void = watch.reason()
    if outcome.exit_code:
        raise SystemExit(outcome.error)
    probes = [json.loads((folder / name / "probe.json").read_text()) for name in ("probe0", "probe1")]
    real = {name: read_record(folder / name).result for name in composed}
    said = {}
    for name, one in composed.items():
        calibration = json.loads((folder / f"c {name}" / "calibration.json").read_text())
        said[name] = predicted(one, merged(probes), calibration).result
    found = Launch(
        {name: result["iteration_s"]["p50"] for name, result in real.items()},
        {name: result["iteration_s"]["p50"] for name, result in said.items()},
        {name: result["memory_bytes"]["peak"] for name, result in real.items()},
        real["none"]["loss"] == real["disk"]["loss"],
    )
    return found, void


def _report(title: str, launches: Sequence[Launch]) -> None:
    if not launches:
        print(f"{title} batch: every launch was void, other processes were busy")
        return
    ratios: dict[str, list[float]] = {}
    for what in ("measured", "predicted"):
        seconds = [one.measured_s if what == "measured" else one.predicted_s for one in launches]
        ratios[what] = [s["disk"] / s["none"] for s in seconds]
        none, disk = (statistics.median(s[name] for s in seconds) for name in ("none", "disk"))
        print(
            f"{title} batch, {what:9}: {none:.3f} s an iteration, with offload=disk {disk:.3f}, slow-down "
            f"{statistics.median(ratios[what]):.2f} ({min(ratios[what]):.2f} to {max(ratios[what]):.2f})"
        )
    peaks = {name: launches[0].peak_bytes[name] / 1e6 for name in ("none", "disk")}
    print(f"peak of the process {peaks['none']:.0f} MB, with offload=disk {peaks['disk']:.0f} MB")
    off = [said / real - 1 for said, real in zip(ratios["predicted"], ratios["measured"], strict=True)]
    same = all(one.same_losses for one in launches)
    print(
        f"predicted slow-down off by {statistics.median(off):+.1%} ({min(off):+.1%} to {max(off):+.1%}; limit 15%); "
        f"losses {'equal bit by bit' if same else 'DIFFER'}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
