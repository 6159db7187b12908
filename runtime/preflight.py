"""Everything about a training that can be refused before a process starts. Imports no torch."""

import tempfile
from contextlib import suppress
from pathlib import Path

from ..conf.compose import model_spec
from ..conf.model_spec import ModelSpec
from ..conf.schema import Backend, ClusterConf, ExperimentConf, Precision
from ..policies.comm import build_comm
from ..policies.layout import layout_of, replicas_of
from ..policies.mesh import DATA
from .checkpoint import check_resume
from .data import check_data
from .overlap_check import check_overlap

MAX_LOCAL_RANKS = 64  # each is a process with torch in it: about 300 MB


def check_devices(cluster: ClusterConf) -> None:
    """Refuse to start more ranks than a machine can hold, or ranks of a GPU cluster where the GPUs are not.

    Raises:
        ValueError: Naming the cluster, the GPUs it needs here and the ways out.
    """
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if cluster.backend is Backend.nccl and found < cluster.num_ranks:
        raise ValueError(
            f"cluster={cluster.name} with launch=local needs {cluster.num_ranks} GPUs on this machine, found {found}; "
            "use launch=torchrun or launch=slurm to write a script for the cluster, target=sim to simulate it, or "
            "cluster=local_2x2"
        )
    if cluster.num_ranks > MAX_LOCAL_RANKS:
        raise ValueError(
            f"cluster.nodes={cluster.nodes} x cluster.devices_per_node={cluster.devices_per_node} with launch=local: "
            f"{cluster.num_ranks} ranks on this machine, must be at most {MAX_LOCAL_RANKS}; use target=sim, or "
            "launch=torchrun or launch=slurm for a cluster"
        )


def check_run(experiment: ExperimentConf) -> None:
    """Refuse what the ranks could only fail on.

    Raises:
        ValueError: The data, the checkpoint to resume from, or a combination of keys does not do.
    """
    spec = model_spec(experiment)
    fp16_server = experiment.comm.parameter_server and experiment.precision is Precision.fp16
    if fp16_server and not experiment.train.loss_scale:
        raise ValueError(
            "train.loss_scale=0 (dynamic) with comm.parameter_server=true and precision=fp16: only the "
            "server sees an overflow, and the others would go on with another scale; give a fixed scale, or "
            "use precision=bf16"
        )
    _check_offload(experiment)
    _check_layout(experiment, spec)
    _check_overlap(experiment)
    check_data(experiment, spec=spec)
    check_resume(experiment)


def _check_layout(experiment: ExperimentConf, spec: ModelSpec) -> None:
    """What does not go together with a model that is shared out over ranks."""
    layout = layout_of(experiment, spec)
    if layout is None:
        return
    said = " ".join(f"parallel.{axis}={size}" for axis, size in layout.dims if size > 1 and axis != DATA)
    if experiment.offload.active:
        raise ValueError(
            f"offload={experiment.offload.name} with {said}: the runtime offloads models that are not shared out over "
            "ranks; use offload=none, or parallel.data alone"
        )
    if (
        layout.tensor > 1
        and experiment.comm.parameter_server
        and experiment.optimizer.name in ("lamb", "lars")
    ):
        raise ValueError(
            f"optimizer={experiment.optimizer.name} with comm.parameter_server=true and parallel.tensor="
            f"{layout.tensor}: norms of whole parameters are summed over all ranks of a stage, of which the server's "
            "alone step; use another comm, or optimizer=adamw or sgd"
        )
    if layout.stages > 1 and experiment.comm.overlap and experiment.cluster.backend is Backend.gloo:
        raise ValueError(
            f"comm.overlap=true with parallel.pipeline={layout.stages} and cluster.backend=gloo: chunks of a "
            "stage would share one communication thread, which is not built; use comm.overlap=false"
        )


def _check_overlap(experiment: ExperimentConf) -> None:
    if not experiment.comm.overlap or experiment.cluster.backend is not Backend.gloo:
        return
    seen = replicas_of(experiment)
    policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    check_overlap(
        policy,
        ("root", "block.0"),
        precision=experiment.precision,
        micro_batches=experiment.batch.accumulation,
    )


def _check_offload(experiment: ExperimentConf) -> None:
    """What the simulator can offload, and the runtime cannot."""
    conf, resume_from = experiment.offload, experiment.train.resume_from
    if not conf.active:
        return
    if conf.name == "disk" and experiment.cluster.backend is Backend.nccl:
        raise ValueError(
            f"offload=disk with cluster={experiment.cluster.name} is only simulated: the runtime offloads to disk on "
            "CPUs (cluster.backend=gloo); use offload=cpu on GPUs, or target=sim"
        )
    if conf.chunk_bytes is not None:
        raise ValueError(
            f"offload.chunk_bytes={conf.chunk_bytes} is only simulated: the runtime moves whole units (null)"
        )
    if conf.name == "cpu":
        for key, value, all_of_it in (
            ("parameters", conf.parameters, 1.0),
            ("optimizer", conf.optimizer, 1.0),
            ("policy", conf.policy.value, "static"),
            ("fp32", conf.fp32, True),
        ):
            if value != all_of_it:
                raise ValueError(
                    f"offload.{key}={value} with offload=cpu is only simulated: FSDP2 keeps all states in the host's "
                    f"memory, in fp32; use offload.{key}={all_of_it}"
                )
    if conf.resume and conf.path is None:
        raise ValueError("offload.resume=true needs offload.path: the folder whose training did not end")
    if conf.resume and resume_from is not None:
        raise ValueError(
            f"offload.resume=true and train.resume_from={resume_from!r}: give one of them, the training can go on "
            "from one state only"
        )


def check_offload_path(experiment: ExperimentConf) -> None:
    """Refuse a folder for states on this machine that the ranks would refuse.

    Raises:
        ValueError: It cannot be made or written to, or what lies there is not what offload.resume says.
    """
    if experiment.offload.name != "disk" or experiment.offload.path is None:
        return
    path = Path(experiment.offload.path)
    where = f"offload.path={str(path)!r}"
    above = next(parent for parent in (path, *path.parents) if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{where}: {above} is a file; must be a folder, or one that can be made")
    try:
        _try_to_write(path, above)
    except OSError as err:
        raise ValueError(f"{where}: {above} cannot be written to: {err.strerror}") from err
    manifests = [path / f"rank_{rank}" / "store.json" for rank in range(experiment.cluster.num_ranks)]
    held = [manifest for manifest in manifests if manifest.is_file()]
    if experiment.offload.resume and len(held) < len(manifests):
        lacking = next(manifest for manifest in manifests if not manifest.is_file())
        raise ValueError(
            f"{where} with offload.resume=true: there is no {lacking}, so no training to go on from"
        )
    if held and not experiment.offload.resume:
        raise ValueError(
            f"{where}: {held[0].parent} is of a training that did not end: offload.resume=true goes on from it; else "
            "remove the folder"
        )


def _try_to_write(folder: Path, above: Path) -> None:
    """Make a folder and a file in it, and take away what was made. Permissions alone do not tell: root has them all.

    Raises:
        OSError: It cannot be done.
    """
    new = [parent for parent in (folder, *folder.parents) if above in parent.parents]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    finally:
        for made in new:  # the innermost first
            with suppress(OSError):
                made.rmdir()
