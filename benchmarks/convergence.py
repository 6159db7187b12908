"""Do quantized weights and gradients keep the convergence? zeropp and the rivals of qgZ against zero3, for real.

Run: python benchmarks/convergence.py [OUTPUT]. All runs start from the same weights and data of their seed, on four
real ranks; links are not shaped, for only numbers matter here.
"""

import csv
import statistics
import sys
from pathlib import Path

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

SEEDS = (0, 1, 2)
STEPS = 300
TAIL = 30  # the training loss is the mean of the last so many steps: one batch is noisy
POLICIES = {
    "zero3": ("comm=zero3",),
    "zeropp": ("comm=zeropp",),
    "one_hop": ("comm=zeropp", "comm.gradient_path=one_hop"),
    "ring": ("comm=zeropp", "comm.gradient_path=ring"),
    "whole_tensor": ("comm=zeropp", "comm.gradient_block=0"),
}


Losses = tuple[list[float], list[list[float]]]  # of each training step; (step, loss) of each validation


def run(folder: Path) -> dict[tuple[str, int], Losses]:
    """(policy, seed) -> losses."""
    cases, cluster = [], None
    for seed in SEEDS:
        for policy, keys in POLICIES.items():
            composed = compose(
                [
                    "target=runtime",
                    "cluster.shaped=false",
                    *keys,
                    "batch.sequence=64",
                    f"seed={seed}",
                    f"steps={STEPS}",
                    "train.warmup_lr_steps=20",
                    "train.lr_schedule=cosine",
                    "train.eval_every=50",
                    "train.eval_batches=16",
                    "train.timeout_s=120",
                ]
            )
            cluster = composed.experiment.cluster
            name = f"{policy}-{seed}"
            cases.append(Case(name=name, folder=name, experiment=composed.resolved))
    assert cluster is not None
    outcome = launch_local(folder, cluster=cluster, cases=cases)
    if outcome.status != "ok":
        sys.exit(outcome.error)
    found = {}
    for case in cases:
        policy, _, seed_text = case.name.rpartition("-")
        result = read_record(folder / case.name).result
        found[policy, int(seed_text)] = (result["loss"], result["validation_loss"])
    return found


def report(found: dict[tuple[str, int], Losses], folder: Path) -> None:
    """Table, CSV and a picture."""
    from matplotlib.figure import Figure

    print(
        f"{'policy':>14} {'training':>10} {'to zero3':>9} {'validation':>11} {'to zero3':>9}   (means over the seeds)"
    )
    rows = []
    for policy in POLICIES:
        finals = [_final(*found[policy, seed]) for seed in SEEDS]
        base = {
            kind: statistics.mean(_final(*found["zero3", seed])[kind] for seed in SEEDS) for kind in (0, 1)
        }
        train, valid = (statistics.mean(f[kind] for f in finals) for kind in (0, 1))
        spread = max(f[1] for f in finals) - min(f[1] for f in finals)
        print(
            f"{policy:>14} {train:10.4f} {train / base[0] - 1:9.2%} {valid:11.4f} {valid / base[1] - 1:9.2%}"
            f"   seeds {SEEDS}, spread {spread:.3f}"
        )
        rows += [
            [policy, seed, step, loss] for seed in SEEDS for step, loss in enumerate(found[policy, seed][0])
        ]
    with (folder / "convergence.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["policy", "seed", "step", "loss"], *rows])
    figure = Figure(figsize=(11, 5))
    training, validation = figure.subplots(1, 2, sharey=True)
    for policy in POLICIES:
        curves = [found[policy, seed][0] for seed in SEEDS]
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        smooth = [statistics.mean(mean[max(0, i - 9) : i + 1]) for i in range(len(mean))]
        training.plot(smooth, label=policy)
        steps = [step for step, _ in found[policy, SEEDS[0]][1]]
        held_out = [
            statistics.mean(found[policy, seed][1][i][1] for seed in SEEDS) for i in range(len(steps))
        ]
        validation.plot(steps, held_out, marker="o", label=policy)
    training.set(
        xlabel="step", ylabel="loss in nats a byte, mean of the seeds", title="training, mean of 10 steps"
    )
    validation.set(xlabel="step", title="validation")
    training.legend()
    figure.savefig(folder / "convergence.png", dpi=130)
    print(f"wrote {folder}/convergence.png and convergence.csv")


def _final(losses: list[float], validation: list[list[float]]) -> tuple[float, float]:
    return statistics.mean(losses[-TAIL:]), validation[-1][1]


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0] if arguments else "outputs/bench/convergence")
    folder.mkdir(parents=True, exist_ok=True)
    report(run(folder), folder)


if __name__ == "__main__":
    main()
