"""At which size and on which links does which tensor mode win? Simulated blocks of a GPT, one figure.

Run: python benchmarks/mode_order.py [OUTPUT]; writes mode_order.csv and mode_order.png there (docs/figures by default).
Two questions of every mode, number of GPUs and cluster:

* equal batch: how long forward and backward of one block take, at two sizes. Of four simulations, with 2 and 4 layers
  and 1 and 2 micro-batches: a difference of differences, in which embedding, head, optimizer and clipping cancel.
* largest batch: the most sequences (in steps of 16) of which an 8-layer model's step fits the GPU, and what forward and
  backward of the whole model then take for one sequence. Published gains of 2D to 3D often mix both questions.

Nothing is measured, and nothing is tuned towards an order.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter

from twinbed.analysis.plots import MODE_COLOURS
from twinbed.analysis.record import Record
from twinbed.conf.compose import Composed, compose
from twinbed.policies.comm import build_comm
from twinbed.sim.layout.memory import layout_memory
from twinbed.sim.memory import at_most, out_of_memory
from twinbed.sim.simulate import simulate

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"


@dataclass(frozen=True, slots=True)
class Links:
    """One kind of cluster. `node`: GPUs of a node; of fewer GPUs than that a node has only those."""

    title: str
    overrides: tuple[str, ...]
    node: int = 8


CLUSTERS = {
    "uniform": Links("NVLink between all 8 of a node", ("cluster=dgx_a100",)),
    "pairs": Links("NVLink in pairs, PCIe between them", ("cluster=pairs_a100",)),
    "narrow": Links(
        "nodes of 4 on NVLink, one HDR link each",
        (
            "cluster=dgx_a100",
            "cluster.device.memory_bytes=42.48e9",
            "cluster.device.memory_Bps=1555e9",
            "cluster.inter_node.links=1",
        ),
        node=4,
    ),
}


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model and its batch on one tensor group."""

    title: str
    hidden: int
    sequences: int
    tokens: int


# The first is the one of the published volumes; all modes can cut both
SIZES = {
    "small": Size("b s = 6,144, h = 3,072", 3072, 16, 384),
    "large": Size("b s = 32,768, h = 8,192", 8192, 64, 512),
}
HEADS, VOCAB = 64, 50304
LARGEST, LAYERS, GRAIN = "largest", 8, 16  # the largest batch: of the large size, with so many layers

