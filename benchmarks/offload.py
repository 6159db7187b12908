"""Offload to disk: the store against the disk's own sequential rate, and what a training loses by it.

Run: python benchmarks/offload.py [FOLDER]

The page cache is out of play: both use direct I/O. FOLDER is on the disk in question (default: a temporary one).
The rates are what `cluster.disk.read_Bps` and `cluster.disk.write_Bps` mean; with them
`twinbed target=sim offload=disk` predicts the slow-down that is measured here.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.offload.disk_rate import measure_disk
from twinbed.runtime.offload.header import lay_out
from twinbed.runtime.offload.region import Region
from twinbed.runtime.offload.store import Store

ENTRY_BYTES = 64 << 20
NUM_ENTRIES = 8
ROUNDS = 3
STEPS = 6
# Blocks of 12.6 MB: large enough that transfers, and not their number, take the time
TRAINED = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 256, "sequence": 256}


def main() -> None:
    """Print the disk's rates, the store's beside them, and a training's iteration with and without."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
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
        _training(folder)


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


def _training(folder: Path) -> None:
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
        "batch.micro=4",
        f"steps={STEPS}",
    ]
    names = {"none": [], "disk": ["offload=disk"]}
    cases = [
        Case(name=name, folder=name, experiment=compose([*common, *overrides]).resolved)
        for name, overrides in names.items()
    ]
    cluster = compose(common).experiment.cluster
    outcome = launch_local(folder / "runs", cluster=cluster, cases=cases, timeout_s=600, show_progress=False)
    if outcome.exit_code:
        raise SystemExit(outcome.error)
    results = {name: json.loads((folder / "runs" / name / "result.json").read_text()) for name in names}
    iteration_s = {name: result["iteration_s"]["p50"] for name, result in results.items()}
    same = results["none"]["loss"] == results["disk"]["loss"]
    for name, seconds in iteration_s.items():
        peak = results[name]["memory_bytes"]["peak"]
        print(f"training, offload={name:4}: {seconds:7.3f} s an iteration, peak {peak / 1e6:6.0f} MB")
    slow_down = iteration_s["disk"] / iteration_s["none"]
    print(f"slow-down {slow_down:.2f}; losses {'equal bit by bit' if same else 'DIFFER'}")


if __name__ == "__main__":
    main()
