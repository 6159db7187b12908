"""Figures of a report: one pure function each, DataFrame -> Figure. Agg, no pyplot, no global state."""

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .tables import MEMORY, SIDES, records
from .units import scale

# One colour for each policy, in every figure of the project.
POLICY_COLOURS = {
    "ddp": "#7f7f7f",
    "ps": "#8c564b",
    "zero1": "#bcbd22",
    "zero2": "#e69f00",
    "zero3": "#0072b2",
    "qwz": "#56b4e9",
    "hpz": "#009e73",
    "qgz": "#cc79a7",
    "zeropp": "#d55e00",
}
OTHER_COLOUR = "#555a66"
# And for each tensor mode
MODE_COLOURS = {"1d": "#0072b2", "2d": "#e69f00", "2.5d": "#009e73", "3d": "#cc79a7"}
# also the order of a rank's tracks
_STREAM_COLOURS = {
    "compute": "#3b7dd8",
    "quantize": "#7a8794",
    "gather": "#e08e2b",
    "reduce": "#3a9d5d",
    "reduce_local": "#8cc9a1",
    "reduce_node": "#1f6e3d",
    "library": "#a05fb8",
}
_SPARE_COLOURS = ("#c44e52", "#64b5cd", "#8c8c8c", "#937860", "#da8bc3")
_MEMORY_COLOURS = dict(
    zip(MEMORY, ("#0072b2", "#e69f00", "#8c564b", "#009e73", "#56b4e9", "#bdbdbd"), strict=True)
)
_NAMES = {
    "comm_exposed": "communication\nexposed",
    "comm_total": "communication\ntotal",
    "inter_node": "between\nnodes",
    "intra_node": "inside\nthe node",
    "wire": "on the\nwire",
}
_SERIES_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
_STYLES = ("-", "--", ":", "-.")
_INK, _GRID, _BAD = "#1d2733", "#dfe4ea", "#b3261e"
_OOM = "does not fit in memory"


def iteration_figure(times: pd.DataFrame, *, policy: str, naive_s: float | None) -> Figure:
    """Iteration time, predicted and measured, with bytes / bandwidth beside.

    Args:
        times: `tables.iteration_table`. Bars are means, error bars minimum to maximum of the n iterations of
            a run, low to high over guessed inputs of a prediction.
    """
    figure, axes = _figure(5.0, 3.1)
    labels, position = [], 0
    for row in records(times):
        mean, side = row["mean"], str(row["side"])
        if pd.isna(mean):
            continue
        low, high = (row["min"], row["max"]) if side == "measured" else (row["low"], row["high"])
        spread = None
        if not pd.isna(low) and not pd.isna(high):
            spread = [[max(mean - low, 0.0)], [max(high - mean, 0.0)]]
        _bar(axes, position, float(mean), side, _policy_colour(policy), spread)
        labels.append(f"{side}\n(n = {int(row['n'])})" if side == "measured" else side)
        position += 1
    if naive_s is not None and position:
        _bar(axes, position, naive_s, "naive", "#c9ced6", None)
        labels.append("bytes /\nbandwidth")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, max(len(labels), 2) - 0.4)
    axes.set_ylabel("time of one iteration (s)")
    axes.margins(y=0.18)
    axes.set_ylim(bottom=0)
    return figure


def volume_figure(volumes: pd.DataFrame, *, policy: str) -> Figure:
    """Bytes of one rank in one iteration by kind; `volumes`: `tables.volume_table`."""
    figure, axes = _figure(5.8, 3.2)
    scaled = volumes.assign(amount=volumes["bytes"] / 1e6)
    _grouped(axes, scaled, "volume", ("payload", "wire", "inter_node", "intra_node"), _policy_colour(policy))
    axes.set_ylabel("MB per rank and iteration")
    return figure


def phase_figure(phases: pd.DataFrame, *, policy: str) -> Figure:
    """Time of an iteration in each phase; `phases`: `tables.phase_table`."""
    figure, axes = _figure(6.8, 3.2)  # narrower, the names of the phases touch
    factor, unit = scale("s", phases["seconds"])
    scaled = phases.assign(amount=phases["seconds"] / factor)
    order = ("compute", "comm_exposed", "comm_total", "quantize", "idle")
    _grouped(axes, scaled, "phase", order, _policy_colour(policy))
    axes.set_ylabel(f"time in one iteration ({unit})")
    return figure


