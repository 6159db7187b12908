"""Measures this cluster: collectives, codecs, copies, matmuls, and the disk where states go to it. `twinbed-probe`
writes a cluster's YAML.

Collectives are measured whole. What of them is a fixed cost the simulator finds out for itself, by taking off
what its network needs for them (`sim.constants`).
"""

import argparse
import errno
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.record import write_text
from .measured import cluster_with

if TYPE_CHECKING:
    from ..policies.layout import ParallelLayout
    from ..policies.mesh import Dims, Mesh
    from .case import Case
    from .worker import WorkerContext

PROBE = "probe.json"

DISK_BYTES = 128 << 20


def probe_case(case: "Case", context: "WorkerContext") -> None:
    """A case of a launch: measure, and write `probe.json` (rank 0)."""
    import torch.distributed as dist

    from ..conf.compose import load_experiment, model_spec
    from ..policies.layout import layout_of

    experiment = load_experiment(case.experiment)
    if context.rank == 0:
        sys.stderr.write(f"twinbed: {case.name}: measuring collectives, codecs and matmuls\n")
    layout = layout_of(experiment, model_spec(experiment))
    measured = measure(context, precision=experiment.precision.value, layout=layout)
    if context.rank == 0:
        if experiment.offload.name == "disk":
            measured["disk"] = _disk(Path(experiment.offload.path or context.case_folder(case)))
        write_text(context.case_folder(case) / PROBE, json.dumps(measured, indent=1) + "\n")
    dist.barrier()


def measure(
    context: "WorkerContext", *, precision: str, layout: "ParallelLayout | None" = None
) -> dict[str, Any]:
    """All figures; the same call on all ranks. Times are means over ranks that all do the same.

    Args:
        layout: Of the model; its collectives are measured on its own axes, and a communication policy's on those of the
            ranks that hold the same part of the model.
    """
    import torch

    from ..policies.mesh import OF_REPLICAS
    from .collectives import backend_of, build_collectives
    from .interpreter import Interpreter
    from .kernel_probe import CodecProbe, MatmulProbe
    from .layer_probe import LayerProbe
    from .layout.interpreter import LayerInterpreter
    from .ledger import Ledger
    from .op_probe import LARGE_ELEMENTS, OpProbe, Timed
    from .probe_timing import BATCHES

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    mesh = probed_mesh(context.num_ranks, context.ranks_per_node, () if layout is None else layout.dims)
    groups = context.groups(mesh)
    collectives = build_collectives(backend_of(context.device))
    ledger = Ledger(rank=context.rank, mesh=mesh)
    interpreter = Interpreter(groups.of_replicas(), ledger, collectives)
    ops: list[Timed] = []
    if layout is None:
        ops.append(OpProbe(interpreter, dtype, context.device))
    else:  # a stage's or a tensor group's part of the model is a fraction of it
        large = LARGE_ELEMENTS // 4
        ops.append(OpProbe(interpreter, dtype, context.device, OF_REPLICAS, large=large))
        layers = LayerInterpreter(groups, ledger, collectives)
        ops.append(LayerProbe(layout, layers, dtype, context.device))
    codecs = CodecProbe(dtype, context.device)
    matmul = MatmulProbe(context.device)
    for _ in range(BATCHES):  # turn by turn: what wanders, wanders over all of them alike
        for each in ops:
            each.batch()
        codecs.batch()
        matmul.batch()
    calls = [call for each in ops for _, call in each.calls]
    if calls:  # one rank alone has none
        matmul.beside(lambda: calls[0]())
    return {
        "num_ranks": context.num_ranks,
        "ranks_per_node": context.ranks_per_node,
        "cores": os.cpu_count() or 1,
        "precision": precision,
        "ops": [asdict(row) for each in ops for row in each.rows()],
        "codec": codecs.result(),
        "matmul": matmul.result(),
    }


def probed_mesh(num_ranks: int, ranks_per_node: int, dims: "Dims") -> "Mesh":
    """With `hpz` as large as the ranks of a node allow."""
    from ..policies.mesh import LOCAL, OF_REPLICAS, Mesh

    if not dims:
        return Mesh(num_ranks, ranks_per_node, ranks_per_node)
    mesh = Mesh(num_ranks, ranks_per_node, dims=dims)
    return Mesh(num_ranks, ranks_per_node, mesh.size(OF_REPLICAS[LOCAL]), dims)


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
