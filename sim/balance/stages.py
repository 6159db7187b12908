"""Uneven stages in simulated time: the split that follows from how fast each stage's devices are at the start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ...analysis.record import Decision
from ...conf.conditions import rank_slowdowns
from ...conf.model_spec import ModelSpec
from ...conf.schema import DeviceConf, ExperimentConf
from ...policies.balance import (
    ShareBlocks,
    StagesMeasured,
    describe_balance_actions,
    describe_balance_event,
    is_balance_event,
    parse_balance_event,
)
from ...policies.balance.build import build_shares
from ...policies.comm import CommPolicy, build_comm
from ...policies.layout import replicas_of
from ...policies.mesh import PIPELINE
from ..costs import EMBED, HEAD, Costs
from ..engines import EngineModel, Setup
from ..interpreter import Work
from ..run import Run


class LayersRun(Run):
    """One of a pipeline whose stages hold as many blocks as they are fast.

    Args:
        decisions: Of a record whose event the policy is told, in place of what the devices take.
    """

    def __init__(
        self,
        experiment: ExperimentConf,
        spec: ModelSpec,
        policy: CommPolicy | None,
        fold: bool | None,
        make_engine: Callable[[Setup], EngineModel],
        decisions: Sequence[Decision] = (),
    ) -> None:
        event = next((parse_balance_event(d.event) for d in decisions if is_balance_event(d.event)), None)
        if not isinstance(event, StagesMeasured):
            event = measure_stages(experiment, spec, policy)
        balance = build_shares(experiment, spec)
        assert balance is not None
        answer = balance.decide(event)
        for action in answer or ():
            assert isinstance(action, ShareBlocks), f"{balance.name!r} answers {action}"
            parallel = replace(experiment.parallel, stage_layers=list(action.counts))
            experiment = replace(experiment, parallel=parallel)
        super().__init__(experiment, spec, policy, fold, make_engine)
        told = (describe_balance_event(event), describe_balance_actions(answer))
        self.decided[0] = [told, *self.decided[0]]


def measure_stages(
    experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy | None = None
) -> StagesMeasured:
    """What each stage's slowest rank takes at the start of the run for a block, and for the ends of the model; a tensor
    group's collectives left out.
    """
    cluster = experiment.cluster
    if policy is None:
        seen = replicas_of(experiment)
        policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    slowdowns = rank_slowdowns(cluster.slowdown, cluster.num_ranks)
    known: dict[int, Costs] = {}

    def costs_of(device: DeviceConf) -> Costs:
        if id(device) not in known:
            own = replace(experiment, cluster=replace(cluster, device=device))
            known[id(device)] = Costs(own, spec, policy)
        return known[id(device)]

    laid = costs_of(cluster.device).laid
    assert laid is not None, "a pipeline is a layout"
    layout, mesh = laid.model.layout, laid.model.mesh
    block_ns = [0] * layout.stages
    ends_ns = [0, 0]
    for rank in range(mesh.num_ranks):
        costs, stage = costs_of(cluster.device_of(rank)), mesh.index(PIPELINE, rank)
        slow = prod(s.factor for s in slowdowns if s.where == rank and s.holds_at(0, 0))

        def takes_ns(unit: str, costs: Costs = costs, slow: float = slow) -> int:
            return round(
                slow * sum(costs.ns(Work("compute", f"{way}/{unit}")) for way in ("forward", "backward"))
            )

        block = f"block.{layout.layers(stage, 0)[0]}"
        block_ns[stage] = max(block_ns[stage], takes_ns(block))
        if stage == 0:
            ends_ns[0] = max(ends_ns[0], takes_ns(EMBED))
        if stage == layout.stages - 1:
            ends_ns[1] = max(ends_ns[1], takes_ns(HEAD))
    return StagesMeasured(tuple(block_ns), (ends_ns[0], ends_ns[1]))
