"""Whether states can be offloaded in an experiment, and which keys of it then have no effect."""

from dataclasses import fields

from .schema import Backend, ClusterConf, Engine, ExperimentConf, OffloadConf, OffloadKind, Target


def check_offload(experiment: ExperimentConf) -> list[str]:
    """Warnings about keys of `offload` that nothing reads.

    Raises:
        ValueError: If this experiment cannot offload, or the cluster's file does not say what it takes.
    """
    conf, cluster = experiment.offload, experiment.cluster
    if conf.active:
        _refuse(experiment)
        if experiment.target is not Target.runtime:
            for key, value in _needed(cluster, conf).items():
                if value is None:
                    raise ValueError(
                        f"{key}={value}: must be given for cluster={cluster.name} with offload={conf.name}"
                    )
    files = conf.name == "disk" and experiment.target is not Target.sim
    readers = {
        "chunk_bytes": conf.active,
        "prefetch": conf.active,
        "policy": conf.active,
        "optimizer": conf.active,
        "parameters": conf.active and conf.policy is OffloadKind.static,
        "memory_bytes": conf.active,
        "activations": conf.active and (conf.policy is OffloadKind.auto or conf.memory_bytes is not None),
        "warmup_activations": conf.active and conf.policy is OffloadKind.auto,
        "fp32": conf.name == "cpu",
        "pinned": conf.name == "cpu" or (conf.name == "disk" and cluster.backend is Backend.nccl),
        "path": files,
        "io_threads": files,
        "direct": files,
        "commit_every": conf.name == "disk",
        "resume": files,
    }
    without = []
    for field in fields(conf):
        value = getattr(conf, field.name)
        if value != field.default and not readers.get(field.name, True):
            shown = value.value if isinstance(value, OffloadKind) else value
            sim_only = conf.name == "disk" and field.name in ("path", "io_threads", "direct", "resume")
            mode = "target=sim" if sim_only else _mode(conf)
            without.append(f"offload.{field.name}={shown} has no effect with {mode}")
    return without


def _refuse(experiment: ExperimentConf) -> None:
    conf, comm = experiment.offload, experiment.comm
    which = f"offload={conf.name}"
    if experiment.engine is not Engine.fsdp2:
        raise ValueError(
            f"{which} is built for engine=fsdp2 only, got engine={experiment.engine.value}: use engine=fsdp2, or "
            "offload=none"
        )
    if comm.policy is None and (comm.zero_stage == 0 or comm.parameter_server):
        raise ValueError(
            f"{which} needs sharded weights, and comm={comm.name} replicates them: use a comm with zero_stage >= 1"
        )
    if experiment.optimizer.name not in ("adamw", "sgd"):
        raise ValueError(
            f"optimizer={experiment.optimizer.name} with {which}: its norms need all states at once; use one of "
            "['adamw', 'sgd']"
        )
    if conf.name == "cpu" and experiment.cluster.backend is not Backend.nccl:
        raise ValueError(
            f"{which} needs GPUs (cluster.backend=nccl), and cluster={experiment.cluster.name} computes in the host's "
            "memory already: use offload=disk"
        )


def _needed(cluster: ClusterConf, conf: OffloadConf) -> dict[str, float | None]:
    """What must be known of a cluster: key -> value, None where it is not."""
    host, disk = cluster.host, cluster.disk
    gpus = cluster.backend is Backend.nccl
    found: dict[str, float | None] = {}
    if conf.name == "disk":
        found |= {"cluster.disk.read_Bps": disk.read_Bps, "cluster.disk.write_Bps": disk.write_Bps}
    if gpus:
        found |= {"cluster.host.pcie_Bps": host.pcie_Bps, "cluster.host.memory_Bps": host.memory_Bps}
    if gpus and conf.name == "cpu":
        found["cluster.host.step_cores"] = host.step_cores or None
    return found


def _mode(conf: OffloadConf) -> str:
    return f"offload={conf.name}" + (f" and offload.policy={conf.policy.value}" if conf.active else "")