def memory_figure(memory: pd.DataFrame) -> Figure:
    """Memory of the fullest rank by class, stacked, and the peak; `memory`: `tables.memory_table`."""
    figure, axes = _figure(5.8, 2.4)
    present = [side for side in SIDES if side in set(memory["side"])]
    largest = float(memory["bytes"].max()) if len(memory) else 0.0
    scale, unit = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    labelled: set[str] = set()
    for position, side in enumerate(reversed(present)):
        rows = memory[memory["side"] == side].set_index("class")["bytes"] / scale
        left = 0.0
        for name in MEMORY:
            width = float(rows.get(name, 0.0))
            if width <= 0:
                continue
            label = None if name in labelled else name.replace("_", " ")
            labelled.add(name)
            axes.barh(position, width, left=left, height=0.6, color=_MEMORY_COLOURS[name], label=label)
            left += width
        if rows.get("peak", 0.0) > 0:
            label = None if "peak" in labelled else "peak"
            labelled.add("peak")
            peak = float(rows["peak"])
            axes.plot([peak, peak], [position - 0.38, position + 0.38], color=_INK, linewidth=2, label=label)
    axes.set_yticks(range(len(present)), list(reversed(present)))
    axes.set_ylim(-0.6, max(len(present), 1) - 0.4)
    axes.set_xlabel(f"{unit} on the fullest rank")
    axes.grid(axis="x", color=_GRID)
    axes.grid(visible=False, axis="y")
    if labelled:
        handles, labels = axes.get_legend_handles_labels()
        pairs = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0] == "peak")
        figure.legend(
            [handle for _, handle in pairs],
            [label for label, _ in pairs],
            loc="outside upper center",
            ncols=4,
            frameon=False,
            fontsize=8,
        )
    return figure


def memory_series_figure(series: pd.DataFrame, *, capacity_bytes: float | None) -> Figure:
    """Memory by class through a step, stacked; `series`: `tables.memory_series`, `capacity_bytes`: of the device."""
    figure, axes = _figure(9.0, 3.2)
    factor, unit = scale("s", series["t_s"])
    totals = series[list(MEMORY)].sum(axis=1)
    giga, shown = (1e9, "GB") if float(totals.max()) >= 1e9 else (1e6, "MB")
    present = [name for name in MEMORY if series[name].max() > 0]
    axes.stackplot(
        series["t_s"] / factor,
        [series[name] / giga for name in present],
        labels=[name.replace("_", " ") for name in present],
        colors=[_MEMORY_COLOURS[name] for name in present],
        step="post",
        linewidth=0,
    )
    fullest = int(totals.argmax())
    axes.plot(
        series["t_s"].iloc[fullest] / factor, totals.iloc[fullest] / giga, "v", color=_INK, label="peak"
    )
    if capacity_bytes and capacity_bytes <= 2 * float(totals.max()):
        axes.axhline(capacity_bytes / giga, color=_BAD, linestyle="--", linewidth=1.2, label="capacity")
    axes.set_xlabel(f"time since the start of the iteration ({unit})")
    axes.set_ylabel(f"{shown} on rank {int(series['rank'].iloc[0])}")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    figure.legend(loc="outside upper center", ncols=len(present) + 2, frameon=False, fontsize=8)
    return figure


