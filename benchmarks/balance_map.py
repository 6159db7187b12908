"""Which balancing policy where? Where SEMI prunes, where it migrates, where both, and whether its predictions hold.

Run: python benchmarks/balance_map.py [OUTPUT] [--layers N] [--way WAY]; writes balance_map.csv and balance_map.png
there (docs/figures by default; of ways by columns balance_map_WAY.csv and .png). Each setting is simulated with nothing
done and with each policy, until it changes nothing any more: SEMI's ViT-1B on its 8 V100 with stragglers that repeat
their products, or of which everything is slow, on three kinds of links and with three budgets of accuracy; and two
models on 4 A100 and 4 V100.

What is compared: a policy predicts what the work of all blocks (products and what is beside them) and the movement that
does not hide take in a step, with nothing done over with what is in force, when it decides. Of the simulation that is
`work / (work - (step - step_with_policy))`: all that a policy saves or adds, taken off the slowest ranks' work of the
first period. On whole steps both are `step / (step - what is saved)`. The naive prediction is the lossless ceiling:
whole units shared out best, all work goes with them, movement free.
"""

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from twinbed.conf.compose import Composed, compose
from twinbed.conf.schema import BalanceConf, SlowdownBy, Way
from twinbed.policies.balance import Half, balanced_work
from twinbed.policies.balance.split import lossless_ceiling
from twinbed.policies.layout import layout_of
from twinbed.sim.simulate import simulate

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
STEPS, PERIOD = 14, 2
RANKS = 8
LEAST, MOST_OFF = 0.97, 0.10  # of the better of both; mean error of predictions

POLICIES = ("resize", "migrate", "semi")
DECISIONS = {"none": "#dfe4ea", "prune": "#e69f00", "migrate": "#56b4e9", "both": "#009e73"}
# colour, marker, its size
SHOWN = {"resize": ("#d55e00", "s", 8), "migrate": ("#0072b2", "D", 7), "semi": ("#009e73", "o", 4)}
INK = "#1d2733"


@dataclass(frozen=True, slots=True)
class Links:
    """Of each GPU, or of the network between nodes."""

    title: str
    bandwidth_Bps: float
    latency_ns: int


LINKS = {
    "nvlink": Links("NVLink, 120 GB/s", 120e9, 3_400),
    "pcie": Links("as PCIe 3, 12 GB/s", 12e9, 10_000),
    "slow": Links("10 Gbit/s", 1.25e9, 14_000),
}
CHI = (2, 4, 8)
STRAGGLERS = (1, 2, 3)
DEVICES = (1, 3)  # as many of which everything is slow
BUDGETS_POINTS = (0.0, 0.5, 2.0)
BETWEEN = {"edr": 12.5e9, "slow": 1.25e9}  # of the links between mixed nodes

