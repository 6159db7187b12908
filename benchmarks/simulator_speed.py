"""How fast the simulator is: 384 V100s and 138B parameters, as a whole process and in process; and many ranks.

Run: python benchmarks/simulator_speed.py.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twinbed.conf.compose import compose
from twinbed.sim.simulate import simulate

REPEATS = 15
BIG = ("target=sim", "model=gpt_138b", "cluster=dgx2_v100", "recompute=full", "batch.micro=4")


def in_process(policy: str, nodes: int) -> float:
    """Median seconds of `simulate`, imports done."""
    composed = compose([*BIG, f"comm={policy}", f"cluster.nodes={nodes}"])
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def whole_process(policy: str) -> float:
    run = Path(__file__).resolve().parent.parent / "run.py"
    times = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, str(run), *BIG, f"comm={policy}", f"hydra.run.dir={folder}/out"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    print(f"{'policy':>8} {'whole process':>14} {'384 ranks':>12} {'16,384 ranks':>13}   (medians)")
    for policy in ("zero3", "zeropp"):
        small, large = in_process(policy, 24), in_process(policy, 1024)
        print(f"{policy:>8} {whole_process(policy):12.2f} s {small * 1e3:9.1f} ms {large * 1e3:10.1f} ms")


if __name__ == "__main__":
    main()
