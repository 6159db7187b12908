"""From a config to the balancing policy of a tensor group, and to what its blocks come to."""

from ...conf.model_spec import ModelSpec
from ...conf.schema import BalanceConf, ExperimentConf
from ..layout import ParallelLayout
from .batch import BalanceBatch
from .layers import BalanceLayers
from .policy import BalancePolicy
from .work import BlockWork, block_work


def balanced_work(
    experiment: ExperimentConf, spec: ModelSpec, layout: ParallelLayout | None
) -> BlockWork | None:
    """What a block comes to where the ranks of tensor groups are balanced; None where they are not."""
    if layout is None or not experiment.balance.of_tensor_ranks:
        return None
    return block_work(
        spec,
        ranks=layout.tensor,
        blocks=layout.num_layers // layout.stages,
        micro=experiment.batch.micro,
        sequence=(experiment.batch.sequence or spec.sequence) // layout.sequence,
        element_bytes=experiment.precision.element_bytes,
    )


def build_balance(conf: BalanceConf, work: BlockWork) -> BalancePolicy:
    """A new policy, for one tensor group.

    Raises:
        ValueError: If there is none of that name, or the user's own cannot be made.
    """
    raise NotImplementedError


def build_shares(experiment: ExperimentConf, spec: ModelSpec) -> BalancePolicy | None:
    """A new policy for all replicas of the model (balance=batch) or all stages (balance=layers); None: neither is
    balanced.
    """
    conf, parallel = experiment.balance, experiment.parallel
    if conf.name == "batch":
        replicas = experiment.cluster.num_ranks // parallel.ranks_a_replica
        return BalanceBatch(replicas=replicas, micro=experiment.batch.micro, slack=conf.slack)
    if conf.name == "layers":
        return BalanceLayers(stages=parallel.pipeline, layers=spec.layers, slack=conf.slack)
    return None
