"""How true are predictions of layouts? One model, one global batch, every way to lay it out over 4 or 8 ranks.

Run: python benchmarks/layouts.py [OUTPUT] [BUDGET_S] [SHAPE]. Shapes take turns, each launch with all of its layouts,
as long as the budget (default: 480 s) lets another one end in time; every shape is launched once in any case. Before
each training its layout's collectives are measured and its computation is calibrated; nothing is fitted on the runs.

Ranks share the cores of this machine, so computation is slept out to a rate that all of them can keep
(`cluster.emulated_flops_per_s`): then the device is defined, and layouts differ by what they send. The shape "real"
computes at the machine's own speed in its place. Launches on a busy machine are void; they count nowhere.

Beside the simulator stands a naive prediction: bytes that leave a node over the link's bandwidth, and the calibrated
computation, one after the other.
"""

import csv
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

from twinbed.analysis.parity import compare_records
from twinbed.analysis.record import read_record
from twinbed.conf.compose import Composed, compose, load_experiment
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import replicas_of
from twinbed.runtime.case import CALIBRATE, Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.machine import BusyWatch
from twinbed.runtime.measured import cluster_with
from twinbed.sim.constants import with_fixed_costs
from twinbed.sim.simulate import simulate

BUDGET_S = 480.0
MUST, GOAL = 0.15, 0.08  # mean absolute error

SEQUENCES = 8  # of a step, whatever the layout
MODEL = (
    "model=gpt",
    "model.layers=4",
    "model.hidden=256",
    "model.heads=8",
    "model.vocab=256",
    "model.sequence=32",
    "precision=fp32",
    "data=synthetic",
    "comm=ddp",
    "steps=7",
    "warmup_steps=2",
)
WHOLE = (f"batch.micro={SEQUENCES}",)
PIPELINED = (f"batch.micro={SEQUENCES // 4}", "batch.accumulation=4")
SLEPT = ("cluster.emulated_flops_per_s=4e9",)  # 8 ranks need 32 GFLOP/s of two cores at the most
CALIBRATION = {"warmup": 1, "iterations": 4}

OF_FOUR: Mapping[str, tuple[str, ...]] = {
    "1d": (*WHOLE, "parallel.tensor=4"),
    "1d sequence": (*WHOLE, "parallel.tensor=4", "parallel.sequence=4"),
    "2d": (*WHOLE, "parallel.tensor=4", "parallel.tensor_mode=2d"),
    "ring": (*WHOLE, "parallel.sequence=4", "parallel.sequence_mode=ring"),
    "ulysses": (*WHOLE, "parallel.sequence=4", "parallel.sequence_mode=ulysses"),
    "pipeline": (*PIPELINED, "parallel.pipeline=4"),
}
OF_EIGHT: Mapping[str, tuple[str, ...]] = {
    "2.5d": (*WHOLE, "parallel.tensor=8", "parallel.tensor_mode=2.5d", "parallel.depth=2"),
    "3d": (*WHOLE, "parallel.tensor=8", "parallel.tensor_mode=3d"),
}


def cluster_keys(nodes: int, per_node: int, mbit: float) -> tuple[str, ...]:
    return (
        f"cluster.nodes={nodes}",
        f"cluster.devices_per_node={per_node}",
        f"cluster.inter_node.bandwidth_Bps={mbit * 1e6 / 8}",
    )


@dataclass(frozen=True)
class Shape:
    """One cluster, and the layouts that run on it."""

    name: str
    cluster: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]