def loss_figure(losses: pd.DataFrame) -> Figure:
    """Training loss at each step, a line a run; `losses`: `tables.loss_table`.

    Runs of one policy (several seeds, say) share its colour and differ in line style.
    """
    figure, axes = _figure(5.8, 3.4)
    seen: dict[str, int] = {}
    labels = list(dict.fromkeys(losses["label"]))
    for label in labels:
        rows = losses[losses["label"] == label]
        policy = str(rows["policy"].iloc[0])
        style = _STYLES[seen.get(policy, 0) % len(_STYLES)]
        seen[policy] = seen.get(policy, 0) + 1
        values = rows["loss"].astype(float)
        axes.plot(
            rows["step"],
            values,
            style,
            color=_policy_colour(policy),
            label=label,
            linewidth=1.6,
            marker="o" if len(rows) <= 30 else None,
            markersize=3,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=1 + len(labels) // 8)
    return figure


def timeline_figure(timeline: pd.DataFrame) -> Figure:
    """One iteration, a track for each rank and stream, the prediction above the run.

    `timeline`: `timelines.iteration_timeline`. Both share one time axis.
    """
    present = [side for side in SIDES if side in set(timeline["side"])]
    tracks = {side: _tracks(timeline[timeline["side"] == side]) for side in present}
    heights = [max(len(tracks[side]), 2) for side in present] or [2]
    figure = Figure(figsize=(11.5, 1.2 + 0.27 * sum(heights)), layout="constrained", facecolor="white")
    grid = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    streams = sorted({str(stream) for stream in timeline["stream"]}, key=_stream_order)
    colours = _stream_colours(streams)
    longest = float(timeline["end_s"].max()) if len(timeline) else 1.0
    scale, unit = (1e3, "ms") if longest < 10 else (1.0, "s")
    for axes, side in zip(grid[:, 0], present, strict=False):
        _style(axes)
        _draw_tracks(axes, timeline[timeline["side"] == side], tracks[side], colours, scale, longest)
        axes.set_title(side, loc="left", fontsize=10, fontweight="bold", color=_INK)
    grid[-1, 0].set_xlabel(f"time since the start of the iteration ({unit})")
    grid[-1, 0].set_xlim(0, longest * scale)
    for stream in streams:
        grid[0, 0].barh(0, 0, color=colours[stream], label=stream)
    if streams:
        figure.legend(loc="outside upper right", ncols=len(streams), frameon=False, fontsize=9)
    return figure


def sweep_figure(sweep: pd.DataFrame, *, x: str, y: str = "iteration_s") -> Figure:
    """Iteration time of a multirun's runs that gave one; those that do not fit in memory are crossed out.

    Args:
        sweep: Columns `x`, `series`, `policy`, `status`, `y`, `low_s`, `high_s`. A numeric `x` gives a line a
            series, anything else a bar a run. Error bars go from low to high. Lines have their policy's colour,
            or one each where all are of one policy.
        x: The column on the horizontal axis, also its title.
    """
    figure, axes = _figure(6.2, 3.8)
    numeric = pd.api.types.is_numeric_dtype(sweep[x])
    errors = [
        [max(m - low, 0.0) for m, low in zip(sweep[y], sweep["low_s"].fillna(sweep[y]), strict=True)],
        [max(high - m, 0.0) for m, high in zip(sweep[y], sweep["high_s"].fillna(sweep[y]), strict=True)],
    ]
    frame = sweep.assign(down=errors[0], up=errors[1])
    if numeric:
        markers = ("o", "s", "^", "D", "v")
        labels = list(dict.fromkeys(frame["series"]))
        one_policy = frame["policy"].nunique() == 1 and len(labels) > 1
        seen: Counter[str] = Counter()
        for i, series in enumerate(labels):
            rows = frame[frame["series"] == series].sort_values(x)
            policy = str(rows["policy"].iloc[0])
            axes.errorbar(
                rows[x],
                rows[y],
                yerr=[rows["down"], rows["up"]] if (rows["down"] + rows["up"]).any() else None,
                marker=markers[i % len(markers)],
                linestyle=_STYLES[0 if one_policy else seen[policy] % len(_STYLES)],
                color=_SERIES_COLOURS[i % len(_SERIES_COLOURS)] if one_policy else _policy_colour(policy),
                label=str(series) or None,
                capsize=3,
            )
            seen[policy] += 1
        out = frame[frame["status"] == "oom"]
        if len(out):
            axes.plot(out[x], out[y], "x", color=_BAD, markersize=11, markeredgewidth=2, label=_OOM, zorder=5)
        axes.set_xticks(sorted(set(frame[x])))
        if any(frame["series"]) or len(out):
            axes.legend(frameon=False, fontsize=9)
    else:
        for position, row in enumerate(records(frame)):
            axes.bar(position, row[y], width=0.65, color=_policy_colour(str(row["policy"])))
            if row["status"] == "oom":
                named = _OOM in axes.get_legend_handles_labels()[1]
                look: dict[str, Any] = {"color": _BAD, "markersize": 11, "markeredgewidth": 2, "zorder": 5}
                axes.plot(position, row[y], "x", label=None if named else _OOM, **look)
                axes.legend(frameon=False, fontsize=9)
            if row["down"] or row["up"]:
                spread = [[row["down"]], [row["up"]]]
                axes.errorbar(position, row[y], yerr=spread, color=_INK, capsize=3, linewidth=1)
        longest = max((len(str(text)) for text in frame[x]), default=0)
        turned = longest * len(frame) > 70
        axes.set_xticks(
            range(len(frame)),
            [str(text) for text in frame[x]],
            rotation=45 if turned else 0,
            ha="right" if turned else "center",
            fontsize=8 if turned else 10,
        )
    axes.set_xlabel(x)
    axes.set_ylabel("time of one iteration (s)")
    axes.set_ylim(bottom=0)
    return figure


def png(figure: Figure, *, dpi: int = 130) -> bytes:
    """The figure as a PNG file; equal figures give equal bytes."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)  # attaches itself
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    _style(axes)
    return figure, axes


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa5b1")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)


def _policy_colour(policy: str) -> str:
    return POLICY_COLOURS.get(policy, OTHER_COLOUR)


def _bar(
    axes: Axes, position: float, height: float, side: str, colour: str, spread: list[list[float]] | None
) -> None:
    """One bar with its value above; a prediction is hatched, a measurement solid."""
    axes.bar(position, height, width=0.55, **_fill(side, colour))
    top = height
    if spread is not None:
        axes.errorbar(position, height, yerr=spread, color=_INK, capsize=4, linewidth=1.2)
        top += spread[1][0]
    axes.annotate(
        f"{height:.4g}", (position, top), (0, 4), textcoords="offset points", ha="center", fontsize=9
    )


def _fill(side: str, colour: str) -> dict[str, Any]:
    if side == "predicted":
        return {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 1.2}
    return {"facecolor": colour, "edgecolor": colour, "linewidth": 1.2}


def _grouped(axes: Axes, frame: pd.DataFrame, by: str, order: Sequence[str], colour: str) -> None:
    """Groups of bars, one bar a side; `frame` has columns side, `by`, amount."""
    present = [side for side in SIDES if side in set(frame["side"])]
    groups = [name for name in order if name in set(frame[by])]
    width = 0.8 / max(len(present), 1)
    for i, side in enumerate(present):
        rows = frame[frame["side"] == side].set_index(by)["amount"]
        for position, name in enumerate(groups):
            if name not in rows.index:
                continue
            at = position + (i - (len(present) - 1) / 2) * width
            height = float(rows[name])
            label = side if position == 0 else None
            axes.bar(at, height, width=width * 0.92, label=label, **_fill(side, colour))
            axes.annotate(
                f"{height:.3g}", (at, height), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set_xticks(range(len(groups)), [_NAMES.get(name, name) for name in groups])
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    if present:
        axes.legend(frameon=False, fontsize=9)


def _tracks(timeline: pd.DataFrame) -> list[tuple[int, str]]:
    pairs = {(int(row["rank"]), str(row["stream"])) for row in records(timeline)}
    return sorted(pairs, key=lambda pair: (pair[0], _stream_order(pair[1])))


def _stream_order(stream: str) -> tuple[int, str]:
    known = list(_STREAM_COLOURS)
    return (known.index(stream) if stream in known else len(known), stream)


def _stream_colours(streams: Sequence[str]) -> dict[str, str]:
    spare = [stream for stream in streams if stream not in _STREAM_COLOURS]
    return _STREAM_COLOURS | {s: _SPARE_COLOURS[i % len(_SPARE_COLOURS)] for i, s in enumerate(spare)}


def _draw_tracks(
    axes: Axes,
    timeline: pd.DataFrame,
    tracks: Sequence[tuple[int, str]],
    colours: dict[str, str],
    scale: float,
    longest: float,
) -> None:
    row_of = {track: len(tracks) - 1 - i for i, track in enumerate(tracks)}
    for span in records(timeline):
        height = max(0.84 - 0.24 * span["depth"], 0.2)
        start, length = span["start_s"] * scale, (span["end_s"] - span["start_s"]) * scale
        row = row_of[span["rank"], span["stream"]]
        axes.broken_barh(
            [(start, length)],
            (row - height / 2, height),
            facecolors=colours[span["stream"]],
            edgecolors="white",
            linewidth=0.4,
            alpha=1.0 if span["depth"] == 0 else 0.75,
        )
        # about 190 characters of this size fit across; a name that does not fit its bar is left out
        if span["depth"] == 0 and len(span["name"]) < 190 * (length / scale) / longest:
            middle = start + length / 2
            axes.text(middle, row, span["name"], ha="center", va="center", fontsize=6.5, color="white")
    axes.set_yticks(range(len(tracks)), [f"rank {r}  {s}" for r, s in reversed(tracks)], fontsize=8)
    axes.set_ylim(-0.6, len(tracks) - 0.4)
    axes.grid(axis="x", color=_GRID)
    axes.grid(visible=False, axis="y")
