"""From a config to the balancing policy of a tensor group, and to what its blocks come to."""

from typing import Any

from ...conf.model_spec import ModelSpec
from ...conf.schema import BalanceConf, ExperimentConf, Way
from ..comm import Placement, build_comm
from ..layout import ParallelLayout, replicas_of
from ..loading import load_named
from .assignment import Assignment
from .batch import BalanceBatch
from .decider import Decider
from .layers import BalanceLayers
from .migrate import MigratePolicy
from .policy import BalanceAction, BalanceEvent, BalancePolicy, Half, Migrate, Prune
from .resize import ResizePolicy
from .semi import SemiPolicy
from .work import BlockWork, Product, block_work, column_work

_POLICIES: dict[str, type[Decider]] = {
    "resize": ResizePolicy,
    "migrate": MigratePolicy,
    "semi": SemiPolicy,
}


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
        passes=layout.micro_batches,
        ahead=_lies_whole(experiment),
    )
    by_columns = experiment.balance.moves and experiment.balance.way is not Way.paired
    return column_work(spec, even) if by_columns else even


def _lies_whole(experiment: ExperimentConf) -> bool:
    """Whether weights do so on their rank between units: one replica has nobody to share them with."""
    seen = replicas_of(experiment)
    policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    return seen.num_ranks == 1 or policy.placement is not Placement.sharded


def build_balance(conf: BalanceConf, work: BlockWork) -> BalancePolicy:
    """A new policy, for one tensor group.

    Raises:
        ValueError: If there is none of that name, or the user's own cannot be made.
    """
    if conf.policy:
        return NamedPolicy(conf, load_named("balance.policy", conf.policy, conf, work), work)
    if conf.name not in _POLICIES:
        raise ValueError(
            f"balance.name={conf.name}: must be one of {list(_POLICIES)} for ranks of a tensor group"
        )
    return _POLICIES[conf.name](conf, work)


class NamedPolicy:
    """The user's own, whose answers are checked.

    Raises:
        ValueError: If it lacks something that a policy has, or answers what no rank can carry out; naming it.
    """

    def __init__(self, conf: BalanceConf, policy: Any, work: BlockWork) -> None:
        self._key = f"balance.policy={conf.policy!r}"
        lacking = [key for key in ("name", "decide") if not hasattr(policy, key)]
        if lacking:
            raise ValueError(
                f"{self._key} makes a {type(policy).__name__}, which is no policy: it lacks {lacking}"
            )
        self._conf, self._policy, self._work = conf, policy, work
        self._products = frozenset(name for name, _ in work.products())

    @property
    def name(self) -> str:
        return str(self._policy.name)

    @property
    def predicted_speedup(self) -> float | None:
        """Its own prediction, if it makes one."""
        found = getattr(self._policy, "predicted_speedup", None)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise ValueError(f"{self._key}: predicted_speedup={found!r}: must be a number, or None")
        return None if found is None else float(found)

    def decide(self, event: BalanceEvent) -> tuple[BalanceAction, ...] | None:
        answer = self._policy.decide(event)
        if answer is None:
            return None
        if not isinstance(answer, tuple) or not all(isinstance(each, Prune | Migrate) for each in answer):
            raise ValueError(f"{self._key} answers {answer!r}: must be None, or a tuple of Prune and Migrate")
        for action in answer:
            self._check(action)
        try:
            Assignment(self._work, answer)
        except ValueError as err:
            raise ValueError(f"{self._key}: {err}") from err
        return answer

    def _check(self, action: Prune | Migrate) -> None:
        """What `Assignment` takes as given, and what the settings leave room for."""
        told, conf = f"{self._key} answers {action}", self._conf
        if isinstance(action, Prune):
            if not conf.prunes:
                raise ValueError(
                    f"{told} with balance={conf.name}, which prunes nothing: use balance=resize or semi"
                )
            if action.product and action.product not in self._products:
                raise ValueError(
                    f"{told}: product must be '' (all), or block.N.P with N in [0, {self._work.blocks}) and P one of "
                    f"{[product.value for product in Product]}"
                )
            return
        if not conf.moves:
            raise ValueError(
                f"{told} with balance={conf.name}, which moves nothing: use balance=migrate or semi"
            )
        if not isinstance(action.half, Half):
            raise ValueError(f"{told}: half must be Half.attention or Half.ffn")
        if not all(isinstance(number, int) for number in (action.src, action.dst, action.units)):
            raise ValueError(f"{told}: src, dst and units must be whole numbers")


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
