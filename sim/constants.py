"""Fixed costs of collectives, from a probe that measured them whole: what the network needs is taken off."""

from dataclasses import replace

import simpy

from ..conf.model_spec import ModelSpec
from ..conf.schema import ClusterConf, ExperimentConf
from ..policies.comm import CommPolicy
from ..policies.mesh import Mesh
from .collectives import PerStep
from .costs import Costs
from .interpreter import Transfer
from .machine import Machine, Steps
from .topology import Topology

WHOLE = ("all_reduce", "reduce", "reduce_tree", "broadcast")  # their message is the whole tensor


def with_fixed_costs(experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy) -> ExperimentConf:
    """The experiment with `host.op_ns` from `host.op_measured_ns`; unchanged if there is nothing to do.

    A probe's collective takes what the simulated network needs, and its fixed cost, which is the difference: so the
    simulator repeats the probe, unless its network alone takes longer. Two sizes, because in a long collective the
    ranks' own work for one message hides behind another's way. Nothing here has seen the run.
    """
    host = experiment.cluster.host
    if host.op_ns or not host.op_measured_ns:
        return experiment
    bare = replace(experiment, cluster=replace(experiment.cluster, host=replace(host, op_measured_ns={})))
    op_ns = {}
    for key, measured_ns in host.op_measured_ns.items():
        op, axis, message = key.split("/")
        network_ns = collective_ns(bare, spec, policy, op=op, axis=axis, message_bytes=int(message))
        op_ns[key] = max(0, measured_ns - network_ns)
    return replace(experiment, cluster=replace(experiment.cluster, host=replace(host, op_ns=op_ns)))


def collective_ns(
    experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy, *, op: str, axis: str, message_bytes: int
) -> int:
    """One collective on all ranks at once, step by step: from their common start, the mean of their ends.

    Args:
        message_bytes: As in `interpreter.Transfer`.
    """
    cluster: ClusterConf = experiment.cluster
    hpz = policy.hpz_size if policy.hpz_size > 1 else cluster.devices_per_node
    mesh = Mesh.of(cluster, hpz)
    env = simpy.Environment()
    machine = Machine(env, Costs(experiment, spec, policy), Topology(cluster), folded=False)
    collectives = PerStep(machine, mesh)
    element_bytes = experiment.precision.element_bytes
    transfer = Transfer(
        op=op,
        axis=axis,
        group_size=mesh.size(axis),
        payload_bytes=message_bytes,
        message_bytes=message_bytes,
        numel=message_bytes // element_bytes if op in WHOLE else 0,
        element_bytes=element_bytes,
    )
    ends_ns: list[int] = []

    def take_part(rank: int) -> Steps:
        if rank % 2:
            yield env.timeout(machine.skew_ns)
        yield from collectives.run(rank, transfer, tag=mesh.group(axis, rank))
        ends_ns.append(int(env.now))

    env.run(until=env.all_of([env.process(take_part(rank)) for rank in range(cluster.num_ranks)]))
    return sum(ends_ns) // len(ends_ns)
