"""How fast the simulator is, in process and as a whole process, and how much memory it takes.

Run: python benchmarks/simulator_speed.py [name ...]; all cases by default, each in a process of its own. The best of a
few calls is held to the limit: other processes only make a call slower. Where only the time on a processor keeps the
limit, others had the processors, and the verdict is `busy`. Exit code 1 if a limit is missed.
"""

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import simpy

from twinbed.analysis.record import Record
from twinbed.conf.compose import Composed, compose
from twinbed.policies.comm import build_comm
from twinbed.policies.mesh import WORLD, Mesh
from twinbed.sim.costs import Costs
from twinbed.sim.executor import Executor, Segment
from twinbed.sim.folded import Folded
from twinbed.sim.interpreter import Transfer
from twinbed.sim.machine import Machine
from twinbed.sim.program import MAIN, Writer
from twinbed.sim.simulate import simulate
from twinbed.sim.topology import Topology

BIG = ("target=sim", "model=gpt_138b", "cluster=dgx2_v100", "recompute=full", "batch.micro=4")
GIB = 2**30
ONCE = ("target=sim", "steps=1", "warmup_steps=0")
COMMS = ("ddp", "zero1", "zero2", "zero3", "qwz", "hpz", "qgz", "zeropp", "zero3", "zeropp")


@dataclass(frozen=True)
class Case:
    """Something to time. `prepare` gives the call; what it does itself, imports and composing, is not counted."""

    what: str
    limit_s: float
    repeats: int
    prepare: Callable[[], Callable[[], object]]
    limit_bytes: float = math.inf


@dataclass(frozen=True)
class Figures:
    """Of one case. `peak_bytes`: of its process, imports included."""

    best_s: float
    median_s: float
    cpu_s: float  # of the call that took least, on processors
    peak_bytes: int


def ten() -> list[Composed]:
    """Ten configurations of data parallelism on 384 V100, without the range of their guesses."""
    chosen = [
        compose([*BIG, f"comm={comm}", f"cluster.inter_node.links={2 ** (i % 4)}"])
        for i, comm in enumerate(COMMS)
    ]
    for composed in chosen:
        composed.experiment.cluster.guesses = {}
    return chosen


def folded() -> Callable[[], object]:
    """Their figures, all that a sweep or a validation reads."""
    chosen = ten()
    return lambda: [run(composed) for composed in chosen]


def folded_rows() -> Callable[[], object]:
    """The same with all rows of ledger, decisions and timeline."""
    chosen = ten()
    return lambda: [len(run(composed).ledger) for composed in chosen]


def folded_range() -> Callable[[], object]:
    """One of them with its range: three simulations."""
    composed = compose([*BIG, "comm=zeropp"])
    return lambda: run(composed)


def collective() -> Callable[[], object]:
    """An all-reduce of 100 MB on 1,024 equal ranks."""
    composed = compose([*BIG, "cluster.nodes=64"])
    experiment, cluster = composed.experiment, composed.experiment.cluster
    policy, _ = build_comm(experiment.comm, num_ranks=1024, ranks_per_node=16)
    transfer = Transfer("all_reduce", WORLD, 1024, 100_000_000, 100_000_000, 25_000_000, 4)

    def once() -> object:
        mesh = Mesh(1024, 16)
        writer = Writer(merge=False)
        writer.transfer(MAIN, "reduce", "backward", "", transfer)
        costs = Costs(experiment, composed.spec, policy)
        machine = Machine(simpy.Environment(), costs, Topology(cluster), folded=True)
        executor = Executor(machine, Folded(machine, mesh, transfers=[transfer]), [0])
        return executor.run([Segment(0, False, {0: writer.program})])

    return once


def pipeline() -> Callable[[], object]:
    """35 stages with 280 micro-batches: 530B parameters on 280 A100."""
    composed = compose(
        [
            *(
                "target=sim",
                "engine=megatron",
                "cluster=dgx_a100",
                "cluster.nodes=35",
                "model=gpt",
                "comm=ddp",
            ),
            *("model.layers=105", "model.hidden=20480", "model.heads=128", "model.vocab=51200"),
            *("model.sequence=2048", "parallel.pipeline=35", "parallel.tensor=8", "parallel.sequence=8"),
            *("batch.micro=1", "batch.accumulation=280", "recompute=selective"),
        ]
    )
    composed.experiment.cluster.guesses = {}
    return lambda: run(composed)


