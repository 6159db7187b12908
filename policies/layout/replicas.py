"""The layout of an experiment, and the ranks that hold the same part of its model, which are all that a communication
policy sees.
"""

from ...conf.model_spec import ModelSpec
from ...conf.schema import ClusterConf, Engine, ExperimentConf
from ..mesh import Mesh
from .modes import build_mode
from .parallel import ParallelLayout, build_parallel, layout_dims


def layout_of(experiment: ExperimentConf, spec: ModelSpec) -> ParallelLayout | None:
    """None where a layout does not share a model out under engine=fsdp2.

    Raises:
        ValueError: As `build_parallel`.
    """
    if experiment.engine is not Engine.fsdp2 or experiment.parallel.ranks_a_replica == 1:
        return None
    batch = experiment.batch
    return build_parallel(
        experiment.parallel,
        spec,
        num_ranks=experiment.cluster.num_ranks,
        micro=batch.micro,
        micro_batches=batch.accumulation,
        sequence=batch.sequence or spec.sequence,
        uneven=experiment.balance.name == "layers",
    )


def replicas_of(experiment: ExperimentConf) -> Mesh:
    """Numbered from 0, on nodes of their own. All ranks where a layout does not share a model out under engine=fsdp2.

    Raises:
        ValueError: If the layout does not fit the cluster, naming the keys.
    """
    cluster: ClusterConf = experiment.cluster
    parallel = experiment.parallel
    if experiment.engine is not Engine.fsdp2 or parallel.ranks_a_replica == 1:
        return Mesh(cluster.num_ranks, cluster.devices_per_node)
    dims = layout_dims(parallel, build_mode(parallel), num_ranks=cluster.num_ranks)
    return Mesh.of(cluster, 1, dims).of_replicas()
