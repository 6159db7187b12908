"""How true are predictions? Settings on shaped local clusters, predicted from a probe of the same launch.

Run: python benchmarks/prediction.py [OUTPUT] [LAUNCHES]. Each launch probes, calibrates each setting without
communication, then trains it; the simulator predicts each from the launch's own constants. Nothing is
fitted on the runs. Launches on a busy machine are void and repeated.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinbed.analysis.record import read_record
from twinbed.conf.compose import Composed, compose, load_experiment
from twinbed.policies.comm import build_comm
from twinbed.runtime.case import CALIBRATE, Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.machine import BusyWatch
from twinbed.runtime.measured import cluster_with, merged
from twinbed.sim.constants import with_fixed_costs
from twinbed.sim.simulate import simulate

STEPS = ("steps=7", "warmup_steps=2")
MBIT = 1e6 / 8

# 6.1M parameters and little computation; the default gpt_tiny has 3.3M
WIDE = ("model=gpt", "model.layers=3", "model.hidden=384", "model.heads=6", "batch.sequence=32")
# Eight ranks have two cores: their computation is slept out to a rate, only the network is real
PACED = ("cluster.emulated_flops_per_s=4e10", "batch.sequence=32")


@dataclass(frozen=True)
class Shape:
    """One cluster and the settings that run on it; `group` for the summary."""

    name: str
    group: str
    cluster: tuple[str, ...]
    settings: dict[str, tuple[str, ...]]


def cluster_keys(nodes: int, per_node: int, mbit: float, delay_ms: float = 0.0) -> tuple[str, ...]:
    return (
        f"cluster.nodes={nodes}",
        f"cluster.devices_per_node={per_node}",
        f"cluster.inter_node.bandwidth_Bps={mbit * MBIT}",
        f"cluster.inter_node.latency_ns={round(delay_ms * 1e6)}",
    )


def policies(*names: str, keys: Sequence[str] = (), suffix: str = "") -> dict[str, tuple[str, ...]]:
    return {f"{name}{suffix}": (f"comm={name}", *keys) for name in names}


SHAPES = (
    Shape(
        "2x2 100 Mbit/s",
        "100",
        cluster_keys(2, 2, 100),
        policies("ddp", "ps", "zero1", "zero2", "zero3", "qwz", "hpz", "qgz", "zeropp")
        | policies("zero3", "zeropp", keys=("precision=fp32",), suffix=" fp32")
        | policies("zero3", "zeropp", keys=WIDE, suffix=" 6.1M"),
    ),
    Shape(
        "2x2 100 Mbit/s overlap",
        "overlap",
        cluster_keys(2, 2, 100),
        policies("zero3", "zeropp", keys=("comm.overlap=true",), suffix=" overlap"),
    ),
    Shape("2x2 50 Mbit/s", "100", cluster_keys(2, 2, 50), policies("zero3", "zeropp")),
    Shape("2x2 100 Mbit/s 5 ms", "100", cluster_keys(2, 2, 100, 5), policies("zero3", "hpz", "zeropp")),
    Shape("2x1 100 Mbit/s", "100", cluster_keys(2, 1, 100), policies("zero3", "qwz", "zeropp")),
    Shape("2x2 200 Mbit/s", "fast", cluster_keys(2, 2, 200), policies("zero3", "hpz", "zeropp")),
    Shape("2x2 500 Mbit/s", "fast", cluster_keys(2, 2, 500), policies("zero3", "qwz", "hpz", "zeropp")),
    Shape(
        "4x2 100 Mbit/s paced",
        "paced",
        cluster_keys(4, 2, 100),
        policies("zero3", "hpz", "zeropp", keys=PACED),
    ),
)


@dataclass(frozen=True)
class Row:
    """One setting of one launch; seconds of an iteration (median)."""

    shape: str
    group: str
    setting: str
    launch: int
    measured_s: float
    predicted_s: float
    naive_s: float
    noise: float  # (maximum - minimum) / median of the iterations

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def launch(shape: Shape, folder: Path, number: int) -> tuple[list[Row], str | None]:
    """(rows, why they are void)."""
    composed: dict[str, Composed] = {}
    calibrations: dict[str, str] = {}
    cases: list[Case] = []
    for setting, keys in shape.settings.items():
        overrides = ["cluster=local_2x2", *shape.cluster, *STEPS, *keys]
        composed[setting] = compose(["target=runtime", *overrides])
        resolved = composed[setting].resolved
        if not cases:
            cases.append(_probe_case("probe0", resolved))
        calibrations[setting] = name = f"calibration{len(calibrations)}"
        cases.append(Case(name=name, folder=name, experiment=resolved, kind=CALIBRATE))
        cases.append(Case(name=setting, folder=setting.replace(" ", "_"), experiment=resolved))
    cases.append(_probe_case("probe1", cases[0].experiment))
    watch = BusyWatch()
    outcome = launch_local(folder, cluster=composed[setting].experiment.cluster, cases=cases)
    void = watch.reason()
    if outcome.status != "ok":
        sys.exit(outcome.error)
    if outcome.unshaped_reason:
        sys.exit(f"this benchmark needs shaped links: {outcome.unshaped_reason}")
    probes = [json.loads((folder / name / "probe.json").read_text()) for name in ("probe0", "probe1")]
    rows = []
    for setting in shape.settings:
        one = composed[setting]
        found = json.loads((folder / calibrations[setting] / "calibration.json").read_text())
        cluster = cluster_with(
            one.resolved["cluster"], merged(probes), found, one_machine=True, links_known=True
        )
        policy = _policy(one)
        experiment = with_fixed_costs(load_experiment(one.resolved | {"cluster": cluster}), one.spec, policy)
        sim = simulate(experiment, spec=one.spec, policy=policy).result
        real = read_record(folder / setting.replace(" ", "_"))
        stats = real.result["iteration_s"]
        per_node = [0.0] * one.experiment.cluster.nodes
        for row in real.ledger:
            per_node[row.rank // one.experiment.cluster.devices_per_node] += row.inter_node_bytes
        naive_s = max(per_node) / one.experiment.steps / one.experiment.cluster.inter_node.node_Bps
        rows.append(
            Row(
                shape.name,
                shape.group,
                setting,
                number,
                stats["p50"],
                sim["iteration_s"]["p50"],
                naive_s,
                (stats["max"] - stats["min"]) / stats["p50"],
            )
        )
    return rows, void


def _probe_case(name: str, resolved: dict[str, Any]) -> Case:
    return Case(name=name, folder=name, experiment=resolved, kind="twinbed.runtime.probe:probe_case")


def _policy(composed: Composed) -> Any:
    cluster = composed.experiment.cluster
    return build_comm(
        composed.experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
    )[0]


def report(rows: Sequence[Row]) -> None:
    print(
        f"\n{'cluster':24} {'setting':16} {'measured':>10} {'predicted':>10} {'error':>8} {'spread':>8} {'naive':>8}"
    )
    by_setting: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_setting.setdefault((row.shape, row.setting), []).append(row)
    errors: dict[str, list[float]] = {}
    for (shape, setting), same in by_setting.items():
        measured = statistics.median(r.measured_s for r in same)
        error = statistics.median(r.error for r in same)
        errors.setdefault(same[0].group, []).append(error)
        spread = max(r.error for r in same) - min(r.error for r in same)
        naive = statistics.median(r.naive_s / r.measured_s - 1 for r in same)
        predicted = statistics.median(r.predicted_s for r in same)
        print(
            f"{shape:24} {setting:16} {measured * 1e3:8.0f}ms {predicted * 1e3:8.0f}ms {error:8.1%} "
            f"{spread:8.1%} {naive:8.1%}"
        )
    print(f"\n{'group':10} {'settings':>8} {'mean |error|':>13} {'largest':>9} {'bias':>8}")
    for group, found in errors.items():
        print(
            f"{group:10} {len(found):8} {statistics.mean(map(abs, found)):13.1%} "
            f"{max(map(abs, found)):9.1%} {statistics.mean(found):8.1%}"
        )
    for shape in dict.fromkeys(r.shape for r in rows):
        _order(shape, [same for (s, _), same in by_setting.items() if s == shape])
    _speed_up(by_setting)


def _order(shape: str, settings: Sequence[Sequence[Row]]) -> None:
    """Pairs whose measured gap exceeds the noise must be predicted in the same order."""
    pairs = wrong = 0
    for i, a in enumerate(settings):
        for b in settings[i + 1 :]:
            measured = [statistics.median(r.measured_s for r in x) for x in (a, b)]
            noise = max((max(r.measured_s for r in x) - min(r.measured_s for r in x)) for x in (a, b)) + max(
                statistics.median(r.noise * r.measured_s for r in x) for x in (a, b)
            )
            if abs(measured[0] - measured[1]) > noise:
                pairs += 1
                predicted = [statistics.median(r.predicted_s for r in x) for x in (a, b)]
                wrong += (measured[0] < measured[1]) != (predicted[0] < predicted[1])
    print(f"order of settings, {shape}: {pairs - wrong} of {pairs} pairs beyond the noise are right")


def _speed_up(by_setting: dict[tuple[str, str], list[Row]]) -> None:
    for suffix in ("", " fp32", " 6.1M"):
        pair = [by_setting.get(("2x2 100 Mbit/s", f"{name}{suffix}")) for name in ("zero3", "zeropp")]
        if all(pair):
            ups = [a.measured_s / b.measured_s for a, b in zip(*pair, strict=True)]  # type: ignore[arg-type]
            print(
                f"zeropp against zero3 at 100 Mbit/s{suffix or ' bf16'}: {statistics.median(ups):.2f}x "
                f"({min(ups):.2f}-{max(ups):.2f})"
            )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = Path(arguments[0] if arguments else "outputs/bench/prediction")
    launches = int(arguments[1]) if len(arguments) > 1 else 3
    only = arguments[2] if len(arguments) > 2 else ""
    rows: list[Row] = []
    for shape in SHAPES:
        if only not in shape.name:
            continue
        for number in range(launches):
            for attempt in range(3):
                found, void = launch(
                    shape, folder / f"{shape.name.replace('/', '_')}_{number}_{attempt}", number
                )
                if void is None:
                    rows += found
                    break
                again = "again" if attempt < 2 else "left out"
                print(f"{shape.name}, launch {number}: void, {void}; {again}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps([r.__dict__ for r in rows], indent=1))
    if not rows:
        sys.exit("every launch was void: other processes were busy")
    report(rows)


if __name__ == "__main__":
    main()