SHAPES = (
    Shape("2x2 100 Mbit/s", (*cluster_keys(2, 2, 100), *SLEPT), OF_FOUR),
    Shape("2x2 500 Mbit/s", (*cluster_keys(2, 2, 500), *SLEPT), OF_FOUR),
    Shape("2x4 500 Mbit/s", (*cluster_keys(2, 4, 500), *SLEPT), OF_EIGHT),
    Shape("2x2 500 Mbit/s real", cluster_keys(2, 2, 500), OF_FOUR),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of one launch; seconds of an iteration (medians), and of its phases (means over ranks)."""

    shape: str
    layout: str
    launch: int
    measured_s: float
    predicted_s: float
    naive_s: float
    error: float  # of the prediction, as a fraction of what was measured
    naive_error: float
    noise: float  # (maximum - minimum) / median of the iterations
    measured_compute_s: float
    predicted_compute_s: float
    measured_comm_s: float
    predicted_comm_s: float
    ledger_equal: bool
    void: str  # why it does not count


def launch(shape: Shape, folder: Path, number: int) -> list[Row]:
    """Raises:
    RuntimeError: The launch failed, or its links are not shaped.
    """
    composed: dict[str, Composed] = {}
    cases: list[Case] = []
    for name, keys in shape.layouts.items():
        one = composed[name] = compose(["target=runtime", "cluster=local_2x2", *shape.cluster, *MODEL, *keys])
        place = name.replace(" ", "_")
        probe = "twinbed.runtime.probe:probe_case"
        cases += [
            Case(name=f"probe {name}", folder=f"{place}_probe", experiment=one.resolved, kind=probe),
            Case(
                name=f"calibration {name}",
                folder=f"{place}_calibration",
                experiment=one.resolved,
                kind=CALIBRATE,
                options=CALIBRATION,
            ),
            Case(name=name, folder=place, experiment=one.resolved),
        ]
    watch = BusyWatch()
    cluster = next(iter(composed.values())).experiment.cluster
    outcome = launch_local(folder, cluster=cluster, cases=cases, timeout_s=600.0, show_progress=False)
    void = watch.reason() or ""
    if outcome.status != "ok":
        raise RuntimeError(outcome.error)
    if outcome.unshaped_reason:
        raise RuntimeError(f"this benchmark needs shaped links: {outcome.unshaped_reason}")
    return [
        _row(shape, name, one, folder / name.replace(" ", "_"), number, void)
        for name, one in composed.items()
    ]


def _row(shape: Shape, name: str, one: Composed, folder: Path, number: int, void: str) -> Row:
    probe = json.loads(folder.with_name(f"{folder.name}_probe").joinpath("probe.json").read_text())
    found = json.loads(
        folder.with_name(f"{folder.name}_calibration").joinpath("calibration.json").read_text()
    )
    cluster = cluster_with(one.resolved["cluster"], probe, found, one_machine=True, links_known=True)
    seen = replicas_of(one.experiment)
    policy, _ = build_comm(one.experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    experiment = with_fixed_costs(load_experiment(one.resolved | {"cluster": cluster}), one.spec, policy)
    sim = simulate(experiment, spec=one.spec, policy=policy)
    real = read_record(folder)
    parity = compare_records(sim, real)
    per_node = [0.0] * one.experiment.cluster.nodes
    for row in real.ledger:
        per_node[row.rank // one.experiment.cluster.devices_per_node] += row.inter_node_bytes
    sent_s = max(per_node) / one.experiment.steps / one.experiment.cluster.inter_node.node_Bps
    stats, predicted_s = real.result["iteration_s"], sim.result["iteration_s"]["p50"]
    measured_s, naive_s = stats["p50"], sent_s + found["iteration_ns"] / 1e9
    phases = {side: record.result["phases_s"] for side, record in (("real", real), ("sim", sim))}
    return Row(
        shape=shape.name,
        layout=name,
        launch=number,
        measured_s=measured_s,
        predicted_s=predicted_s,
        naive_s=naive_s,
        error=predicted_s / measured_s - 1,
        naive_error=naive_s / measured_s - 1,
        noise=(stats["max"] - stats["min"]) / measured_s,
        measured_compute_s=phases["real"]["compute"],
        predicted_compute_s=phases["sim"]["compute"],
        measured_comm_s=phases["real"]["comm_exposed"],
        predicted_comm_s=phases["sim"]["comm_exposed"],
        ledger_equal=bool(parity["ledger_equal"]),
        void=void,
    )


# ---- what came out


@dataclass(frozen=True)
class Setting:
    """One layout on one shape, over all launches that count."""

    rows: Sequence[Row]

    def median(self, key: str) -> float:
        found: Any = statistics.median(getattr(row, key) for row in self.rows)
        return float(found)

    @property
    def error(self) -> float:
        return self.median("predicted_s") / self.median("measured_s") - 1

    @property
    def naive_error(self) -> float:
        return self.median("naive_s") / self.median("measured_s") - 1

    @property
    def noise_s(self) -> float:
        """The range over launches, and that within one."""
        times = [row.measured_s for row in self.rows]
        within = statistics.median(row.noise * row.measured_s for row in self.rows)
        return max(times) - min(times) + within


def report(rows: Sequence[Row]) -> bool:
    """Print the table; whether the mean absolute error is as it must be."""
    counted = [row for row in rows if not row.void]
    shown = counted or rows
    print(
        f"{'cluster':22}{'layout':13}{'launches':>9}{'measured ms':>13}{'noise':>7}{'predicted':>11}{'error':>8}"
        f"{'naive':>9}{'error':>8}{'compute':>17}{'exposed comm':>17}  ledger"
    )
    settings: dict[tuple[str, str], Setting] = {}
    for key in dict.fromkeys((row.shape, row.layout) for row in shown):
        one = settings[key] = Setting([row for row in shown if (row.shape, row.layout) == key])
        compute, comm = (
            f"{one.median(f'measured_{phase}_s') * 1e3:7.0f}/{one.median(f'predicted_{phase}_s') * 1e3:.0f}"
            for phase in ("compute", "comm")
        )
        equal = "equal" if all(row.ledger_equal for row in one.rows) else "DIFFERENT"
        print(
            f"{key[0]:22}{key[1]:13}{len(one.rows):9}{one.median('measured_s') * 1e3:13.0f}"
            f"{one.noise_s / one.median('measured_s'):7.0%}{one.median('predicted_s') * 1e3:11.0f}{one.error:+8.1%}"
            f"{one.median('naive_s') * 1e3:9.0f}{one.naive_error:+8.1%}{compute:>17}{comm:>17}  {equal}"
        )
    for shape in dict.fromkeys(name for name, _ in settings):
        right, pairs = order([one for (name, _), one in settings.items() if name == shape])
        print(f"order of layouts, {shape}: {right} of {pairs} pairs beyond the noise are predicted right")
    mean = statistics.mean(abs(one.error) for one in settings.values())
    naive = statistics.mean(abs(one.naive_error) for one in settings.values())
    worst = max(abs(one.error) for one in settings.values())
    print(
        f"mean absolute error {mean:.1%} (at most {MUST:.0%} it must be, {GOAL:.0%} is the goal), worst {worst:.1%}; "
        f"naive {naive:.1%}"
    )
    for reason in dict.fromkeys(row.void for row in rows if row.void):
        print(f"void: {reason}")
    if not counted:
        print("every launch was void, so that none of these figures counts")
    return bool(counted) and mean <= MUST and all(row.ledger_equal for row in rows)


def order(settings: Sequence[Setting]) -> tuple[int, int]:
    """(pairs predicted in the order measured, pairs whose measured gap exceeds the noise)."""
    right = pairs = 0
    for a, b in combinations(settings, 2):
        gap = a.median("measured_s") - b.median("measured_s")
        if abs(gap) > max(a.noise_s, b.noise_s):
            pairs += 1
            right += (gap < 0) == (a.median("predicted_s") < b.median("predicted_s"))
    return right, pairs


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [each.name for each in fields(Row)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)


def launches(shapes: Sequence[Shape], budget_s: float) -> Iterator[tuple[Shape, int]]:
    """Shapes in turn, with the launch's number, while the last launch of the shape would still fit."""
    began, took_s = time.monotonic(), dict.fromkeys((shape.name for shape in shapes), 0.0)
    number = 0
    while True:
        any_fits = False
        for shape in shapes:
            started = time.monotonic()
            if number and started + took_s[shape.name] > began + budget_s:
                continue
            any_fits = True
            yield shape, number
            took_s[shape.name] = time.monotonic() - started
        if not any_fits:
            return
        number += 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = Path(arguments[0] if arguments else "outputs/bench/layouts")
    budget_s = float(arguments[1]) if len(arguments) > 1 else BUDGET_S
    only = arguments[2] if len(arguments) > 2 else ""
    shapes = [shape for shape in SHAPES if only in shape.name]
    if not shapes:
        sys.exit(f"no shape {only!r}; there are {', '.join(shape.name for shape in SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{SEQUENCES} sequences a step; computation is slept at {SLEPT[0].partition('=')[2]} FLOP/s a rank, "
        "but for 'real'"
    )
    rows: list[Row] = []
    failed = 0
    for shape, number in launches(shapes, budget_s):
        started = time.monotonic()
        place = folder / f"{shape.name.replace('/', '_').replace(' ', '_')}_{number}"
        try:
            found = launch(shape, place, number)
        except (OSError, RuntimeError, ValueError) as err:  # the other shapes may do better
            failed += 1
            print(f"{shape.name}, launch {number} failed: {err}", file=sys.stderr)
            continue
        rows += found
        write_csv(folder / "layouts.csv", rows)
        void = f"; void: {found[-1].void}" if found[-1].void else ""
        print(f"{shape.name}, launch {number}: {time.monotonic() - started:.0f} s{void}", file=sys.stderr)
    if not rows:
        sys.exit("every launch failed")
    return 0 if report(rows) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
