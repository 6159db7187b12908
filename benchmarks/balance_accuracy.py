"""What pruning costs in accuracy, and what it saves: a small ViT on pictures of clothes, for real, on two tensor ranks.

Run: python benchmarks/balance_accuracy.py [OUTPUT] [SEEDS]. One rank of two is slow throughout. `resize` prunes it by a
fixed ratio, with every selection of columns and imputation of gradients; `migrate` and `semi` do what they decide. All
runs of a seed begin with the same weights and see the same pictures. Finished runs are kept in OUTPUT and not repeated.

Times are of launches of their own, in which products are slept out to a device's rate: a step of each way over a step
with nothing done. Needs the pictures: apt-get install dataset-fashion-mnist.
"""

import csv
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinbed.analysis.record import RESULT
from twinbed.conf.compose import Composed, compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

SEEDS = 5
EPOCHS, PICTURES, BATCH = 8, 12_000, 128
RATIOS = (0.25, 0.5, 0.75)
CHI = 2
MODEL = (
    "target=runtime",
    "cluster.nodes=1",
    "cluster.devices_per_node=2",
    "cluster.shaped=false",
    "parallel.tensor=2",
    "model=vit_fashion",
    "model.hidden=64",
    "model.heads=4",
    "data=fashion_mnist",
    f"data.num_train={PICTURES}",
    "comm=ddp",
    "precision=fp32",
    f"batch.micro={BATCH}",
    "optimizer.lr=2e-3",
    "optimizer.weight_decay=0.05",
    "train.lr_schedule=cosine",
    "train.warmup_lr_steps=50",
    "train.timeout_s=120",
)
STEPS = EPOCHS * PICTURES // BATCH
TRAINED = (
    f"steps={STEPS}",
    f"train.eval_every={STEPS}",
    f"cluster.slowdown={{1:{CHI}}}",
    "balance.refresh=94",  # an epoch
)
TIMED = (
    "steps=14",
    "cluster.emulated_flops_per_s=1.5e9",
    f"cluster.slowdown={{1:{CHI}}}",
    "balance.period=2",
    "warmup_steps=6",
)


def ways() -> dict[str, tuple[str, ...]]:
    """Name -> keys: "resize priority zero 0.5", ..."""
    found: dict[str, tuple[str, ...]] = {"none": (), "migrate": ("balance=migrate",)}
    kinds = [("random", "zero"), ("priority", "zero"), ("differentiated", "zero")]
    kinds += [("priority", "average"), ("priority", "same")]
    for selection, imputation in kinds:
        for ratio in RATIOS:
            found[f"resize {selection} {imputation} {ratio}"] = (
                "balance=resize",
                f"balance.ratio={ratio}",
                f"balance.selection={selection}",
                f"balance.imputation={imputation}",
            )
    found["resize within 0.5 points"] = ("balance=resize", "balance.accuracy_budget=0.5")
    found["semi within 0.5 points"] = ("balance=semi",)
    return found


def train(folder: Path, seeds: Sequence[int]) -> dict[tuple[str, int], float]:
    """(way, seed) -> accuracy on the test pictures, in percent."""
    for seed in seeds:
        composed = {name: compose([*MODEL, *TRAINED, *keys, f"seed={seed}"]) for name, keys in ways().items()}
        missing = {
            name: c for name, c in composed.items() if not (folder / place(name, seed) / RESULT).exists()
        }
        if missing:
            launch(folder, {place(name, seed): c for name, c in missing.items()})
    return {(name, seed): accuracy(folder / place(name, seed)) for name in ways() for seed in seeds}


def time_steps(folder: Path) -> dict[str, float]:
    """Way -> median seconds of a step."""
    composed = {name: compose([*MODEL, *TIMED, *keys]) for name, keys in ways().items()}
    missing = {
        name: c for name, c in composed.items() if not (folder / "timed" / slug(name) / RESULT).exists()
    }
    if missing:
        launch(folder, {f"timed/{slug(name)}": c for name, c in missing.items()})
    return {
        name: json.loads((folder / "timed" / slug(name) / RESULT).read_text())["iteration_s"]["p50"]
        for name in composed
    }


def launch(folder: Path, cases: Mapping[str, Composed]) -> None:
    outcome = launch_local(
        folder,
        cluster=next(iter(cases.values())).experiment.cluster,
        cases=[Case(name=name, folder=name, experiment=c.resolved) for name, c in cases.items()],
        show_progress=False,
    )
    if outcome.status != "ok":
        sys.exit(outcome.error)


def slug(name: str) -> str:
    return name.replace(" ", "-")


def place(name: str, seed: int) -> str:
    return f"seed_{seed}/{slug(name)}"


def accuracy(run: Path) -> float:
    found = json.loads((run / RESULT).read_text())["validation_accuracy"]
    return 100 * float(found[-1][1])


def report(found: Mapping[tuple[str, int], float], times: Mapping[str, float], folder: Path) -> None:
    """Differences are of runs of one seed; the spread is their standard deviation over the seeds."""
    seeds = sorted({seed for _, seed in found})
    print(
        f"{len(seeds)} seeds, {STEPS} steps; points lost against none of the same seed: mean, deviation, worst\n"
    )
    print(f"{'way':38} {'accuracy':>9} {'lost':>6} {'dev.':>6} {'worst':>6} {'step':>7} {'speed-up':>9}")
    rows = []
    for name in ways():
        values = [found[name, seed] for seed in seeds]
        lost = [found["none", seed] - found[name, seed] for seed in seeds]
        spread = statistics.stdev(lost) if len(lost) > 1 else 0.0
        mean, worst = statistics.mean(lost), max(lost)
        speedup = times["none"] / times[name]
        rows.append([name, statistics.mean(values), mean, spread, worst, times[name], speedup])
        print(
            f"{name:38} {rows[-1][1]:9.2f} {mean:6.2f} {spread:6.2f} {worst:6.2f} {times[name]:6.3f}s {speedup:8.2f}x"
        )
    with (folder / "balance_accuracy.csv").open("w", newline="") as file:
        head = ["way", "accuracy", "points_lost", "deviation", "worst", "step_s", "speedup"]
        csv.writer(file).writerows([head, *rows])
    for ratio in RATIOS:
        lost = {
            kind: [found["none", s] - found[f"resize {kind} zero {ratio}", s] for s in seeds]
            for kind in ("random", "priority")
        }
        gap = statistics.mean(lost["priority"]) - statistics.mean(lost["random"])
        noise = max(statistics.stdev(each) for each in lost.values()) if len(seeds) > 1 else 0.0
        word = (
            "worse than random beyond the spread"
            if gap > noise
            else "not worse than random beyond the spread"
        )
        print(f"ratio {ratio}: priority is {word} ({gap:+.2f} points, spread {noise:.2f})")
    print(f"wrote {folder / 'balance_accuracy.csv'}")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0] if arguments else "outputs/bench/balance_accuracy").absolute()
    seeds = range(int(arguments[1]) if len(arguments) > 1 else SEEDS)
    report(train(folder, list(seeds)), time_steps(folder), folder)


if __name__ == "__main__":
    main()
