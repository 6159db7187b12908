"""All benchmarks, one after the other: `make bench`. Figures are ratios within one run of a quiet machine.

`python benchmarks/bench.py NAME ...` runs some of them. Exit code 1 if the simulator misses a limit of its speed.
"""

import sys
import time
from collections.abc import Callable

import balance_accuracy
import balance_limits
import balance_map
import chunks
import codec_speed
import convergence
import layouts
import offload
import overhead
import prediction
import rivals
import simulator_speed
import trained_weights

BENCHMARKS: dict[str, tuple[str, Callable[[], object]]] = {
    "codec": ("speed of the quantization kernels", codec_speed.main),
    "simulator": ("speed of the simulator", lambda: simulator_speed.main([])),
    "rivals": ("error of qgZ and its rivals against the number of ranks", rivals.main),
    "weights": ("quantization in blocks on trained weights", lambda: trained_weights.main([])),
    "chunks": ("the two hops of qgZ in a pipeline, and fused kernels", lambda: chunks.main([])),
    "offload": ("offload to disk", offload.main),
    "overhead": ("cost of the policy path", overhead.main),
    "prediction": ("truth of the predictions", lambda: prediction.main([])),
    "limits": ("balancing against its limits", lambda: balance_limits.main([])),
    "map": ("which balancing policy where, and its predictions", lambda: balance_map.main([])),
    "accuracy": ("accuracy under pruning", lambda: balance_accuracy.main([])),
    "layouts": ("truth of the predictions of layouts", lambda: layouts.main([])),
    "convergence": ("convergence under quantization", lambda: convergence.main([])),
}


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            sys.exit(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    missed = False
    for name in names:
        title, run = BENCHMARKS[name]
        print(f"\n== {name}: {title}\n", flush=True)
        started = time.monotonic()
        missed |= bool(run())
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