# mode, depth, shape
MODES: dict[int, tuple[tuple[str, int, str], ...]] = {
    4: (("1d", 1, "[4]"), ("2d", 1, "[2,2]")),
    8: (("1d", 1, "[8]"), ("2.5d", 2, "[2,2,2]"), ("3d", 1, "[2,2,2]")),
    16: (("1d", 1, "[16]"), ("2d", 1, "[4,4]"), ("2.5d", 4, "[2,2,4]")),
    32: (("1d", 1, "[32]"), ("2.5d", 2, "[4,4,2]")),
    64: (("1d", 1, "[64]"), ("2d", 1, "[8,8]"), ("2.5d", 4, "[4,4,4]"), ("3d", 1, "[4,4,4]")),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One mode on one cluster.

    Args:
        question: "small" or "large", of equal batch; or "largest".
        ms: Forward and backward of one block; of the largest batch, of the whole model for one sequence.
        exposed: Share of a one micro-batch step in which nothing is computed.
        memory_bytes: Peak of the fullest GPU.
    """

    question: str
    links: str
    gpus: int
    mode: str
    shape: str
    sequences: int
    ms: float
    exposed: float
    memory_bytes: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", nargs="?", default=str(FOLDER))
    parser.add_argument("--redraw", action="store_true", help="from OUTPUT/mode_order.csv; simulate nothing")
    given = parser.parse_args(argv)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    if given.redraw:
        points = read_csv(folder / "mode_order.csv")
    else:
        points = []
        for point in all_points():
            points.append(point)
            sys.stderr.write(
                f"\r{len(points)} points, {point.question} {point.links} {point.gpus} {point.mode}   "
            )
        sys.stderr.write("\n")
        write_csv(points, folder / "mode_order.csv")
    figure = order_figure(points)
    FigureCanvasAgg(figure)
    figure.savefig(folder / "mode_order.png", dpi=130)
    print(table(points))
    for line in verdicts(points):
        print(line)
    print(f"wrote {folder}/mode_order.csv and mode_order.png")


# ---- simulations


def all_points() -> Iterator[Point]:
    for links in CLUSTERS:
        for gpus, modes in MODES.items():
            for mode, depth, shape in modes:
                for size in SIZES:
                    yield of_a_block(size, links, gpus, mode, depth, shape)
                yield of_the_largest_batch(links, gpus, mode, depth, shape)


def of_a_block(question: str, links: str, gpus: int, mode: str, depth: int, shape: str) -> Point:
    """Equal batch."""
    size = SIZES[question]

    def record(layers: int, accumulation: int) -> Record:
        return run(links, gpus, mode, depth, size, layers, size.sequences, accumulation)

    found = {(layers, times): record(layers, times) for layers in (2, 4) for times in (1, 2)}
    s = {key: _seconds(each) for key, each in found.items()}
    block_s = ((s[4, 2] - s[4, 1]) - (s[2, 2] - s[2, 1])) / 2
    return _point(question, links, gpus, mode, shape, size.sequences, block_s, found[4, 1])


def of_the_largest_batch(links: str, gpus: int, mode: str, depth: int, shape: str) -> Point:
    size = SIZES["large"]

    def record(accumulation: int) -> Record:
        return run(links, gpus, mode, depth, size, LAYERS, most, accumulation)

    def fits(grains: int) -> bool:
        composed = with_batch(experiment_of(links, gpus, mode, depth, size, LAYERS), grains * GRAIN, 2)
        experiment = composed.experiment
        policy, _ = build_comm(experiment.comm, num_ranks=1, ranks_per_node=1)
        held = at_most(layout_memory(experiment, composed.spec, policy))
        return out_of_memory(held, experiment.cluster.device.memory_bytes) is None

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise RuntimeError(f"{mode} on {gpus} GPUs of {links}: not even {GRAIN} sequences fit")
    most = low * GRAIN
    once, twice = record(1), record(2)
    if twice.result["status"] != "ok":
        raise RuntimeError(f"{mode} on {gpus} GPUs of {links}: {twice.result['error']}")
    return _point(LARGEST, links, gpus, mode, shape, most, (_seconds(twice) - _seconds(once)) / most, once)


def run(
    links: str, gpus: int, mode: str, depth: int, size: Size, layers: int, sequences: int, accumulation: int
) -> Record:
    """One step of one tensor group."""
    composed = with_batch(experiment_of(links, gpus, mode, depth, size, layers), sequences, accumulation)
    return simulate(composed.experiment, spec=composed.spec)


def with_batch(composed: Composed, sequences: int, accumulation: int) -> Composed:
    experiment = composed.experiment
    batch = replace(experiment.batch, micro=sequences, accumulation=accumulation)
    return replace(composed, experiment=replace(experiment, batch=batch))


@cache
def experiment_of(links: str, gpus: int, mode: str, depth: int, size: Size, layers: int) -> Composed:
    """Without the cluster's guesses, whose bounds would take two more simulations of each."""
    kind = CLUSTERS[links]
    composed = compose(
        (
            "target=sim",
            *kind.overrides,
            f"cluster.nodes={max(1, gpus // kind.node)}",
            f"cluster.devices_per_node={min(gpus, kind.node)}",
            "model=gpt",
            f"model.layers={layers}",
            f"model.hidden={size.hidden}",
            f"model.heads={HEADS}",
            f"model.vocab={VOCAB}",
            f"model.sequence={size.tokens}",
            "data=synthetic",
            "comm=ddp",
            f"batch.micro={size.sequences}",
            f"parallel.tensor={gpus}",
            f"parallel.tensor_mode='{mode}'",
            f"parallel.depth={depth}",
            "train.gradient_clipping=0",
            "steps=1",
            "warmup_steps=0",
        )
    )
    cluster = replace(composed.experiment.cluster, guesses={})
    return replace(composed, experiment=replace(composed.experiment, cluster=cluster))


def _seconds(record: Record) -> float:
    found: float = record.result["iteration_s"]["mean"]
    return found


def _point(
    question: str, links: str, gpus: int, mode: str, shape: str, sequences: int, seconds: float, of: Record
) -> Point:
    exposed = of.result["phases_s"]["comm_exposed"] / _seconds(of)
    peak = of.result["memory_bytes"]["peak"]
    return Point(question, links, gpus, mode, shape, sequences, seconds * 1e3, exposed, peak)


# ---- what it comes to


def fastest(points: Sequence[Point], question: str, links: str, gpus: int, modes: Sequence[str]) -> Point:
    found = [
        p for p in points if (p.question, p.links, p.gpus) == (question, links, gpus) and p.mode in modes
    ]
    return min(found, key=lambda p: p.ms)


def flips(points: Sequence[Point], question: str, modes: Sequence[str] = tuple(MODE_COLOURS)) -> list[int]:
    """Numbers of GPUs at which another of the modes wins in pairs than on uniform NVLink."""
    return [
        gpus
        for gpus in MODES
        if fastest(points, question, "uniform", gpus, modes).mode
        != fastest(points, question, "pairs", gpus, modes).mode
    ]


def verdicts(points: Sequence[Point]) -> Iterator[str]:
    modes = list(MODE_COLOURS)
    for question in (*SIZES, LARGEST):
        for links in CLUSTERS:
            won = ", ".join(f"{gpus}: {fastest(points, question, links, gpus, modes).mode}" for gpus in MODES)
            yield f"{question:<8} {links:<8} fastest at {won}"
        at = flips(points, question) or "no size"
        yield f"{question:<8} another mode wins in pairs than on uniform NVLink at {at}"
        ahead = [
            n for n in MODES if fastest(points, question, "uniform", n, ("1d", "2d", "2.5d")).mode == "1d"
        ]
        behind = [
            n for n in ahead if fastest(points, question, "pairs", n, ("1d", "2d", "2.5d")).mode != "1d"
        ]
        yield f"{question:<8} 1D leads 2D and 2.5D on uniform NVLink at {ahead}, and no more in pairs at {behind}"


def table(points: Sequence[Point]) -> str:
    heads = "".join(f" {question + ' ' + links:>17}" for question in (*SIZES, LARGEST) for links in CLUSTERS)
    lines = [f"{'GPUs':>4} {'mode':<5} {'shape':<8}{heads}"]
    by_place = {(p.question, p.links, p.gpus, p.mode): p for p in points}
    for gpus, modes in MODES.items():
        for mode, _, shape in modes:
            cells = []
            for question in (*SIZES, LARGEST):
                for links in CLUSTERS:
                    at = by_place[question, links, gpus, mode]
                    cells.append(f"{at.ms:.2f} ms" + (f" ({at.sequences:,})" if question == LARGEST else ""))
            lines.append(f"{gpus:>4} {mode:<5} {shape:<8}" + "".join(f" {cell:>17}" for cell in cells))
    return "\n".join(lines)


def write_csv(points: Sequence[Point], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)], lineterminator="\n")
        writer.writeheader()
        for point in points:
            rounded = {"ms": f"{point.ms:.6g}", "exposed": f"{point.exposed:.4f}"}
            writer.writerow(asdict(point) | rounded)