# batch and precision as SEMI's code has them; the GPT in the tensor cores' precision, on which kinds differ more
MODELS: dict[str, tuple[str, ...]] = {
    "vit_1b": ("model=vit_1b", "batch.micro=64", "precision=fp32"),
    "vit_3b": ("model=vit_3b", "batch.micro=32", "precision=fp32"),
    "gpt": (
        "model=gpt",
        "model.layers=24",
        "model.hidden=2048",
        "model.heads=32",
        "model.sequence=1024",
        "data=synthetic",
        "batch.micro=8",
        "precision=bf16",
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """`stragglers` of 8 ranks take `chi` times as long; pruning may cost `budget_points` of accuracy.

    Args:
        chi: 0: as slow as their kind of device is.
        links: A key of LINKS; of `mixed_group` of BETWEEN.
        way: In which units move.
        by: What of stragglers is slow: products alone (repeat), or everything (device).
    """

    model: str
    cluster: str
    chi: int
    stragglers: int
    links: str
    budget_points: float
    way: str = Way.paired.value
    by: str = SlowdownBy.repeat.value


@dataclass(frozen=True, slots=True)
class Speedup:
    """Over nothing done, of whole steps and of the blocks' work with movement.

    Args:
        decision: none, prune, migrate or both.
        settled: Whether nothing changed in the last three periods.
    """

    step: float
    work: float
    predicted_step: float
    predicted_work: float
    decision: str
    settled: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Args:
    step_s, work_s: Nothing done: of a step, and of its slowest ranks' work in blocks.
    ceiling: Of work: lossless, whole units, movement free.
    """

    setting: Setting
    step_s: float
    work_s: float
    ceiling: float
    speedups: Mapping[str, Speedup]

    @property
    def semi(self) -> Speedup:
        return self.speedups["semi"]

    @property
    def over_better(self) -> float:
        """SEMI's measured speed-up of whole steps, over that of the better of the others."""
        return self.semi.step / max(self.speedups["resize"].step, self.speedups["migrate"].step)


def main(arguments: Sequence[str] | None = None) -> bool:
    """Whether SEMI or its predictions miss what they must reach."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", nargs="?", default=str(FOLDER))
    parser.add_argument("--layers", type=int, help="blocks of each model; by default as many as it has")
    parser.add_argument("--way", choices=[way.value for way in Way], default=Way.paired.value)
    given = parser.parse_args(arguments)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in settings():
        rows.append(row(replace(setting, way=given.way), given.layers))
        sys.stderr.write(f"\r{len(rows)} settings ")
    sys.stderr.write("\n")
    stem = "balance_map" if given.way == Way.paired.value else f"balance_map_{given.way}"
    write_csv(rows, folder / f"{stem}.csv")
    figure = map_figure(rows)
    FigureCanvasAgg(figure)
    figure.savefig(folder / f"{stem}.png", dpi=130)
    print(table(rows))
    lines, missed = verdicts(rows)
    print("\n".join(lines))
    print(f"wrote {folder}/{stem}.csv and {stem}.png")
    return missed


def settings() -> Iterator[Setting]:
    for chi, stragglers, links, budget in itertools.product(CHI, STRAGGLERS, LINKS, BUDGETS_POINTS):
        yield Setting("vit_1b", "v100_8", chi, stragglers, links, budget)
    for chi, stragglers, links, budget in itertools.product(CHI, DEVICES, LINKS, BUDGETS_POINTS):
        yield Setting("vit_1b", "v100_8", chi, stragglers, links, budget, by=SlowdownBy.device.value)
    for model, links, budget in itertools.product(("vit_3b", "gpt"), BETWEEN, BUDGETS_POINTS):
        yield Setting(model, "mixed_group", 0, 4, links, budget)


# ---- simulations


def row(setting: Setting, layers: int | None = None) -> Row:
    composed = experiment_of(replace(setting, budget_points=0.0, way=Way.paired.value), layers)
    experiment, way = composed.experiment, Way(setting.way)
    work = balanced_work(
        replace(experiment, balance=BalanceConf(name="semi", way=way)),
        composed.spec,
        layout_of(experiment, composed.spec),
    )
    assert work is not None
    step_s, _ = run(composed, "none", 0.0)
    # what the first period shows is of even work, whoever measures it
    _, (first, *_) = run(composed, "migrate", 0.0)
    halves_ns = blocks_ns(first)
    if way is not Way.paired:  # whose predictions are of products alone
        halves_ns = [first[f"{half.value}_ns"] for half in Half]
    even_ns = [sum(both) for both in zip(*halves_ns, strict=True)]
    work_s = sum(max(each) for each in halves_ns) / 1e9
    speedups = {}
    for name in POLICIES:
        budget = 0.0 if name == "migrate" else setting.budget_points
        with_s, periods = run(composed, name, budget, way if name != "resize" else Way.paired)
        speedups[name] = speedup_of(step_s, work_s, with_s, periods)
    ceiling = lossless_ceiling([took / min(even_ns) for took in even_ns], work)
    return Row(setting, step_s, work_s, ceiling, speedups)


def blocks_ns(period: Mapping[str, Any]) -> list[list[float]]:
    """[halves][ranks], what blocks' work took in a step."""
    return [
        [
            products + between + around / 2
            for products, between, around in zip(
                period[f"{half.value}_ns"],
                period[f"{half.value}_between_ns"],
                period["around_ns"],
                strict=True,
            )
        ]
        for half in Half
    ]


def speedup_of(step_s: float, work_s: float, with_s: float, periods: Sequence[Mapping[str, Any]]) -> Speedup:
    """The prediction is that of the decision by which what is in force at the end came to be."""
    actions = periods[-1]["actions"]
    tail = list(
        itertools.takewhile(
            lambda each: each["actions"] == actions, sorted(periods, key=lambda p: -p["step"])
        )
    )
    predicted = tail[-1]["predicted_speedup"]
    saved_s = step_s - with_s
    prunes, moves = "prune" in actions, "migrate" in actions
    return Speedup(
        step=step_s / with_s,
        work=work_s / (work_s - saved_s),
        predicted_step=step_s / (step_s - work_s * (1 - 1 / predicted)),
        predicted_work=predicted,
        decision="both" if prunes and moves else "prune" if prunes else "migrate" if moves else "none",
        settled=len(tail) >= 3,
    )


@cache
def experiment_of(setting: Setting, layers: int | None) -> Composed:
    """Without the cluster's guesses, whose bounds would take two more simulations of each."""
    if setting.cluster == "mixed_group":
        cluster: tuple[str, ...] = (
            f"cluster.inter_node.bandwidth_Bps={BETWEEN[setting.links]}",
            f"cluster.parts.1.inter_node.bandwidth_Bps={BETWEEN[setting.links]}",
        )
    else:
        links = LINKS[setting.links]
        slow = ",".join(f"{rank}:{setting.chi}" for rank in range(setting.stragglers))
        cluster = (
            f"cluster.intra_node.bandwidth_Bps={links.bandwidth_Bps}",
            f"cluster.intra_node.latency_ns={links.latency_ns}",
            f"cluster.slowdown={{{slow}}}",
            f"cluster.slowdown_by={setting.by}",
        )
    composed = compose(
        (
            "target=sim",
            f"cluster={setting.cluster}",
            *cluster,
            *MODELS[setting.model],
            *(() if layers is None else (f"model.layers={layers}",)),
            f"parallel.tensor={RANKS}",
            "comm=ddp",
            "train.gradient_clipping=0",
            f"steps={STEPS}",
            f"warmup_steps={STEPS - PERIOD}",
        )
    )
    known = replace(composed.experiment.cluster, guesses={})
    return replace(composed, experiment=replace(composed.experiment, cluster=known))


_RUNS: dict[tuple[int, str, float, Way], tuple[float, list[dict[str, Any]]]] = {}


def run(
    composed: Composed, name: str, budget_points: float, way: Way = Way.paired
) -> tuple[float, list[dict[str, Any]]]:
    """(a step of the last period in seconds; what was measured and decided, by period)"""
    key = (id(composed), name, budget_points, way)  # `experiment_of` keeps it
    if key not in _RUNS:
        budget = budget_points if name in ("resize", "semi") else None
        conf = (
            BalanceConf()
            if name == "none"
            else BalanceConf(name=name, period=PERIOD, accuracy_budget=budget, way=way)
        )
        record = simulate(replace(composed.experiment, balance=conf), spec=composed.spec)
        if record.result["status"] != "ok":
            raise RuntimeError(f"{name}: {record.result['error']}")
        periods = [] if name == "none" else record.result["balance"]["groups"][0]["periods"]
        _RUNS[key] = (record.result["iteration_s"]["mean"], periods)
    return _RUNS[key]


# ---- what it comes to


def error_of(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def verdicts(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Lines, and whether something falls short."""
    counts = {word: sum(each.semi.decision == word for each in rows) for word in DECISIONS}
    least = min(rows, key=lambda each: each.over_better)
    lines = [
        f"{len(rows)} settings: " + ", ".join(f"{word} {count}" for word, count in counts.items()),
        f"not settled: {sum(not s.settled for each in rows for s in each.speedups.values())}",
        f"SEMI over the better of both: at the least {least.over_better:.3f} ({least.setting}), mean "
        f"{mean([each.over_better for each in rows]):.3f}; must be {LEAST} everywhere",
    ]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for name in POLICIES:
        of_policy = [each.speedups[name] for each in rows]
        pairs[f"{name}, steps"] = [(s.predicted_step, s.step) for s in of_policy]
        pairs[f"{name}, work and movement"] = [(s.predicted_work, s.work) for s in of_policy]
    naive = [(each.ceiling, each.semi.work) for each in rows]
    pairs["lossless ceiling for semi, steps"] = [
        (each.step_s / (each.step_s - each.work_s * (1 - 1 / each.ceiling)), each.semi.step) for each in rows
    ]
    pairs["lossless ceiling for semi, work and movement"] = naive
    for name, both in pairs.items():
        errors = [error_of(*pair) for pair in both]
        lines.append(
            f"predicted against measured, {name}: mean {100 * mean(errors):.1f} %, worst {100 * max(errors):.1f} %"
        )
    off = mean([error_of(*pair) for pair in pairs["semi, work and movement"]])
    return lines, least.over_better < LEAST or off > MOST_OFF


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(rows: Sequence[Row]) -> str:
    """Speed-ups of whole steps; of SEMI also of work, predicted and measured."""
    lines = [
        f"{'model':<7}{'slow':<7}{'chi':>4}{'slow':>5} {'links':<7}{'points':>6} {'SEMI does':<9}"
        f"{'resize':>7}{'migrate':>8}"
        f"{'semi':>7}{'ratio':>7} | {'work':>8} {'predicted':>9}{'ceiling':>8}"
    ]
    for each in rows:
        at, semi = each.setting, each.semi
        lines.append(
            f"{at.model:<7}{at.by if at.chi else '-':<7}{at.chi or '-':>4}{at.stragglers:>5} {at.links:<7}"
            f"{at.budget_points:>6g} "
            f"{semi.decision:<9}{each.speedups['resize'].step:>7.2f}{each.speedups['migrate'].step:>8.2f}"
            f"{semi.step:>7.2f}{each.over_better:>7.3f} | {semi.work:>8.2f} {semi.predicted_work:>9.2f}"
            f"{each.ceiling:>8.2f}"
        )
    return "\n".join(lines)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        kinds = ("step", "work", "predicted_step", "predicted_work", "decision")
        writer.writerow(
            [
                *("model", "cluster", "slowdown_by", "chi", "stragglers", "links", "budget_points"),
                *("step_ms", "work_ms", "ceiling"),
                *(f"{name}_{kind}" for name in POLICIES for kind in kinds),
            ]
        )
        for each in rows:
            at = each.setting
            by = at.by if at.chi else ""
            found: list[object] = [at.model, at.cluster, by, at.chi, at.stragglers]
            found += [at.links, at.budget_points]
            found += [f"{each.step_s * 1e3:.5g}", f"{each.work_s * 1e3:.5g}", f"{each.ceiling:.4g}"]
            for name in POLICIES:
                values = [getattr(each.speedups[name], kind) for kind in kinds]
                found += [value if isinstance(value, str) else f"{value:.4g}" for value in values]
            writer.writerow(found)


# ---- figure


def map_figure(rows: Sequence[Row]) -> Figure:
    """Left what SEMI does where products alone are slow, by links, budget, chi and number of stragglers; right its
    predictions, of all settings.
    """
    figure = Figure(figsize=(13, 7.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.5, 1))
    grid = left.subplots(len(LINKS), len(BUDGETS_POINTS), sharex=True, sharey=True)
    for down, links in enumerate(LINKS):
        for across, budget in enumerate(BUDGETS_POINTS):
            axes = grid[down][across]
            _cells(axes, [r for r in rows if (r.setting.links, r.setting.budget_points) == (links, budget)])
            if not down:
                axes.set_title(f"pruning may cost {budget:g} points", fontsize=10)
            if not across:
                axes.set_ylabel(f"{LINKS[links].title}\nstragglers of {RANKS}", fontsize=9)
            if down == len(LINKS) - 1:
                axes.set_xlabel("times as slow")
    left.legend(
        handles=[Patch(color=colour, label=word) for word, colour in DECISIONS.items()],
        loc="outside upper center",
        ncols=len(DECISIONS),
        frameon=False,
        title="What SEMI does; its speed-up of a step, in brackets the better of resize and migrate",
    )
    _predictions(right.subplots(), rows)
    return figure


def _cells(axes: Axes, rows: Sequence[Row]) -> None:
    own = {
        (r.setting.stragglers, r.setting.chi): r
        for r in rows
        if r.setting.cluster == "v100_8" and r.setting.by == SlowdownBy.repeat.value
    }
    words = list(DECISIONS)
    colours = [[words.index(own[n, chi].semi.decision) for chi in CHI] for n in STRAGGLERS]
    axes.imshow(
        colours, cmap=ListedColormap(list(DECISIONS.values())), vmin=0, vmax=len(words) - 1, aspect="auto"
    )
    for (down, n), (across, chi) in itertools.product(enumerate(STRAGGLERS), enumerate(CHI)):
        at = own[n, chi]
        better = at.semi.step / at.over_better
        shown = f"{at.semi.step:.2f}\n({better:.2f})"
        axes.text(across, down, shown, ha="center", va="center", fontsize=9, color=INK)
    axes.set_xticks(range(len(CHI)), [str(chi) for chi in CHI])
    axes.set_yticks(range(len(STRAGGLERS)), [str(n) for n in STRAGGLERS])
    axes.tick_params(length=0)


def _predictions(axes: Axes, rows: Sequence[Row]) -> None:
    for name, (colour, marker, size) in SHOWN.items():
        own = [each.speedups[name] for each in rows]
        axes.plot(
            [s.work for s in own],
            [s.predicted_work for s in own],
            linestyle="none",
            marker=marker,
            markersize=size,
            markerfacecolor=colour if name == "semi" else "none",
            color=colour,
            label=f"{name}, as it predicted",
        )
    axes.plot(
        [each.semi.work for each in rows],
        [each.ceiling for each in rows],
        linestyle="none",
        marker="x",
        markersize=5,
        color="#8c8c8c",
        label="lossless ceiling for semi",
        zorder=0,
    )
    ends = (0.9, 9.0)
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    axes.fill_between(
        ends,
        [(1 - MOST_OFF) * end for end in ends],
        [(1 + MOST_OFF) * end for end in ends],
        color="#dfe4ea",
        label=f"within {MOST_OFF:.0%}",
        zorder=-1,
    )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = (1, 1.5, 2, 3, 4, 6, 8)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("measured speed-up of work and movement (simulation)")
    axes.set_ylabel("predicted")
    axes.legend(loc="upper left", fontsize=9, frameon=False)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
