"""What chunks in a pipeline and fused kernels are worth, from both targets: measured on a shaped cluster and predicted.

Run: python benchmarks/chunks.py [OUTPUT] [LAUNCHES]. zeropp with 1, 2 and 4 chunks, with fused kernels and without, on
two nodes of two ranks at 100 and 500 Mbit/s. Each launch probes, measures each setting's computation between
collectives, then trains it; the simulator predicts each from the launch's own constants. Launches on a busy machine
are void, and repeated.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinbed.analysis.record import Record, Span, read_record
from twinbed.conf.compose import Composed, compose, load_experiment
from twinbed.policies.comm import build_comm
from twinbed.policies.plan import REDUCE_STREAM
from twinbed.runtime.case import CALIBRATE, Case
from twinbed.runtime.intervals import length_ns, union
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.machine import BusyWatch
from twinbed.runtime.measured import cluster_with, merged
from twinbed.sim.constants import with_fixed_costs
from twinbed.sim.simulate import simulate

MBIT = 1e6 / 8
BANDWIDTHS = (100, 500)
CHUNKS = (1, 2, 4)
STEPS, SHOWN = 8, 3  # the simulator's timeline shows the first three steps
# 6.1M parameters and little computation: the time is the communication's
MODEL = ("model=gpt", "model.layers=3", "model.hidden=384", "model.heads=6", "batch.sequence=32")
GRADIENT_KERNELS = ("encode4", "decode4", "own", "reduce", "reorder")


@dataclass(frozen=True)
class Row:
    """One setting of one launch, seconds. `reduce`: of a step, from the first kernel of a unit's sum to the last."""

    mbit: int
    chunks: int
    fused: bool
    measured_s: float
    predicted_s: float
    measured_reduce_s: float
    predicted_reduce_s: float
    measured_quantize_s: float
    predicted_quantize_s: float


def settings() -> dict[str, tuple[int, bool]]:
    return {
        f"{chunks} chunks{'' if fused else ' unfused'}": (chunks, fused)
        for fused in (True, False)
        for chunks in CHUNKS
    }


def launch(mbit: int, folder: Path) -> tuple[list[Row], str | None]:
    """(rows, why they are void)."""
    composed: dict[str, Composed] = {}
    cases: list[Case] = []
    for name, (chunks, fused) in settings().items():
        one = composed[name] = compose(
            [
                "target=runtime",
                "cluster=local_2x2",
                f"cluster.inter_node.bandwidth_Bps={mbit * MBIT}",
                *MODEL,
                "comm=zeropp",
                f"comm.gradient_chunks={chunks}",
                f"comm.fused_kernels={fused}",
                f"steps={STEPS}",
                "warmup_steps=2",
            ]
        )
        if not cases:
            cases.append(_probe("probe0", one))
        cases.append(
            Case(name=f"calibrate {name}", folder=f"c {name}", experiment=one.resolved, kind=CALIBRATE)
        )
        cases.append(Case(name=name, folder=name, experiment=one.resolved))
    cases.append(_probe("probe1", one))
    watch = BusyWatch()
    outcome = launch_local(folder, cluster=one.experiment.cluster, cases=cases)
    void = watch.reason()
    if outcome.status != "ok":
        sys.exit(outcome.error)
    if outcome.unshaped_reason:
        sys.exit(f"this benchmark needs shaped links: {outcome.unshaped_reason}")
    probes = [json.loads((folder / name / "probe.json").read_text()) for name in ("probe0", "probe1")]
    rows = []
    for name, (chunks, fused) in settings().items():
        calibration = json.loads((folder / f"c {name}" / "calibration.json").read_text())
        sim = predicted(composed[name], merged(probes), calibration)
        real = read_record(folder / name)
        rows.append(
            Row(
                mbit,
                chunks,
                fused,
                *(record.result["iteration_s"]["p50"] for record in (real, sim)),
                reduce_s(real, STEPS),
                reduce_s(sim, SHOWN),
                *(record.result["phases_s"]["quantize"] for record in (real, sim)),
            )
        )
    return rows, void


def predicted(one: Composed, probe: dict[str, Any], calibration: dict[str, Any]) -> Record:
    """The simulation of the same experiment, from what the launch measured."""
    cluster = cluster_with(one.resolved["cluster"], probe, calibration, one_machine=True, links_known=True)
    ranks, per_node = one.experiment.cluster.num_ranks, one.experiment.cluster.devices_per_node
    policy, _ = build_comm(one.experiment.comm, num_ranks=ranks, ranks_per_node=per_node)
    experiment = load_experiment(one.resolved | {"cluster": cluster})
    return simulate(with_fixed_costs(experiment, one.spec, policy), spec=one.spec, policy=policy)


def reduce_s(record: Record, steps: int) -> float:
    """Seconds of a step in which gradients were on their way or in a kernel, mean over ranks."""
    ranks: dict[int, list[Span]] = {}
    for span in record.spans:
        kernel = span.name.partition(" ")[0] in GRADIENT_KERNELS and span.stream == "quantize"
        if kernel or span.stream.startswith(REDUCE_STREAM):
            ranks.setdefault(span.rank, []).append(span)
    lengths = [length_ns(union((s.start_ns, s.end_ns) for s in spans)) for spans in ranks.values()]
    return statistics.mean(lengths) / steps / 1e9


def _probe(name: str, one: Composed) -> Case:
    return Case(name=name, folder=name, experiment=one.resolved, kind="twinbed.runtime.probe:probe_case")


def report(rows: Sequence[Row]) -> None:
    def ms(values: Iterable[float]) -> str:
        return f"{statistics.median(values) * 1e3:8.1f}"

    print(f"{'':26}{'iteration, ms':>18}{'':9}{'reduction, ms':>18}{'kernels, ms':>18}")
    print(
        f"{'Mbit/s chunks':16}{'':10}{'measured':>9}{'predicted':>10}{'error':>8}"
        + "  measured predicted" * 2
    )
    groups: dict[tuple[int, bool, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.mbit, not row.fused, row.chunks), []).append(row)
    for (mbit, unfused, chunks), same in sorted(groups.items()):
        error = statistics.median(r.predicted_s / r.measured_s - 1 for r in same)
        print(
            f"{mbit:6} {chunks:6} {'unfused' if unfused else 'fused':>11} "
            f"{ms(r.measured_s for r in same):>9} {ms(r.predicted_s for r in same):>9} {error:7.1%} "
            f"{ms(r.measured_reduce_s for r in same):>9} {ms(r.predicted_reduce_s for r in same):>9} "
            f"{ms(r.measured_quantize_s for r in same):>9} {ms(r.predicted_quantize_s for r in same):>9}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = Path(arguments[0] if arguments else "outputs/bench/chunks")
    launches = int(arguments[1]) if len(arguments) > 1 else 2
    rows: list[Row] = []
    for mbit in BANDWIDTHS:
        for number in range(launches):
            for attempt in range(3):
                found, void = launch(mbit, folder / f"{mbit}_{number}_{attempt}")
                if void is None:
                    rows += found
                    break
                again = "again" if attempt < 2 else "left out"
                print(f"{mbit} Mbit/s, launch {number}: void, {void}; {again}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not rows:
        sys.exit("every launch was void: other processes were busy")
    report(rows)


if __name__ == "__main__":
    main()
