"""Measures this cluster: collectives, codecs, copies, matmuls, and the disk where states go to it. `twinbed-probe`
writes a cluster's YAML.

Collectives are measured whole. What of them is a fixed cost the simulator finds out for itself, by taking off
what its network needs for them (`sim.constants`).
"""

import argparse
import errno
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.record import write_text
from .measured import OpRow, cluster_with

if TYPE_CHECKING:
    from .case import Case
    from .worker import WorkerContext

PROBE = "probe.json"

SMALL_ELEMENTS = 256  # of one slice: nothing but fixed costs
LARGE_ELEMENTS = 200_000
BATCHES = 5  # spread over the probe, each of REPEATS in a row: fixed costs wander within a second
REPEATS = 8
CODEC_ELEMENTS = (4_096, 262_144)
PARTS = (2, 8)  # that a fused kernel adds up
MATMUL_SIZE = 256
WORK_BYTES = 4 << 20
DISK_BYTES = 128 << 20


def probe_case(case: "Case", context: "WorkerContext") -> None:
    """A case of a launch: measure, and write `probe.json` (rank 0)."""
    import torch.distributed as dist

    from ..conf.compose import load_experiment

    experiment = load_experiment(case.experiment)
    if context.rank == 0:
        sys.stderr.write(f"twinbed: {case.name}: measuring collectives, codecs and matmuls\n")
    measured = measure(context, precision=experiment.precision.value)
    if context.rank == 0:
        if experiment.offload.name == "disk":
            measured["disk"] = _disk(Path(experiment.offload.path or context.case_folder(case)))
        write_text(context.case_folder(case) / PROBE, json.dumps(measured, indent=1) + "\n")
    dist.barrier()


def measure(context: "WorkerContext", *, precision: str) -> dict[str, Any]:
    """All figures; the same call on all ranks. Times are means over ranks that all do the same."""
    import torch

    from ..policies.mesh import Mesh
    from .collectives import backend_of, build_collectives
    from .interpreter import Interpreter
    from .ledger import Ledger

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    mesh = Mesh(context.num_ranks, context.ranks_per_node, context.ranks_per_node)
    groups = context.groups(mesh)
    collectives = build_collectives(backend_of(context.device))
    ledger = Ledger(rank=context.rank, mesh=mesh)
    interpreter = Interpreter(groups, ledger, collectives)
    ops = _OpProbe(interpreter, dtype, context.device)
    codecs = _CodecProbe(dtype, context.device)
    matmul = _MatmulProbe(context.device)
    for _ in range(BATCHES):  # turn by turn: what wanders, wanders over all of them alike
        ops.batch()
        codecs.batch()
        matmul.batch()
    if ops.calls:  # one rank alone has none
        matmul.beside(lambda: ops.calls[0][1]())
    return {
        "num_ranks": context.num_ranks,
        "ranks_per_node": context.ranks_per_node,
        "cores": os.cpu_count() or 1,
        "precision": precision,
        "ops": [asdict(row) for row in ops.rows()],
        "codec": codecs.result(),
        "matmul": matmul.result(),
    }


def _disk(folder: Path) -> dict[str, float] | None:
    """The disk of this node; None: its file system knows no direct I/O, so that it cannot be seen past the cache."""
    from .memory import keep_freed_memory, return_freed_memory
    from .offload.disk_rate import measure_disk, measure_moves

    folder.mkdir(parents=True, exist_ok=True)
    return_freed_memory()  # as a training with offload=disk does
    try:
        return asdict(measure_disk(folder, nbytes=DISK_BYTES)) | asdict(measure_moves(folder))
    except OSError as err:
        if err.errno == errno.EINVAL:
            return None
        raise RuntimeError(f"offload=disk: {folder} cannot be measured: {err.strerror}") from err
    finally:
        keep_freed_memory()


def _agreed_mean(values: Sequence[float]) -> list[float]:
    """Means over ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return list((tensor / dist.get_world_size()).tolist())


def _timed(call: Callable[[], object], repeats: int) -> float:
    """Mean seconds of one call, all ranks having started together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():  # calls return once they are on their stream
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