def many() -> Callable[[], object]:
    """100,000 ranks of which 100 are slow, in 64 classes, one iteration of ZeRO-3."""
    slow = random.Random(0).sample(range(100_000), 100)
    slowdown = "{" + ",".join(f"{rank}:{1.01 + 0.01 * (i % 63):.2f}" for i, rank in enumerate(slow)) + "}"
    composed = compose(
        [
            *(*ONCE, "model=gpt_138b", "cluster=dgx_a100", "cluster.nodes=12500", "comm=zero3"),
            f"cluster.slowdown={slowdown}",
        ]
    )
    return lambda: run(composed)


def unfolded() -> Callable[[], object]:
    """384 ranks, every one apart, 96 layers, one iteration of ZeRO-3."""
    composed = compose([*ONCE, "model=gpt3_175b", "model.layers=96", "cluster=dgx2_v100", "comm=zero3"])
    composed.experiment.cluster.guesses = {}
    return lambda: simulate(composed.experiment, spec=composed.spec, fold=False)


def whole_process() -> Callable[[], object]:
    """One configuration as a command, record written."""
    program = Path(__file__).resolve().parent.parent / "run.py"

    def once() -> object:
        with tempfile.TemporaryDirectory() as folder:
            return subprocess.run(
                [sys.executable, str(program), *BIG, "comm=zeropp", f"hydra.run.dir={folder}/out"],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    return once


def run(composed: Composed) -> Record:
    return simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)


CASES = {
    "folded": Case("10 folded configurations, 384 ranks", 0.2, 9, folded),
    "rows": Case("the same with their ledgers and timelines", 0.2, 9, folded_rows),
    "range": Case("one with low and high", 0.1, 9, folded_range),
    "collective": Case("all-reduce on 1,024 ranks", 0.01, 15, collective),
    "pipeline": Case("35 stages, 280 micro-batches", 1.0, 5, pipeline),
    "many": Case("100,000 ranks, 64 classes", 5.0, 2, many, limit_bytes=2 * GIB),
    "unfolded": Case("384 ranks unfolded, 96 layers", 5.0, 2, unfolded),
    "process": Case("a whole process", 1.0, 7, whole_process),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the cases and print them; the number of limits that were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; none: all")
    parser.add_argument("--here", action="store_true", help="one case in this process, its figures as JSON")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if chosen.here:
        print(json.dumps(asdict(measure(CASES[chosen.names[0]]))))
        return 0
    missed = 0
    print(f"{'case':>42} {'best':>10} {'median':>10} {'CPU':>10} {'limit':>8}          {'peak memory':>11}")
    for name in chosen.names or list(CASES):
        case, figures = CASES[name], apart(name)
        verdict = verdict_of(case, figures)
        missed += verdict == "MISSED"
        most = f" of {case.limit_bytes / GIB:.0f}" if case.limit_bytes < math.inf else ""
        print(
            f"{case.what:>42} {figures.best_s * 1e3:7.1f} ms {figures.median_s * 1e3:7.1f} ms "
            f"{figures.cpu_s * 1e3:7.1f} ms {case.limit_s * 1e3:5.0f} ms {verdict:>7} "
            f"{figures.peak_bytes / GIB:7.2f} GiB{most}",
            flush=True,
        )
    return missed


def verdict_of(case: Case, figures: Figures) -> str:
    if figures.cpu_s > case.limit_s or figures.peak_bytes > case.limit_bytes:
        return "MISSED"
    return "held" if figures.best_s <= case.limit_s else "busy"


def apart(name: str) -> Figures:
    """Measure a case in a fresh process, whose memory is then its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", name]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(**json.loads(ended.stdout))


def measure(case: Case) -> Figures:
    call = case.prepare()
    if case.repeats > 2:
        call()
    walls, cpus = [], []
    for _ in range(case.repeats):
        started, used = time.perf_counter(), cpu_s()
        call()
        walls.append(time.perf_counter() - started)
        cpus.append(cpu_s() - used)
    return Figures(min(walls), statistics.median(walls), min(cpus), peak_bytes())


def cpu_s() -> float:
    """On processors so far, with what this process started and that has ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def peak_bytes() -> int:
    """The most memory that this process held, or one that it started.

    Linux counts a process's `ru_maxrss` from before its `exec`, so a large parent would be seen in it.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.exists():
        own = next(int(s.split()[1]) for s in status.read_text().splitlines() if s.startswith("VmHWM:"))
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
