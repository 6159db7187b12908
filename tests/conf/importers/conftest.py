"""Tables in the layout of nccl-tests (NVIDIA/nccl-tests, src/common.cu), with times of our choice."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
_REDOP = {"all_reduce": "sum", "reduce_scatter": "sum"}
_TITLES = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def _table(
    op: str,
    times_us: Sequence[tuple[int, float]],
    *,
    ranks: int,
    hosts: int = 1,
    gpu: str = "NVIDIA A100-SXM4-80GB",
    named: bool = True,
    listed: bool = True,
) -> str:
    """What `OP_perf` prints.

    Args:
        times_us: (bytes, microseconds) of each row.
        named: The file says which collective it is.
        listed: The file lists ranks and hosts.
    """
    text = f"# Collective test starting: {op}_perf\n" if named else ""
    text += "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20\n"
    if listed:
        text += "#\n# Using devices\n"
        for rank in range(ranks):
            host, device = divmod(rank, ranks // hosts)
            where = f"on node-{host} device {device:2d} [0x{16 + rank:x}] {gpu}"
            text += f"#  Rank {rank:2d} Group  0 Pid {4000 + rank} {where}\n"
    text += _TITLES + "".join(_row(op, nbytes, time_us, ranks) for nbytes, time_us in times_us)
    return text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 67.9217\n#\n"


def _row(op: str, nbytes: int, time_us: float, ranks: int) -> str:
    parts = ranks if op in ("all_gather", "reduce_scatter") else 1
    root = 0 if op == "broadcast" else -1
    algorithm = nbytes / time_us / 1e3
    # a broadcast, and a sum over two ranks, have as much on the bus
    bus = algorithm * _FACTORS[op](ranks)
    half = f"{time_us:8.4g}" if time_us < 1000 else f"{time_us:8.0f}"
    half += f" {algorithm:7.2f} {bus:7.2f}      0 "
    head = f"{nbytes:12d} {nbytes // 4 // parts:13d}     float {_REDOP.get(op, 'none'):>7} {root:7d} "
    return f"{head}{half}{half}".rstrip() + "\n"


def _line_times(
    op: str, *, ranks: int, latency_us: float, bus_GBps: float, sizes: Sequence[int]
) -> list[tuple[int, float]]:
    """Times of a straight line in the bytes that a rank sends."""
    factor = _FACTORS[op](ranks)
    return [(size, latency_us + factor * size / bus_GBps / 1e3) for size in sizes]


@pytest.fixture(scope="session")
def tables() -> SimpleNamespace:
    """`table(op, times, ranks=, hosts=)` as nccl-tests print it, and `line_times(op, ...)` of a straight line."""
    return SimpleNamespace(table=_table, line_times=_line_times)


@pytest.fixture(scope="session")
def data() -> Path:
    return Path(__file__).parent / "data"
