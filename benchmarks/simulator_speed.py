"""How fast the simulator is, in process and as a whole process, and how much memory it takes.

Run: python benchmarks/simulator_speed.py [name ...]; all cases by default, each with the limit that it is held to.
"""

import argparse
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import simpy

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
ONCE = ("target=sim", "steps=1", "warmup_steps=0")
COMMS = ("ddp", "zero1", "zero2", "zero3", "qwz", "hpz", "qgz", "zeropp", "zero3", "zeropp")


@dataclass(frozen=True)
class Case:
    """Something to time. `prepare` gives the call; what it does itself, imports and composing, is not counted."""

    what: str
    limit_s: float
    repeats: int
    prepare: Callable[[], Callable[[], object]]


def folded() -> Callable[[], object]:
    """Ten configurations of data parallelism on 384 V100, without the range of their guesses."""
    chosen = [
        compose([*BIG, f"comm={comm}", f"cluster.inter_node.links={2 ** (i % 4)}"])
        for i, comm in enumerate(COMMS)
    ]
    for composed in chosen:
        composed.experiment.cluster.guesses = {}
    return lambda: [run(composed) for composed in chosen]


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


def run(composed: Composed) -> object:
    return simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)


CASES = {
    "folded": Case("10 folded configurations, 384 ranks", 0.2, 7, folded),
    "range": Case("one with low and high", 0.1, 7, folded_range),
    "collective": Case("all-reduce on 1,024 ranks", 0.01, 15, collective),
    "pipeline": Case("35 stages, 280 micro-batches", 1.0, 3, pipeline),
    "many": Case("100,000 ranks, 64 classes", 5.0, 1, many),
    "unfolded": Case("384 ranks unfolded, 96 layers", 5.0, 1, unfolded),
    "process": Case("a whole process", 1.0, 5, whole_process),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; none: all")
    names = parser.parse_args(arguments).names or list(CASES)
    print(f"{'case':>38} {'median':>10} {'CPU':>10} {'limit':>8} {'peak memory':>12}")
    for name in names:
        case = CASES[name]
        call = case.prepare()
        if case.repeats > 1:
            call()
        wall, cpu = [], []
        for _ in range(case.repeats):
            started, used = time.perf_counter(), time.process_time()
            call()
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"{case.what:>38} {statistics.median(wall) * 1e3:7.1f} ms {statistics.median(cpu) * 1e3:7.1f} ms "
            f"{case.limit_s * 1e3:5.0f} ms {peak_bytes / 1e9:9.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
