"""Everything about a training that can be refused before a process starts. Imports no torch."""

from pathlib import Path

from ..conf.compose import model_spec
from ..conf.schema import Backend, ClusterConf, ExperimentConf, Precision
from .checkpoint import check_resume
from .data import check_data

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
    check_data(experiment, vocab=spec.vocab, sequence=experiment.batch.sequence or spec.sequence)
    check_resume(experiment)