def read_csv(path: Path) -> list[Point]:
    """What `write_csv` wrote."""
    kinds = {field.name: field.type for field in fields(Point)}
    with path.open(newline="") as file:
        return [
            Point(**{key: kinds[key](value) for key, value in row.items()})  # type: ignore[operator, arg-type]
            for row in csv.DictReader(file)
        ]


# ---- figure


def order_figure(points: Sequence[Point]) -> Figure:
    """A row for each question, a column for each kind of links; the fastest mode has a ring around it."""
    figure = Figure(figsize=(11, 9.5), layout="constrained")
    rows = {**{name: size.title for name, size in SIZES.items()}, LARGEST: "largest batch that fits"}
    grid = figure.subplots(len(rows), len(CLUSTERS), sharex=True, sharey="row")
    for row, (question, title) in enumerate(rows.items()):
        for column, (links, kind) in enumerate(CLUSTERS.items()):
            axes = grid[row][column]
            _lines(axes, points, question, links)
            if links == "pairs":
                _mark_flips(axes, flips(points, question))
            if not row:
                axes.set_title(kind.title, fontsize=10)
            if not column:
                what = f"a sequence, {LAYERS} layers" if question == LARGEST else "one block"
                axes.set_ylabel(f"{title}\nforward + backward of {what} (ms)", fontsize=9)
            if row == len(rows) - 1:
                axes.set_xlabel("GPUs of the tensor group")
    handles, labels = grid[-1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)
    return figure


def _lines(axes: Axes, points: Sequence[Point], question: str, links: str) -> None:
    for mode, colour in MODE_COLOURS.items():
        own = [p for p in points if (p.question, p.links, p.mode) == (question, links, mode)]
        xs, ys = [p.gpus for p in own], [p.ms for p in own]
        axes.plot(xs, ys, color=colour, marker="o", markersize=4, label=mode)
    best = [fastest(points, question, links, gpus, list(MODE_COLOURS)) for gpus in MODES]
    axes.plot(
        [p.gpus for p in best],
        [p.ms for p in best],
        linestyle="none",
        marker="o",
        markersize=10,
        markerfacecolor="none",
        markeredgecolor="#1d2733",
        label="fastest",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xticks(list(MODES), [str(gpus) for gpus in MODES])
    axes.minorticks_off()
    axes.grid(color="#dfe4ea")
    axes.set_axisbelow(True)


def _mark_flips(axes: Axes, at: Sequence[int]) -> None:
    for i, gpus in enumerate(at):
        label = "another mode wins than on the left" if not i else None
        axes.axvspan(gpus / 1.25, gpus * 1.25, color="#fbe3c0", zorder=0, label=label)
    if at:
        axes.legend(*[[each[-1]] for each in axes.get_legend_handles_labels()], loc="best", fontsize=8)


if __name__ == "__main__":
    main()
