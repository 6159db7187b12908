"""How large may a batch be? AdamW and SGD, their rate growing with the batch, against LAMB and LARS, on Fashion-MNIST.

Run: python benchmarks/large_batch.py [OUTPUT] [--epochs E] [--seeds N]; needs dataset-fashion-mnist, or --data FOLDER.
Every cell is a training by the project's own trainer on one rank with as many epochs as all others: a batch that is 4
times as large takes a fourth of the steps. Rates are tuned at the smallest batch alone and follow from it by the arm's
rule at all others. A cell that is finished (OUTPUT/cells/*.json) is not run again.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinbed.analysis.record import write_text
from twinbed.conf.compose import compose, load_experiment
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.worker import WorkerContext

BATCHES = (512, 2048, 8192, 32768)
SMALL = BATCHES[0]
MICRO = 512
WARMUP_FRAC = 1 / 8  # of the steps, at every batch
POINT = 0.01
# First rates to try at the smallest batch; while the best is at an end, one more beyond it, by 3 or 10/3
GRIDS = {
    "adamw": (1e-3, 3e-3, 1e-2),
    "sgd": (0.03, 0.1, 0.3),
    "lamb": (3e-3, 1e-2, 3e-2),
    "lars": (0.3, 1.0, 3.0),
}
MAX_TRIES = 6
KEYS = {"sgd": ("optimizer.momentum=0.9",)}  # all else as conf/optimizer has it

# Arm: optimizer, and the power of (batch / smallest batch) by which its rate grows. Linear: Goyal et al. 2017; square
# root: Krizhevsky 2014, and You et al. 2020 for LAMB. LARS: linear, as You et al. 2017.
ARMS = {
    "adamw, linear": ("adamw", 1.0),
    "adamw, square root": ("adamw", 0.5),
    "sgd, linear": ("sgd", 1.0),
    "lamb, square root": ("lamb", 0.5),
    "lars, linear": ("lars", 1.0),
}
COLOURS = dict(zip(ARMS, ("#1f77b4", "#17becf", "#ff7f0e", "#2ca02c", "#d62728"), strict=True))


@dataclass(frozen=True, slots=True)
class Cell:
    """One training."""

    optimizer: str
    batch: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.batch}-{self.rate:.6g}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What it came to. A training whose gradients were no numbers any more is `diverged`; its accuracy is that of the
    weights before."""

    steps: int
    accuracy: float
    validation_loss: float
    training_loss: float
    diverged: bool
    seconds: float


