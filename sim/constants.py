"""Fixed costs of collectives, from a probe that measured them whole: what the network needs is taken off."""

from dataclasses import replace

import simpy

from ..conf.model_spec import ModelSpec
from ..conf.schema import ClusterConf, ExperimentConf
from ..policies.comm import CommPolicy
from ..policies.mesh import LOCAL, OF_REPLICAS, Mesh
from .collectives import PerStep
from .costs import Costs
from .interpreter import Transfer
from .machine import Machine, Steps
from .topology import Topology

_SHIFT = (("send", 1), ("recv", -1))  # both ends of a ring's messages
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
    env = simpy.Environment()
    costs = Costs(experiment, spec, policy)
    mesh = _mesh(cluster, policy.hpz_size, costs.laid.model.mesh if costs.laid is not None else None)
    machine = Machine(env, costs, Topology(cluster), folded=False)
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
        tag = mesh.group(axis, rank)
        if op == "send":
            ends = [replace(transfer, op=end, peer=by) for end, by in _SHIFT]
            yield env.all_of([env.process(collectives.run(rank, end, tag=tag)) for end in ends])
        else:
            yield from collectives.run(rank, transfer, tag=tag)
        ends_ns.append(int(env.now))

    env.run(until=env.all_of([env.process(take_part(rank)) for rank in range(cluster.num_ranks)]))
    return sum(ends_ns) // len(ends_ns)


def _mesh(cluster: ClusterConf, hpz_size: int, laid: Mesh | None) -> Mesh:
    """As the probe has it: `hpz` is a policy's, or as large as the ranks of a node allow."""
    if laid is None:
        return Mesh.of(cluster, hpz_size if hpz_size > 1 else cluster.devices_per_node)
    return Mesh.of(cluster, hpz_size if hpz_size > 1 else laid.size(OF_REPLICAS[LOCAL]), laid.dims)
