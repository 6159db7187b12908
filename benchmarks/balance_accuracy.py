"""What pruning costs in accuracy, and what it saves: a small ViT on pictures of clothes, for real, on two tensor ranks.

Run: python benchmarks/balance_accuracy.py [OUTPUT] [SEEDS]. One rank of two is slow throughout. `resize` prunes it by a
fixed ratio, with every selection of columns and imputation of gradients, and `migrate` does what it decides. Columns
are selected once an epoch, as in the paper, or every few steps. What each ratio lost on average by the latter is then
what `resize` and `semi` are told as `balance.loss_points`, and both are held to a budget on seeds that took no part in
these averages. All runs of a seed begin with the same weights and see the same pictures. Finished runs are kept in
OUTPUT and not repeated.

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
BUDGET_POINTS = 0.5
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
OFTEN = 5  # steps between two selections, in place of an epoch
TIMED = (
    "steps=14",
    "cluster.emulated_flops_per_s=1.5e9",
    f"cluster.slowdown={{1:{CHI}}}",
    "balance.period=2",
    "warmup_steps=6",
)


Ways = dict[str, tuple[str, ...]]  # name -> keys
Found = Mapping[tuple[str, int], float]  # (way, seed) -> accuracy in percent
Row = list[str | float]


def ways() -> Ways:
    """ "resize priority zero 0.5", ..."""
    found: Ways = {"none": (), "migrate": ("balance=migrate",)}
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
    for ratio in RATIOS:
        found[often(ratio)] = ("balance=resize", f"balance.ratio={ratio}", f"balance.refresh={OFTEN}")
    return found


def often(ratio: float) -> str:
    return f"resize priority zero {ratio} refresh {OFTEN}"


def budgeted(points: Sequence[tuple[float, float]]) -> Ways:
    """What answers to a budget, told what ratios cost."""
    told = "balance.loss_points=[" + ",".join(f"[{ratio},{cost:.3f}]" for ratio, cost in points) + "]"
    within = (f"balance.accuracy_budget={BUDGET_POINTS}", f"balance.refresh={OFTEN}", told)
    return {
        "none": (),
        f"resize within {BUDGET_POINTS} points": ("balance=resize", *within),
        f"semi within {BUDGET_POINTS} points": ("balance=semi", *within),
    }


def measured_points(found: Found, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """(ratio, mean points lost by columns that are selected often), never falling and never below 0."""
    points: list[tuple[float, float]] = []
    for ratio in RATIOS:
        mean = statistics.mean(lost(found, often(ratio), seeds))
        points.append((ratio, max(mean, points[-1][1] if points else 0.0)))
    return points


def train(folder: Path, names: Ways, seeds: Sequence[int]) -> dict[tuple[str, int], float]:
    """(way, seed) -> accuracy on the test pictures, in percent."""
    for seed in seeds:
        composed = {name: compose([*MODEL, *TRAINED, *keys, f"seed={seed}"]) for name, keys in names.items()}
        missing = {name: c for name, c in composed.items() if not done(folder / place(name, seed))}
        if missing:
            launch(folder, {place(name, seed): c for name, c in missing.items()})
    return {(name, seed): accuracy(folder / place(name, seed)) for name in names for seed in seeds}


def time_steps(folder: Path, names: Ways) -> dict[str, float]:
    """Way -> median seconds of a step."""
    composed = {name: compose([*MODEL, *TIMED, *keys]) for name, keys in names.items()}
    missing = {name: c for name, c in composed.items() if not done(folder / "timed" / slug(name))}
    if missing:
        launch(folder, {f"timed/{slug(name)}": c for name, c in missing.items()})
    return {
        name: json.loads((folder / "timed" / slug(name) / RESULT).read_text())["iteration_s"]["p50"]
        for name in composed
    }


def done(run: Path) -> bool:
    """Whether the run is there; one that was interrupted is made again."""
    path = run / RESULT
    return path.exists() and json.loads(path.read_text())["status"] == "ok"


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


def lost(found: Found, name: str, seeds: Sequence[int]) -> list[float]:
    """Points that a way lost against none, seed by seed."""
    return [found["none", seed] - found[name, seed] for seed in seeds]


def table(found: Found, names: Ways, seeds: Sequence[int], times: Mapping[str, float]) -> list[Row]:
    """Prints a row for each way: differences are of runs of one seed, the deviation is theirs over the seeds."""
    print(f"{'way':38} {'accuracy':>9} {'lost':>6} {'dev.':>6} {'worst':>6} {'step':>7} {'speed-up':>9}")
    rows: list[Row] = []
    for name in names:
        accuracy_percent = statistics.mean(found[name, seed] for seed in seeds)
        points = lost(found, name, seeds)
        spread = statistics.stdev(points) if len(points) > 1 else 0.0
        mean, worst, speedup = statistics.mean(points), max(points), times["none"] / times[name]
        rows.append([name, accuracy_percent, mean, spread, worst, times[name], speedup])
        print(
            f"{name:38} {accuracy_percent:9.2f} {mean:6.2f} {spread:6.2f} {worst:6.2f} {times[name]:6.3f}s "
            f"{speedup:8.2f}x"
        )
    return rows


def compare_selections(found: Found, seeds: Sequence[int]) -> None:
    for ratio in RATIOS:
        points = {kind: lost(found, f"resize {kind} zero {ratio}", seeds) for kind in ("random", "priority")}
        gap = statistics.mean(points["priority"]) - statistics.mean(points["random"])
        noise = max(statistics.stdev(each) for each in points.values()) if len(seeds) > 1 else 0.0
        word = (
            "worse than random beyond the spread"
            if gap > noise
            else "not worse than random beyond the spread"
        )
        print(f"ratio {ratio}: priority is {word} ({gap:+.2f} points, spread {noise:.2f})")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0] if arguments else "outputs/bench/balance_accuracy").absolute()
    count = int(arguments[1]) if len(arguments) > 1 else SEEDS
    seeds, fresh = list(range(count)), list(range(count, 2 * count))
    found = train(folder, ways(), seeds)
    points = measured_points(found, seeds)
    held = train(folder, budgeted(points), fresh)
    times = time_steps(folder, ways() | budgeted(points))

    print(
        f"{STEPS} steps; points lost against none of the same seed: mean, deviation, worst\n\nseeds {seeds}"
    )
    rows = table(found, ways(), seeds, times)
    compare_selections(found, seeds)
    print(
        f"\nseeds {fresh}, with balance.loss_points={[[r, round(p, 2)] for r, p in points]} from those above"
    )
    rows += table(held, budgeted(points), fresh, times)
    with (folder / "balance_accuracy.csv").open("w", newline="") as file:
        head = ["way", "accuracy", "points_lost", "deviation", "worst", "step_s", "speedup"]
        csv.writer(file).writerows([head, *rows])
    print(f"wrote {folder / 'balance_accuracy.csv'}")


if __name__ == "__main__":
    main()