def run_cell(case: Case, context: WorkerContext) -> None:
    """On the rank: train, validate on all test images, and write the cell's file."""
    import time

    from twinbed.runtime.trainer import Trainer

    experiment = load_experiment(case.experiment)
    trainer = Trainer(experiment, context)
    began, losses, diverged = time.monotonic(), [], False
    try:
        for step in range(experiment.steps):
            context.beat(step)
            try:
                losses.append(trainer.step(step).loss)
            except RuntimeError as err:
                if "finite" not in str(err) and "Inf" not in str(err):
                    raise
                diverged = True
                break
        loss, accuracy = trainer.validate(experiment.steps - 1)
    finally:
        trainer.close()
    assert accuracy is not None
    last = losses[-max(1, len(losses) // 20) :]
    outcome = Outcome(
        steps=experiment.steps,
        accuracy=accuracy,
        validation_loss=loss,
        training_loss=statistics.mean(last) if last else float("nan"),
        diverged=diverged,
        seconds=time.monotonic() - began,
    )
    write_text(Path(case.options["file"]), json.dumps(asdict(outcome), indent=1) + "\n")


class Experiment:
    """Runs cells, and remembers those that are done."""

    def __init__(self, folder: Path, *, epochs: float, data: str | None) -> None:
        self._folder, self._epochs, self._data = folder, epochs, data
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        settings = {"epochs": epochs, "micro": MICRO, "warmup_frac": WARMUP_FRAC, "data": data}
        known = folder / "settings.json"
        if known.exists() and json.loads(known.read_text()) != settings:
            sys.exit(f"{known} is of another experiment: {known.read_text().strip()}; give another OUTPUT")
        write_text(known, json.dumps(settings) + "\n")

    def run(self, cells: Sequence[Cell]) -> dict[Cell, Outcome]:
        """All of them, in one launch, without those that are done."""
        open_cells = [cell for cell in dict.fromkeys(cells) if not self._file(cell).exists()]
        if open_cells:
            cases = [self._case(cell) for cell in open_cells]
            cluster = load_experiment(cases[0].experiment).cluster
            outcome = launch_local(self._folder / "launch", cluster=cluster, cases=cases, show_progress=False)
            if outcome.status != "ok":
                sys.exit(outcome.error)
        return {cell: Outcome(**json.loads(self._file(cell).read_text())) for cell in cells}

    def _file(self, cell: Cell) -> Path:
        return self._folder / "cells" / f"{cell.name}.json"

    def _case(self, cell: Cell) -> Case:
        keys = [
            "target=runtime",
            "model=vit_fashion",
            "data=fashion_mnist",
            "comm=ddp",
            "cluster.nodes=1",
            "cluster.devices_per_node=1",
            "cluster.shaped=false",
            "precision=fp32",
            f"optimizer={cell.optimizer}",
            f"optimizer.lr={cell.rate!r}",
            *KEYS.get(cell.optimizer, ()),
            f"batch.micro={MICRO}",
            f"batch.global_sequences={cell.batch}",
            f"train.epochs={self._epochs}",
            "train.lr_schedule=cosine",
            "train.lr_min_fraction=0",
            "train.eval_every=1",  # of all test images; the cell asks for one at its end
            "train.timeout_s=600",
            f"seed={cell.seed}",
        ]
        if self._data is not None:
            keys.append(f"data.path={self._data}")
        steps = compose(keys).experiment.steps
        composed = compose([*keys, f"train.warmup_lr_steps={max(1, round(WARMUP_FRAC * steps))}"])
        options = {"file": str(self._file(cell).absolute())}
        kind = f"{Path(__file__).absolute()}:run_cell"
        return Case(
            name=cell.name,
            folder=f"case-{cell.name}",
            experiment=composed.resolved,
            kind=kind,
            options=options,
        )


def tune(experiment: Experiment) -> dict[str, dict[float, Outcome]]:
    """Optimizer -> rate -> outcome at the smallest batch with seed 0."""
    rates = {optimizer: list(grid) for optimizer, grid in GRIDS.items()}
    while True:
        cells = {o: [Cell(o, SMALL, rate, 0) for rate in tried] for o, tried in rates.items()}
        done = experiment.run([cell for own in cells.values() for cell in own])
        found = {o: {cell.rate: done[cell] for cell in own} for o, own in cells.items()}
        more = False
        for optimizer, tried in rates.items():
            best, ranked = best_rate(found[optimizer]), sorted(tried)
            if best not in (ranked[0], ranked[-1]) or len(tried) == MAX_TRIES:
                continue
            more = True
            tried.append(_beside(best, up=best == ranked[-1]))
        if not more:
            return found


def best_rate(tried: dict[float, Outcome]) -> float:
    """The one with the highest accuracy on the test images; ties: the lowest."""
    return max(sorted(tried), key=lambda rate: tried[rate].accuracy)


def _beside(rate: float, *, up: bool) -> float:
    """The next of 1, 3, 10, 30, ..."""
    digit = f"{rate:e}"[0]
    factor = (3 if digit == "1" else 10 / 3) if up else (1 / 3 if digit == "3" else 3 / 10)
    return float(f"{rate * factor:.3g}")


def largest(mean_by_batch: dict[int, float]) -> int:
    """The largest batch up to which every one is within a point of the smallest."""
    kept = SMALL
    for batch in sorted(mean_by_batch):
        if mean_by_batch[batch] < mean_by_batch[SMALL] - POINT:
            break
        kept = batch
    return kept


def report(
    found: dict[tuple[str, int, int], tuple[Cell, Outcome]],
    tuned: dict[str, dict[float, Outcome]],
    seeds: Sequence[int],
    folder: Path,
    epochs: float,
) -> None:
    """Table, CSV files and a picture."""
    print("rates tried at batch 512 (accuracy with seed 0):")
    for optimizer, tried in tuned.items():
        told = ", ".join(f"{rate:g}: {tried[rate].accuracy:.4f}" for rate in sorted(tried))
        print(f"  {optimizer:>6} {told}; taken: {best_rate(tried):g}")
    print(
        f"accuracy on the test images after {epochs:g} epochs, mean of seeds {list(seeds)} (least to most):"
    )
    means: dict[str, dict[int, float]] = {}
    for arm in ARMS:
        means[arm] = {}
        for batch in BATCHES:
            values = [found[arm, batch, seed][1].accuracy for seed in seeds]
            means[arm][batch] = statistics.mean(values)
            cell, outcome = found[arm, batch, seeds[0]]
            diverged = sum(found[arm, batch, seed][1].diverged for seed in seeds)
            print(
                f"  {arm:>19} batch {batch:6} rate {cell.rate:8.4g} steps {outcome.steps:5}: {means[arm][batch]:.4f} "
                f"({min(values):.4f} to {max(values):.4f}){f', {diverged} diverged' if diverged else ''}"
            )
    print("the largest batch within 1 point of the arm's own accuracy at 512:")
    for arm in ARMS:
        print(f"  {arm:>19} {largest(means[arm])}")
    _write_csv(found, tuned, folder)
    _plot(found, means, seeds, folder, epochs)
    print(f"wrote {folder}/large_batch.csv, large_batch_tuning.csv and large_batch.png")


def _write_csv(
    found: dict[tuple[str, int, int], tuple[Cell, Outcome]],
    tuned: dict[str, dict[float, Outcome]],
    folder: Path,
) -> None:
    columns = ["steps", "accuracy", "validation_loss", "training_loss", "diverged"]
    with (folder / "large_batch.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "optimizer", "batch", "seed", "rate", *columns])
        for (arm, batch, seed), (cell, outcome) in found.items():
            values: dict[str, Any] = asdict(outcome)
            writer.writerow([arm, cell.optimizer, batch, seed, cell.rate, *(values[c] for c in columns)])
    with (folder / "large_batch_tuning.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["optimizer", "rate", *columns])
        for optimizer, tried in tuned.items():
            for rate in sorted(tried):
                values = asdict(tried[rate])
                writer.writerow([optimizer, rate, *(values[c] for c in columns)])


def _plot(
    found: dict[tuple[str, int, int], tuple[Cell, Outcome]],
    means: dict[str, dict[int, float]],
    seeds: Sequence[int],
    folder: Path,
    epochs: float,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5))
    whole, near = figure.subplots(1, 2)
    for i, arm in enumerate(ARMS):
        shift = 1.04 ** (i - 2)  # so that bars do not hide each other
        for axes, base, unit in ((whole, 0.0, 1.0), (near, means[arm][SMALL], 100.0)):
            values = {b: [(found[arm, b, s][1].accuracy - base) * unit for s in seeds] for b in BATCHES}
            middle = [statistics.mean(values[b]) for b in BATCHES]
            low = [m - min(values[b]) for m, b in zip(middle, BATCHES, strict=True)]
            high = [max(values[b]) - m for m, b in zip(middle, BATCHES, strict=True)]
            axes.errorbar(
                [b * shift for b in BATCHES],
                middle,
                yerr=[low, high],
                label=arm,
                color=COLOURS[arm],
                marker="o",
                markersize=3,
                capsize=3,
            )
    near.axhline(-1.0, color="gray", linestyle=":", linewidth=1)
    near.set(
        ylim=(-6, 1.5), ylabel="points above the arm's own accuracy at 512", title="the same, near the limit"
    )
    whole.set(ylabel="accuracy on 10,000 test images", title=f"Fashion-MNIST, ViT, {epochs:g} epochs")
    for axes in (whole, near):
        axes.set_xscale("log", base=2)
        axes.set_xticks(BATCHES, [str(b) for b in BATCHES])
        axes.set_xlabel(f"global batch; bars: least to most of {len(seeds)} seeds")
    whole.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "large_batch.png", dpi=130)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", nargs="?", default="outputs/bench/large_batch")
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--data", default=None, help="folder with the four IDX files")
    arguments = parser.parse_args(argv)
    folder, seeds = Path(arguments.output), range(arguments.seeds)
    data = str(Path(arguments.data).absolute()) if arguments.data is not None else None
    experiment = Experiment(folder, epochs=arguments.epochs, data=data)
    tuned = tune(experiment)
    base = {optimizer: best_rate(tried) for optimizer, tried in tuned.items()}
    cells = {
        (arm, batch, seed): Cell(
            optimizer, batch, float(f"{base[optimizer] * (batch / SMALL) ** power:.6g}"), seed
        )
        for seed in seeds
        for batch in BATCHES
        for arm, (optimizer, power) in ARMS.items()
    }
    done = experiment.run(list(cells.values()))
    report(
        {key: (cell, done[cell]) for key, cell in cells.items()}, tuned, list(seeds), folder, arguments.epochs
    )


if __name__ == "__main__":
    main()