class _Work:
    """A few milliseconds of computation that leave caches cold, as an iteration has between two collectives."""

    def __init__(self, device: Any) -> None:
        import torch

        self._a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
        self._memory = torch.zeros(WORK_BYTES // 4, device=device)

    def __call__(self) -> None:
        self._a @ self._a
        self._memory.add_(1.0)


def _timed_between_work(call: Callable[[], object], work: Callable[[], object], repeats: int) -> float:
    """Mean seconds that `call` adds to a loop of `work`: with the waking of threads and the waiting for each other
    that calls in a row do not show."""

    def both() -> None:
        work()
        call()

    return max(0.0, _timed(both, repeats) - _timed(work, repeats))


class _OpProbe:
    """Each collective through the interpreter, as a run has it."""

    def __init__(self, interpreter: Any, dtype: Any, device: Any) -> None:
        import torch

        from ..policies.mesh import HPZ, LOCAL, NODE, WORLD
        from ..policies.plan import (
            AllGather,
            AllReduce,
            AllToAll,
            Broadcast,
            Plan,
            Reduce,
            ReduceScatter,
            ReduceTo,
            StoreCopy,
        )

        mesh = interpreter.mesh
        self.calls: list[tuple[OpRow, Callable[[], None]]] = []
        self._batches: list[list[float]] = []
        self._work = _Work(device)
        world = mesh.num_ranks

        def add(op: str, axis: str, message: int, numel: int, call: Callable[[], None]) -> None:
            size = mesh.size(axis)
            if size > 1:
                self.calls.append((OpRow(op, axis, size, message, numel, ()), call))
                self._batches.append([])

        class Held:
            def __init__(self, shard: torch.Tensor) -> None:
                self.shard = shard

            def load(self, axis: str) -> torch.Tensor:
                return self.shard

            def store(self, axis: str, shard: torch.Tensor) -> None:
                self.shard = shard

        from ..policies.plan import LoadCopy

        for n in (SMALL_ELEMENTS, LARGE_ELEMENTS // world * 4):
            n -= n % (4 * world)
            full = torch.zeros(world * n, dtype=dtype, device=device)
            shard, out = full[:n].clone(), torch.empty_like(full)
            nbytes = n * dtype.itemsize
            held = Held(full[: world * n // mesh.size(HPZ)].clone())

            def gather(plan: Plan, shard: Any = shard, out: Any = out, n: int = n, held: Any = held) -> None:
                interpreter.gather(plan, unit="probe", shard=shard, out=out, segments=(n,), copies=held)

            def reduce(plan: Plan, full: Any = full, shard: Any = shard, n: int = n) -> None:
                interpreter.reduce(plan, unit="probe", slices=full, out=shard, segments=(n,), mean=True)

            def whole(plan: Plan, full: Any = full, n: int = n) -> None:
                interpreter.whole(plan, unit="probe", flat=full, segments=(world * n,), mean=True)

            all_gather = Plan((AllGather(axis=WORLD), StoreCopy(axis=HPZ)))
            local = Plan((LoadCopy(axis=HPZ), AllGather(axis=HPZ)))
            add("all_gather", WORLD, nbytes, world * n, lambda g=gather, p=all_gather: g(p))  # type: ignore[misc]
            if mesh.size(HPZ) < world:
                message = world * nbytes // mesh.size(HPZ)
                add("all_gather", HPZ, message, world * n, lambda g=gather, p=local: g(p))  # type: ignore[misc]
            ring = Plan((ReduceScatter(axis=WORLD),))
            add("reduce_scatter", WORLD, nbytes, world * n, lambda r=reduce, p=ring: r(p))  # type: ignore[misc]
            hop = Plan((AllToAll(axis=WORLD), Reduce()))
            add("all_to_all", WORLD, nbytes, world * n, lambda r=reduce, p=hop: r(p))  # type: ignore[misc]
            for axis in (LOCAL, NODE):
                size = mesh.size(axis)
                if size == world:
                    continue
                messages = [torch.zeros(n, dtype=dtype, device=device) for _ in range(size - 1)]
                received = [torch.empty_like(m) for m in messages]

                def exchange(axis: str = axis, m: Any = messages, r: Any = received) -> None:
                    with interpreter.ledger.span("probe", axis):
                        interpreter.collectives.all_to_all(interpreter.groups[axis], m, r)

                add("all_to_all", axis, nbytes, world * n, exchange)
            for op, step in (
                ("all_reduce", AllReduce(axis=WORLD)),
                ("reduce", ReduceTo(axis=WORLD)),
                ("broadcast", Broadcast(axis=WORLD)),
            ):
                plan = Plan((step,))
                add(op, WORLD, world * nbytes, world * n, lambda w=whole, p=plan: w(p))  # type: ignore[misc]
        for _, call in self.calls:
            call()  # the first opens connections

    def batch(self) -> None:
        for (row, call), batches in zip(self.calls, self._batches, strict=True):
            small = row.numel <= SMALL_ELEMENTS * max(1, row.group_size) * 8
            batches.append(_timed_between_work(call, self._work, REPEATS if small else 2))

    def rows(self) -> list[OpRow]:
        flat = _agreed_mean([seconds for batches in self._batches for seconds in batches])
        rows = []
        for i, (row, _) in enumerate(self.calls):
            mine = flat[i * BATCHES : (i + 1) * BATCHES]
            rows.append(OpRow(row.op, row.axis, row.group_size, row.message_bytes, row.numel, tuple(mine)))
        return rows


class _CodecProbe:
    """Encoding and decoding as the interpreter does them, all ranks at once."""

    def __init__(self, dtype: Any, device: Any) -> None:
        import torch

        from ..kernels import (
            decode_segments,
            dequantize_reduce,
            dequantize_reduce_quantize,
            encode_segments,
        )

        self._times: dict[str, list[float]] = {}
        self._calls: list[tuple[str, Callable[[], object]]] = []
        for n in CODEC_ELEMENTS:
            x = torch.randn(n, device=device).to(dtype)
            for bits, block in ((8, 2048), (4, 256)):
                options: dict[str, Any] = {"segments": (n,), "bits": bits, "block": block}
                message = encode_segments(x, **options)
                total = torch.zeros(n, device=device)
                self._calls += [
                    (f"encode{bits}/{n}", lambda x=x, o=options: encode_segments(x, **o)),  # type: ignore[misc]
                ]
                if bits == 8:
                    self._calls.append(
                        (f"decode8/{n}", lambda m=message, o=options, x=x: decode_segments(m, **o, out=x))  # type: ignore[misc]
                    )
                else:
                    self._calls.append(
                        (
                            f"decode4/{n}",
                            lambda m=message, o=options, t=total: dequantize_reduce(m[None], t, **o, out=t),  # type: ignore[misc]
                        )
                    )
                    for parts in PARTS:
                        again = partial(
                            dequantize_reduce_quantize,
                            message.repeat(parts, 1),
                            **options,
                            out_bits=4,
                            out_block=256,
                        )
                        self._calls.append((f"{parts}requantize/{n}", again))
            source, target = torch.randn(n, device=device), torch.empty(n, device=device)
            self._calls.append((f"copy/{n}", lambda s=source, t=target: t.copy_(s)))  # type: ignore[misc]
        for name, call in self._calls:
            self._times[name] = []
            call()

    def batch(self) -> None:
        for name, call in self._calls:
            self._times[name].append(_timed(call, REPEATS))

    def result(self) -> dict[str, dict[str, float]]:
        """Of each kernel: fixed ns of a call, and ns of an element."""
        names = list(self._times)
        means = dict(
            zip(names, _agreed_mean([statistics.median(self._times[name]) for name in names]), strict=True)
        )
        small, large = CODEC_ELEMENTS
        found = {}
        for kind in sorted({name.partition("/")[0] for name in names}):
            a, b = means[f"{kind}/{small}"] * 1e9, means[f"{kind}/{large}"] * 1e9
            slope = max(0.0, (b - a) / (large - small))
            found[kind] = {"fixed_ns": max(0.0, a - slope * small), "ns_per_element": slope}
        few, many = (found.pop(f"{parts}requantize") for parts in PARTS)
        decode = max(0.0, many["ns_per_element"] - few["ns_per_element"]) / (PARTS[1] - PARTS[0])
        encode = max(0.0, few["ns_per_element"] - PARTS[0] * decode)
        return found | {
            "requantize_decode4": {"fixed_ns": 0.0, "ns_per_element": decode},
            "requantize_encode4": {"fixed_ns": few["fixed_ns"], "ns_per_element": encode},
        }


class _MatmulProbe:
    """The rate of a matmul alone (all ranks at once), and while a collective runs beside it."""

    def __init__(self, device: Any) -> None:
        import torch

        self._a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
        self._b = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
        self._alone: list[float] = []
        self._beside: float | None = None

    def _work(self) -> object:
        return self._a @ self._b

    def batch(self) -> None:
        self._alone.append(_timed(self._work, REPEATS))

    def beside(self, collective: Callable[[], None]) -> None:
        import threading

        calls = 0
        running = threading.Event()

        def communicate() -> None:
            running.set()
            for _ in range(4 * REPEATS):  # the same number on all ranks
                collective()

        thread = threading.Thread(target=communicate)
        thread.start()
        running.wait()
        started = time.perf_counter()
        while thread.is_alive():
            self._work()
            calls += 1
        self._beside = (time.perf_counter() - started) / max(calls, 1)
        thread.join()

    def result(self) -> dict[str, float]:
        median = statistics.median(self._alone)
        alone, beside = _agreed_mean([median, median if self._beside is None else self._beside])
        flop = 2 * MATMUL_SIZE**3
        return {"flop_per_s": flop / alone, "flop_per_s_beside_collective": flop / beside}


def _check_output(path: Path) -> None:
    """Make the file's folder, and see whether the file can be written: measuring takes a while.

    Raises:
        OSError: It cannot.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """The command `twinbed-probe`: measure a cluster and write conf/cluster-style YAML."""
    import yaml

    from ..conf.compose import compose
    from ..conf.schema import Backend, Launch
    from ..kernels.native import prepare
    from .case import Case
    from .launcher import launch_local
    from .preflight import check_devices

    parser = argparse.ArgumentParser(prog="twinbed-probe", description=(main.__doc__ or "").split(": ", 1)[1])
    parser.add_argument("output", type=Path, help="YAML file to write; its stem is the cluster's name")
    parser.add_argument("overrides", nargs="*", help="as for twinbed, e.g. cluster=local_2x2 cluster.nodes=4")
    arguments = parser.parse_args(argv)
    try:
        composed = compose(["target=runtime", *arguments.overrides])
        if composed.experiment.launch is not Launch.local:
            raise ValueError(
                f"launch={composed.experiment.launch.value}: only this machine can be probed; leave launch=local, with "
                "the ranks that this machine has"
            )
        if composed.experiment.cluster.placement.cyclic:
            raise ValueError(
                "cluster.rank_order=cyclic: a node's own links are measured in groups of consecutive ranks, which "
                "would span nodes; use block, which measures the same links"
            )
        check_devices(composed.experiment.cluster)
    except ValueError as err:
        sys.stderr.write(f"twinbed-probe: {err}\n")
        return 2
    try:
        _check_output(arguments.output)
    except OSError as err:
        sys.stderr.write(f"twinbed-probe: cannot write {arguments.output}: {err.strerror or err}\n")
        return 1
    ranks = composed.experiment.cluster.num_ranks
    sys.stdout.write(f"measuring {ranks} rank{'s' * (ranks > 1)} on this machine: about a minute\n")
    sys.stdout.flush()
    ready = prepare()
    with tempfile.TemporaryDirectory(prefix="twinbed-probe-") as folder:
        case = Case(
            name="probe",
            folder="probe",
            experiment=composed.resolved,
            kind="twinbed.runtime.probe:probe_case",
        )
        outcome = launch_local(Path(folder), cluster=composed.experiment.cluster, cases=(case,))
        if outcome.status != "ok":
            sys.stderr.write(f"twinbed-probe: {outcome.error}\n")
            return 1
        measured = json.loads((Path(folder) / "probe" / PROBE).read_text(encoding="utf-8"))
    cluster = cluster_with(
        composed.resolved["cluster"],
        measured,
        one_machine=composed.experiment.cluster.backend is Backend.gloo,
        links_known=outcome.backend != "none",
    )
    kernels = f"{ready.backend} kernels, {ready.reason}, ready after {ready.seconds:.2f} s"
    cluster |= {"name": arguments.output.stem, "source": f"measured by twinbed-probe ({kernels})"}
    try:
        write_text(arguments.output, yaml.safe_dump(cluster, sort_keys=False))
    except OSError as err:
        sys.stderr.write(f"twinbed-probe: {err.strerror}\n")
        return 1
    folder_of = arguments.output.resolve().parent
    sys.stdout.write(
        f"wrote {arguments.output}\nuse it, from a folder named cluster: "
        f"twinbed --config-dir {folder_of.parent} cluster={arguments.output.stem}\n"
    )
    return 0
