"""From a config to the balancing policy of a tensor group, and to what its blocks come to."""

from ...conf.model_spec import ModelSpec
from ...conf.schema import BalanceConf, ExperimentConf, Way
from ..layout import ParallelLayout
from .policy import BalancePolicy
from .work import BlockWork, block_work, column_work


def balanced_work(
    experiment: ExperimentConf, spec: ModelSpec, layout: ParallelLayout | None
) -> BlockWork | None:
    """What a block comes to where the ranks of tensor groups are balanced; None where they are not."""
    if layout is None or not experiment.balance.of_tensor_ranks:
        return None
    even = block_work(
        spec,
        ranks=layout.tensor,
        blocks=layout.num_layers // layout.stages,
        micro=experiment.batch.micro,
        sequence=(experiment.batch.sequence or spec.sequence) // layout.sequence,
        element_bytes=experiment.precision.element_bytes,
    )
    by_columns = experiment.balance.moves and experiment.balance.way is not Way.paired
    return column_work(spec, even) if by_columns else even


def build_balance(conf: BalanceConf, work: BlockWork) -> BalancePolicy:
    """A new policy, for one tensor group.

    Raises:
        ValueError: If there is none of that name, or the user's own cannot be made.
    """
    raise NotImplementedError
